"""The coordinator of groups' committed offsets: the leader of a partition of `__consumer_offsets` keeps them in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.partition import Append, Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.core.group_offsets import GroupOffsets, OffsetRecord, offset_record
from spark_broker.core.replica import ACKS_ALL
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.messages import CommittedOffset, CommittedOffsets, OffsetCommit, OffsetFetch
from spark_broker.protocol.murmur2 import group_partition

COMMIT_TIMEOUT_MS = 10_000
READ_BYTES = 4_194_304


@dataclass(slots=True)
class _Shard:
    """One partition of `__consumer_offsets` that this broker leads.

    `offsets` holds the log up to `read_to`, which is committed; `appended` counts records since the last snapshot.
    """

    leader_epoch: int
    offsets: GroupOffsets = field(default_factory=GroupOffsets)
    read_to: int = 0
    appended: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Coordinator:
    """Brokers keep no consumer state but this: offsets live in the log, and a new leader reads them from it."""

    def __init__(self, manager: ReplicaManager, snapshot_records: int) -> None:
        self._manager = manager
        self._snapshot_records = snapshot_records
        self._lock = threading.Lock()
        self._shards: dict[int, _Shard] = {}

    def commit(self, request: OffsetCommit) -> None:
        """Append the offsets and wait until they are committed. Raises the error that the client gets."""
        if not request.group_id:
            raise InvalidRequestError("a commit without a group id")
        if any(committed.offset < 0 for committed in request.offsets):
            raise InvalidRequestError("a commit of a negative offset")
        partition, shard = self._shard(request.group_id)
        records = [offset_record(request.group_id, committed) for committed in request.offsets]
        if not records:
            return
        self._append(partition, shard, records)
        with shard.lock:
            self._catch_up(partition, shard)
            shard.appended += len(records)
            if shard.appended >= self._snapshot_records:
                self._snapshot(partition, shard)

    def fetch(self, request: OffsetFetch) -> CommittedOffsets:
        """What the group has committed. Raises the error that the client gets."""
        partition, shard = self._shard(request.group_id)
        with shard.lock:
            self._catch_up(partition, shard)
            offsets: list[CommittedOffset] = shard.offsets.committed(request.group_id, request.partitions)
        return CommittedOffsets(offsets)

    def _shard(self, group_id: str) -> tuple[Partition, _Shard]:
        topic = self._manager.image.topic(CONSUMER_OFFSETS_TOPIC)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{CONSUMER_OFFSETS_TOPIC} does not exist yet")
        number = group_partition(group_id, len(topic.partitions))
        partition = self._manager.partition(topic.topic_id, number)
        leader_epoch = partition.leader_epoch()
        with self._lock:
            shard = self._shards.get(number)
            if shard is None or shard.leader_epoch != leader_epoch:
                shard = self._shards[number] = _Shard(leader_epoch)
        return partition, shard

    def _catch_up(self, partition: Partition, shard: _Shard) -> None:
        """Read what was committed since the last time; a new shard reads from the log's start."""
        log_start, high_watermark = partition.offsets(shard.leader_epoch)
        shard.read_to = max(shard.read_to, log_start)
        while shard.read_to < high_watermark:
            frames = partition.read_committed(shard.leader_epoch, shard.read_to, READ_BYTES).frames
            if not frames:
                raise CoordinatorNotAvailableError(f"{partition} could not be read up to {high_watermark}")
            for frame in frames:
                shard.offsets.replay(_records(partition.decode(frame)))
                shard.read_to = frame.header.next_offset

    def _append(self, partition: Partition, shard: _Shard, records: list[OffsetRecord]) -> int:
        """Append with acks=all and wait. Returns the base offset."""
        topic = partition.topic
        append = Append(
            message=encode_batch(_batch(records, topic.schemas[-1]), schema_id=topic.schema_id),
            leader_epoch=shard.leader_epoch,
            acks=ACKS_ALL,
            schema_id=topic.schema_id,
            deadline_ms=SYSTEM_CLOCK.boottime_ms() + COMMIT_TIMEOUT_MS,
        )
        answer = _Answer()
        try:
            partition.append(append, answer)
        except (NotLeaderOrFollowerError, NotEnoughReplicasError) as error:
            raise CoordinatorNotAvailableError(error.message) from None
        return answer.wait(COMMIT_TIMEOUT_MS)

    def _snapshot(self, partition: Partition, shard: _Shard) -> None:
        """Until compaction exists: write every live offset as one batch, then drop what is older (DESIGN 6)."""
        base_offset = self._append(partition, shard, shard.offsets.snapshot())
        partition.advance_log_start(base_offset)
        shard.appended = 0


class _Answer:
    """An append's outcome, for the thread that waits for it."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._base_offset = -1
        self._error: SparkBrokerError | None = None

    def acknowledge(self, base_offset: int) -> None:
        self._base_offset = base_offset
        self._done.set()

    def refuse(self, error: SparkBrokerError) -> None:
        self._error = error
        self._done.set()

    def wait(self, timeout_ms: int) -> int:
        if not self._done.wait(timeout_ms / 1000):
            raise RequestTimedOutError("the offsets were not committed in time")
        if self._error is not None:
            raise self._error
        return self._base_offset


def _batch(records: list[OffsetRecord], schema: pa.Schema) -> pa.RecordBatch:
    now_us = SYSTEM_CLOCK.wall_ms() * 1000
    columns: list[pa.Array] = [
        pa.array([record.key for record in records], schema.field("key").type),
        pa.array([record.value for record in records], schema.field("value").type),
        pa.nulls(len(records), schema.field("headers").type),
        pa.array([now_us] * len(records), pa.int64()).cast(schema.field("timestamp").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _records(batch: pa.RecordBatch) -> Iterator[OffsetRecord]:
    keys, values = batch.column("key"), batch.column("value")
    return (OffsetRecord(key.as_py(), value.as_py()) for key, value in zip(keys, values, strict=True))
