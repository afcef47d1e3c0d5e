"""Committed offsets of a group, kept by its coordinator: the leader of a partition of `__consumer_offsets`."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Mapping

from spark_broker.client.coordinator import CoordinatorClient
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.model import (
    CONSUMER_OFFSETS_TOPIC,
    NO_EPOCH,
    GroupMetadata,
    OffsetAndMetadata,
    TopicPartition,
    known_epoch,
)
from spark_broker.protocol.messages import (
    CommittedOffset,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    EmptyResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
)

NO_IDS: Mapping[TopicPartition, str] = {}

NOBODY = GroupMetadata("")
"""A commit without a member."""


class GroupOffsets:
    """Commits and reads a group's offsets. One commit at a time: a late copy of one must not undo the next."""

    def __init__(self, metadata: ClusterMetadata, group_id: str) -> None:
        self._committer = uuid.uuid4().hex
        self._sequence = itertools.count()
        self._metadata = metadata
        self._coordinator = CoordinatorClient(metadata, CONSUMER_OFFSETS_TOPIC, group_id)
        self._group_id = group_id

    def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        deadline: Deadline,
        topic_ids: Mapping[TopicPartition, str] = NO_IDS,
        member: GroupMetadata = NOBODY,
        *,
        trying: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the offsets. `topic_ids`: of the topics that were read, where they are known. `member`: who has read.
        `trying` is called before each attempt.

        Raises typed errors; after RequestTimedOutError they may be stored or not. Raises InconsistentTopicIdError or
        UnknownTopicOrPartitionError for a topic that was deleted, StaleMemberEpochError for a partition that is not the
        member's any more; the other offsets are stored then. Raises UnknownMemberIdError where the group has members,
        and this is none.
        """
        request = OffsetCommitRequest(
            self._group_id,
            to_messages(offsets, topic_ids),
            member.member_id,
            member.member_epoch,
            member.instance_id,
            committer=self._committer,
            sequence=next(self._sequence),
        )
        self._coordinator.ask(request, EmptyResponse, deadline, trying=trying)

    def heartbeat(self, request: ConsumerGroupHeartbeatRequest, deadline: Deadline) -> ConsumerGroupHeartbeatResponse:
        """One attempt. Raises the typed error of the coordinator, or why there is no answer."""
        return self._coordinator.ask_once(request, ConsumerGroupHeartbeatResponse, deadline)

    def fetch(
        self,
        partitions: Iterable[TopicPartition] | None,
        deadline: Deadline,
        *,
        require_stable: bool = False,
        member: GroupMetadata = NOBODY,
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Committed offsets of these partitions (None: of all); one without a commit is absent.

        A commit for an earlier topic of the same name is none. `require_stable`: wait for open transactions of the
        group. Raises UnstableOffsetCommitError at the deadline, and StaleMemberEpochError for another epoch than the
        member's.
        """
        wanted = None if partitions is None else [(tp.topic, tp.partition) for tp in partitions]
        request = OffsetFetchRequest(self._group_id, wanted, require_stable, member.member_id, member.member_epoch)
        answer = self._coordinator.ask(request, OffsetFetchResponse, deadline)
        if any(self._is_of_another(offset) for offset in answer.offsets):  # Or what is known of the topics is old.
            self._metadata.refresh(deadline)
        return from_messages(offset for offset in answer.offsets if not self._is_of_another(offset))

    def _is_of_another(self, offset: CommittedOffset) -> bool:
        topic = self._metadata.view.topic(offset.topic)
        return topic is not None and offset.topic_id not in ("", topic.topic_id)


def to_messages(
    offsets: Mapping[TopicPartition, OffsetAndMetadata], topic_ids: Mapping[TopicPartition, str] = NO_IDS
) -> list[CommittedOffset]:
    """The offsets as requests carry them."""
    return [
        CommittedOffset(
            tp.topic,
            tp.partition,
            offset.offset,
            NO_EPOCH if offset.leader_epoch is None else offset.leader_epoch,
            offset.metadata,
            topic_ids.get(tp, ""),
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
