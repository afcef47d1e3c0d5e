"""Which segments retention may delete. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark_broker.protocol.frame import BatchHeader
from spark_broker.storage.config import LogConfig
from spark_broker.storage.segment import Segment


@dataclass(frozen=True, slots=True)
class RetentionClock:
    """Now, by the clock of this leader, which is that of its batches' append times: those from `leader_epoch` on.

    Others may be from a clock that was `skew_max_ms` behind this one.
    """

    now_ms: int
    leader_epoch: int = -1
    skew_max_ms: int = 0

    def age_ms(self, batch: BatchHeader) -> int:
        """For how long the batch has been there at least."""
        foreign = batch.leader_epoch < self.leader_epoch
        return self.now_ms - batch.append_time_ms - (self.skew_max_ms if foreign else 0)


def expired_segments(
    segments: Sequence[Segment], config: LogConfig, *, high_watermark: int, clock: RetentionClock
) -> int:
    """How many of the oldest segments are deleted: too old by append time, or beyond the size, and wholly committed.

    The last segment stays, however old: it holds the log's end. Event time plays no part (a topic of old events would
    be deleted at once).
    """
    size = sum(segment.size_bytes for segment in segments)
    count = 0
    for segment in segments[:-1]:
        too_old = 0 <= config.retention_ms < clock.age_ms(segment.last)
        too_much = 0 <= config.retention_bytes <= size - segment.size_bytes
        if segment.next_offset > high_watermark or not (too_old or too_much):
            break
        size -= segment.size_bytes
        count += 1
    return count
