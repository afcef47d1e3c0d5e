"""Which rows of a topic's table are too old, or too many: `retention.ms` and `retention.bytes` of the topic. Pure.

A table does not say when its rows were appended to the topic: `_timestamp` may be the time of an event. So each commit
of a tierer carries marks of the commits before it. What a commit added was appended before it. So it is deleted when
the commit is too old, later than one by one, and never earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MARKS_MAX = 64
"""How many commits are told apart. Of more, two that are close in time are deleted together."""


@dataclass(frozen=True)
class HistoryMark:
    """A commit: when it was made (UTC ms, by the tierer's clock), up to which offset (exclusive) it reached in each
    partition, and how many bytes the records that it added had in the log.
    """

    time_ms: int
    ends: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class HistoryRetention:
    """How long rows are kept, and how many bytes of each partition; -1: no limit."""

    ms: int = -1
    size_bytes: int = -1

    @staticmethod
    def of_topic(config: Mapping[str, str]) -> HistoryRetention:
        """Only what was set for the topic, or for all topics of the cluster, counts. A default deletes nothing.

        Of a topic that is compacted and nothing else, nothing is deleted either.
        """
        if config.get("cleanup.policy") == "compact":
            return HistoryRetention()
        return HistoryRetention(int(config.get("retention.ms", -1)), int(config.get("retention.bytes", -1)))


def with_mark(marks: Sequence[HistoryMark], mark: HistoryMark) -> tuple[HistoryMark, ...]:
    """The marks once this newest commit is made."""
    kept = [*marks, mark]
    while len(kept) > MARKS_MAX:
        gaps = [later.time_ms - earlier.time_ms for earlier, later in pairwise(kept)]
        earlier = gaps.index(min(gaps))
        joined = replace(kept[earlier + 1], sizes=_sum(kept[earlier].sizes, kept[earlier + 1].sizes))
        kept[earlier : earlier + 2] = [joined]
    return tuple(kept)


def expired_before(
    marks: Sequence[HistoryMark], retention: HistoryRetention, now_ms: int, log_starts: Sequence[int], partitions: int
) -> tuple[int, ...]:
    """Before which offset the rows of each partition are to be deleted; at least `log_starts`, as before."""
    starts = [log_starts[p] if p < len(log_starts) else 0 for p in range(partitions)]
    for mark in marks:
        if 0 <= retention.ms < now_ms - mark.time_ms:
            starts = [max(start, end) for start, end in zip(starts, _padded(mark.ends, partitions), strict=True)]
    if retention.size_bytes >= 0:
        starts = [_within_size(marks, retention.size_bytes, p, start) for p, start in enumerate(starts)]
    return tuple(starts)


def _within_size(marks: Sequence[HistoryMark], size_bytes: int, partition: int, start: int) -> int:
    """The oldest commits go as long as what is left still has `size_bytes`, as with segments of a log."""
    left = [m for m in marks if partition < len(m.ends) and m.ends[partition] > start]
    total = sum(mark.sizes[partition] for mark in left)
    for mark in left:
        if total - mark.sizes[partition] < size_bytes:
            break
        total -= mark.sizes[partition]
        start = mark.ends[partition]
    return start


def _sum(sizes: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    partitions = max(len(sizes), len(more))
    return tuple(a + b for a, b in zip(_padded(sizes, partitions), _padded(more, partitions), strict=True))


def _padded(values: Sequence[int], partitions: int) -> list[int]:
    return [*values, *[0] * (partitions - len(values))][:partitions]
