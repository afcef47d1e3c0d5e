"""Which offsets to tier next. Pure: from one snapshot of the table and what the controller has recorded.

What the table and the controller know of a topic's history:

    table                             controller        the history ends at
    --------------------------------  ----------------  ------------------------------------------------------------
    no commit of ours                 nothing           the log starts: it begins now
    version v                         version v         what the controller has recorded
    version v, with its end offsets   an older version  the commit's end offsets; the controller is to record them
    version v, end offsets cleaned    an older version  unknown: tiering stops
    older than v, or another table    version v         unknown: tiering stops, the table was replaced or taken back.
                                                        Brokers delete nothing for being in it, until it is found again

A commit of which the log has lost records by an unclean election is recorded with the end offsets up to which the log
has them. Then the table has rows beyond the history (`uncut`), which go before anything else is appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spark_broker.errors import HistoryNotFoundError, TieringStoppedError
from spark_broker.history.retention import HistoryMark


@dataclass(frozen=True)
class HistoryState:
    """A topic's history: the offsets `starts[p]` up to `ends[p]` (exclusive) of partition p.

    `version`: of the newest transaction (-1: none). `table_version`: Delta's version of its commit. `quarantined`: how
    many records the table has refused so far. `uncut`: the table may have rows of that transaction beyond `ends`.
    """

    table_id: str = ""
    version: int = -1
    table_version: int = -1
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    quarantined: int = 0
    uncut: bool = False


@dataclass(frozen=True)
class TieringRange:
    """Offsets `start` up to `end` (exclusive) of a partition, which are to be tiered, or were."""

    partition: int
    start: int
    end: int


@dataclass(frozen=True)
class TableCommit:
    """A commit of ours, as the table's log has it. `attempt`: the uuid of the try that made it. `marks`: what retention
    knows of this and earlier commits, oldest first.

    `quarantined`: how many records the table has refused so far. `refused`: the ranges of this commit, if it lacks some
    of their records for that reason.
    """

    table_version: int
    version: int
    attempt: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    marks: tuple[HistoryMark, ...] = ()
    quarantined: int = 0
    refused: tuple[TieringRange, ...] = ()


@dataclass(frozen=True)
class Written:
    """A commit of ours that was read back, Delta's id of its table, and what Delta counted of it."""

    table_id: str
    commit: TableCommit
    rows: int
    files: int
    size_bytes: int


@dataclass(frozen=True)
class TableSnapshot:
    """One version of the table. `version`: of the topic's newest transaction in it (-1: none).

    `commits`: those of the topic, by the version of the transaction, which the controller recorded last or has not
    recorded yet, and whose metadata the table still has.
    """

    table_id: str
    table_version: int
    version: int
    commits: Mapping[int, TableCommit]

    @property
    def marks(self) -> tuple[HistoryMark, ...]:
        """What retention knows of the commits so far; none where the metadata of the newest was cleaned up."""
        newest = self.commits.get(self.version)
        return () if newest is None else newest.marks


@dataclass(frozen=True)
class PartitionLog:
    """Where a partition's log begins on its leader, and up to which offset (exclusive) it may be tiered."""

    log_start: int
    sealed: int


def recover(recorded: HistoryState, table: TableSnapshot | None) -> HistoryState:
    """The history as the table has it. Raises HistoryNotFoundError where the table lacks what is recorded, and
    TieringStoppedError where its end is not known.
    """
    if table is None:
        if recorded.version >= 0:
            raise HistoryNotFoundError(
                f"the table of the topic's history is gone, or delta.path was changed: its id was {recorded.table_id}, "
                "and a history stays in its table"
            )
        return recorded
    if recorded.table_id not in ("", table.table_id):
        raise HistoryNotFoundError(
            f"the table was replaced, or delta.path was changed: its id is {table.table_id}, it was "
            f"{recorded.table_id}, and a history stays in its table"
        )
    if table.version == recorded.version:
        return recorded
    if table.version < recorded.version:
        raise HistoryNotFoundError(
            f"the table was taken back: its newest transaction is {table.version}, {recorded.version} was confirmed"
        )
    newest = table.commits.get(table.version)
    if newest is None:
        raise TieringStoppedError(
            f"the table's log no longer has the end offsets of transaction {table.version}: it was cleaned up"
        )
    return HistoryState(
        table.table_id, newest.version, newest.table_version, newest.starts, newest.ends, newest.quarantined
    )


def unrecorded(recorded: HistoryState, commit: TableCommit, logs: Sequence[PartitionLog]) -> list[TieringRange]:
    """The ranges of a commit that the controller has not recorded, as far as the logs still reach back."""
    ranges = []
    for partition, end in enumerate(commit.ends):
        before = recorded.ends[partition] if partition < len(recorded.ends) else 0
        start = max(before, logs[partition].log_start)
        if start < end:
            ranges.append(TieringRange(partition, start, end))
    return ranges


def shortened(history: HistoryState, offsets: Mapping[int, int]) -> HistoryState:
    """The history without what comes from these offsets on (inclusive), by partition. The table still has it."""
    ends = tuple(min(end, offsets.get(partition, end)) for partition, end in enumerate(history.ends))
    starts = tuple(min(start, end) for start, end in zip(history.starts, ends, strict=True))
    return replace(history, starts=starts, ends=ends, uncut=True)


def cut_back(history: HistoryState, marks: Sequence[HistoryMark], attempt: str) -> TableCommit:
    """The next transaction: the table without the rows beyond the history. `marks`: those of its newest commit."""
    cut = (
        replace(mark, ends=tuple(min(*both) for both in zip(mark.ends, history.ends, strict=False))) for mark in marks
    )
    return TableCommit(
        table_version=-1,
        version=history.version + 1,
        attempt=attempt,
        starts=history.starts,
        ends=history.ends,
        marks=tuple(cut),
        quarantined=history.quarantined,
    )


def next_ranges(history: HistoryState, logs: Sequence[PartitionLog]) -> list[TieringRange]:
    """What is sealed and not in the history yet. `logs`: of every partition, in order.

    Where a log begins beyond the end of the history (its records were deleted), the history goes on at the log start.
    """
    ranges = []
    for partition, log in enumerate(logs):
        end = history.ends[partition] if partition < len(history.ends) else 0
        start = max(end, log.log_start)
        if start < log.sealed:
            ranges.append(TieringRange(partition, start, log.sealed))
    return ranges


def after(
    history: HistoryState, ranges: Sequence[TieringRange], partitions: int, deleted: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """Starts and ends of the history once these ranges are in it. A gap before a range begins the history anew.

    `deleted`: rows of each partition before these offsets are no longer in the table.
    """
    starts = [*history.starts, *[0] * (partitions - len(history.starts))]
    starts[: len(deleted)] = [max(start, offset) for start, offset in zip(starts, deleted, strict=False)]
    ends = [*history.ends, *[0] * (partitions - len(history.ends))]
    for tiered in ranges:
        if ends[tiered.partition] != tiered.start or starts[tiered.partition] == ends[tiered.partition]:
            starts[tiered.partition] = tiered.start
        ends[tiered.partition] = tiered.end
    return starts, ends
