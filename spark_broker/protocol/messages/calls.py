"""Calls to any broker: metadata, offsets, producer ids, committed offsets."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from spark_broker.model import BrokerInfo, ClusterDescription, ControllerInfo
from spark_broker.protocol.messages.common import (
    BrokerId,
    Brokers,
    Count,
    Epoch,
    ErrorCode,
    Int64,
    LogPlace,
    Message,
    Name,
    Offset,
    Offsets,
    PartitionId,
    Text,
    TopicId,
    TopicIdOrEmpty,
)
from spark_broker.times import LogEdge, from_ms


class MetadataRequest(Message, frozen=True):
    """`topics=None`: all of them. A name that does not exist is absent from the response.

    `certain`: the controller answers, as of now. Else any broker does, and it may lag behind.
    """

    topics: Annotated[list[Name], Meta(max_length=10_000)] | None = None
    certain: bool = False


class DescribeLogDirRequest(Message, frozen=True):
    """What a broker has in its log directory."""


class StoredReplica(Message, frozen=True):
    """A replica that is open: the bytes of its segments."""

    topic: Name
    partition: PartitionId
    size_bytes: Offset


class ReplicaSetAside(Message, frozen=True):
    """A replica that was set aside. kind: "stray", "damaged" or "diverged". `since_ms`: UTC, by the broker's clock."""

    topic: Name
    partition: PartitionId
    kind: Name
    path: LogPlace
    since_ms: Int64 = -1


class DescribeLogDirResponse(Message, frozen=True):
    path: LogPlace
    replicas: list[StoredReplica]
    set_aside: list[ReplicaSetAside]


class BrokerMetadata(Message, frozen=True):
    """`directory`: the path of its log directory on its machine, where readers may read its files; empty: not known."""

    id: BrokerId
    host: Name
    port: Count
    rack: Name | None
    epoch: Epoch
    pid: Count
    executor_id: Name
    executor_pid: Count
    fenced: bool
    log: LogPlace = ""
    directory: LogPlace = ""

    def to_info(self) -> BrokerInfo:
        """The same as a value of the public interface."""
        return BrokerInfo(
            id=self.id,
            host=self.host,
            port=self.port,
            rack=self.rack,
            epoch=self.epoch,
            pid=self.pid,
            executor_id=self.executor_id,
            executor_pid=self.executor_pid,
            fenced=self.fenced,
            log=self.log or None,
            directory=self.directory or None,
        )


class ControllerMetadata(Message, frozen=True):
    """The driver of the current controller: its machine and pid, and when it took over (UTC, by its own clock)."""

    host: Name = ""
    pid: Count = -1
    started_ms: Int64 = 0

    def to_info(self, epoch: int) -> ControllerInfo | None:
        """The same as a value of the public interface; None if the broker knows no controller yet."""
        if self.pid < 0:
            return None
        return ControllerInfo(epoch, self.host, self.pid, from_ms(self.started_ms))


class PartitionMetadata(Message, frozen=True):
    """`adding`: those of `replicas` that a move adds. Once all of them are in the ISR, the move is over."""

    partition: PartitionId
    leader: BrokerId
    leader_epoch: Epoch
    replicas: Brokers
    isr: Brokers
    partition_epoch: Epoch
    elr: Brokers = msgspec.field(default_factory=list)
    last_known_elr: Brokers = msgspec.field(default_factory=list)
    adding: Brokers = msgspec.field(default_factory=list)


class HistoryMetadata(Message, frozen=True):
    """What of a topic is in its Delta table; the fields are those of `controller.topic_history.TopicHistory`.

    The epochs at the ends are left out: only brokers need them, and they have the metadata log.
    """

    table_id: Name
    version: Offset
    table_version: Offset
    starts: Offsets
    ends: Offsets
    stopped: Text = ""
    quarantined: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    uncut: bool = False
    missing: bool = False


class TopicMetadata(Message, frozen=True):
    """`schemas[i]` is the IPC schema message of schema id i, empty where it is not known; the last one is current.

    `history`: None when nothing was ever tiered. `log_starts[p]`: records of partition p before it were deleted; a
    partition beyond these begins where its leader says. `next_tiering_ms`: in how many ms the cluster tiers it next;
    -1: the controller was not asked (`certain`), or does not know.
    """

    name: Name
    topic_id: TopicId
    partitions: list[PartitionMetadata]
    schemas: list[bytes]
    config: dict[str, str]
    history: HistoryMetadata | None = None
    log_starts: Offsets = msgspec.field(default_factory=list)
    next_tiering_ms: Offset = -1


class MetadataResponse(Message, frozen=True):
    """`metadata_offset`: the answer shows the metadata log up to it (exclusive); -1: the broker does not say."""

    cluster_id: Name
    controller_epoch: Epoch
    brokers: list[BrokerMetadata]
    topics: list[TopicMetadata]
    controller: ControllerMetadata = ControllerMetadata()
    metadata_offset: Offset = -1

    def to_description(self, *, include_fenced: bool) -> ClusterDescription:
        """The cluster as a value of the public interface."""
        brokers = (broker.to_info() for broker in self.brokers if include_fenced or not broker.fenced)
        return ClusterDescription(
            cluster_id=self.cluster_id,
            controller_epoch=self.controller_epoch,
            brokers=tuple(sorted(brokers, key=lambda broker: broker.id)),
            controller=self.controller.to_info(self.controller_epoch),
        )


