"""Which segments retention may delete. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark_broker.protocol.frame import BatchHeader
from spark_broker.storage.config import LogConfig
from spark_broker.storage.segment import Segment


@dataclass(frozen=True, slots=True)
class RetentionClock:
    """The current time by this leader's clock, which also gave the append times of the batches from `leader_epoch` on.

    The append times of earlier batches may be from a clock that was up to `skew_max_ms` behind this one. `now_ms` is
    None where the clock may be wrong: nothing is old then.
    """

    now_ms: int | None
    leader_epoch: int = -1
    skew_max_ms: int = 0

    def age_ms(self, batch: BatchHeader) -> int:
        """The least age that the batch can have."""
        if self.now_ms is None:
            return -1
        foreign = batch.leader_epoch < self.leader_epoch
        return self.now_ms - batch.append_time_ms - (self.skew_max_ms if foreign else 0)


def expired_segments(
    segments: Sequence[Segment], config: LogConfig, *, high_watermark: int, clock: RetentionClock
) -> int:
    """How many of the oldest segments to delete: wholly committed ones that are too old or beyond the size limit.

    The age is by append time. By event time, a topic of old events would be deleted at once. Only its age deletes the
    last segment, and not that of a topic with a table: who reads from there on would look for a record in the table.
    """
    size = sum(segment.size_bytes for segment in segments)
    count = 0
    for segment in segments if config.deletes_last_segment else segments[:-1]:
        too_old = 0 <= config.retention_ms < clock.age_ms(segment.last)
        too_much = segment is not segments[-1] and 0 <= config.retention_bytes <= size - segment.size_bytes
        if segment.next_offset > high_watermark or not (too_old or too_much):
            break
        size -= segment.size_bytes
        count += 1
    return count
