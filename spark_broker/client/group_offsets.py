"""Committed offsets of a group, kept by its coordinator: the leader of a partition of `__consumer_offsets`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spark_broker.client.coordinator import CoordinatorClient
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, NO_EPOCH, OffsetAndMetadata, TopicPartition, known_epoch
from spark_broker.protocol.messages import (
    CommittedOffset,
    EmptyResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
)


class GroupOffsets:
    """Commits and reads a group's offsets."""

    def __init__(self, metadata: ClusterMetadata, group_id: str) -> None:
        self._coordinator = CoordinatorClient(metadata, CONSUMER_OFFSETS_TOPIC, group_id)
        self._group_id = group_id

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], deadline: Deadline) -> None:
        """Store the offsets. Raises typed errors; after RequestTimedOutError they may be stored or not."""
        self._coordinator.ask(OffsetCommitRequest(self._group_id, to_messages(offsets)), EmptyResponse, deadline)

    def fetch(
        self, partitions: Iterable[TopicPartition] | None, deadline: Deadline
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Committed offsets of these partitions (None: of all); one without a commit is absent."""
        wanted = None if partitions is None else [(tp.topic, tp.partition) for tp in partitions]
        answer = self._coordinator.ask(OffsetFetchRequest(self._group_id, wanted), OffsetFetchResponse, deadline)
        return from_messages(answer.offsets)


def to_messages(offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> list[CommittedOffset]:
    """The offsets as requests carry them."""
    return [
        CommittedOffset(
            tp.topic,
            tp.partition,
            offset.offset,
            NO_EPOCH if offset.leader_epoch is None else offset.leader_epoch,
            offset.metadata,
        )
        for tp, offset in offsets.items()
    ]


def from_messages(offsets: Iterable[CommittedOffset]) -> dict[TopicPartition, OffsetAndMetadata]:
    """The offsets of an answer; a partition without a commit is absent."""
    return {
        TopicPartition(offset.topic, offset.partition): OffsetAndMetadata(
            offset.offset, known_epoch(offset.leader_epoch), offset.metadata
        )
        for offset in offsets
        if offset.offset >= 0
    }
