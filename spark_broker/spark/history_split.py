"""Which offsets of a read come from the topic's Delta table, and which from the log. Pure.

A read of [start, end) of a partition whose history is [first, boundary):

    from the table: [max(start, first), min(end, boundary))        from the log: [max(start, boundary), end)

The boundary is fixed when the read is planned. Tiering only moves it up, and the table keeps what it has. So the two
sides stay complete, and no offset is on both. What lies before `first` was deleted: a read that asks for it by offset
has lost it.

A table that has refused records is not complete. Then the boundary is where the log begins, if that is earlier: a read
gets what the table lacks for as long as the log has it, as every other reader does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_broker.spark.bounds import LATEST_OFFSET


@dataclass(frozen=True)
class HistoryRange:
    """The offsets `start` up to `end` (exclusive) of a partition that are in the table; none where they are equal."""

    start: int
    end: int


@dataclass(frozen=True)
class Wanted:
    """The offsets that a read asks for of a partition: from `start` up to `end` (exclusive; -1: the latest).

    `log_start`: where the log begins. It counts for `from_earliest` (the read begins wherever the records begin), and
    where the table has refused records.
    """

    start: int
    end: int
    log_start: int
    from_earliest: bool


@dataclass(frozen=True)
class Split:
    """By partition: what comes from the table, what from the log (end -1: the latest), and what was deleted although
    the read asks for it. No range is empty.
    """

    table: Mapping[int, HistoryRange]
    log: Mapping[int, tuple[int, int]]
    lost: Mapping[int, HistoryRange]

    @property
    def needs_table(self) -> bool:
        return bool(self.table)


def split(wanted: Mapping[int, Wanted], history: Mapping[int, HistoryRange], *, has_refused: bool = False) -> Split:
    """Divide what is wanted of each partition between table and log. `has_refused`: the table lacks records."""
    table: dict[int, HistoryRange] = {}
    log: dict[int, tuple[int, int]] = {}
    lost: dict[int, HistoryRange] = {}
    for partition, read in wanted.items():
        there = history.get(partition, HistoryRange(0, 0))
        if has_refused:
            there = HistoryRange(there.start, max(there.start, min(there.end, read.log_start)))
        start, end = max(read.start, there.start), there.end
        if read.end != LATEST_OFFSET:
            end = min(end, read.end)
        if start < end:
            table[partition] = HistoryRange(start, end)
        if read.start < there.start and not read.from_earliest:
            first = there.start if read.end == LATEST_OFFSET else min(there.start, read.end)
            lost[partition] = HistoryRange(read.start, first)
        rest = max(read.start, there.end)
        if read.from_earliest:
            # Records between the table's end and the log's start were deleted before anything tiered them.
            rest = max(rest, read.log_start)
        if read.end == LATEST_OFFSET or rest < read.end:
            log[partition] = (rest, read.end)
    return Split(table, log, lost)
