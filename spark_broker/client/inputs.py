"""Turns the data of `append` into record batches of the topic's schema, no larger than the topic takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.given_columns import column_of, from_frame
from spark_broker.errors import (
    InvalidDataError,
    InvalidTimestampError,
    MessageTooLargeError,
    SchemaMismatchError,
    SparkBrokerError,
)
from spark_broker.protocol.arrays import repeated, scalar_of, to_numpy
from spark_broker.protocol.arrow_message import MAX_ROWS, encoded_batch
from spark_broker.protocol.schema import conform
from spark_broker.times import LATEST_US
from spark_broker.visible import shown

METADATA_BYTES = 1024
"""Our own metadata makes the head of a message longer, but by less than this."""

SLICE_BYTES = 4 * 1024 * 1024
"""A table that is too large for one micro-batch is cut into slices of about this size."""


class Conformed(NamedTuple):
    """Record batches of the topic's schema. `divisible`: they came as a table, which may be cut anywhere."""

    batches: list[pa.RecordBatch]
    divisible: bool


def tabular(data: object) -> object:
    """The data, read once: a stream of Arrow batches can be read only once, and they may be conformed twice.

    Raises InvalidDataError for a stream or an array that does not become a table.
    """
    known = isinstance(data, pa.RecordBatch | pa.Table | type) or _is_pandas_frame(data)
    if known or not (hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")):
        return data
    try:
        return pa.table(data)
    except Exception as error:
        raise InvalidDataError(
            f"{type(data).__name__} does not become a table: {type(error).__name__}: {error}"
        ) from error


def conformed(data: object, topic: TopicView) -> Conformed:
    """The user's data under the topic's schema.

    Raises InvalidDataError for data that is no table, and SchemaMismatchError for a table that does not fit.
    """
    if isinstance(data, pa.RecordBatch):
        return Conformed([with_timestamps(conform(data, topic.schema), topic)], divisible=False)
    batches = (batch for batch in _to_batches(data, topic.schema) if batch.num_rows)
    return Conformed([with_timestamps(conform(batch, topic.schema), topic) for batch in batches], divisible=True)


def with_timestamps(batch: pa.RecordBatch, topic: TopicView) -> pa.RecordBatch:
    """Kafka's record always has a timestamp. It is the current time where the user gave none.

    Raises InvalidTimestampError for a time before 1970, or after the year 9999.
    """
    if not topic.has_default_schema or topic.timestamp_column != "timestamp":
        return batch
    index = batch.schema.get_field_index("timestamp")
    column = batch.column(index)
    missing = column.null_count
    if missing < len(column):
        _check_times(column)
    if not missing:
        return batch
    now_us = time.time_ns() // 1000
    if missing == len(column):
        filled = repeated(now_us, len(column), column.type)
    else:
        filled = pc.fill_null(column, scalar_of(now_us, column.type))
    return batch.set_column(index, batch.schema.field(index), filled)


def _check_times(column: pa.Array) -> None:
    times = to_numpy(pc.drop_null(column).view(pa.int64()))
    wrong = times[(times < 0) | (times > LATEST_US)]
    if len(wrong):
        raise InvalidTimestampError(
            f"a timestamp of {int(wrong[0])} microseconds since 1970 is not from 1970 to 9999",
            hint="Give times as datetimes, or as Arrow timestamps of the right unit.",
        )


def sliced(batch: pa.RecordBatch, start: int, rows: int) -> pa.RecordBatch:
    """Some rows, without those around them: of lists that are empty, Arrow writes the children of the whole column."""
    piece = batch.slice(start, rows)
    columns = [pa.concat_arrays([column]) if pa.types.is_nested(column.type) else column for column in piece.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def fits(batch: pa.RecordBatch, limit_bytes: int) -> bool:
    """Whether the batch is no larger than this, before compression."""
    size = pa.ipc.get_record_batch_size(batch) + METADATA_BYTES
    return size <= limit_bytes or len(encoded_batch(batch)) <= limit_bytes


def within_size(batch: pa.RecordBatch, topic: TopicView, *, divisible: bool) -> list[pa.RecordBatch]:
    """The batch, or slices of it that the topic takes. Raises MessageTooLargeError, before anything was sent.

    As on the broker, the size before compression counts: a reader needs room for it.
    """
    limit = topic.settings.max_message_bytes
    if batch.num_rows <= MAX_ROWS and fits(batch, limit):
        return [batch]
    size = pa.ipc.get_record_batch_size(batch) + METADATA_BYTES
    if not divisible or batch.num_rows == 1:
        raise MessageTooLargeError(
            f"a batch of {batch.num_rows} rows is about {size} bytes; max.message.bytes of {topic.name!r} is {limit}, "
            f"and a batch has at most {MAX_ROWS} rows"
        )
    rows = max(1, min(batch.num_rows // 2, batch.num_rows * min(SLICE_BYTES, limit) // size))
    slices = (sliced(batch, start, rows) for start in range(0, batch.num_rows, rows))
    return [part for piece in slices for part in within_size(piece, topic, divisible=True)]


def _to_batches(data: object, schema: pa.Schema) -> Sequence[pa.RecordBatch]:
    if isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview):
        return (_from_rows(data, schema),)
    if not isinstance(data, pa.Table) and not _is_pandas_frame(data):
        raise InvalidDataError(
            f"{type(data).__name__} is not a RecordBatch, Table, pandas frame, list of dicts or Arrow stream",
            hint="Whatever has __arrow_c_stream__ is taken (polars, duckdb); a lazy frame has to be collected first.",
        )
    try:
        table = data if isinstance(data, pa.Table) else from_frame(data, schema)
        return cast("list[pa.RecordBatch]", table.combine_chunks().to_batches())
    except (MemoryError, SparkBrokerError):
        raise
    except Exception as error:
        raise InvalidDataError(f"the data does not become a table: {error}") from error


def _is_pandas_frame(data: object) -> bool:
    """Without an import of pandas. It has `__arrow_c_stream__`, too, which would add its index as a column."""
    return any(
        kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas" for kind in type(data).__mro__
    )


def _from_rows(rows: Sequence[object], schema: pa.Schema) -> pa.RecordBatch:
    wrong = next((number for number, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise InvalidDataError(f"row {wrong} is {type(rows[wrong]).__name__}, not a dict")
    dicts = cast("Sequence[dict[str, object]]", rows)
    _check_names(dicts, schema)
    return pa.RecordBatch.from_arrays(
        [column_of([row.get(field.name) for row in dicts], field) for field in schema], schema=schema
    )


def _check_names(rows: Sequence[dict[str, object]], schema: pa.Schema) -> None:
    """Raises SchemaMismatchError for a name that the schema does not have: its values would be dropped silently."""
    unknown = sorted({name for row in rows for name in row} - set(schema.names), key=str)
    if unknown:
        raise SchemaMismatchError(f"unknown column {shown(unknown[0])}; the topic has {', '.join(schema.names)}")
