"""Which segments retention may delete. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from spark_broker.storage.config import LogConfig
from spark_broker.storage.segment import Segment


def expired_segments(segments: Sequence[Segment], config: LogConfig, *, high_watermark: int, now_ms: int) -> int:
    """How many of the oldest segments are to go: too old by append time, or beyond the size, and wholly committed.

    The last segment stays, however old: it holds the log's end. Event time plays no part (a topic of old events would
    be deleted at once).
    """
    size = sum(segment.size_bytes for segment in segments)
    count = 0
    for segment in segments[:-1]:
        too_old = 0 <= config.retention_ms < now_ms - segment.last.append_time_ms
        too_much = 0 <= config.retention_bytes <= size - segment.size_bytes
        if segment.next_offset > high_watermark or not (too_old or too_much):
            break
        size -= segment.size_bytes
        count += 1
    return count
