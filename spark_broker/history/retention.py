"""Which rows of a topic's table are too old, or too many: `retention.ms` and `retention.bytes` of the topic. Pure.

A table does not say when its rows were appended to the topic: `_timestamp` may be the time of an event. So each commit
of a tierer carries marks of the commits before it. What a commit added was appended before it. So it is deleted when
the commit is too old, later than one by one, and never earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

MARKS_MAX = 64
"""How many groups of commits are told apart. Those of a group are deleted together."""

FEWEST_MARKS = 16
"""As many where nothing is to be deleted at present, or where they would be large: each commit carries them all."""

NUMBERS_MAX = 20_000
"""About how many offsets and sizes the marks of a commit have, of all partitions, before there are fewer marks."""


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

    def marks_max(self, partitions: int) -> int:
        """How many marks a commit of a topic with so many partitions carries."""
        if self.ms < 0 and self.size_bytes < 0:
            return FEWEST_MARKS
        return min(MARKS_MAX, max(FEWEST_MARKS, NUMBERS_MAX // (2 * partitions)))


def with_mark(
    marks: Sequence[HistoryMark],
    mark: HistoryMark,
    log_starts: Sequence[int] = (),
    retention: HistoryRetention = HistoryRetention(),
) -> tuple[HistoryMark, ...]:
    """The marks once this newest commit is made. It has one of its own.

    `log_starts`: before which offsets records were deleted. A mark of nothing else is of no use any more.

    Of n marks, one that was joined has at most about four in n of the time, and of the bytes, that all have. So what is
    deleted late is late by that.
    """
    deleted = _padded(log_starts, len(mark.ends))
    kept = [_left_of(each, deleted) for each in marks if _is_left(each, deleted)]
    while len(kept) >= retention.marks_max(len(mark.ends)):
        _join(kept, by_time=retention.ms >= 0 or retention.size_bytes < 0)
    return (*kept, mark)


def _is_left(mark: HistoryMark, deleted: Sequence[int]) -> bool:
    return any(end > start for end, start in zip(mark.ends, deleted, strict=False))


def _left_of(mark: HistoryMark, deleted: Sequence[int]) -> HistoryMark:
    """The mark without the bytes of partitions where all of it was deleted. They would count for ever where another
    partition keeps everything.
    """
    sizes = zip(mark.sizes, mark.ends, deleted, strict=False)
    return replace(mark, sizes=tuple(size if end > start else 0 for size, end, start in sizes))


def _join(marks: list[HistoryMark], *, by_time: bool) -> None:
    """Join the two neighbours that together have the least of the bytes and, `by_time`, of the time.

    The time between the two is not what counts. The newest mark would be joined with each commit, as there is the least
    between these, and never be old. The oldest one is not joined: nobody knows when it began.
    """
    times = [mark.time_ms for mark in marks]
    sizes = [sum(mark.sizes) for mark in marks]
    time_ms, size_bytes = max(max(times) - min(times), 1), max(sum(sizes), 1)

    def share(earlier: int) -> float:
        size = sizes[earlier] + sizes[earlier + 1]
        return by_time * max(times[earlier + 1] - times[earlier - 1], 0) / time_ms + size / size_bytes

    earlier = min(range(1, len(marks) - 1), key=share)
    first, second = marks[earlier : earlier + 2]
    marks[earlier : earlier + 2] = [replace(second, sizes=_sum(first.sizes, second.sizes))]


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
