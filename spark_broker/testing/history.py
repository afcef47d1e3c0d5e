"""What clients did and saw, as plain data: appends, transactions, polls, committed offsets, whole reads.

Simulated and real runs have the same format, and one checker (`checker.check_history`) judges both. Values must be
unique: otherwise a lost, a doubled or a moved record would not be visible. `recorder.HistoryRecorder` collects events
from many threads; `history_file` keeps them as JSON lines.

The order of events: an action is recorded before its client begins it (`Invoked`, `CommitInvoked`, `SnapshotBegan`),
and its outcome after the client has learned it (`Acknowledged`, `TransactionCommitted`, `Polled`). If an outcome comes
before an invocation in the list, it was known before that invocation began, even if they belong to different clients.
The checker relies on this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from spark_broker.model import TopicPartition


class Isolation(StrEnum):
    """Which records of transactions a reader is given."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


class Stored(NamedTuple):
    """One record and its place. `where`: whose files it was read from ("broker 1"), if it was read from files."""

    partition: TopicPartition
    offset: int
    value: bytes
    where: str = ""


class Run(NamedTuple):
    """Values at `base_offset`, `base_offset + 1`, ... of a partition. A marker or an aborted batch ends a run."""

    partition: TopicPartition
    base_offset: int
    values: tuple[bytes, ...]

    @property
    def next_offset(self) -> int:
        return self.base_offset + len(self.values)


