"""`spark-broker consume`: records of a topic on standard output."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

import spark_broker
from spark_broker.cli.options import Bootstrap, Settings, Topic, bootstrap_servers, reading_settings
from spark_broker.cli.output import note, print_table
from spark_broker.cli.partition_lists import partition_numbers
from spark_broker.cli.records import LeftOut, cell, prefix_of_places, records, values
from spark_broker.digits import digits
from spark_broker.errors import InvalidConfigError, UnknownTopicOrPartitionError
from spark_broker.model import ConsumedBatch, TopicPartition
from spark_broker.times import parsed, shown
from spark_broker.visible import visible

if TYPE_CHECKING:
    from spark_broker.client.consumer import Consumer

TABLE_ROWS = 20
POLL_S = 0.5


class RecordOutput(StrEnum):
    """How a record is printed."""

    TABLE = "table"
    JSON = "json"
    VALUE = "value"


class IsolationLevel(StrEnum):
    """Which records of transactions are read."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


def consume(
    topic: Topic,
    offset: Annotated[
        str,
        typer.Option(
            metavar="OFFSET",
            help="earliest, latest, an offset, or a time: 2026-01-31T12:00 (UTC), 2026-01-31T12:00+01:00.",
        ),
    ] = "earliest",
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help=f"Records to read. Default: all; {TABLE_ROWS} in a table.")
    ] = None,
    partition: Annotated[list[int] | None, typer.Option("--partition", "-p", help="Only this one; repeatable.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is appended from now on.")] = False,
    isolation_level: Annotated[
        IsolationLevel | None, typer.Option(help="Records of committed transactions (the default), or of all.")
    ] = None,
    config: Settings = None,
    bootstrap_server: Bootstrap = "",
    output: Annotated[
        RecordOutput, typer.Option("--output", "-o", help="A table, a line of JSON each, or the bare values.")
    ] = RecordOutput.TABLE,
) -> None:
    """Print the records of a topic, up to what it holds now; or, with --follow, on and on.

    Status 1 when a record could not be shown, such as one with a time after the year 9999.
    """
    servers = bootstrap_servers(bootstrap_server)
    chosen = choose_partitions(servers, topic, partition)
    limit = TABLE_ROWS if num is None and output is RecordOutput.TABLE and not follow else num
    left_out = LeftOut()
    with spark_broker.Consumer(
        servers, config=reading_settings(config), enable_auto_commit=False, isolation_level=isolation_level
    ) as consumer:
        ends = None if follow else consumer.end_offsets(chosen)
        starts = start_offsets(consumer, chosen, offset)
        consumer.assign(chosen)
        for tp, start in starts.items():
            consumer.seek(tp, start)
        batches = read(consumer, ends, limit)
        if output is RecordOutput.TABLE and not follow:
            _print_table(list(batches), limit, None if ends is None else _count(starts, ends), topic, left_out)
        else:
            _print_lines(batches, output, left_out)
    left_out.check()


def choose_partitions(servers: str, topic: str, wanted: list[int] | None) -> list[TopicPartition]:
    """All partitions of the topic, or those wanted. Raises UnknownTopicOrPartitionError."""
    with spark_broker.Admin(servers) as admin:
        there = partition_numbers(admin, topic)
    unknown = sorted(set(wanted or []) - set(there))
    if unknown:
        raise UnknownTopicOrPartitionError(f"topic {topic!r} has partitions 0 to {len(there) - 1}, not {unknown[0]}")
    return [TopicPartition(topic, number) for number in sorted(set(wanted or there))]


def start_offsets(consumer: Consumer, chosen: list[TopicPartition], offset: str) -> dict[TopicPartition, int]:
    """Where to begin in each partition. Raises InvalidConfigError for a text that names no offset."""
    if offset == "earliest":
        return consumer.beginning_offsets(chosen)
    if offset == "latest":
        return consumer.end_offsets(chosen)
    if (number := digits(offset)) is not None:
        begins, ends = consumer.beginning_offsets(chosen), consumer.end_offsets(chosen)
        return {tp: _from(number, tp, begins[tp], ends[tp]) for tp in chosen}
    try:
        when = parsed(offset)
    except ValueError:
        raise InvalidConfigError(
            f"--offset {offset!r}: earliest, latest, a number, or a time like 2026-01-31T12:00 (UTC)",
            hint="`spark-broker consume --help` explains the options.",
        ) from None
    note(f"from {shown(when)} on")
    ends = consumer.end_offsets(chosen)
    offsets = consumer.offsets_for_times(dict.fromkeys(chosen, when))
    return {tp: ends[tp] if at is None else at for tp, at in offsets.items()}


