"""What readers ask of a partition's leader: consumers, DataFrames, and the coordinators of this broker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_broker.core.replica import Replica, Role
from spark_broker.protocol.arrow_message import decode_batch
from spark_broker.protocol.frame import CONTROL, TRANSACTIONAL, Frame

if TYPE_CHECKING:
    from spark_broker.broker.partition import Partition


@dataclass(frozen=True, slots=True)
class PartitionRead:
    """Frames, and what the leader knew when it read them.

    `next_offset`: where to read on; past frames that were left out. `next_epoch`: the leader epoch of the frame before
    it; -1 when there is none.
    """

    frames: list[Frame]
    leader_epoch: int
    high_watermark: int
    log_start_offset: int
    next_offset: int = -1
    next_epoch: int = -1


def is_left_out(frame: Frame, replica: Replica, *, read_committed: bool) -> bool:
    """Markers are for nobody, aborted batches for none who reads what is committed.

    Asked with the partition's lock held, of a frame that `can_judge` includes.
    """
    header = frame.header
    if header.attributes & CONTROL:
        return True
    if not read_committed or not header.attributes & TRANSACTIONAL:
        return False
    return replica.producers.transactions.is_aborted(header.producer_id, header.base_offset)


def can_judge(frame: Frame, replica: Replica, leader_epoch: int) -> bool:
    """Whether the replica still knows of the aborted transactions at a frame that was read in this leader epoch.

    The log is read without the lock. Meanwhile retention may have taken the frame from the log, and with it the memory
    that it was aborted; or the replica follows again and has begun anew.
    """
    leads = replica.role is Role.LEADER and replica.assignment.leader_epoch == leader_epoch
    return leads and frame.header.next_offset > replica.log_start_offset


class PartitionReader:
    """Reads of one replica, while it leads and its broker has a lease. Safe for use by many threads."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._lock = partition.lock
        self._replica = partition.replica

    def check_lineage(self, leader_epoch: int, offset: int, last_epoch: int) -> None:
        """Raises LogTruncationError where the record before `offset` is not of this leader epoch any more (KIP-320)."""
        with self._lock:
            self._replica.check_lineage(leader_epoch, offset, last_epoch)

    def epoch_before(self, offset: int) -> int:
        """The leader epoch of the record before `offset`; -1: it is not known."""
        with self._lock:
            return self._replica.epochs.epoch_at(offset - 1) if offset > self._replica.log_start_offset else -1

    def extent(self, start: int, end: int, max_bytes: int) -> tuple[int, int]:
        """Bytes stored from `start` to `end` (exclusive), and how far `max_bytes` of them reach."""
        return self._partition.guard_storage(lambda: self._partition.log.extent(start, end, max_bytes))

    def read(self, leader_epoch: int, offset: int, max_bytes: int, *, read_committed: bool) -> PartitionRead:
        """Committed batches of records, if any, from the one that holds `offset` on, without markers.
        With `read_committed`, aborted batches are left out too, and the bound is the last stable offset."""
        read = self.read_all(leader_epoch, offset, max_bytes, read_committed=read_committed)
        with self._lock:
            if read.frames and not can_judge(read.frames[0], self._replica, read.leader_epoch):
                return replace(read, frames=[], next_offset=offset, next_epoch=-1)  # The next request hears why.
            frames = [f for f in read.frames if not is_left_out(f, self._replica, read_committed=read_committed)]
        return replace(read, frames=frames)

    def read_all(self, leader_epoch: int, offset: int, max_bytes: int, *, read_committed: bool) -> PartitionRead:
        """Like `read`, with markers and aborted batches."""
        with self._lock:
            self._partition.check_lease(writing=False)
            bound = self._replica.check_read(leader_epoch, offset, read_committed=read_committed)
            read = self._partition.position(bound)
        frames = self._partition.read_log(offset, max_bytes, bound) if offset < bound else []
        if not frames:
            return PartitionRead([], *read[1:], next_offset=offset)
        last = frames[-1].header
        return PartitionRead(frames, *read[1:], next_offset=last.next_offset, next_epoch=last.leader_epoch)

    def offset_at(self, leader_epoch: int, timestamp_ms: int, *, read_committed: bool) -> tuple[int, int] | None:
        """Offset and timestamp (ms) of the first committed record at or after the time; None: there is none."""
        with self._lock:
            self._partition.check_lease(writing=False)
            end = self._replica.latest_offset(leader_epoch, read_committed=read_committed)
            leader_epoch = self._replica.assignment.leader_epoch
            position = self._partition.guard_storage(
                lambda: self._partition.log.offset_for_timestamp(timestamp_ms * 1000)
            )
        # The running maximum may stem from a batch that retention has removed: look at the rows, and go on if need be.
        while position is not None and position < end:
            frame = self._partition.read_log(position, 1, end)[0]
            position = frame.header.next_offset
            with self._lock:
                self._replica.check_leader(leader_epoch)
                known = can_judge(frame, self._replica, leader_epoch)
                if not known or is_left_out(frame, self._replica, read_committed=read_committed):
                    continue
            record = self._partition.topic.first_since(timestamp_ms, self.decode(frame), frame.header.append_time_ms)
            if record is not None:
                return frame.header.base_offset + record[0], record[1]
        return None

    def offsets(self, leader_epoch: int, *, read_committed: bool = False) -> tuple[int, int]:
        """Log start, and high watermark or last stable offset, as the leader knows them."""
        with self._lock:
            self._partition.check_lease(writing=False)
            latest = self._replica.latest_offset(leader_epoch, read_committed=read_committed)
            return self._replica.log_start_offset, latest

    def decode(self, frame: Frame) -> pa.RecordBatch:
        return decode_batch(frame.message, self._partition.topic.schemas[frame.header.schema_id])
