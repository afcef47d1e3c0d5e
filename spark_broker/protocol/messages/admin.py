"""Administration: any broker passes these on to the controller.

`topic_id`: of the topic that is meant. A request that comes late, or is sent again, changes no newer topic of the name.
Empty, from older clients: any topic.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from spark_broker.protocol.messages.common import (
    Brokers,
    Count,
    Epoch,
    ErrorCode,
    LogStart,
    LogStarts,
    Message,
    Name,
    Offset,
    PartitionId,
    Text,
    TopicId,
    TopicIdOrEmpty,
)


class CreateTopicRequest(Message, frozen=True):
    """`partitions`, `replication_factor` -1: the default. `schema`: IPC schema message; empty: Kafka's record.

    `assignment[p]`: the replicas of partition p, preferred leader first; empty: placed by the controller.
    """

    name: Text
    partitions: Count
    replication_factor: Count
    schema: Annotated[bytes, Meta(max_length=16 * 1024 * 1024)]
    config: Annotated[dict[Name, Text], Meta(max_length=1000)]
    assignment: Annotated[list[Brokers], Meta(max_length=100_000)] = msgspec.field(default_factory=list)
    internal: bool = False


class DeleteTopicRequest(Message, frozen=True):
    """Delete a topic with its records."""

    name: Text
    topic_id: TopicIdOrEmpty = ""


class CreatePartitionsRequest(Message, frozen=True):
    """`total`: how many partitions the topic is to have. A number that is not larger than it has is refused."""

    name: Text
    total: Count
    topic_id: TopicIdOrEmpty = ""


class AlterTopicConfigRequest(Message, frozen=True):
    """Set (text) or reset (None) settings of a topic."""

    name: Text
    values: Annotated[dict[Name, Text | None], Meta(max_length=1000)]
    topic_id: TopicIdOrEmpty = ""


class AlterTopicSchemaRequest(Message, frozen=True):
    """Columns to add to a topic, or to widen: an IPC schema message."""

    name: Text
    schema: Annotated[bytes, Meta(max_length=16 * 1024 * 1024)]
    topic_id: TopicIdOrEmpty = ""


class ElectLeadersRequest(Message, frozen=True):
    """Preferred-leader election for these partitions; None: all.

    `unclean`: elect any live replica of partitions that have no leader, at the price of the records that it lacks.
    `topic_ids`: of the topics of these partitions, by their names.
    """

    partitions: Annotated[list[tuple[Name, PartitionId]], Meta(max_length=100_000)] | None = None
    unclean: bool = False
    topic_ids: Annotated[dict[Name, TopicIdOrEmpty], Meta(max_length=100_000)] = msgspec.field(default_factory=dict)


class ElectionResult(Message, frozen=True):
    """`error_code` 0: the partition has a new leader."""

    topic: Name
    partition: PartitionId
    error_code: ErrorCode
    error_message: Text = ""


class ElectLeadersResponse(Message, frozen=True):
    """A result for each named partition; if none was named, for each one that needed an election."""

    results: list[ElectionResult]


class ReassignPartitionRequest(Message, frozen=True):
    """Move a partition to `replicas`, preferred leader first. The move ends when the new ones are in sync."""

    topic: Name
    partition: PartitionId
    replicas: Brokers
    topic_id: TopicIdOrEmpty = ""


class ConfirmHistoryRequest(Message, frozen=True):
    """A tierer has read back a commit to the topic's table. The history of partition p is `starts[p]` to `ends[p]`.

    `controller_epoch`: of the controller under which the tierer began. `version`: of the transaction in the table;
    `table_version`: Delta's version of the table. `quarantined`: how many records the table has refused so far.
    `leader_epochs`: of each partition, before the tierer read from its leader or compared the table with it.
    `end_epochs`: leader epochs of the records before `ends`, as the leaders have them; -1: not known.
    `uncut`: the table has rows beyond `ends`, which the logs have lost. They are deleted next.
    """

    topic_id: TopicId
    controller_epoch: Epoch
    table_id: Name
    version: Offset
    table_version: Offset
    starts: LogStarts
    ends: LogStarts
    quarantined: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    leader_epochs: Annotated[list[Epoch], Meta(max_length=100_000)] = msgspec.field(default_factory=list)
    end_epochs: Annotated[list[Epoch], Meta(max_length=100_000)] = msgspec.field(default_factory=list)
    uncut: bool = False


class RaiseLogStartsRequest(Message, frozen=True):
    """Records before these offsets are deleted, by partition, from the logs and from the topic's table.

    From a leader that was asked to delete records, or from a tierer that applies the topic's retention.
    """

    topic_id: TopicId
    starts: Annotated[list[tuple[PartitionId, LogStart]], Meta(max_length=100_000)]


class ReportTieringRequest(Message, frozen=True):
    """Why tiering of the topic has stopped; empty: it goes on.

    `found`: whether the run has found in the table what the controller has recorded; None: it has not looked.
    """

    topic_id: TopicId
    stopped: Text
    found: bool | None = None


class AnnounceTieringRequest(Message, frozen=True):
    """In how many ms the cluster tiers each topic next, by topic id. From its driver. It is not recorded, and replaces
    what was announced before.
    """

    in_ms: Annotated[dict[TopicId, Offset], Meta(max_length=100_000)]


class EnsureOffsetsTopicRequest(Message, frozen=True):
    """Create `__consumer_offsets` if it does not exist."""
