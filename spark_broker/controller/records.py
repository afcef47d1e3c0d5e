"""The metadata records: everything the controller ever decides, and all that its image is built from.

Records are kept for years in `metadata.dir`, so their tags are numbers that are never used again; fields are only added
at the end, with defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.messages.common import (
    BrokerId,
    Brokers,
    Count,
    Epoch,
    LogPlace,
    Name,
    Offset,
    Offsets,
    PartitionId,
    Text,
    TopicId,
)
from spark_broker.protocol.wire import UNDECODABLE

MAX_RECORDS_BYTES = 256 * 1024 * 1024
"""Largest run of encoded records (a snapshot of a very large cluster)."""

SchemaBytes = Annotated[bytes, Meta(max_length=16 * 1024 * 1024)]
TopicSettings = Annotated[dict[Name, Annotated[str, Meta(max_length=65_536)]], Meta(max_length=1000)]


class Record(Struct, frozen=True, array_like=True, gc=False):
    """Base of all records: stored as `[tag, field, field, ...]`."""


class ClusterRecord(Record, frozen=True, tag=0):
    """The cluster's id: the first record of its log."""

    cluster_id: Name


class ControllerEpochRecord(Record, frozen=True, tag=1):
    """A controller took over; `writer` is the UUID that its files carry.

    `host`, `pid`: of its driver; `started_ms`: when it took over, by its own clock (UTC). `begins`: the offset of this
    record, in snapshots; -1: it is where it was written.
    """

    epoch: Epoch
    writer: Name
    host: Name = ""
    pid: int = -1
    started_ms: int = 0
    begins: Offset = -1


class LaunchRecord(Record, frozen=True, tag=2):
    """A launch number was given out; launches up to `launch` exist."""

    launch: int


class RegisterBrokerRecord(Record, frozen=True, tag=3):
    """A broker's process registered. It is fenced until a heartbeat says that it is ready.

    `broker_epoch` is this record's offset in the metadata log. start_kind: "clean", "process_crash" or "machine_crash".
    `recorded`: the newest incarnation that its directory is known to know; empty: none is.
    """

    broker_id: BrokerId
    broker_epoch: Epoch
    directory_id: Name
    incarnation: Name
    launch: int
    host: Name
    port: int
    rack: Name | None
    machine: Name
    executor_id: Name
    executor_pid: int
    pid: int
    pid_start_time: int
    start_kind: Name
    log: LogPlace = ""
    directory: LogPlace = ""
    recorded: Name = ""


class BrokerChangeRecord(Record, frozen=True, tag=4):
    """A change of a broker; None: unchanged. `broker_epoch` names the incarnation that the change is about."""

    broker_id: BrokerId
    broker_epoch: Epoch
    fenced: bool | None = None
    in_controlled_shutdown: bool | None = None


class UnregisterBrokerRecord(Record, frozen=True, tag=5):
    """The broker was removed for good. Its id is not given out again."""

    broker_id: BrokerId
    broker_epoch: Epoch


class TopicRecord(Record, frozen=True, tag=6):
    """A topic was created. `config` holds the settings that differ from the built-in defaults."""

    name: Name
    topic_id: TopicId
    config: TopicSettings
    internal: bool = False


class SchemaRecord(Record, frozen=True, tag=7):
    """The topic's schema `schema_id` (0, 1, ...): the IPC schema message as it is stored in segments.

    Ids are skipped where a SchemaIdsRecord says so. Records about them may follow later.
    """

    topic_id: TopicId
    schema_id: int
    schema: SchemaBytes


class TopicConfigRecord(Record, frozen=True, tag=8):
    """The topic's settings were replaced."""

    topic_id: TopicId
    config: TopicSettings


class RemoveTopicRecord(Record, frozen=True, tag=9):
    """The topic was deleted, with its partitions."""

    topic_id: TopicId


class PartitionRecord(Record, frozen=True, tag=10):
    """A partition in full. Partitions of a topic come in the order of their numbers."""

    topic_id: TopicId
    partition: PartitionId
    replicas: Brokers
    isr: Brokers
    leader: BrokerId
    leader_epoch: Epoch
    partition_epoch: Epoch
    adding: Brokers = []
    removing: Brokers = []
    damaged: Brokers = []
    elr: Brokers = []
    last_known_elr: Brokers = []
    unclean_epoch: Epoch = -1
    lacking: Count = 0


