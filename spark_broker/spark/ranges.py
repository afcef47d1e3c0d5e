"""Ranges of offsets: resolved once, when a query is planned. Large ones are split into several tasks. Small ones share
a task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from spark_broker.model import TopicPartition


@dataclass(frozen=True)
class OffsetRange:
    """Offsets `start` up to `end`, exclusive, of one partition of the topic with this id: the work of one task.

    `read_to`, `read_epoch`: an offset not below `end`, and the leader epoch of the record before it when the query was
    planned. A log that does not agree with these does not hold the planned records. -1: not known.
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


TaskRanges = tuple[OffsetRange, ...]
"""What one task reads, in this order: one range or more, none of them empty."""


@dataclass(frozen=True)
class TaskSize:
    """What is enough for a task, which costs Spark a fixed price whatever it reads. Ranges share a task until it has as
    many records, or as many stored bytes. 1 record: each range has a task of its own.
    """

    records: int
    bytes: int


@dataclass(frozen=True)
class TaskRules:
    """How ranges become tasks. `at_least`: about so many tasks (0: any number). `max_records`: of a task (0: any
    number).
    """

    enough: TaskSize
    at_least: int = 0
    max_records: int = 0


def tasks_of(
    ranges: Sequence[OffsetRange], rules: TaskRules, record_bytes: Mapping[TopicPartition, float]
) -> list[TaskRanges]:
    """The tasks that read these ranges: every offset once, in the order of the ranges.

    `record_bytes`: what a record of the partition takes as stored, where that is known.
    """
    pieces = split_ranges(ranges, min_partitions=rules.at_least, max_records=rules.max_records)
    enough = rules.enough
    weights = [
        min(1, piece.size * max(1 / enough.records, record_bytes.get(piece.tp, 0) / enough.bytes)) for piece in pieces
    ]
    count = min(len(pieces), max(math.ceil(sum(weights)), rules.at_least, 1))
    return _packed(pieces, weights, count, rules.max_records)


def _packed(pieces: Sequence[OffsetRange], weights: Sequence[float], count: int, max_records: int) -> list[TaskRanges]:
    """The pieces in this many tasks of about the same weight. More, where one would have more than `max_records`."""
    tasks: list[list[OffsetRange]] = []
    share, reached, records = sum(weights) / max(count, 1), 0.0, 0  # `records`: of the last task
    for index, (piece, end) in enumerate(zip(pieces, accumulate(weights), strict=True)):
        # The middle of the piece says to which share it belongs. The last pieces have a task each if they are needed.
        is_next = not tasks or (reached + end) / 2 >= len(tasks) * share or len(pieces) - index <= count - len(tasks)
        if is_next or (max_records and records + piece.size > max_records):
            tasks.append([])
            records = 0
        tasks[-1].append(piece)
        reached, records = end, records + piece.size
    return [tuple(task) for task in tasks]


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
