"""Records as a person or a script reads them: one mapping per record, bytes as text where they are text."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from typing import TypeVar

import msgspec
import typer

from spark_broker.cli.output import counted, note, print_error
from spark_broker.errors import RecordNotShowableError
from spark_broker.model import NOT_SHOWABLE, ConsumedBatch
from spark_broker.times import from_us, shown


def is_default(batch: ConsumedBatch) -> bool:
    """Whether these are Kafka's records and not rows of typed columns."""
    from spark_broker.protocol.schema import DEFAULT_SCHEMA

    return bool(batch.data.schema.equals(DEFAULT_SCHEMA))


class LeftOut:
    """The records that a command cannot show. Each is named on standard error, where no script looks."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, why: str) -> None:
        """One more."""
        print_error(why)
        self.count += 1

    def check(self) -> None:
        """End the command with status 1 if there is any: its output lacks records."""
        if self.count:
            note(f"{counted(self.count, 'record', 'records')} could not be shown")
            raise typer.Exit(1)


Shown = TypeVar("Shown")


def records(batch: ConsumedBatch, left_out: LeftOut) -> Iterator[dict[str, object]]:
    """The records with their places, under the names that the DataFrame uses."""
    return _shown(batch, _records, left_out)


def _shown(
    batch: ConsumedBatch, show: Callable[[ConsumedBatch], Iterator[Shown]], left_out: LeftOut
) -> Iterator[Shown]:
    """All that can be shown. Each record that cannot is added to `left_out`."""
    try:
        shown = list(show(batch))
    except NOT_SHOWABLE:
        for number in range(batch.data.num_rows):
            alone = batch.slice(number, 1)
            try:
                next(alone.records())
            except RecordNotShowableError as error:
                left_out.add(str(error))
            else:
                yield from show(alone)
    else:
        yield from shown


def prefix_of_places(batch: ConsumedBatch) -> str:
    """What `topic`, `partition` and so on begin with: a typed topic may have columns of these names."""
    return "" if is_default(batch) else "_"


def _records(batch: ConsumedBatch) -> Iterator[dict[str, object]]:
    prefix = prefix_of_places(batch)
    rows = batch.data.to_pylist()
    times = batch.timestamps.cast("int64").to_pylist()
    for index, (row, time_us) in enumerate(zip(rows, times, strict=True)):
        place: dict[str, object] = {
            f"{prefix}topic": batch.topic,
            f"{prefix}partition": batch.partition,
            f"{prefix}offset": batch.base_offset + index,
            f"{prefix}timestamp": from_us(time_us),
        }
        columns = {name: readable(value) for name, value in row.items() if name != f"{prefix}timestamp"}
        yield {**columns, **place} if prefix else {**place, **columns}


def values(batch: ConsumedBatch, left_out: LeftOut) -> Iterator[bytes]:
    """What was sent, without its place: the value of a Kafka record, the columns of a typed one as JSON."""
    return _shown(batch, _values, left_out)


def _values(batch: ConsumedBatch) -> Iterator[bytes]:
    if is_default(batch):
        yield from (value or b"" for value in batch.data.column("value").to_pylist())
    else:
        yield from (msgspec.json.encode(readable(row)) for row in batch.data.to_pylist())


def readable(value: object) -> object:
    """The value with bytes as text, those that are not UTF-8 as `{"base64": ...}`; NaN and Infinity as text.

    JSON has no such numbers, and would say `null`: another value, for whoever reads it.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {name: readable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [readable(inner) for inner in value]
    return value


def cell(value: object) -> str:
    """The value in a table. A time of a column without a zone is shown as it is, every other one in UTC."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds") if value.tzinfo is None else shown(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
