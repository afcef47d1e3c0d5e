"""What a consumer reads of a partition, and which stored batches it does not see."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.core.replica import Replica, Role
from spark_broker.protocol.frame import CONTROL, TRANSACTIONAL, Frame


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
