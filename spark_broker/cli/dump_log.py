"""`spark-broker dump-log`: shows what segment files hold. It needs no cluster, but can read a running one's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from spark_broker.cli.options import OutputFormat, OutputOption
from spark_broker.cli.output import counted, note, print_error, print_json, print_line, print_table
from spark_broker.cli.records import LeftOut, readable
from spark_broker.errors import CorruptMessageError
from spark_broker.model import NOT_SHOWABLE
from spark_broker.times import shown_ms

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_broker.cli.segment_dump import DumpedBatch

RIGHT = ("rows", "position", "bytes", "epoch", "sequence", "schema")
COLUMNS = ("offsets", *RIGHT[:3], "appended", "epoch", "producer", "sequence", "schema", "flags", "state")


class BatchLine(msgspec.Struct, frozen=True):
    """A batch in JSON: its index entry, whether its checksums hold, and with --print-data-log its rows."""

    segment: str
    base_offset: int
    last_offset: int
    row_count: int
    position: int
    length_bytes: int
    append_time_ms: int
    max_timestamp_us: int
    leader_epoch: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    schema_id: int
    attributes: list[str]
    message_crc: int
    problem: str
    data: list[object] | None = None
    offsets: list[int] | None = None  # of the rows in `data`


def dump_log(
    paths: Annotated[list[Path], typer.Argument(help="Segment files, or a partition's directory.")],
    data: Annotated[bool, typer.Option("--print-data-log", help="The rows, too (as JSON).")] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the batches of segment files and verify their checksums.

    Status 1 when anything is damaged, and when a row that is to be printed could not be shown.
    """
    from spark_broker.cli.segment_dump import segments_at

    damaged, left_out = 0, LeftOut()
    for directory, base_offset in [segment for path in paths for segment in segments_at(path)]:
        lines, problems = _read(directory, base_offset, data, left_out)
        if output is OutputFormat.JSON:
            for line in lines:
                print_json(line)
        elif lines or not problems:
            _print_segment(directory, base_offset, lines, data)
        damaged += sum(bool(line.problem) for line in lines) + len(problems)
        for problem in problems:
            print_error(f"{_name(directory, base_offset)}: {problem}")
    if damaged:
        note(f"{damaged} damaged")
    left_out.check()
    if damaged:
        raise typer.Exit(1)


def _name(directory: Path, base_offset: int) -> str:
    return f"{directory.name}/{base_offset:020d}"


def _read(directory: Path, base_offset: int, data: bool, left_out: LeftOut) -> tuple[list[BatchLine], list[str]]:
    """The batches of a segment, and what is wrong with it as a whole. `data`: with their rows."""
    from spark_broker.cli.segment_dump import read_segment, segment_schema

    batches, problem = read_segment(directory, base_offset)
    problems, schema = [problem] if problem else [], None
    if data and batches:
        schema, why_none = segment_schema(directory, base_offset)
        problems += [f"its rows cannot be shown: {why_none}"] if schema is None else []
    return [_line(_name(directory, base_offset), batch, schema, left_out) for batch in batches], problems


def _line(segment: str, batch: DumpedBatch, schema: pa.Schema | None, left_out: LeftOut) -> BatchLine:
    from spark_broker.cli.segment_dump import offsets_of, rows_of

    header, problem = batch.header, batch.problem
    rows, offsets = None, None
    if schema is not None and not problem:
        try:
            offsets = offsets_of(batch)
            rows = _readable_rows(rows_of(batch, schema), offsets, left_out)
        except CorruptMessageError as error:
            problem = error.message
    return BatchLine(
        segment=segment,
        base_offset=header.base_offset,
        last_offset=header.last_offset,
        row_count=header.row_count,
        position=batch.position,
        length_bytes=header.length,
        append_time_ms=header.append_time_ms,
        max_timestamp_us=header.max_timestamp_us,
        leader_epoch=header.leader_epoch,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        schema_id=header.schema_id,
        attributes=batch.attributes,
        message_crc=header.message_crc,
        problem=problem,
        data=rows,
        offsets=None if rows is None else offsets,
    )


def _readable_rows(rows: pa.RecordBatch, offsets: Sequence[int], left_out: LeftOut) -> list[object]:
    """Each row, readable. One without a form in Python is None here, and is added to `left_out`."""
    try:
        return [readable(row) for row in rows.to_pylist()]
    except NOT_SHOWABLE as error:
        if rows.num_rows == 1:
            left_out.add(f"offset {offsets[0]} cannot be shown: {type(error).__name__}: {error}")
            return [None]
        each = ((rows.slice(n, 1), offsets[n : n + 1]) for n in range(rows.num_rows))
        return [row for alone, offset in each for row in _readable_rows(alone, offset, left_out)]


def _print_segment(directory: Path, base_offset: int, lines: list[BatchLine], data: bool) -> None:
    batches, rows = len(lines), sum(line.row_count for line in lines)
    size = f"{counted(batches, 'batch', 'batches')}, {counted(rows, 'row', 'rows')}"
    title = f"{_name(directory, base_offset)}: {size}"
    print_table(COLUMNS, [_cells(line) for line in lines], title=title, right=RIGHT)
    if data:
        for line in lines:
            for offset, row in zip(line.offsets or [], line.data or [], strict=True):
                print_line(f"{offset} {msgspec.json.encode(row).decode()}")


def _cells(line: BatchLine) -> tuple[object, ...]:
    return (
        f"{line.base_offset}..{line.last_offset}",
        line.row_count,
        line.position,
        line.length_bytes,
        shown_ms(line.append_time_ms) if line.append_time_ms >= 0 else "",
        line.leader_epoch,
        f"{line.producer_id}:{line.producer_epoch}" if line.producer_id >= 0 else "",
        line.base_sequence if line.base_sequence >= 0 else "",
        line.schema_id,
        ",".join(line.attributes).lower(),
        line.problem or "ok",
    )
