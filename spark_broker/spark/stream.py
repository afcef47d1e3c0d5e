"""The streaming read of the data source: a thin shell around `stream_planner`, in a process of Spark.

Spark asks for offsets and ranges in one process that lives as long as the query. It reads each range in a task
elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from spark_broker.errors import UnknownTopicOrPartitionError
from spark_broker.spark.options import ReadOptions
from spark_broker.spark.planned_topic import TOPIC_GONE
from spark_broker.spark.range_rows import Ranges
from spark_broker.spark.stream_offset import INITIAL, StreamOffset, parse_offset
from spark_broker.spark.stream_planner import (
    Logs,
    Loss,
    StreamPlanner,
    batch_ranges,
    end_of_batch,
    find_losses,
    first_position,
    limited_ends,
    loss_error,
    resumed,
    still_there,
)
from spark_broker.spark.task import planned, read_task
from spark_broker.spark.user_errors import message_alone

if TYPE_CHECKING:
    from spark_broker.client.cluster_view import TopicView
    from spark_broker.spark.ranges import OffsetRange
    from spark_broker.spark.stream_session import StreamSession

_log = logging.getLogger(__name__)

Json = dict[str, Any]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The object that Spark calls. It is pickled for the tasks before it has connected to anything."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._planner = StreamPlanner(options.limits)
        self._session: StreamSession | None = None
        self._first: StreamOffset | None = None
        self._latest: StreamOffset | None = None
        self._planned_end: Json | None = None

    @message_alone()
    def initialOffset(self) -> Json:
        """A mark without offsets. Spark asks twice, and again after a crash. `latestOffset` resolves the mark once."""
        return dict(INITIAL)

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limits of a batch. Every Spark limit but ReadAllAvailable stands for all limits of the options."""
        limits = self._options.limits
        if limits.max_offsets:
            return ReadMaxRows(limits.max_offsets)
        if limits.max_bytes:
            return ReadMaxBytes(limits.max_bytes)
        return ReadMinRows(limits.min_offsets) if limits.min_offsets else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the current ends. The query reads up to them, and then ends."""
        self._planner.stop_at(self._connected().logs(None))

    @message_alone()
    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """The end of the next batch. It is `start` while there is nothing to read.

        Raises typed errors: records or topics are gone (failOnDataLoss), no cluster.
        """
        try:
            return self._next_end(start, limit)
        except UnknownTopicOrPartitionError:
            # A topic was deleted between two requests. The next look finds it gone.
            if self._options.fail_on_data_loss:
                raise
            return self._next_end(start, limit)

    def _next_end(self, start: Json, limit: ReadLimit) -> Json:
        session = self._connected()
        position = parse_offset(start)
        is_first = position is None
        if position is None:
            position = self._first = self._first or session.first_position()
        session.publish(position)  # Spark asks for the next batch when the last one is committed.
        logs = session.logs(position)
        lossy = self._report(find_losses(position, logs))
        logs = self._planner.within_target(position, logs)
        end = self._end(session, position, logs, limited=not isinstance(limit, ReadAllAvailable), lossy=lossy)
        self._latest = _all_of(logs)
        if is_first:
            end = replace(end, first=replace(position, ends={}))
        self._planned_end = start if end is position else end.to_json()
        return self._planned_end

    def _end(
        self, session: StreamSession, position: StreamOffset, logs: Logs, *, limited: bool, lossy: bool
    ) -> StreamOffset:
        begin = resumed(position, logs)
        # If isolation.level was another one before, the position may be past the last stable offset.
        ends = {tp: max(begin[tp], log.end) for tp, log in logs.items()}
        if limited:
            if self._planner.is_delayed(sum(ends[tp] - begin[tp] for tp in ends), int(time.monotonic() * 1000)):
                return position
            ends = self._planner.limited(begin, ends)
            if self._options.limits.max_bytes:
                parts = self._planner.byte_shares(session.sizes(begin))
                ends |= {tp: min(end, ends[tp]) for tp, end in session.reached(begin, parts).items()}
        return end_of_batch(position, logs, ends, session.epochs_before(limited_ends(logs, ends)), lossy=lossy)

    @message_alone()
    def reportLatestOffset(self) -> Json | None:
        """Where the logs ended at the last look. The query's progress shows it beside the offsets that were read."""
        return None if self._latest is None else self._latest.to_json()

    @message_alone()
    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        """Tasks that read all between the two offsets. A repeated batch has the same records. Raises typed errors."""
        last = parse_offset(end)
        if last is None or start == end:
            return []
        session = self._connected()
        position = first_position(last, parse_offset(start))
        ranges = batch_ranges(position, last)
        if end != self._planned_end:  # The batch was planned in another run.
            logs = session.logs(position)
            self._report(find_losses(replace(position, ends={}), logs))
            ranges = still_there(ranges, logs)
        if self._options.ranges:
            return [InputPartition(Ranges(tuple(ranges)))]
        topics = self._topics_of(session, ranges)
        tasks = session.tasks_of([part for part in ranges if part.topic in topics])
        return planned(tasks, list(topics.values()), self._options, self._schema, session.view)

    def _topics_of(self, session: StreamSession, ranges: Sequence[OffsetRange]) -> dict[str, TopicView]:
        """The topics of these ranges, by name; with failOnDataLoss=false, those that are not gone since the plan."""
        topics = {}
        for part in {part.topic: part for part in ranges}.values():
            try:
                topics[part.topic] = session.topic_of(part)
            except TOPIC_GONE as error:
                if self._options.fail_on_data_loss or not session.is_gone(part):
                    raise
                _log.warning("failOnDataLoss=false, passing over what was planned of %s: %s", part.tp, error.message)
        return topics

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, of each range in order of their offsets. Raises typed errors."""
        if isinstance(partition.value, Ranges):
            return partition.value.batches()
        return read_task(self._options, self._schema, partition)

    @message_alone()
    def commit(self, end: Json) -> None:
        """Spark has committed a batch that ended here."""
        position = parse_offset(end)
        if position is not None:
            self._connected().publish(position)

    def stop(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _connected(self) -> StreamSession:
        from spark_broker.spark.stream_session import StreamSession

        if self._session is None:
            self._session = StreamSession(self._options)
        return self._session

    def _report(self, losses: Sequence[Loss]) -> bool:
        """Raise the losses, or log them. Returns whether there are any."""
        if losses and self._options.fail_on_data_loss:
            raise loss_error(losses)
        for loss in losses:
            _log.warning("failOnDataLoss=false, going on with what there is: %s", loss)
        return bool(losses)


def _all_of(logs: Logs) -> StreamOffset:
    return StreamOffset({tp: log.end for tp, log in logs.items()}, {tp.topic: log.topic_id for tp, log in logs.items()})
