"""The coordinator of groups' committed offsets: the leader of a partition of `__consumer_offsets` keeps them in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.confirmation import Confirm, append_confirmed, no_coordinator
from spark_broker.broker.internal_records import encode_rows, rows_of
from spark_broker.broker.partition import Partition
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
from spark_broker.protocol.frame import ABORT, CONTROL, TRANSACTIONAL, Frame
from spark_broker.protocol.messages import (
    CommittedOffset,
    CommittedOffsets,
    OffsetCommit,
    OffsetFetch,
    TransactionalOffsetCommit,
)
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

    def __init__(self, manager: ReplicaManager, snapshot_records: int, confirm: Confirm = no_coordinator) -> None:
        self._manager = manager
        self._snapshot_records = snapshot_records
        self._confirm = confirm
        self._lock = threading.Lock()
        self._shards: dict[int, _Shard] = {}

    def commit(self, request: OffsetCommit | TransactionalOffsetCommit) -> None:
        """Append the offsets and wait until they are in the log for good; those of a transaction count once it is
        committed. Raises the error that the client gets."""
        if not request.group_id:
            raise InvalidRequestError("a commit without a group id")
        if any(committed.offset < 0 for committed in request.offsets):
            raise InvalidRequestError("a commit of a negative offset")
        partition, shard = self._shard(request.group_id)
        records = [offset_record(request.group_id, committed) for committed in request.offsets]
        if not records:
            return
        self._append(partition, shard, records, request if isinstance(request, TransactionalOffsetCommit) else None)
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
            read = partition.read_all(shard.leader_epoch, shard.read_to, READ_BYTES, read_committed=False)
            frames = read.frames
            if not frames:
                raise CoordinatorNotAvailableError(f"{partition} could not be read up to {high_watermark}")
            for frame in frames:
                _replay(shard.offsets, partition, frame)
                shard.read_to = frame.header.next_offset

    def _append(
        self,
        partition: Partition,
        shard: _Shard,
        records: list[OffsetRecord],
        transaction: TransactionalOffsetCommit | None = None,
    ) -> int:
        """Append with acks=all and wait. Returns the base offset."""
        topic = partition.topic
        append = Append(
            message=_encode(partition, records, transaction),
            leader_epoch=shard.leader_epoch,
            acks=ACKS_ALL,
            schema_id=topic.schema_id,
            deadline_ms=SYSTEM_CLOCK.boottime_ms() + COMMIT_TIMEOUT_MS,
        )
        answer = _Answer()
        transactional_id = transaction.transactional_id if transaction is not None else ""
        try:
            append_confirmed(partition, append, answer, transactional_id, self._confirm)
        except (NotLeaderOrFollowerError, NotEnoughReplicasError) as error:
            raise CoordinatorNotAvailableError(error.message) from None
        return answer.wait(COMMIT_TIMEOUT_MS)

    def _snapshot(self, partition: Partition, shard: _Shard) -> None:
        """Until compaction exists: write every live offset as one batch, then drop what is older (DESIGN 6).

        Not what is undecided: its transaction may yet commit it.
        """
        shard.appended = 0
        snapshot = shard.offsets.snapshot()
        if not snapshot:
            return  # Everything so far is undecided, or was aborted.
        base_offset = self._append(partition, shard, snapshot)
        undecided = shard.offsets.first_undecided
        partition.advance_log_start(base_offset if undecided is None else min(base_offset, undecided))


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


def _encode(partition: Partition, records: list[OffsetRecord], transaction: TransactionalOffsetCommit | None) -> bytes:
    topic, now_ms = partition.topic, SYSTEM_CLOCK.wall_ms()
    if transaction is None:
        return encode_rows(records, topic.schemas[-1], topic.schema_id, now_ms)
    return encode_rows(
        records,
        topic.schemas[-1],
        topic.schema_id,
        now_ms,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        sequence=transaction.sequence,
        attributes=TRANSACTIONAL,
    )


def _replay(offsets: GroupOffsets, partition: Partition, frame: Frame) -> None:
    """A committed batch. One open transaction does not hold up the groups of others: its offsets are kept aside."""
    header = frame.header
    if header.attributes & CONTROL:
        offsets.replay_marker(header.producer_id, committed=not header.attributes & ABORT)
        return
    records = _records(partition.decode(frame))
    if header.attributes & TRANSACTIONAL:
        offsets.replay_undecided(header.producer_id, header.base_offset, records)
    else:
        offsets.replay(records)


def _records(batch: pa.RecordBatch) -> Iterator[OffsetRecord]:
    """As they are stored: what has no key or no value is found when it is decoded."""
    return (OffsetRecord(key, value) for key, value in rows_of(batch))  # type: ignore[arg-type]