class _Event(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Events cannot be part of a reference cycle: a million of them cost the garbage collector nothing."""


class Invoked(_Event, frozen=True):
    """An append of one micro-batch began. `writer`: appends of one writer to one partition keep their order.

    `transaction`: the transaction that it belongs to; None for a plain append. `keys`: of the values, where the topic
    is compacted. `tombstones`: which of them, by their number, delete their key.
    """

    operation: int
    writer: str
    partition: TopicPartition
    values: tuple[bytes, ...]
    transaction: int | None = None
    keys: tuple[bytes, ...] = ()
    tombstones: tuple[int, ...] = ()


class Acknowledged(_Event, frozen=True):
    """With acks=all: the append's values are at `base_offset`, `base_offset + 1`, ... Weaker acks promise nothing."""

    operation: int
    base_offset: int


class Failed(_Event, frozen=True):
    """The client was given an error. The values may be stored, once and all of them, or not at all."""

    operation: int
    error: str


class TransactionBegan(_Event, frozen=True):
    """A transaction of one writer. In the many-writer form: one task attempt joined (`app`, `version`, `execution`)."""

    transaction: int
    writer: str
    transactional_id: str = ""
    app: str = ""
    version: int = -1
    execution: str = ""


class CommitInvoked(_Event, frozen=True):
    """A commit was requested: of one transaction, or in the many-writer form of the `winners`, all or none of them.

    A commit that is requested again after an unclear outcome is a commit of its own that names the same transactions.
    `app` and `version` are needed where there are no winners.
    """

    commit: int
    transactions: tuple[int, ...]
    app: str = ""
    version: int = -1


class TransactionCommitted(_Event, frozen=True):
    """commit() returned: from now on every partition shows all of it."""

    commit: int


class CommitRefused(_Event, frozen=True):
    """The commit certainly did not happen.

    `already_committed`: this version or a later one is committed, perhaps by this very request, which was sent twice.
    """

    commit: int
    error: str
    already_committed: bool = False


class CommitUnknown(_Event, frozen=True):
    """It is unknown whether it was committed: all of it is there, or nothing. No outcome event means the same."""

    commit: int
    error: str


class TransactionAborted(_Event, frozen=True):
    """abort() returned: nothing of it will ever be shown to a reader of committed records.

    An abort of unknown outcome needs no event: what was never requested to be committed may not be shown anyway.
    """

    transaction: int


class ReaderOpened(_Event, frozen=True):
    """The isolation and group of `reader`. A reader without this event reads committed records and has no group."""

    reader: str
    isolation: Isolation = Isolation.READ_COMMITTED
    group: str = ""


class Positioned(_Event, frozen=True):
    """A reader's next poll of a partition begins at `offset` (None: anywhere), after an assignment or a seek.

    A reader of a group begins at the offset that the group has committed; it does not seek.
    """

    reader: str
    partition: TopicPartition
    offset: int | None = None


class Assigned(_Event, frozen=True):
    """A member of a group has learned that it owns these partitions, and begins to read them. `epoch`: its own."""

    reader: str
    partitions: tuple[TopicPartition, ...]
    epoch: int


class Revoked(_Event, frozen=True):
    """A member gives these partitions up, and has not told the group yet.

    `lost`: the group has gone on without the member, so another one may own them already.
    """

    reader: str
    partitions: tuple[TopicPartition, ...]
    lost: bool = False


class Gone(_Event, frozen=True):
    """A member died without a word: it owns nothing any more, and the group does not know yet."""

    reader: str


class Polled(_Event, frozen=True):
    """A reader was handed these values, at `base_offset`, `base_offset + 1`, ..."""

    reader: str
    partition: TopicPartition
    base_offset: int
    values: tuple[bytes, ...]


class Truncated(_Event, frozen=True):
    """A reader was notified of a truncation at `offset`: the records read from there on may be gone (KIP-320)."""

    reader: str
    partition: TopicPartition
    offset: int


class LatestShown(_Event, frozen=True):
    """An observer, which sends one request after the other, was shown this latest offset (high watermark)."""

    observer: str
    partition: TopicPartition
    offset: int


class OffsetsCommitted(_Event, frozen=True):
    """A group's offset was stored: `offset` is the next to be read.

    `transaction`: the offset counts only when that transaction is committed. The event then comes when it is sent.
    `reader`: the member that has committed, where members share partitions; `began`: how many events there were when
    it asked for the commit.
    """

    group: str
    partition: TopicPartition
    offset: int
    transaction: int | None = None
    reader: str = ""
    began: int = -1


class OffsetsFetched(_Event, frozen=True):
    """A group's committed offset. None: there is none.

    `began`: how many events there were when it was asked for; -1: every one that is recorded before.
    """

    group: str
    partition: TopicPartition
    offset: int | None
    began: int = -1


class SnapshotBegan(_Event, frozen=True):
    """A whole read began: it will show at least what was acknowledged or committed before."""

    source: str


class Snapshot(_Event, frozen=True):
    """Everything that was there, read until caught up. `source`: its reader, with a name that no other snapshot has.

    `final`: after the last outcome, with every transaction ended and everything healed. Others are taken on the way:
    each holds all that was visible below its ends.
    """

    source: str
    runs: tuple[Run, ...]
    isolation: Isolation = Isolation.READ_COMMITTED
    final: bool = True


class UncleanElection(_Event, frozen=True):
    """An operator let a replica lead that may lack records: they may be lost, and readers must be notified.

    `has_table`: the topic has a table. A reader whose place is in the table, and no longer in the log, is not notified.
    """

    partition: TopicPartition
    has_table: bool = False


Event = (
    Invoked
    | Acknowledged
    | Failed
    | TransactionBegan
    | CommitInvoked
    | TransactionCommitted
    | CommitRefused
    | CommitUnknown
    | TransactionAborted
    | ReaderOpened
    | Positioned
    | Assigned
    | Revoked
    | Gone
    | Polled
    | Truncated
    | LatestShown
    | OffsetsCommitted
    | OffsetsFetched
    | SnapshotBegan
    | Snapshot
    | UncleanElection
)


@dataclass(frozen=True, slots=True)
class History:
    """Events, in the order that the module's docstring describes."""

    events: tuple[Event, ...]


def runs_of(rows: Iterable[Stored]) -> tuple[Run, ...]:
    """Rows in the order in which they were read, as runs of consecutive offsets."""
    return tuple(_runs(rows))


def _runs(rows: Iterable[Stored]) -> Iterator[Run]:
    first: Stored | None = None
    values: list[bytes] = []
    for row in rows:
        if first is not None and (row.offset != first.offset + len(values) or row.partition != first.partition):
            yield Run(first.partition, first.offset, tuple(values))
            first, values = None, []
        first = first or row
        values.append(row.value)
    if first is not None:
        yield Run(first.partition, first.offset, tuple(values))


def rows_of(runs: Iterable[Run]) -> Iterator[Stored]:
    """The records of runs, each with its offset."""
    for run in runs:
        for at, value in enumerate(run.values):
            yield Stored(run.partition, run.base_offset + at, value)
