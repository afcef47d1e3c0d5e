"""Turns the frames of a fetch into batches for the caller: checked, decoded without a copy, with the topic's current
schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.partition_position import Prefetched
from spark_broker.model import ConsumedBatch
from spark_broker.protocol.arrays import from_numpy, scalar_of
from spark_broker.protocol.arrow_message import decode_batch, row_deltas
from spark_broker.protocol.frame import ROW_OFFSETS, BatchHeader, Frame
from spark_broker.protocol.messages import FetchedPartition
from spark_broker.protocol.schema import TIMESTAMP_TYPE, columns_stored, conform
from spark_broker.times import from_ms

AHEAD_BYTES = 65536
"""A batch of at least this size is decoded ahead, while the caller works: decompression takes time. A smaller one waits
undecoded. Arrow's objects for a batch of one row take five times its bytes.
"""

_MICROSECONDS_PER_DAY = scalar_of(86_400_000_000, pa.int64())


class Projection:
    """The columns that a consumer of a topic wants, in the order of the topic's schema.

    The broker is also asked for the timestamp column, if there is one. It is removed again here.
    """

    def __init__(self, topic: TopicView, columns: Sequence[str] | None, *, sliced: bool = True) -> None:
        """`sliced`: messages have only what was asked for. Otherwise they have every column, as they are stored."""
        self.topic = topic
        self._sliced = sliced
        self.wanted = None if columns is None else [name for name in topic.schema.names if name in columns]
        self.asked: list[str] | None = None
        if self.wanted is not None:
            self.asked = [n for n in topic.schema.names if n in self.wanted or n == topic.timestamp_column]

    def batch(self, message: memoryview, schema_id: int) -> pa.RecordBatch:
        """The rows with every column that was asked for."""
        stored, current = self.topic.schema_of(schema_id), self.topic.schema
        if self.asked is None:
            return conform(decode_batch(message, stored), current)
        names = columns_stored(stored, self.asked)
        rows = decode_batch(message, _select(stored, names)) if self._sliced else decode_batch(message, stored, names)
        asked = _select(current, self.asked)
        return conform(rows.select([name for name in names if name in asked.names]), asked)

    def visible(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if self.wanted is None or self.wanted == self.asked else batch.select(self.wanted)


def decode_fetched(
    frames: Iterable[Frame], projection: Projection, answer: FetchedPartition, fetch_offset: int
) -> list[Prefetched]:
    """The batches of an answer from `fetch_offset` on; the first is cut when the offset lies inside it.

    Small ones are checked now, and decoded when the caller wants them.

    Offsets at the end that the broker passed over, where markers or aborted batches are, come as one entry without a
    batch; those in between are simply missing. Raises CorruptMessageError, and UnknownSchemaError (retriable) for a
    schema that is not known yet.
    """
    fetched: list[Prefetched] = []
    for frame in frames:
        header = frame.header
        if header.next_offset <= fetch_offset:
            continue
        decode = None
        if header.row_count:
            decode = _decoder(frame, answer.partition, fetch_offset, projection)
        fetched.append(Prefetched(decode, header.next_offset, header.leader_epoch, header.length))
        fetch_offset = header.next_offset
    if answer.next_offset > fetch_offset:
        fetched.append(Prefetched(None, answer.next_offset, answer.next_epoch, 0))
    return fetched


def _decoder(frame: Frame, partition: int, fetch_offset: int, projection: Projection) -> Callable[[], ConsumedBatch]:
    projection.topic.schema_of(frame.header.schema_id)
    if frame.header.length < AHEAD_BYTES:
        return partial(_consumed, frame, partition, fetch_offset, projection)
    batch = _consumed(frame, partition, fetch_offset, projection)
    return lambda: batch


def _consumed(frame: Frame, partition: int, fetch_offset: int, projection: Projection) -> ConsumedBatch:
    header, topic = frame.header, projection.topic
    batch = projection.batch(memoryview(frame.message), header.schema_id)
    sparse = None
    if header.attributes & ROW_OFFSETS:
        sparse = from_numpy(header.base_offset + row_deltas(header, frame.message))
    consumed = ConsumedBatch(
        topic=topic.name,
        partition=partition,
        base_offset=header.base_offset if sparse is None else sparse[0].as_py(),
        data=projection.visible(batch),
        leader_epoch=header.leader_epoch,
        append_time=from_ms(header.append_time_ms),
        timestamps=_timestamps_us(batch, topic.timestamp_column, header).view(TIMESTAMP_TYPE),
        typed=not topic.has_default_schema,
        sparse=sparse,
    )
    return consumed.slice(consumed.rows_below(fetch_offset)) if fetch_offset > header.base_offset else consumed


def _timestamps_us(batch: pa.RecordBatch, column_name: str, header: BatchHeader) -> pa.Array:
    """Every record's timestamp: its column's, or the append time where there is none."""
    append_time_us = scalar_of(header.append_time_ms * 1000, pa.int64())
    index = batch.schema.get_field_index(column_name) if column_name else -1
    if index < 0:
        return pa.repeat(append_time_us, batch.num_rows)
    column = batch.column(index)
    if pa.types.is_date(column.type):
        times_us = pc.multiply(column.cast(pa.int32()).cast(pa.int64()), _MICROSECONDS_PER_DAY)
    else:
        times_us = column.cast(pa.int64())
    return pc.fill_null(times_us, append_time_us) if times_us.null_count else times_us


def _select(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in names])
