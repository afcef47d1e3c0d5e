"""What the next batches of a log must be, and whether they begin a segment."""

from __future__ import annotations

from collections.abc import Sequence

from spark_broker.errors import invariant
from spark_broker.protocol.frame import ENTRY_BYTES, Frame
from spark_broker.storage.config import LogConfig
from spark_broker.storage.segment import Segment


def begins_segment(
    segments: Sequence[Segment], config: LogConfig, length: int, schema_id: int, append_time_ms: int
) -> bool:
    """Whether a batch of `length` bytes behind these segments begins one of its own."""
    if not segments or segments[-1].sealed:
        return True
    active = segments[-1]
    return (
        active.size_bytes + length > config.segment_bytes
        or active.index_bytes + ENTRY_BYTES > config.segment_index_bytes
        or schema_id != active.last.schema_id
        or append_time_ms - active.first.append_time_ms >= config.segment_ms
    )


def check_contiguous(frames: Sequence[Frame], log_end_offset: int, latest_us: int, *, begins: bool) -> None:
    """Nothing is missing between the batches, and no maximum of timestamps falls. Raises InvariantError.

    `begins`: the log has no batch. Its start may lie within the leader's batch; it gets that batch first.
    """
    expected = log_end_offset
    for number, (header, message) in enumerate(frames):
        first = number == 0 and begins and header.base_offset <= expected < header.next_offset
        follows = first or header.base_offset == expected
        invariant(follows, "a batch at %d in a log that ends at %d", header.base_offset, expected)
        invariant(header.length == len(message), "a header's length is its message's")
        invariant(header.max_timestamp_us >= latest_us, "the maximum timestamp of a partition never falls")
        expected, latest_us = header.next_offset, header.max_timestamp_us
