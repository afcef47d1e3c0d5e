"""How many bytes a range of a log takes, from its indexes alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from spark_broker.storage.index import Entries, count_below, count_within, end_position
from spark_broker.storage.segment import Segment


def extent(
    segments: Sequence[Segment], entries_of: Callable[[Segment], Entries], start: int, end: int, max_bytes: int
) -> tuple[int, int]:
    """How many bytes the batches from `start` up to `end` (exclusive) have, and how far `max_bytes` of them reach.

    The first batch is the one that contains `start`. The second number is the offset after the last batch that fits
    into `max_bytes`; at least one batch counts as fitting, if there is one. The index of a segment that lies wholly in
    the range is not read, unless `max_bytes` ends in it.
    """
    size, fitting, full = 0, start, False
    first = bisect_right(segments, start, key=lambda segment: segment.base_offset) - 1
    for segment in segments[max(0, first) :]:
        if segment.base_offset >= end:
            break
        whole = segment.base_offset >= start and segment.next_offset <= end
        if whole and (full or size + segment.size_bytes <= max_bytes):
            size += segment.size_bytes
            fitting = fitting if full else segment.next_offset
            continue
        entries = entries_of(segment)
        begin, stop = count_below(entries, start), count_below(entries, end)
        if stop <= begin:
            continue
        if not full:
            within = min(stop, count_within(entries, begin, max_bytes - size))
            within = max(within, begin + 1 if fitting == start else begin)
            if within > begin:
                fitting = int(entries["base_offset"][within - 1]) + int(entries["last_offset_delta"][within - 1]) + 1
            full = within < stop
        size += end_position(entries, stop - 1) - int(entries["position"][begin])
    return size, fitting
