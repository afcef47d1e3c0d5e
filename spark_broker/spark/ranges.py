"""Ranges of offsets: resolved once, when a query is planned, and split into the partitions of the DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from spark_broker.model import TopicPartition


@dataclass(frozen=True)
class OffsetRange:
    """Offsets `start` up to `end`, exclusive, of one partition of the topic with this id: the work of one task.

    `read_to`, `read_epoch`: the end of the whole partition when the query was planned, and the leader epoch of the
    record before it. A log that does not agree with these does not hold the planned records. -1: not known.
    """

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    read_to: int = -1
    read_epoch: int = -1

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


def split_ranges(ranges: Sequence[OffsetRange], *, min_partitions: int = 0, max_records: int = 0) -> list[OffsetRange]:
    """The ranges that are not empty, cut into about `min_partitions` parts of at most `max_records` offsets (0: any
    number).

    The parts of a range have about the same size, as in Spark's Kafka source.
    """
    pieces = [whole for whole in ranges if whole.size > 0]
    if max_records:
        pieces = [piece for whole in pieces for piece in _cut(whole, -(-whole.size // max_records))]
    if len(pieces) >= min_partitions:
        return pieces
    total = sum(piece.size for piece in pieces)
    return [piece for whole in pieces for piece in _cut(whole, max(1, round(whole.size * min_partitions / total)))]


def _cut(whole: OffsetRange, parts: int) -> Iterable[OffsetRange]:
    """The range in this many parts (or fewer, because none is empty). Their sizes differ by one at most."""
    parts = min(parts, whole.size)
    bounds = [whole.start + whole.size * index // parts for index in range(parts + 1)]
    for start, end in pairwise(bounds):
        yield replace(whole, start=start, end=end)