class PartitionChangeRecord(Record, frozen=True, tag=11):
    """A change of a partition; None: unchanged. It raises the partition epoch.

    A `leader` that is not None is an election: it raises the leader epoch even if the same broker wins (KAFKA-7164).
    `unclean`: the elected leader is not known to have everything that was committed; the loss was accepted.
    `leader_epoch`: the one that the election begins, where the next may have been given out already.
    """

    topic_id: TopicId
    partition: PartitionId
    leader: BrokerId | None = None
    isr: Brokers | None = None
    replicas: Brokers | None = None
    adding: Brokers | None = None
    removing: Brokers | None = None
    damaged: Brokers | None = None
    elr: Brokers | None = None
    last_known_elr: Brokers | None = None
    unclean: bool = False
    leader_epoch: Epoch | None = None
    lacking: Count | None = None


class OlderMetadataRecord(Record, frozen=True, tag=17):
    """An operator has accepted that this log may lack what brokers have seen, while the controller of `epoch` runs."""

    epoch: Epoch


class OffsetRecord(Record, frozen=True, tag=18):
    """The next record has this offset: those before it may have been given to records that this log lacks."""

    next_offset: Offset


class TombstonesRecord(Record, frozen=True, tag=19):
    """Ids of deleted topics, in the order of their deletion (in snapshots)."""

    topic_ids: Annotated[list[TopicId], Meta(max_length=100_000)]


class SchemaIdsRecord(Record, frozen=True, tag=20):
    """Ids of the topic's schemas below `next_schema_id` may have been given out by records that this log lacks."""

    topic_id: TopicId
    next_schema_id: int


class ProducerIdsRecord(Record, frozen=True, tag=12):
    """Producer ids below `next_producer_id` were given out."""

    next_producer_id: Offset


class BrokerIdsRecord(Record, frozen=True, tag=13):
    """Broker ids below `next_broker_id` were used (in snapshots, where the registrations may be gone)."""

    next_broker_id: int


class HistoryRecord(Record, frozen=True, tag=14):
    """A commit to the topic's Delta table was read back. `starts` and `ends`: of its history, by partition.

    `version`: of the transaction in the table; `table_version`: Delta's version of the table. `quarantined`: how many
    records the table has refused so far. `end_epochs`: the leader epochs of the records before `ends`; -1: not known.
    `uncut`: the table may have rows of the transaction beyond `ends`.
    """

    topic_id: TopicId
    table_id: Name
    version: Offset
    table_version: Offset
    starts: Offsets
    ends: Offsets
    quarantined: int = 0
    end_epochs: Annotated[list[Epoch], Meta(max_length=100_000)] = msgspec.field(default_factory=list)
    uncut: bool = False


class HistoryStatusRecord(Record, frozen=True, tag=15):
    """Why tiering of the topic has stopped; empty: it goes on. `missing`: the history was not found in the table."""

    topic_id: TopicId
    stopped: Text
    missing: bool = False


class LogStartsRecord(Record, frozen=True, tag=16):
    """Records before `starts[p]` of each partition p were deleted; a partition beyond these lost none."""

    topic_id: TopicId
    starts: Offsets


MetadataRecord = (
    ClusterRecord
    | ControllerEpochRecord
    | LaunchRecord
    | RegisterBrokerRecord
    | BrokerChangeRecord
    | UnregisterBrokerRecord
    | TopicRecord
    | SchemaRecord
    | TopicConfigRecord
    | RemoveTopicRecord
    | PartitionRecord
    | PartitionChangeRecord
    | ProducerIdsRecord
    | BrokerIdsRecord
    | HistoryRecord
    | HistoryStatusRecord
    | LogStartsRecord
    | OlderMetadataRecord
    | OffsetRecord
    | TombstonesRecord
    | SchemaIdsRecord
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[MetadataRecord])


def encode_records(records: Sequence[MetadataRecord]) -> bytes:
    """Records as bytes, in order."""
    return _encoder.encode(list(records))


def decode_records(data: bytes | memoryview) -> list[MetadataRecord]:
    """The records that `encode_records` wrote. Raises InvalidRequestError on anything else."""
    if len(data) > MAX_RECORDS_BYTES:
        raise InvalidRequestError(f"{len(data)} bytes of metadata records")
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise InvalidRequestError(f"metadata records that do not decode: {error}") from None
