"""Broker and controller: registration, heartbeats, metadata, ISR changes. Also what a new follower asks its leader."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from spark_broker.protocol.messages.common import (
    BrokerId,
    Count,
    Epoch,
    ErrorCode,
    Int64,
    LogPlace,
    LogStart,
    Message,
    Milliseconds,
    Name,
    Offset,
    PartitionId,
    Port,
    Size,
    Text,
    TopicId,
)

ISR_CHANGES_MAX = 10_000
"""Of one request."""

ANY_INCARNATION = "*"
"""Stands for incarnations of which a log directory has no list."""

NO_INCARNATION = "-"
"""In place of earlier incarnations: the directory has lost files, and counts as an older copy of itself."""

UNRECORDED = "unrecorded-"
"""Begins an incarnation that could not be saved in its log directory."""


class MetadataSeen(Message, frozen=True):
    """A place in the metadata log, and the numbers that were given out up to there.

    Everything before `next_offset` had been applied; `writer` was the controller of `controller_epoch` there.
    """

    next_offset: Offset
    controller_epoch: Epoch
    writer: Name
    last_launch: Count
    next_broker_id: Count
    next_producer_id: Offset


class RegisterBrokerRequest(Message, frozen=True):
    """First message of a session. `broker_id` -1: the directory has no id yet.

    start_kind: "clean", "process_crash" or "machine_crash". `incarnation`: UUID of this process. `earlier`: those
    incarnations of which the log directory knows that they may have registered; empty, or with `ANY_INCARNATION`: it
    does not know them all; `NO_INCARNATION`: it has lost files. `directory`: the path of the broker's log directory on
    its machine; empty: it does not say. `seen`: the newest metadata that this directory is known to have had; None: it
    knows none.
    """

    version: Int64
    cluster_id: Name
    launch: Count
    broker_id: BrokerId
    directory_id: Name
    incarnation: Name
    start_kind: Name
    host: Name
    port: Port
    rack: Name | None
    machine: Name
    executor_id: Name
    executor_pid: Count
    pid: Count
    pid_start_time: Int64
    log: LogPlace = ""
    earlier: Annotated[list[Name], Meta(max_length=10_000)] = msgspec.field(default_factory=list)
    seen: MetadataSeen | None = None
    directory: LogPlace = ""


class RegisterBrokerResponse(Message, frozen=True):
    """The broker's id and epoch; metadata follows at once as a snapshot.

    `wall_ms`: the controller's wall clock (UTC) when the registration came; -1: not said.
    """

    cluster_id: Name
    controller_epoch: Epoch
    broker_id: BrokerId
    broker_epoch: Epoch
    session_timeout_ms: Milliseconds
    heartbeat_interval_ms: Milliseconds
    wall_ms: Int64 = -1


class LogEnd(Message, frozen=True):
    """How far a replica reaches while its partition has no leader. `high_watermark`: what is committed; -1: not said.

    `last_epoch`: leader epoch of its last batch (-1: it is empty). `leader_epoch`: the newest that the replica knows;
    it no longer takes batches from leaders of older epochs.
    """

    topic_id: TopicId
    partition: PartitionId
    leader_epoch: Epoch
    last_epoch: Epoch
    log_end_offset: Offset
    high_watermark: Offset = -1


class TopicSchema(Message, frozen=True):
    """A schema of a topic: the IPC schema message with which a segment of the topic begins."""

    topic_id: TopicId
    schema_id: Size
    schema: Annotated[bytes, Meta(max_length=16 * 1024 * 1024)]


class HeartbeatRequest(Message, frozen=True):
    """`sent_ms`: by the broker's own clock; the answer returns it. `ready`: its logs are open up to `metadata_offset`.

    `damaged`: replicas whose log was quarantined, each with the number that this process gave to the damage; they leave
    ISR and ELR. Those that were found damaged at their opening leave before the broker is unfenced.
    `log_ends`: replicas of partitions that have no leader, where this broker is neither in the ISR nor in the ELR.
    `wall_ms`: the broker's wall clock (UTC); -1: not said. `ahead_max_ms`: how far that clock is ahead of the
    controller's at most, as the last answer showed; None: not known yet. `full`: the broker's disk has no room.
    `offline`: by topic id, replicas whose files could not be made or opened. The broker tries again; none may lead.
    `schemas`: some of those that logs of the broker have and its metadata lacks. Log ends of these topics come later.
    """

    broker_epoch: Epoch
    metadata_offset: Offset
    sent_ms: Int64
    ready: bool
    wants_shutdown: bool = False
    damaged: Annotated[list[tuple[TopicId, PartitionId, Int64]], Meta(max_length=100_000)] = msgspec.field(
        default_factory=list
    )
    log_ends: Annotated[list[LogEnd], Meta(max_length=100_000)] = msgspec.field(default_factory=list)
    wall_ms: Int64 = -1
    ahead_max_ms: Int64 | None = None
    full: bool = False
    offline: Annotated[
        dict[TopicId, Annotated[list[PartitionId], Meta(max_length=100_000)]], Meta(max_length=100_000)
    ] = msgspec.field(default_factory=dict)
    schemas: Annotated[list[TopicSchema], Meta(max_length=100_000)] = msgspec.field(default_factory=list)


class HeartbeatResponse(Message, frozen=True):
    """`fenced`: the controller does not (yet) count this broker as live. `shut_down`: the broker may stop now.

    `damage_heard`: the highest damage number in the heartbeat. The decision on it was sent before this answer.
    `wall_ms`: the controller's wall clock (UTC) when the heartbeat came; -1: not said. `reason`: why the broker stays
    fenced although it is ready.
    """

    sent_ms: Int64
    fenced: bool
    shut_down: bool = False
    damage_heard: Int64 = 0
    wall_ms: Int64 = -1
    reason: Text = ""


class MetadataUpdate(Message, frozen=True):
    """Committed metadata records `first_offset` up to `next_offset` (exclusive), encoded by `controller.records`.

    `snapshot`: the records rebuild the whole image, which replaces the broker's.
    """

    controller_epoch: Epoch
    first_offset: Offset
    next_offset: Offset
    records: bytes
    snapshot: bool = False


class StopBroker(Message, frozen=True):
    """Controller to broker: leave in order (controlled shutdown), or at once when `superseded`."""

    superseded: bool = False
    reason: Text = ""


class IsrMember(Message, frozen=True):
    broker_id: BrokerId
    broker_epoch: Epoch


class AlterIsr(Message, frozen=True):
    """`lacking`: replicas outside this ISR that are known to lack committed records: they are not eligible either."""

    topic_id: TopicId
    partition: PartitionId
    leader_epoch: Epoch
    partition_epoch: Epoch
    isr: Annotated[list[IsrMember], Meta(max_length=1000)]
    lacking: Annotated[list[BrokerId], Meta(max_length=1000)] = msgspec.field(default_factory=list)


class AlterPartitionRequest(Message, frozen=True):
    """A leader asks the controller to change ISRs; each is a compare-and-set on the partition epoch."""

    broker_id: BrokerId
    broker_epoch: Epoch
    changes: Annotated[list[AlterIsr], Meta(max_length=ISR_CHANGES_MAX)]


class AlterIsrResult(Message, frozen=True):
    topic_id: TopicId
    partition: PartitionId
    error_code: ErrorCode
    error_message: Text = ""


class AlterPartitionResponse(Message, frozen=True):
    results: list[AlterIsrResult]


class AllocateProducerIdsRequest(Message, frozen=True):
    broker_id: BrokerId
    broker_epoch: Epoch


class AllocateProducerIdsResponse(Message, frozen=True):
    first_id: Int64
    count: Count


class ReplicaStateRequest(Message, frozen=True):
    """Follower to leader: what a replica needs before it can start at the leader's log start (beyond offset 0).

    `producers_max`: how many producers are to come at once, of those whose ids are above `after_producer_id`; 0: all.
    """

    topic_id: TopicId
    partition: PartitionId
    leader_epoch: Epoch
    after_producer_id: Int64 = -1
    producers_max: Count = 0


class ProducerStateEntry(Message, frozen=True):
    """`batches`: the last few as (first sequence, last sequence, base offset, last offset), oldest first.

    `transaction_start`: where its ongoing transaction begins; -1: it has none.
    """

    producer_id: Int64
    producer_epoch: Int64
    last_append_ms: Int64
    batches: list[tuple[Int64, Int64, Int64, Int64]]
    transaction_start: Offset = -1


class ReplicaStateResponse(Message, frozen=True):
    log_start_offset: LogStart
    epochs: list[tuple[Epoch, Offset]]
    producers: list[ProducerStateEntry]
    purge_offset: LogStart = 0
    has_more: bool = False
