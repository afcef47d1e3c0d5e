"""Reads a topic's Delta table without a JVM, through deltalake: what the log does not have any more, as batches.

The table's rows come in windows of offsets, each sorted, because a user may have rewritten the files (OPTIMIZE).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_broker.client.cluster_view import ClusterView, TopicView
from spark_broker.client.consumer_effects import ReadHistory
from spark_broker.client.delta_rows import DeltaRows
from spark_broker.client.partition_position import Prefetched
from spark_broker.client.table_file import Rows
from spark_broker.errors import InvalidDataError, OffsetOutOfRangeError, SparkBrokerError
from spark_broker.model import NO_EPOCH, ConsumedBatch, TopicPartition
from spark_broker.protocol.arrays import scalar_of
from spark_broker.protocol.messages import ListedOffset
from spark_broker.protocol.schema import TIMESTAMP_TYPE
from spark_broker.times import EARLIEST, Moment, nearest_to_us

WINDOW_BYTES = 64 * 1024 * 1024
"""About so many bytes of rows are sorted at a time."""

WINDOW_ROWS_MAX = 1_000_000

_LOG_COLUMNS = ("_offset", "_timestamp", "_leader_epoch")


class HistoryReader:
    """The history of one topic, as the table is now. For one thread. Raises what `DeltaRows` does."""

    def __init__(self, topic: TopicView, window_bytes: int | None = None) -> None:
        """`window_bytes`: about so many bytes of rows are sorted at a time; None: WINDOW_BYTES."""
        self._topic = topic
        self._table = DeltaRows(topic)
        self._window_bytes = WINDOW_BYTES if window_bytes is None else window_bytes
        self._window = min(WINDOW_ROWS_MAX, max(1, self._window_bytes // self._table.row_bytes))
        """At most so many offsets are sorted at a time: rows are not smaller in memory than in their files."""

    def batches(
        self, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[ConsumedBatch]:
        """The records of these offsets (`end` is exclusive), in order. `columns`: only these; None: the topic's.

        Not every offset holds a record. `append_time` of a batch is its newest timestamp: the table has no other.
        Raises InvalidDataError where an offset is in the table twice, and where rows are none of the topic's.
        """
        names = self._topic.schema.names if columns is None else list(columns)
        wanted = [*(name for name in names if name.lower() in self._table.columns), *_LOG_COLUMNS]
        last = start - 1
        while start < end:
            rows = Rows(partition, start, min(end, start + self._window))
            rows, at_once = self._table.fitting(rows, wanted, self._window_bytes)
            for batch in self._table.sorted(rows, wanted, at_once):
                # A user may have changed the table: any error of Arrow's here is the partition's, and not the client's.
                with self._table.failures():
                    offsets = batch.column("_offset").to_numpy()
                    if len(offsets) and (offsets[0] <= last or (np.diff(offsets) <= 0).any()):
                        path = self._topic.settings.delta_path
                        raise InvalidDataError(f"{path} has an offset of partition {partition} twice, after {last}")
                    last = int(offsets[-1]) if len(offsets) else last
                    consumed = list(self._consumed(batch, offsets, partition, names))
                yield from consumed
            start = rows.end

    def first_since(self, partition: int, timestamp_us: int, log_start: int) -> int | None:
        """The first offset before the log with this timestamp (us since 1970) or a later one.

        From `log_start` on the log decides: it also has records that the table refused, or lacks since.
        """
        # Rows of deleted records stay in the table until the next run of the tierer deletes them.
        start, end = self._topic.history_of(partition)
        return self._table.first_since(Rows(partition, start, min(end, log_start)), timestamp_us)

    def _consumed(
        self, batch: pa.RecordBatch, offsets: np.ndarray[Any, Any], partition: int, names: Sequence[str]
    ) -> Iterator[ConsumedBatch]:
        """Runs of consecutive offsets of one leader epoch: an offset without a record ends a run."""
        epochs = batch.column("_leader_epoch").to_numpy()
        breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(epochs) != 0)) + 1
        data = self._data(batch, names)
        timestamps = batch.column("_timestamp").cast(TIMESTAMP_TYPE)
        bounds = [0, *breaks.tolist(), len(offsets)]
        for first, end in pairwise(bounds):
            if first == end:
                continue
            run = timestamps.slice(first, end - first)
            newest_us: int = pc.max(run.cast(pa.int64())).as_py() or 0
            yield ConsumedBatch(
                topic=self._topic.name,
                partition=partition,
                base_offset=int(offsets[first]),
                data=data.slice(first, end - first),
                leader_epoch=int(epochs[first]),
                append_time=nearest_to_us(newest_us),
                timestamps=run,
                typed=not self._topic.has_default_schema,
            )

    def _data(self, batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
        """The topic's columns in their stored types. A column that the table lacks is null."""
        fields = [self._topic.schema.field(name) for name in names]
        there = set(batch.schema.names)
        arrays = [
            batch.column(field.name).cast(field.type)
            if field.name in there
            else pa.repeat(scalar_of(None, field.type), batch.num_rows)
            for field in fields
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([field.with_nullable(True) for field in fields]))


