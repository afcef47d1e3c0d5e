"""What readers ask of a partition's leader: consumers, DataFrames, and the coordinators of this broker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from spark_broker.core.replica import Replica, Role
from spark_broker.errors import (
    LogTruncationError,
    OffsetMovedToTieredStorageError,
    OffsetOutOfRangeError,
    PolicyViolationError,
)
from spark_broker.protocol.arrow_message import decode_batch, row_deltas
from spark_broker.protocol.frame import COMPRESSED, CONTROL, TRANSACTIONAL, BatchHeader, Frame
from spark_broker.storage.stored_run import StoredRun

if TYPE_CHECKING:
    from spark_broker.broker.partition import Partition
    from spark_broker.broker.topic import Topic


@dataclass(frozen=True, slots=True)
class PartitionRead:
    """Frames, and what the leader knew when it read them.

    `next_offset`: where to read on, past frames that were left out. `next_epoch`: the leader epoch of the frame before
    `next_offset`; -1 when there is none. `purge_offset`, for followers: deletions below it may be missing.
    """

    frames: list[Frame]
    leader_epoch: int
    high_watermark: int
    log_start_offset: int
    next_offset: int = -1
    next_epoch: int = -1
    purge_offset: int = 0


@dataclass(frozen=True, slots=True)
class PartitionGrant:
    """Where a reader on this machine finds the batches of a `PartitionRead`, whose own frames are left out."""

    runs: list[StoredRun]
    read: PartitionRead


class LogBounds(NamedTuple):
    """What the leader knows at one moment. `latest`: high watermark or last stable offset, as the reader is isolated.

    `sealed`: the end of the sealed segments, or the last stable offset where it is lower: what may be tiered.
    """

    log_start: int
    high_watermark: int
    latest: int
    sealed: int
    leader_epoch: int


def is_left_out(header: BatchHeader, replica: Replica, *, read_committed: bool) -> bool:
    """Whether a batch is withheld from a reader: one without records (a marker, or what compaction has emptied) always,
    an aborted batch with `read_committed`.

    Called under the partition's lock, for a batch for which `can_judge` is true.
    """
    if not header.row_count:
        return True
    if not read_committed or not header.attributes & TRANSACTIONAL:
        return False
    return replica.producers.transactions.is_aborted(header.producer_id, header.base_offset)


def can_judge(header: BatchHeader, replica: Replica, leader_epoch: int) -> bool:
    """Whether the replica still knows if a frame that was read in this leader epoch was aborted.

    The log is read without the lock. Meanwhile retention may have removed the frame, and with it the knowledge that it
    was aborted. Or the replica has become a follower and was rebuilt.
    """
    leads = replica.role is Role.LEADER and replica.assignment.leader_epoch == leader_epoch
    return leads and header.next_offset > replica.log_start_offset


def is_outdated(header: BatchHeader, replica: Replica) -> bool:
    """Whether compaction has rewritten the batch since it was read, and forgotten whether it was aborted."""
    undecided = header.row_count and header.attributes & TRANSACTIONAL and not header.attributes & CONTROL
    return bool(undecided) and header.base_offset < replica.producers.transactions.swept_to


class LastLookup:
    """The last look-up by time. `answered`: by time, first batch to look at, first offset and topic: the answer.

    Many clients ask for the same time.
    """

    __slots__ = ("answered",)

    def __init__(self) -> None:
        self.answered: tuple[tuple[int, BatchHeader, int, Topic], tuple[int, int]] | None = None


class PartitionReader:
    """Reads of one replica, while it leads and its broker has a lease. Safe for use by many threads."""

    __slots__ = ("_last_lookup", "_lock", "_partition", "_replica")

    def __init__(self, partition: Partition, last_lookup: LastLookup) -> None:
        self._partition = partition
        self._lock = partition.lock.reading
        self._replica = partition.replica
        self._last_lookup = last_lookup

    def check_lineage(self, leader_epoch: int, offset: int, last_epoch: int) -> None:
        """Raises LogTruncationError when the record before `offset` is no longer of epoch `last_epoch` (KIP-320)."""
        with self._lock:
            self._replica.check_lineage(leader_epoch, offset, last_epoch)

    def epoch_before(self, offset: int) -> int:
        """The leader epoch of the record before `offset`; -1: it is not known."""
        with self._lock:
            return self._replica.epochs.epoch_at(offset - 1) if offset > self._replica.log_start_offset else -1

    def extent(self, start: int, end: int, max_bytes: int) -> tuple[int, int]:
        """Bytes stored from `start` to `end` (exclusive), and how far `max_bytes` of them reach."""
        partition = self._partition
        return partition.guard_storage(lambda: partition.log.extent(start, end, max_bytes), reads=True)

    def read(self, leader_epoch: int, offset: int, max_bytes: int, *, read_committed: bool) -> PartitionRead:
        """Committed batches of records, if any, from the one that holds `offset` on, without markers.
        With `read_committed`, aborted batches are left out too, and the bound is the last stable offset."""
        read = self.read_all(leader_epoch, offset, max_bytes, read_committed=read_committed)
        with self._lock:
            headers = (frame.header for frame in read.frames)
            if read.frames and not self._can_judge(read.frames[0].header, headers, read.leader_epoch):
                return replace(read, frames=[], next_offset=offset, next_epoch=-1)  # The next request raises the error.
            frames = [f for f in read.frames if not is_left_out(f.header, self._replica, read_committed=read_committed)]
        return replace(read, frames=frames)

    def grant(self, leader_epoch: int, offset: int, max_bytes: int, *, read_committed: bool) -> PartitionGrant:
        """Where the batches lie that `read` would return, for a reader that reads the files itself."""
        bound, read = self._readable(leader_epoch, offset, read_committed=read_committed)
        runs = self._partition.locate(offset, max_bytes, bound) if offset < bound else []
        if not runs:
            return PartitionGrant([], replace(read, next_offset=offset))
        with self._lock:
            headers = (header for run in runs for header in run.headers)
            if not self._can_judge(runs[0].headers[0], headers, read.leader_epoch):
                return PartitionGrant([], replace(read, next_offset=offset))  # The next request raises the error.
            left_out = partial(is_left_out, replica=self._replica, read_committed=read_committed)
            kept = [piece for run in runs for piece in run.without(left_out)]
        last = runs[-1].headers[-1]
        return PartitionGrant(kept, replace(read, next_offset=last.next_offset, next_epoch=last.leader_epoch))

    def _can_judge(self, first: BatchHeader, headers: Iterable[BatchHeader], leader_epoch: int) -> bool:
        """Under the lock: whether the replica still knows which of these batches, from `first` on, were aborted."""
        if not can_judge(first, self._replica, leader_epoch):
            return False
        swept = first.base_offset < self._replica.producers.transactions.swept_to
        return not (swept and any(is_outdated(header, self._replica) for header in headers))

    def read_all(self, leader_epoch: int, offset: int, max_bytes: int, *, read_committed: bool) -> PartitionRead:
        """Like `read`, with markers and aborted batches."""
        bound, read = self._readable(leader_epoch, offset, read_committed=read_committed)
        frames = self._partition.read_log(offset, max_bytes, bound) if offset < bound else []
        if not frames:
            return replace(read, next_offset=offset)
        last = frames[-1].header
        return replace(read, frames=frames, next_offset=last.next_offset, next_epoch=last.leader_epoch)

    def _readable(self, leader_epoch: int, offset: int, *, read_committed: bool) -> tuple[int, PartitionRead]:
        """Up to which offset (exclusive) a read may go now, and what the leader knows, without frames."""
        with self._lock:
            self._partition.check_lease(writing=False)
            bound = self._check_read(leader_epoch, offset, read_committed=read_committed)
            _, leader_epoch, high_watermark, _ = self._partition.position(bound)
            return bound, PartitionRead([], leader_epoch, high_watermark, self._replica.first_offset)

    def _check_read(self, leader_epoch: int, offset: int, *, read_committed: bool) -> int:
        """As `Replica.check_read`. Raises OffsetMovedToTieredStorageError for what only the topic's table has."""
        try:
            return self._replica.check_read(leader_epoch, offset, read_committed=read_committed)
        except LogTruncationError:
            raise
        except OffsetOutOfRangeError as error:
            number = self._partition.key[1]
            if offset < self._replica.first_offset and self._partition.topic.has_in_table(number, offset):
                raise OffsetMovedToTieredStorageError(f"{self._partition}: {error.message}") from None
            raise

    def offset_at(self, leader_epoch: int, timestamp_us: int, *, read_committed: bool) -> tuple[int, int] | None:
        """Offset and timestamp (us) of the first committed record at or after the time; None: there is none."""
        replica = self._replica
        with self._lock:
            self._partition.check_lease(writing=False)
            end = replica.latest_offset(leader_epoch, read_committed=read_committed)
            leader_epoch = replica.assignment.leader_epoch
            log = self._partition.log
            header = self._partition.guard_storage(lambda: log.header_for_timestamp(timestamp_us), reads=True)
            if header is None or header.base_offset >= end:
                return None
            # A log may begin within a batch: a leader's retention moves it to the end of a batch of the leader's.
            position = max(header.base_offset, replica.first_offset)
            lookup = (timestamp_us, header, replica.first_offset, self._partition.topic)
            known = self._last_lookup.answered
            if known is not None and known[0] == lookup and self._shows(header, leader_epoch, read_committed):
                return known[1]
        # The running maximum may stem from a batch that retention has removed: look at the rows, and go on if need be.
        while position < end:
            frame = self._partition.read_log(position, 1, end)[0]
            with self._lock:
                replica.check_leader(leader_epoch)
                if is_outdated(frame.header, replica):
                    continue  # It is read again.
                position = frame.header.next_offset
                if not self._shows(frame.header, leader_epoch, read_committed):
                    continue
                first_offset = replica.first_offset
            record = self._first_since(timestamp_us, frame, first_offset)
            if record is not None:
                if (frame.header, first_offset) == lookup[1:3]:
                    self._last_lookup.answered = (lookup, record)
                return record
        return None

    def _shows(self, header: BatchHeader, leader_epoch: int, read_committed: bool) -> bool:
        """Under the lock: whether a reader gets this batch."""
        judgeable = can_judge(header, self._replica, leader_epoch)
        return judgeable and not is_left_out(header, self._replica, read_committed=read_committed)

    def _first_since(self, timestamp_us: int, frame: Frame, first_offset: int) -> tuple[int, int] | None:
        """Offset and timestamp (us) of the batch's first record from `first_offset` on that is at or after the time."""
        topic, header = self._partition.topic, frame.header
        offsets = header.base_offset + row_deltas(*frame)
        deleted = int(np.searchsorted(offsets, first_offset))
        # Of a compressed batch, only this column is inflated.
        columns = topic.timestamp_columns(header.schema_id) if header.attributes & COMPRESSED else None
        batch = decode_batch(frame.message, topic.schema_of(header.schema_id), columns).slice(deleted)
        found = topic.first_since(timestamp_us, batch, header.append_time_ms)
        return None if found is None else (int(offsets[deleted + found[0]]), found[1])

    def offsets(self, leader_epoch: int, *, read_committed: bool = False) -> tuple[int, int]:
        """The first offset, and high watermark or last stable offset, as the leader knows them."""
        with self._lock:
            self._partition.check_lease(writing=False)
            latest = self._replica.latest_offset(leader_epoch, read_committed=read_committed)
            return self._replica.first_offset, latest

    def records_to_delete(self, leader_epoch: int, offset: int) -> int:
        """Up to which offset (exclusive) records are to be deleted: `offset`, or all that are committed (-1).

        Raises NotLeaderOrFollowerError, the errors about leader epochs, PolicyViolationError (a topic that is compacted
        and nothing else) and OffsetOutOfRangeError.
        """
        if "delete" not in self._partition.topic.config.cleanup_policy:
            raise PolicyViolationError(
                f"{self._partition}: cleanup.policy=compact keeps the last record of each key. Append a tombstone "
                "(a null value) for each key to delete, or set cleanup.policy=compact,delete"
            )
        _, high_watermark = self.offsets(leader_epoch)
        if offset > high_watermark:
            raise OffsetOutOfRangeError(
                f"{self._partition}: records before {offset} cannot be deleted, the high watermark is {high_watermark}"
            )
        return high_watermark if offset < 0 else offset

    def bounds(self, leader_epoch: int, *, read_committed: bool) -> LogBounds:
        """What the leader knows now. Raises as `offsets`."""
        with self._lock:
            self._partition.check_lease(writing=False)
            replica = self._replica
            latest = replica.latest_offset(leader_epoch, read_committed=read_committed)
            start, stable = replica.first_offset, replica.last_stable_offset
            sealed = max(min(self._partition.log.sealed_offset, stable), start)
            return LogBounds(start, replica.high_watermark, latest, sealed, replica.assignment.leader_epoch)

    def decode(self, frame: Frame) -> pa.RecordBatch:
        return decode_batch(frame.message, self._partition.topic.schema_of(frame.header.schema_id))
