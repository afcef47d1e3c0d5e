"""A streaming query's requests to the cluster, over connections that it keeps from batch to batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from spark_broker.client.cluster_view import ClusterView, TopicView
from spark_broker.client.committing import RENEW_S
from spark_broker.client.group_offsets import GroupOffsets
from spark_broker.client.offset_lookup import EVERY_BYTE, Reach, all_at, lookup_offsets
from spark_broker.client.retry import Deadline
from spark_broker.errors import SparkBrokerError
from spark_broker.model import OffsetAndMetadata, TopicPartition
from spark_broker.protocol.messages import ListedOffset
from spark_broker.spark.cluster import KnownTopic, connected, existing_topics, partitions_of, selected_topics
from spark_broker.spark.options import ReadOptions
from spark_broker.spark.planned_topic import is_gone, planned_topic
from spark_broker.spark.planning import newest, resolve_starts, whole
from spark_broker.spark.ranges import OffsetRange, TaskRanges, tasks_of
from spark_broker.spark.stream_offset import StreamOffset
from spark_broker.spark.stream_planner import LogRange
from spark_broker.times import LATEST

PUBLISH_TIMEOUT_MS = 5000
"""A group's offsets show others how far the query is. The query waits for a commit no longer than this."""

_log = logging.getLogger(__name__)


class StreamSession:
    """For one thread. Every call has the deadline default.api.timeout.ms, and raises typed errors."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._stack = ExitStack()
        self._metadata = self._stack.enter_context(connected(options.settings))
        self._group = GroupOffsets(self._metadata, options.group) if options.group else None
        self._published: Mapping[TopicPartition, int] = {}
        self._published_s = time.monotonic()
        self._record_bytes: dict[TopicPartition, float] = {}  # as stored, at the last look

    @property
    def view(self) -> ClusterView:
        """The cluster, as the last request showed it."""
        return self._metadata.view

    def first_position(self) -> StreamOffset:
        """Where a new query starts."""
        deadline = self._deadline()
        topics = selected_topics(self._metadata, self._options.selection, deadline)
        infos = self._look_up(partitions_of(self._options.selection, topics), deadline)
        starts = resolve_starts(self._metadata, self._options, infos, topics)
        return StreamOffset(starts, {topic.name: topic.topic_id for topic in topics})

    def logs(self, position: StreamOffset | None) -> dict[TopicPartition, LogRange]:
        """What the selected partitions hold now, with partitions that are new since the last look."""
        deadline = self._deadline()
        topics = existing_topics(self._metadata, self._options.selection, _known(position), deadline)
        begin = {} if position is None else position.offsets
        reached = {tp: Reach(offset, EVERY_BYTE) for tp, offset in begin.items()}
        logs = self._look_up(partitions_of(self._options.selection, topics), deadline, reached)
        self._record_bytes = {
            tp: logs[tp].size_bytes / (logs[tp].offset - start)
            for tp, start in begin.items()
            if tp in logs and logs[tp].offset > start
        }
        infos = whole(logs, newest(self._metadata, topics))
        return {
            tp: LogRange(
                topic_id=info.topic_id,
                start=info.log_start_offset,
                end=info.offset,
                high_watermark=info.high_watermark,
                last_epoch=info.last_epoch,
                position_epoch=info.start_epoch,
            )
            for tp, info in infos.items()
        }

    def sizes(self, begin: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Bytes that are stored from there on."""
        reaches = {tp: Reach(offset, max_bytes=1) for tp, offset in begin.items()}
        return {tp: info.size_bytes for tp, info in self._look_up(begin, self._deadline(), reaches).items()}

    def reached(
        self, begin: Mapping[TopicPartition, int], max_bytes: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """How far this many bytes of each partition reach. It is at least one stored batch."""
        reaches = {tp: Reach(begin[tp], size) for tp, size in max_bytes.items()}
        return {tp: info.fitting_offset for tp, info in self._look_up(reaches, self._deadline(), reaches).items()}

    def epochs_before(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Leader epochs of the records before these offsets; -1: not known."""
        if not offsets:
            return {}
        reaches = {tp: Reach(offset) for tp, offset in offsets.items()}
        return {tp: info.start_epoch for tp, info in self._look_up(offsets, self._deadline(), reaches).items()}

    def topic_of(self, part: OffsetRange) -> TopicView:
        """The topic of the range. Raises as `planned_topic` does."""
        return planned_topic(self._metadata, part.topic, part.topic_id, self._deadline())

    def is_gone(self, part: OffsetRange) -> bool:
        """Whether the topic of the range certainly does not exist any more."""
        return is_gone(self._metadata, part.topic, part.topic_id, self._deadline())

    def tasks_of(self, ranges: Sequence[OffsetRange]) -> list[TaskRanges]:
        """The ranges that each task reads."""
        return tasks_of(ranges, self._options.tasks, self._record_bytes)

    def publish(self, position: StreamOffset) -> None:
        """Commit the position as the offsets of the query's group, if it has one; now and then also unchanged ones.

        A failure is logged. The next batch commits again, and only Spark's checkpoint decides where the query goes on.
        """
        is_fresh = time.monotonic() - self._published_s < RENEW_S
        if self._group is None or (position.offsets == self._published and is_fresh):
            return
        offsets = {
            tp: OffsetAndMetadata(offset, end.leader_epoch if end is not None and end.offset == offset else None)
            for tp, offset in position.offsets.items()
            for end in [position.ends.get(tp)]
        }
        topic_ids = {tp: position.topic_ids[tp.topic] for tp in offsets if tp.topic in position.topic_ids}
        try:
            self._group.commit(offsets, Deadline.after_ms(PUBLISH_TIMEOUT_MS), topic_ids)
        except SparkBrokerError as error:
            _log.warning("the progress was not published as offsets of group %s: %s", self._options.group, error)
        else:
            self._published, self._published_s = position.offsets, time.monotonic()

    def close(self) -> None:
        """Close the connections."""
        self._stack.close()

    def _look_up(
        self,
        partitions: Iterable[TopicPartition],
        deadline: Deadline,
        reaches: Mapping[TopicPartition, Reach] | None = None,
    ) -> dict[TopicPartition, ListedOffset]:
        wanted = all_at(partitions, LATEST)
        read_committed = self._options.settings.read_committed
        return lookup_offsets(self._metadata, wanted, deadline, read_committed=read_committed, reaches=reaches)

    def _deadline(self) -> Deadline:
        return Deadline.after_ms(self._options.settings.default_api_timeout_ms)


def _known(position: StreamOffset | None) -> dict[str, KnownTopic]:
    """The topics of a position, by name. Partitions are never taken away."""
    if position is None:
        return {}
    counts: dict[str, int] = {}
    for tp in position.offsets:
        counts[tp.topic] = max(counts.get(tp.topic, 0), tp.partition + 1)
    return {name: KnownTopic(position.topic_ids[name], count) for name, count in counts.items()}
