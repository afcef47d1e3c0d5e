"""Consumer groups of the fake cluster: the core that brokers run, in one shard, for all partitions at once.

Committed offsets are the cluster's: tests set and read them there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Protocol

from spark_broker.broker.group_messages import description_of, heartbeat_of, heartbeat_response
from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import GroupRecord, OffsetKey, OffsetValue
from spark_broker.core.groups.requests import Commit, GroupSettings, Now
from spark_broker.core.groups.topics import Topic, Topics
from spark_broker.errors import CoordinatorNotAvailableError, NotLeaderOrFollowerError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import (
    CommittedOffset,
    ConsumerGroupHeartbeatRequest,
    DeleteGroupOffsetsRequest,
    DeleteGroupRequest,
    DescribeGroupRequest,
    EmptyResponse,
    GroupListing,
    ListGroupsRequest,
    ListGroupsResponse,
    MemberAbout,
    Message,
    OffsetCommitRequest,
)
from spark_broker.protocol.murmur2 import group_partition

GroupRequest = (
    ConsumerGroupHeartbeatRequest
    | ListGroupsRequest
    | DescribeGroupRequest
    | DeleteGroupRequest
    | DeleteGroupOffsetsRequest
)


class PartitionState(Protocol):
    @property
    def leader(self) -> int: ...
    @property
    def leader_epoch(self) -> int: ...


class TopicState(Protocol):
    @property
    def topic_id(self) -> str: ...
    @property
    def partitions(self) -> Sequence[PartitionState]: ...


Committed = MutableMapping[tuple[str, str, int], CommittedOffset]
"""By group, topic and partition."""


class FakeGroups:
    """Used under the cluster's lock. No answer to a heartbeat is held back."""

    def __init__(self, topics: Mapping[str, TopicState], committed: Committed) -> None:
        self._topics = topics
        self._committed = committed
        self._images = 0
        self._shard = GroupShard(GroupSettings(), generation=1)
        self._shard.loaded(Topics(), self._now())
        self._joined: dict[tuple[str, str], int] = {}
        """The last sequence of each member that `join` has made."""
        self.open_transactions: set[str] = set()
        """Ids of groups."""

    def answer(self, broker: int, request: GroupRequest) -> Message:
        self._bring_up_to_date()
        match request:
            case ListGroupsRequest():
                return self._list(broker)
            case ConsumerGroupHeartbeatRequest():
                self._check_coordinator(broker, request.group_id)
                decision = self._shard.heartbeat(heartbeat_of(request), self._now())
                return heartbeat_response(decision.answer, self._shard.topics)
            case DescribeGroupRequest(group_id):
                self._check_coordinator(broker, group_id)
                return description_of(self._shard.describe(group_id), self._shard.topics, broker, 0)
            case DeleteGroupRequest(group_id):
                self._check_coordinator(broker, group_id)
                self._shard.delete_group(group_id, self._now(), self._is_open)
            case DeleteGroupOffsetsRequest(group_id, named):
                self._check_coordinator(broker, group_id)
                partitions = [(request.topic_ids[topic], number) for topic, number in named]
                self._shard.delete_offsets(group_id, partitions, self._now(), self._is_open)
        self._forget(request.group_id)
        return EmptyResponse()

    def check_commit(self, request: OffsetCommitRequest) -> None:
        """Raises the error of who may not commit, whatever it is."""
        self._shard.refused_offsets(Commit(request.group_id, {}, request.member_id, request.member_epoch))

    def join(self, group_id: str, member_id: str, about: MemberAbout, instance_id: str = "") -> None:
        """A member joins, and says that it has what it is given, until it is given nothing else. The others hear what
        they are to give up, and do not answer.
        """
        self._bring_up_to_date()
        request = ConsumerGroupHeartbeatRequest(group_id, member_id, 0, 1, about=about, instance_id=instance_id)
        for sequence in range(2, 10):
            answer = self._shard.heartbeat(heartbeat_of(request), self._now()).answer
            response = heartbeat_response(answer, self._shard.topics)
            if answer.settled:
                break
            request = ConsumerGroupHeartbeatRequest(
                group_id, member_id, answer.member_epoch, sequence, 1, response.assignment, about, instance_id
            )
        for (of_group, other_id), last in self._joined.items():
            if of_group == group_id:
                self._shard.resume(group_id, other_id, last, self._now())
        self._joined[group_id, member_id] = request.sequence

    def leave(self, group_id: str, member_id: str) -> None:
        del self._joined[group_id, member_id]
        self.remove(group_id, member_id)

    def remove(self, group_id: str, member_id: str) -> None:
        """The group goes on without the member, whoever it is."""
        request = ConsumerGroupHeartbeatRequest(group_id, member_id, -1, 1000)
        self._shard.heartbeat(heartbeat_of(request), self._now())

    def _is_open(self, group_id: str) -> bool:
        return group_id in self.open_transactions

    def _list(self, broker: int) -> ListGroupsResponse:
        topic = self._topics.get(CONSUMER_OFFSETS_TOPIC)
        partitions = [] if topic is None else topic.partitions
        led = [(number, state.leader_epoch) for number, state in enumerate(partitions) if state.leader == broker]
        numbers = {number for number, _ in led}
        groups = [
            GroupListing(group_id, phase.value, len(self._shard.state.group(group_id).members))
            for group_id, phase in self._shard.phases().items()
            if group_partition(group_id, len(partitions)) in numbers
        ]
        return ListGroupsResponse(groups, led)

    def _check_coordinator(self, broker: int, group_id: str) -> None:
        topic = self._topics.get(CONSUMER_OFFSETS_TOPIC)
        if topic is None:
            raise CoordinatorNotAvailableError("there is no topic of groups")
        if topic.partitions[group_partition(group_id, len(topic.partitions))].leader != broker:
            raise NotLeaderOrFollowerError("not the coordinator")

    def _bring_up_to_date(self) -> None:
        """Take the topics, and what the cluster has committed."""
        before = self._shard.topics.by_id.keys()
        topics = [Topic(topic.topic_id, name, len(topic.partitions)) for name, topic in self._topics.items()]
        self._images += 1
        deleted = before - {topic.topic_id for topic in topics}
        self._shard.topics_changed(Topics(topics, self._images), deleted, self._now())
        for (group_id, name, number), offset in self._committed.items():
            if name in self._topics:
                key = OffsetKey(group_id, self._topics[name].topic_id, number)
                value = OffsetValue(offset.offset, offset.leader_epoch, offset.metadata, self._now().wall_ms, name)
                self._shard.state.apply(GroupRecord(key, value))

    def _forget(self, group_id: str) -> None:
        """The shard has deleted offsets of the group."""
        kept = self._shard.state.group(group_id).offsets
        for key in [key for key in self._committed if key[0] == group_id and key[1] in self._topics]:
            if (self._topics[key[1]].topic_id, key[2]) not in kept:
                del self._committed[key]

    def _now(self) -> Now:
        return Now(time.monotonic_ns() // 1_000_000, time.time_ns() // 1_000_000)