def _from(number: int, partition: TopicPartition, begins: int, ends: int) -> int:
    if number < begins:
        note(f"records of {partition} before {begins} are deleted: from {begins} on")
    elif number > ends:
        note(f"{partition} ends at {ends}: from there on")
    return max(begins, min(number, ends))


def read(consumer: Consumer, ends: dict[TopicPartition, int] | None, limit: int | None) -> Iterator[ConsumedBatch]:
    """Batches up to these ends (None: without end), and up to this many records."""
    left = limit
    while not _at_end(consumer, ends) and left != 0:
        for batch in consumer.poll(POLL_S):
            end = None if ends is None else ends[TopicPartition(batch.topic, batch.partition)]
            wanted = first_records(batch, end, left)
            if wanted is not None:
                left = None if left is None else left - wanted.data.num_rows
                yield wanted
            if left == 0:
                return


def first_records(batch: ConsumedBatch, end: int | None, limit: int | None) -> ConsumedBatch | None:
    """The batch's records below the offset `end`, at most `limit`; None when there are none."""
    count = batch.data.num_rows
    if end is not None:
        count = min(count, end - batch.base_offset)
    if limit is not None:
        count = min(count, limit)
    if count <= 0:
        return None
    return batch.slice(0, count)


def _at_end(consumer: Consumer, ends: dict[TopicPartition, int] | None) -> bool:
    return ends is not None and all(consumer.position(tp) >= end for tp, end in ends.items())


def _count(starts: dict[TopicPartition, int], ends: dict[TopicPartition, int]) -> int:
    """Offsets from the starts to the ends. There may be fewer records: markers of transactions take one offset each."""
    return sum(max(0, end - starts[tp]) for tp, end in ends.items())


def _print_lines(batches: Iterator[ConsumedBatch], output: RecordOutput, left_out: LeftOut) -> None:
    for batch in batches:
        if output is RecordOutput.VALUE:
            lines: Iterator[bytes] = values(batch, left_out)
        elif output is RecordOutput.JSON:
            lines = (msgspec.json.encode(record) for record in records(batch, left_out))
        else:
            lines = (visible(_line(batch, record)).encode() for record in records(batch, left_out))
        sys.stdout.buffer.write(b"".join(line + b"\n" for line in lines))
        sys.stdout.buffer.flush()


def _line(batch: ConsumedBatch, record: dict[str, object]) -> str:
    """One record on one line, for --follow: a table would have to know the widths of its columns in advance."""
    prefix = prefix_of_places(batch)
    hidden = {f"{prefix}topic", f"{prefix}partition", f"{prefix}offset"}
    shown = (f"{name}={cell(value)}" for name, value in record.items() if name not in hidden and value is not None)
    return f"{batch.partition}@{record[f'{prefix}offset']}  " + "  ".join(shown)


def _print_table(
    batches: list[ConsumedBatch], limit: int | None, available: int | None, topic: str, left_out: LeftOut
) -> None:
    rows = list(itertools.chain.from_iterable(records(batch, left_out) for batch in batches))
    if not rows:
        if left_out.count:
            return
        note(f"There is nothing to read in {topic} from there on (--offset earliest reads all, --follow waits).")
        return
    topic_column = f"{prefix_of_places(batches[0])}topic"
    names = [name for name in rows[0] if name != topic_column]
    if all(row.get("headers") is None for row in rows):
        names = [name for name in names if name != "headers"]
    right = [name for name in names if isinstance(rows[0][name], int | float)]
    print_table(names, [[cell(row[name]) for name in names] for row in rows], right=right)
    if available is not None and available > len(rows) + left_out.count == limit:
        note(f"{len(rows):,} of up to {available:,} records; --num {available} or --output json shows more.")