class ListOffsetsPartition(Message, frozen=True):
    """`at`: the latest offset is the high watermark, the earliest one the log start.

    `read_committed`: latest is the last stable offset. `start`: the caller's position; the answer has the leader epoch
    of the record before it. With `max_bytes`, it also says how many bytes are stored from `start` to the offset, and
    how far `max_bytes` of them reach.
    """

    topic_id: TopicId
    partition: PartitionId
    leader_epoch: Epoch
    at: Int64 | LogEdge
    read_committed: bool = True
    start: Offset = -1
    max_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class ListOffsetsRequest(Message, frozen=True):
    """To the partitions' leader."""

    partitions: Annotated[list[ListOffsetsPartition], Meta(max_length=100_000)]


class ListedOffset(Message, frozen=True):
    """`offset` -1: no record at or after the time. `timestamp_us`: of the record there, if a time was asked for.

    `last_epoch`: leader epoch of the record before `offset`.

    `sealed_offset`: the end of the sealed segments, as far as transactions are decided: what may be tiered.
    `history_end_offset`: up to there (exclusive) the leader knows records to be in the topic's table; -1: it has none.
    `start_epoch`: leader epoch of the record before the caller's `start`. `size_bytes`: bytes stored from `start` to
    `offset`. `fitting_offset`: the batches from `start` up to it fit into `max_bytes`, or are a single larger batch.
    `now_ms`: the leader's clock, UTC. -1: not known, or not asked for.
    """

    topic_id: TopicId
    partition: PartitionId
    error_code: ErrorCode
    error_message: Text = ""
    offset: Offset = -1
    timestamp_us: Int64 | None = None
    leader_epoch: Epoch = -1
    log_start_offset: Offset = -1
    high_watermark: Offset = -1
    last_epoch: Epoch = -1
    start_epoch: Epoch = -1
    size_bytes: Int64 = -1
    fitting_offset: Offset = -1
    sealed_offset: Offset = -1
    history_end_offset: Offset = -1
    now_ms: Int64 = -1


class ListOffsetsResponse(Message, frozen=True):
    partitions: list[ListedOffset]


class DeleteRecordsPartition(Message, frozen=True):
    """`offset`: records before it are to be deleted; -1: all that are committed."""

    topic_id: TopicId
    partition: PartitionId
    leader_epoch: Epoch
    offset: Offset


class DeleteRecordsRequest(Message, frozen=True):
    """To the partitions' leader."""

    partitions: Annotated[list[DeleteRecordsPartition], Meta(max_length=100_000)]


class DeletedRecords(Message, frozen=True):
    """`log_start_offset`: where the partition begins now."""

    topic_id: TopicId
    partition: PartitionId
    error_code: ErrorCode
    error_message: Text = ""
    log_start_offset: Offset = -1


class DeleteRecordsResponse(Message, frozen=True):
    partitions: list[DeletedRecords]


class InitProducerIdRequest(Message, frozen=True):
    """Asks for a producer id that was never given out before."""


class InitProducerIdResponse(Message, frozen=True):
    producer_id: Int64
    producer_epoch: Int64


class CommittedOffset(Message, frozen=True):
    """`topic_id`: of the topic whose offset it is; a later topic of the name has none of it. Empty: not said."""

    topic: Name
    partition: PartitionId
    offset: Offset
    leader_epoch: Epoch = -1
    metadata: Annotated[str, Meta(max_length=4096)] = ""
    topic_id: TopicIdOrEmpty = ""


class OffsetCommitRequest(Message, frozen=True):
    """To the group's coordinator: the leader of partition `murmur2(group) mod n` of `__consumer_offsets`.

    Without a `member_id`, it is taken only while the group has no members.

    It may come late, when its client has given it up: `coordinator_epoch` is the leader epoch of that partition, as far
    as the client knows (-1: it names none). `sequence` rises with each commit of this `committer`, and stays when one
    is sent again.
    """

    group_id: Name
    offsets: Annotated[list[CommittedOffset], Meta(max_length=100_000)]
    member_id: Name = ""
    member_epoch: Epoch = -1
    instance_id: Name = ""
    coordinator_epoch: Epoch = -1
    committer: Name = ""
    sequence: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class OffsetFetchRequest(Message, frozen=True):
    """To the group's coordinator. `partitions=None`: every committed offset of the group.

    `require_stable`: UNSTABLE_OFFSET_COMMIT while an open transaction may still commit another offset (KIP-447).
    With a `member_id`: STALE_MEMBER_EPOCH for an epoch that the member does not have.
    """

    group_id: Name
    partitions: Annotated[list[tuple[Name, PartitionId]], Meta(max_length=100_000)] | None = None
    require_stable: bool = False
    member_id: Name = ""
    member_epoch: Epoch = -1


class OffsetFetchResponse(Message, frozen=True):
    offsets: list[CommittedOffset]


class EmptyResponse(Message, frozen=True):
    """Success, without a result."""