def first_in_tables(
    topics: Mapping[str, TopicView],
    times_us: Mapping[TopicPartition, int],
    logs: Mapping[TopicPartition, ListedOffset],
) -> dict[TopicPartition, int]:
    """The first offset of the topic's history at or after a time (us since 1970), by partition.

    Only of partitions that have such a record before their log. `logs`: of these partitions, and maybe others, as their
    leaders answered for the same times; `topics` as metadata shows them since. Raises as `HistoryReader` does, if a
    table has to be searched.
    """
    readers: dict[str, HistoryReader] = {}
    first: dict[TopicPartition, int] = {}
    for tp, time_us in times_us.items():
        topic, log_start = topics.get(tp.topic), logs[tp].log_start_offset
        if topic is None or topic.begins(tp.partition, log_start) == log_start:
            continue
        if tp.topic not in readers:
            readers[tp.topic] = HistoryReader(topic)
        offset = readers[tp.topic].first_since(tp.partition, time_us, log_start)
        if offset is not None:
            first[tp] = offset
    return first


def offsets_with_history(
    view: ClusterView, moments: Mapping[TopicPartition, Moment], listed: Mapping[TopicPartition, ListedOffset]
) -> dict[TopicPartition, int]:
    """The offsets that the leaders found for these moments, or earlier ones that are only in the topics' tables.

    -1: there is none. Raises as `first_in_tables` does.
    """
    named = {tp.topic: view.topic(tp.topic) for tp in moments}
    topics = {name: topic for name, topic in named.items() if topic is not None}
    offsets = {tp: listed[tp].offset for tp in moments}
    for tp, moment in moments.items():
        if moment == EARLIEST and tp.topic in topics:
            offsets[tp] = topics[tp.topic].begins(tp.partition, listed[tp].log_start_offset)
    times_us = {tp: moment for tp, moment in moments.items() if isinstance(moment, int)}
    return offsets | first_in_tables(topics, times_us, listed)


def check_start(topic: TopicView, partition: int, start: int) -> None:
    """Check that nothing from this offset on was deleted from a table that is open already.

    `topic`: as the controller had it after the table was opened. It records a deletion before rows leave the table.
    Raises OffsetOutOfRangeError.
    """
    begins, end = topic.history_of(partition)
    if start < begins:
        raise OffsetOutOfRangeError(f"{topic.name}-{partition}: the history begins at {begins} now, up to {end}")


class _OpenTable(NamedTuple):
    """`recorded`: the topic as the controller had it after the table was opened."""

    topic: TopicView
    reader: HistoryReader
    recorded: TopicView


class HistoryParts:
    """Parts of tables for a consumer, one after the other. For one thread.

    The table stays open while the topic's metadata does not change: its history is in the table as it was then.
    """

    def __init__(
        self,
        wanted_of: Callable[[TopicView], list[str] | None],
        part_bytes: int,
        as_recorded: Callable[[TopicView], TopicView],
    ) -> None:
        """`as_recorded`: asks the controller for the topic as it is now."""
        self._wanted_of = wanted_of
        self._part_bytes = part_bytes
        self._as_recorded = as_recorded
        self._open: _OpenTable | None = None

    def next(self, asked: ReadHistory) -> list[Prefetched]:
        """The next batches, of about `part_bytes`. The last entry of a table's end has no records.

        Raises as `HistoryReader` does, and OffsetOutOfRangeError where the history begins later now.
        """
        was_open = self._open is not None
        try:
            return self._part(asked)
        except SparkBrokerError:
            self._open = None
            if not was_open:
                raise
        return self.next(asked)  # A user may have rewritten the files since it was opened (OPTIMIZE, VACUUM).

    def _part(self, asked: ReadHistory) -> list[Prefetched]:
        fetched: list[Prefetched] = []
        size = 0
        reader, columns = self._opened(asked), self._wanted_of(asked.topic)
        for batch in reader.batches(asked.tp.partition, asked.start, asked.end, columns):
            part = Prefetched(partial(_itself, batch), batch.next_offset, batch.leader_epoch, batch.data.nbytes)
            fetched.append(part)
            size += part.size_bytes
            if size >= self._part_bytes:
                return fetched
        return to_the_end(fetched, asked)

    def _opened(self, asked: ReadHistory) -> HistoryReader:
        if self._open is None or asked.topic is not self._open.topic:
            # What is sorted beyond the part is sorted in vain.
            reader = HistoryReader(asked.topic, self._part_bytes)
            self._open = _OpenTable(asked.topic, reader, self._as_recorded(asked.topic))
        check_start(self._open.recorded, asked.tp.partition, asked.start)
        return self._open.reader


def to_the_end(fetched: Sequence[Prefetched], asked: ReadHistory) -> list[Prefetched]:
    """The table's last records up to the end that was asked for, with an entry for offsets after the last record.

    Its epoch is not known. A later leader may have written these offsets: a marker, or records that were removed since.
    """
    if fetched and fetched[-1].next_offset >= asked.end:
        return list(fetched)
    return [*fetched, Prefetched(None, asked.end, NO_EPOCH, 0)]


def _itself(batch: ConsumedBatch) -> ConsumedBatch:
    return batch
