"""Consumer groups: calls to their coordinator, the leader of partition `murmur2(group id) mod n` of
`__consumer_offsets`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from spark_broker.protocol.messages.common import (
    BrokerId,
    Count,
    Epoch,
    Int64,
    Message,
    Name,
    Offset,
    PartitionId,
    Text,
    TopicId,
    TopicIdOrEmpty,
)

MemberEpoch = Annotated[int, Meta(ge=-2, le=2**63 - 1)]
"""0: the member joins; -1: it leaves; -2: it leaves and will come back."""

Numbers = Annotated[list[PartitionId], Meta(max_length=100_000)]
TOPICS_MAX = 10_000
"""That a member names. A pattern may find more."""


class TopicPartitions(Message, frozen=True):
    """Partitions of a topic. The topic's name is empty in requests: its id says which one."""

    topic_id: TopicId
    partitions: Numbers
    topic: Name = ""


Partitions = Annotated[list[TopicPartitions], Meta(max_length=100_000)]


class MemberAbout(Message, frozen=True):
    """What a member says about itself. It subscribes to topics, or to a pattern, or to both.

    `rebalance_timeout_ms`: max.poll.interval.ms. `assignor`: empty when the member does not mind.
    """

    topics: Annotated[list[Name], Meta(max_length=TOPICS_MAX)]
    pattern: Text
    rack: Name
    client_id: Name
    host: Name
    session_timeout_ms: Int64
    rebalance_timeout_ms: Int64
    assignor: Name


class ConsumerGroupHeartbeatRequest(Message, frozen=True):
    """A member joins, goes on or leaves: `core.groups.requests.Heartbeat` says what each field means.

    The answer may be held back while there is nothing to do, for at most a third of the session time-out.
    """

    group_id: Name
    member_id: Name
    member_epoch: MemberEpoch
    sequence: Offset
    generation: Epoch = -1
    owned: Partitions | None = None
    about: MemberAbout | None = None
    instance_id: Name = ""
    reason: Text = ""


class ConsumerGroupHeartbeatResponse(Message, frozen=True):
    """`sequence`: of the heartbeat. `assignment` None: what the member named. The next heartbeat is sent at the latest
    `heartbeat_interval_ms` after the last one was sent, and at once if that time has passed.
    """

    sequence: Offset
    generation: Epoch
    member_epoch: MemberEpoch
    heartbeat_interval_ms: Offset
    assignment: Partitions | None = None


class ListGroupsRequest(Message, frozen=True):
    """To each broker: the groups that it coordinates."""


class GroupListing(Message, frozen=True):
    """`state`: Empty, Assigning, Reconciling or Stable."""

    group_id: Name
    state: Name
    members: Count


class ListGroupsResponse(Message, frozen=True):
    """`partitions`: whose groups these are, as numbers of partitions of `__consumer_offsets`, with their leader epochs.

    A broker that does not know of its leadership yet, or has not read the log yet, leaves the partition out.
    """

    groups: list[GroupListing]
    partitions: list[tuple[PartitionId, Epoch]]


class DescribeGroupRequest(Message, frozen=True):
    """To the group's coordinator. A group that is not there is Dead."""

    group_id: Name


class GroupMember(Message, frozen=True):
    """`kind`: stable, revoking, waiting or away. `revoking`: told to be given up, and perhaps still read."""

    member_id: Name
    instance_id: Name
    kind: Name
    epoch: MemberEpoch
    about: MemberAbout
    assigned: list[TopicPartitions]
    revoking: list[TopicPartitions]
    target: list[TopicPartitions]


class GroupRebalance(Message, frozen=True):
    """Why an epoch began. `time_ms`: wall-clock time."""

    epoch: Epoch
    time_ms: Int64
    reason: Text


class DescribeGroupResponse(Message, frozen=True):
    """`rebalances`: the last few, the newest last."""

    group_id: Name
    state: Name
    epoch: Epoch
    target_epoch: Epoch
    assignor: Name
    members: list[GroupMember]
    rebalances: list[GroupRebalance]
    coordinator: BrokerId
    coordinator_epoch: Epoch


class DeleteGroupRequest(Message, frozen=True):
    """To the group's coordinator: forget the group, which has no members. Answered with EmptyResponse.

    `coordinator_epoch`: as in a commit.
    """

    group_id: Name
    coordinator_epoch: Epoch = -1


class DeleteGroupOffsetsRequest(Message, frozen=True):
    """To the group's coordinator: forget what is committed of topics that no member reads. Answered with
    EmptyResponse. A partition without an offset is no error. `coordinator_epoch`: as in a commit. `topic_ids`: of the
    topics that are meant, by their names. A request that comes late, or is sent again, means no newer topic.
    """

    group_id: Name
    partitions: Annotated[list[tuple[Name, PartitionId]], Meta(max_length=TOPICS_MAX)] = msgspec.field(
        default_factory=list
    )
    coordinator_epoch: Epoch = -1
    topic_ids: Annotated[dict[Name, TopicIdOrEmpty], Meta(max_length=TOPICS_MAX)] = msgspec.field(default_factory=dict)
