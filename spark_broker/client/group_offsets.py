"""Committed offsets of a group, kept by its coordinator: the leader of a partition of `__consumer_offsets`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spark_broker.client.cluster_view import address_of
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline, call_with_retries
from spark_broker.errors import CoordinatorNotAvailableError, SparkBrokerError, UnknownServerError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, OffsetAndMetadata, TopicPartition
from spark_broker.protocol.messages import (
    CallResponse,
    CommittedOffset,
    CommittedOffsets,
    Empty,
    EnsureOffsetsTopic,
    OffsetCommit,
    OffsetFetch,
)
from spark_broker.protocol.murmur2 import group_partition


class GroupOffsets:
    """Commits and reads a group's offsets; a coordinator that has moved is found again, unseen by the caller."""

    def __init__(self, metadata: ClusterMetadata, group_id: str) -> None:
        self._metadata = metadata
        self._group_id = group_id
        metadata.use([CONSUMER_OFFSETS_TOPIC])

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], deadline: Deadline) -> None:
        """Store the offsets. Raises typed errors; after RequestTimedOutError they may be stored or not."""
        committed = [
            CommittedOffset(tp.topic, tp.partition, one.offset, one.leader_epoch, one.metadata)
            for tp, one in offsets.items()
        ]
        answer = self._call(OffsetCommit(self._group_id, committed), deadline)
        if not isinstance(answer, Empty):
            raise UnknownServerError(f"OffsetCommit was answered with {type(answer).__name__}")

    def fetch(
        self, partitions: Iterable[TopicPartition] | None, deadline: Deadline
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Committed offsets of these partitions (None: of all); one without a commit is absent."""
        wanted = None if partitions is None else [(tp.topic, tp.partition) for tp in partitions]
        answer = self._call(OffsetFetch(self._group_id, wanted), deadline)
        if not isinstance(answer, CommittedOffsets):
            raise UnknownServerError(f"OffsetFetch was answered with {type(answer).__name__}")
        return {
            TopicPartition(one.topic, one.partition): OffsetAndMetadata(one.offset, one.leader_epoch, one.metadata)
            for one in answer.offsets
            if one.offset >= 0
        }

    def _call(self, request: OffsetCommit | OffsetFetch, deadline: Deadline) -> CallResponse:
        return call_with_retries(
            lambda: self._call_coordinator(request, deadline),
            deadline=deadline,
            backoff=self._metadata.backoff,
            closing=self._metadata.closing,
            between=lambda error: self._look_again(error, deadline),
        )

    def _look_again(self, error: SparkBrokerError, deadline: Deadline) -> None:
        if error.refresh_metadata:
            self._metadata.refresh(deadline)

    def _call_coordinator(self, request: OffsetCommit | OffsetFetch, deadline: Deadline) -> CallResponse:
        view = self._metadata.view
        topic = view.topic(CONSUMER_OFFSETS_TOPIC)
        if topic is None:
            view = self._metadata.refresh(deadline)
            topic = view.topic(CONSUMER_OFFSETS_TOPIC)
        if topic is None:
            self._metadata.call_any(EnsureOffsetsTopic(), deadline)
            view = self._metadata.refresh(deadline)
            topic = view.topic(CONSUMER_OFFSETS_TOPIC)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{CONSUMER_OFFSETS_TOPIC} is being created")
        partition = group_partition(self._group_id, len(topic.partitions))
        leader = view.leader(CONSUMER_OFFSETS_TOPIC, partition)
        if leader is None:
            raise CoordinatorNotAvailableError(f"{CONSUMER_OFFSETS_TOPIC}-{partition} has no leader")
        return self._metadata.call(address_of(leader[0]), request, deadline)
