"""A partition of `__consumer_offsets` that this broker leads: what groups have committed, and the log under it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterator

from spark_broker.broker.append import Append, AppendToken
from spark_broker.broker.clock import Clock
from spark_broker.broker.confirmation import Confirm, append_confirmed
from spark_broker.broker.internal_records import encode_rows, rows_of
from spark_broker.broker.partition import Partition
from spark_broker.core.group_offsets import READ_BARRIER, CommittedOffsets, OffsetRecord
from spark_broker.core.replica import ACKS_ALL
from spark_broker.errors import CoordinatorNotAvailableError, SparkBrokerError, UnstableOffsetCommitError
from spark_broker.protocol.frame import ABORT, CONTROL, TRANSACTIONAL, Frame
from spark_broker.protocol.messages import CommittedOffset, TransactionalOffsetCommitRequest

logger = logging.getLogger(__name__)

READ_BYTES = 4_194_304
SNAPSHOT_BATCH_BYTES = 1_048_576

FOR_EVER_MS = 2**62
"""A snapshot has no deadline: it is committed, or the leadership ends."""


class OffsetsShard:
    """The shard of one leadership. `committed` and `append` are safe from any thread; `write_snapshot` belongs to one.

    The partition's lock is taken under `_lock`, never the other way round: callbacks of a partition take no lock.
    """

    def __init__(self, partition: Partition, leader_epoch: int, clock: Clock) -> None:
        self.partition = partition
        self.leader_epoch = leader_epoch
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by _lock: what the log says up to `_read_to`, all of it committed.
        self._offsets = CommittedOffsets()
        self._read_to = 0
        self._snapshot: _Snapshot | None = None  # appended, and not known to be committed
        self._snapshot_end = 0  # the end offset of the last snapshot that was written or read

    def is_current(self, partition: Partition | None) -> bool:
        """Whether the leadership that it was made for goes on."""
        return partition is self.partition and self.partition.leader_epoch() == self.leader_epoch

    def committed(
        self, group_id: str, partitions: list[tuple[str, int]] | None, *, require_stable: bool = False
    ) -> list[CommittedOffset]:
        """What the group has committed so far, if this broker still leads (`confirm_leadership`).

        Raises typed errors while this broker cannot know it, and UnstableOffsetCommitError with `require_stable`: an
        open transaction may still commit another offset.
        """
        with self._lock:
            self._catch_up()
            if require_stable and (undecided := self._offsets.undecided(group_id, partitions)) is not None:
                partition = f"{undecided.topic}-{undecided.partition}"
                raise UnstableOffsetCommitError(f"a transaction of group {group_id!r} that is open moves {partition}")
            return self._offsets.committed(group_id, partitions)

    def confirm_leadership(self, token: AppendToken, deadline_ms: int) -> None:
        """Acknowledge `token` when no other leader can have committed anything before this call.

        The controller may move the leadership of a live broker, which learns of it later. Until then, the broker can
        read, but not commit: the other replicas follow the new leader. So it appends a barrier, unless it is alone in
        the ISR (docs/adr/0013-read-barriers.md). When this raises a typed error, nothing is stored.
        """
        if self.partition.is_replaceable():
            self.partition.append(self._append(self._encode([READ_BARRIER]), deadline_ms), token)
        else:
            token.acknowledge(-1)

    def append(
        self,
        records: list[OffsetRecord],
        token: AppendToken,
        deadline_ms: int,
        transaction: TransactionalOffsetCommitRequest | None,
        confirm: Confirm,
    ) -> None:
        """Append commits with acks=all; `token` gets the outcome. When this raises a typed error, nothing is stored."""
        transactional_id = "" if transaction is None else transaction.transactional_id
        append = self._append(self._encode(records, transaction), deadline_ms)
        append_confirmed(self.partition, append, token, transactional_id, confirm)

    def _append(self, message: bytes, deadline_ms: int) -> Append:
        return Append(message, self.leader_epoch, ACKS_ALL, self.partition.topic.schema_id, deadline_ms)

    def _encode(
        self, records: list[OffsetRecord], transaction: TransactionalOffsetCommitRequest | None = None
    ) -> bytes:
        topic, now_ms = self.partition.topic, self._clock.wall_ms()
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

    def _catch_up(self) -> None:
        """Read what was committed since the last time; the first time from the log's start."""
        partition = self.partition
        log_start, high_watermark = partition.reader.offsets(self.leader_epoch)
        self._read_to = max(self._read_to, log_start)
        self._snapshot_end = max(self._snapshot_end, log_start)
        while self._read_to < high_watermark:
            read = partition.reader.read_all(self.leader_epoch, self._read_to, READ_BYTES, read_committed=False)
            if not read.frames:
                raise CoordinatorNotAvailableError(f"{partition} could not be read up to {high_watermark}")
            for frame in read.frames:
                self._replay(frame)
                self._read_to = frame.header.next_offset

    def _replay(self, frame: Frame) -> None:
        """Replay a committed batch. Offsets of an open transaction are kept aside, so they delay no other group."""
        header, offsets = frame.header, self._offsets
        if header.attributes & CONTROL:
            offsets.replay_marker(header.producer_id, committed=not header.attributes & ABORT)
            return
        records = [OffsetRecord(key, value) for key, value in rows_of(self.partition.reader.decode(frame))]  # type: ignore[arg-type]
        if header.attributes & TRANSACTIONAL:
            offsets.replay_undecided(header.producer_id, header.base_offset, records, header.next_offset)
        elif offsets.replay(records, header.next_offset):
            self._snapshot_end = header.next_offset

    def write_snapshot(self, every: int, deleted: Container[str] = ()) -> None:
        """Until compaction exists: after `every` records since the last snapshot, write all live offsets at the log's
        end, but for those of deleted topics. Once they are committed, drop what is older. Raises typed errors."""
        snapshot = self._snapshot
        if snapshot is None:
            self._begin_snapshot(every, deleted)
        elif snapshot.refused:
            self._snapshot = None
        elif snapshot.end_offset >= 0:
            self._snapshot = None
            with self._lock:
                self._snapshot_end = max(self._snapshot_end, snapshot.end_offset)
            self.partition.advance_log_start(snapshot.keep_from)

    def _begin_snapshot(self, every: int, deleted: Container[str]) -> None:
        """A snapshot has no undecided offsets: their transaction may still commit them, so the log keeps them."""
        with self._lock:
            self._catch_up()
            if self._read_to - self._snapshot_end < every:
                return
            # Set even if nothing is written: otherwise a snapshot would be tried all the time.
            self._snapshot_end = as_of = self._read_to
            self._offsets.drop(deleted)
            records = self._offsets.snapshot()
            undecided = self._offsets.first_undecided
        if not records:
            return  # Everything so far is undecided, or was aborted.
        keep_from = as_of if undecided is None else min(as_of, undecided)
        for batch in _batches(records):
            # Batches are committed in order, so the last one stands for all.
            self._snapshot = _Snapshot(keep_from, len(batch))
            try:
                self.partition.append(self._append(self._encode(batch), FOR_EVER_MS), self._snapshot)
            except SparkBrokerError:
                self._snapshot = None
                raise


class _Snapshot:
    """The last batch of a snapshot, on its way. Called under the partition's lock.

    `keep_from`: the log start that the snapshot allows. `end_offset`: the offset after the batch; -1 until it is
    committed.
    """

    def __init__(self, keep_from: int, rows: int) -> None:
        self.keep_from = keep_from
        self.end_offset = -1
        self.refused = False
        self._rows = rows

    def acknowledge(self, base_offset: int) -> None:
        self.end_offset = base_offset + self._rows

    def refuse(self, error: SparkBrokerError) -> None:
        logger.info("a snapshot of committed offsets is not known to be committed: %s", error)
        self.refused = True


def _batches(records: list[OffsetRecord]) -> Iterator[list[OffsetRecord]]:
    """Batches of a moderate size, so that the topic accepts each, however many groups there are."""
    batch: list[OffsetRecord] = []
    size_bytes = 0
    for record in records:
        batch.append(record)
        size_bytes += len(record.key) + len(record.value)
        if size_bytes >= SNAPSHOT_BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
