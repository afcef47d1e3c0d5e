"""The steps of a tiering try: what it wants done. Spark carries them out, and so does the simulator."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from spark_broker.errors import HistoryConflictError, StaleControllerEpochError, StaleMetadataError
from spark_broker.history.plan import HistoryState, TableCommit, TableSnapshot, TieringRange, Written
from spark_broker.protocol.messages import ListedOffset

Answer = TypeVar("Answer")


class ConflictError(Exception):
    """Somebody else changed the table meanwhile, or cancelled the job. Nothing of ours was committed: start over."""


START_OVER = (ConflictError, HistoryConflictError, StaleControllerEpochError, StaleMetadataError)
"""Errors of a try after which another try may succeed, with the topic as it is known then."""


@dataclass(eq=False)
class Step(Generic[Answer]):
    """What a try wants done. Whoever does it sets `answer` before the try goes on. An error there ends the try."""

    answer: Answer = field(init=False, repr=False)


@dataclass(eq=False)
class Order(Step[None]):
    """A step without an answer."""

    answer: None = field(init=False, repr=False, default=None)


@dataclass(eq=False)
class ReadTable(Step[TableSnapshot | None]):
    """The newest version of the table, with our commits from the recorded transaction on; None: there is no table."""

    recorded: int


@dataclass(eq=False)
class ListLogs(Step[list[ListedOffset]]):
    """The log of every partition, from its leader: start, sealed end, last stable offset.

    `ends`: of the history. Each answer says how many bytes are stored from there on.
    """

    ends: tuple[int, ...] = ()


@dataclass(eq=False)
class CompareWithLogs(Step[dict[int, int]]):
    """From which offset on (inclusive) the table has other records in `ranges` than the logs, by partition.

    `in_logs`: what the logs have of these ranges. `size_bytes`: about how much that is.
    """

    ranges: Sequence[TieringRange]
    in_logs: Sequence[TieringRange]
    size_bytes: int


@dataclass(eq=False)
class CutTable(Step[Written]):
    """Delete each partition's rows from its offset on, as transaction `commit.version`, and read the commit back."""

    offsets: Mapping[int, int]
    commit: TableCommit


@dataclass(eq=False)
class ReadRecords(Step[int]):
    """Make ready the records of these ranges for the table. The answer is how many of them it refuses.

    `table_exists`: false where the commit is to create it.
    """

    ranges: Sequence[TieringRange]
    size_bytes: int
    table_exists: bool


@dataclass(eq=False)
class AppendRecords(Step[Written]):
    """Append what `ReadRecords` has made ready, as transaction `commit.version`, and read the commit back."""

    commit: TableCommit


@dataclass(eq=False)
class SaveRefused(Order):
    """Append to the dead-letter table what the commit lacks in these ranges, unless that was done before."""

    ranges: Sequence[TieringRange]
    commit: TableCommit


@dataclass(eq=False)
class Confirm(Order):
    """Let the controller record the history. `end_epochs`: leader epochs of the records before its ends; -1: not known.

    They say after an unclean election whether the new leader's log has the same records as the table.
    """

    history: HistoryState
    end_epochs: Sequence[int] = ()


@dataclass(eq=False)
class HistoryFound(Order):
    """Let the controller record that the table has the history again. An earlier run did not find it there."""


@dataclass(eq=False)
class DeleteRows(Order):
    """Delete the rows of each partition before its offset from the table."""

    before: Mapping[int, int]


@dataclass(eq=False)
class RaiseLogStarts(Order):
    """Let the controller record that records before these offsets are deleted: (partition, offset)."""

    starts: Sequence[tuple[int, int]]


@dataclass(eq=False)
class ReadClock(Step[int]):
    """UTC, ms."""


Result = TypeVar("Result")
Steps = Generator[Step[Any], None, Result]
"""A try, or a part of one: its steps, and what it returns."""


def ask(step: Step[Answer]) -> Generator[Step[Answer], None, Answer]:
    """The step as a part of a try; returns its answer."""
    yield step
    return step.answer
