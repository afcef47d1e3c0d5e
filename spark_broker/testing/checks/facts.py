"""A history, indexed for the checks. It is built in one pass; rows are handled a run at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition
from spark_broker.testing.checks.compaction import removable_values
from spark_broker.testing.history import (
    Acknowledged,
    CommitInvoked,
    CommitRefused,
    CommitUnknown,
    Event,
    Failed,
    Invoked,
    Isolation,
    Polled,
    ReaderOpened,
    Run,
    Snapshot,
    TransactionAborted,
    TransactionBegan,
    TransactionCommitted,
    UncleanElection,
)

Rows = dict[int, bytes]
"""Values of one partition by offset."""

Table = dict[TopicPartition, Rows]


class Outcome(Enum):
    """What is known of a commit, or of a transaction."""

    COMMITTED = "committed"
    UNKNOWN = "unknown"
    NOT_COMMITTED = "not committed"


@dataclass(slots=True)
class Commit:
    """One request for a commit. `position`, `ended_position`: indexes in the list of events; -1: no outcome."""

    invoked: CommitInvoked
    position: int
    outcome: Outcome = Outcome.UNKNOWN
    ended_position: int = -1
    already_committed: bool = False
    app: str = ""
    version: int = -1


@dataclass(slots=True)
class Transaction:
    """What is known of one transaction; `outcome` is right once all events are in."""

    began: TransactionBegan
    operations: list[int] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    aborted: bool = False
    began_position: int = -1
    ended_position: int = -1  # Of the event that commits or aborts it. -1: it may be open.

    @property
    def outcome(self) -> Outcome:
        outcomes = {commit.outcome for commit in self.commits}
        if Outcome.COMMITTED in outcomes:
            return Outcome.COMMITTED
        return Outcome.UNKNOWN if Outcome.UNKNOWN in outcomes and not self.aborted else Outcome.NOT_COMMITTED


@dataclass(frozen=True, slots=True)
class Read:
    """One run that a reader read."""

    source: str
    isolation: Isolation
    run: Run
    final: bool


class Facts:
    """Raises InvalidDataError for a history that cannot be judged, and says why."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.kinds = {type(event) for event in events}
        self.invoked: dict[int, Invoked] = {}
        self.base_offsets: dict[int, int] = {}
        self.failed: set[int] = set()
        self.owners: dict[bytes, int] = {}
        self.transactions: dict[int, Transaction] = {}
        self.commits: dict[int, Commit] = {}
        self.readers: dict[str, ReaderOpened] = {}
        self.reads: list[Read] = []
        self.finals: list[Snapshot] = []
        self.on_the_way = 0  # Whole reads that were not the last.
        self.unclean: set[TopicPartition] = set()
        self.unnoticed: set[TopicPartition] = set()  # those of `unclean` whose readers need not be notified
        for position, event in enumerate(events):
            self._add(position, event)
        if not any(snapshot.isolation is Isolation.READ_COMMITTED for snapshot in self.finals):
            raise InvalidDataError(
                "the history has no final snapshot of committed records: nothing says what was there"
            )
        self._settle_commits()
        self.removable = self._removable()
        self._read_finals()
        self._visible: dict[tuple[Isolation, TopicPartition], list[int]] = {}

    def _add(self, position: int, event: Event) -> None:
        match event:
            case Invoked():
                self._add_invoked(event)
            case Acknowledged():
                self._known_operation(event.operation)
                self.base_offsets[event.operation] = event.base_offset
            case Failed():
                self._known_operation(event.operation)
                self.failed.add(event.operation)
            case Polled():
                opened = self.readers.get(event.reader)
                isolation = Isolation.READ_COMMITTED if opened is None else opened.isolation
                run = Run(event.partition, event.base_offset, event.values)
                self.reads.append(Read(event.reader, isolation, run, final=False))
            case Snapshot():
                self.reads += [Read(event.source, event.isolation, run, event.final) for run in event.runs]
                if event.final:
                    self.finals.append(event)
                else:
                    self.on_the_way += 1
            case ReaderOpened():
                self.readers[event.reader] = event
            case UncleanElection():
                self.unclean.add(event.partition)
                self.unnoticed |= {event.partition} if event.has_table else set()
            case TransactionBegan():
                self.transactions[event.transaction] = Transaction(event, began_position=position)
            case TransactionAborted():
                self._transaction(event.transaction).aborted = True
                self._transaction(event.transaction).ended_position = position
            case CommitInvoked():
                self._add_commit(position, event)
            case TransactionCommitted() | CommitRefused() | CommitUnknown():
                self._add_outcome(position, event)
            case _:
                pass  # Judged in order, by the checks that need it.

    def _add_invoked(self, event: Invoked) -> None:
        before = len(self.owners)
        self.owners.update(dict.fromkeys(event.values, event.operation))
        if len(self.owners) != before + len(event.values):
            raise InvalidDataError(f"operation {event.operation} appends a value a second time: make them unique")
        self.invoked[event.operation] = event
        if event.transaction is not None:
            self._transaction(event.transaction).operations.append(event.operation)

    def _add_commit(self, position: int, event: CommitInvoked) -> None:
        joined = [self._transaction(transaction) for transaction in event.transactions]
        commit = Commit(event, position, app=event.app, version=event.version)
        if joined and not event.app:
            commit.app, commit.version = joined[0].began.app, joined[0].began.version
        self.commits[event.commit] = commit
        for transaction in joined:
            transaction.commits.append(commit)

    def _add_outcome(self, position: int, event: TransactionCommitted | CommitRefused | CommitUnknown) -> None:
        commit = self.commits.get(event.commit)
        if commit is None:
            raise InvalidDataError(f"commit {event.commit} has an outcome, and nobody asked for it")
        commit.ended_position = position
        if isinstance(event, TransactionCommitted):
            commit.outcome = Outcome.COMMITTED
            for transaction in commit.invoked.transactions:
                self.transactions[transaction].ended_position = position
        elif isinstance(event, CommitRefused):
            commit.outcome = Outcome.UNKNOWN if event.already_committed else Outcome.NOT_COMMITTED
            commit.already_committed = event.already_committed

    def _settle_commits(self) -> None:
        """ALREADY_COMMITTED means that some commit has succeeded: mark that commit, if only one is possible."""
        for commit in self.commits.values():
            if commit.already_committed and commit.app:
                candidates = self.same_or_later_commits(commit)
                winners = {(candidate.version, frozenset(candidate.invoked.transactions)) for candidate in candidates}
                if len(winners) == 1:
                    candidates[0].outcome = Outcome.COMMITTED

    def _known_operation(self, operation: int) -> None:
        if operation not in self.invoked:
            raise InvalidDataError(f"operation {operation} has an outcome, and nobody began it")

    def _transaction(self, transaction: int) -> Transaction:
        try:
            return self.transactions[transaction]
        except KeyError:
            raise InvalidDataError(f"transaction {transaction} is spoken of, and nobody began it") from None

    def _read_finals(self) -> None:
        committed = [snapshot for snapshot in self.finals if snapshot.isolation is Isolation.READ_COMMITTED]
        self.final: Table = table_of(run for snapshot in committed for run in snapshot.runs)
        self.final_values: set[bytes] = {
            value for snapshot in committed for run in snapshot.runs for value in run.values
        }
        if self.removable:
            self._put_back()

    def _removable(self) -> set[bytes]:
        """Values that compaction may have removed."""
        aborted = [
            operation
            for transaction in self.transactions.values()
            if transaction.outcome is not Outcome.COMMITTED
            for operation in transaction.operations
        ]
        return removable_values(self.invoked.values(), self.base_offsets, aborted, self._read_offsets())

    def _read_offsets(self) -> dict[bytes, int]:
        """Of committed values that were read. Those of a plain append are committed, whoever reads them."""
        return {
            value: offset
            for read in self.reads
            for offset, value in enumerate(read.run.values, read.run.base_offset)
            if self._shows_committed(read, value)
        }

    def _shows_committed(self, read: Read, value: bytes) -> bool:
        return read.isolation is Isolation.READ_COMMITTED or self.outcome_of(value) is None

    def _put_back(self) -> None:
        """Take for there what compaction may have removed: it was there, at the offset that a client was given.

        A value that is still there, perhaps elsewhere, was not removed.
        """
        removed = self.removable - self.final_values
        for operation, base_offset in self.base_offsets.items():
            invoked = self.invoked[operation]
            if invoked.keys and self._is_promised(invoked):
                rows = self.final.setdefault(invoked.partition, {})
                for offset, value in enumerate(invoked.values, base_offset):
                    if value in removed:
                        rows.setdefault(offset, value)
        for read in self.reads:
            rows = self.final.setdefault(read.run.partition, {})
            for offset, value in enumerate(read.run.values, read.run.base_offset):
                if value in removed and self._shows_committed(read, value):
                    rows.setdefault(offset, value)
        promised = (invoked for invoked in self.invoked.values() if self._is_promised(invoked))
        self.final_values |= removed.intersection(v for invoked in promised for v in invoked.values)

    def _is_promised(self, invoked: Invoked) -> bool:
        if invoked.transaction is not None:
            return self.transactions[invoked.transaction].outcome is Outcome.COMMITTED
        return invoked.operation in self.base_offsets

    def final_rows(self, partition: TopicPartition) -> Rows:
        """What readers of committed records find in a partition at the end."""
        return self.final.get(partition, {})

    def visible(self, isolation: Isolation, partition: TopicPartition) -> list[int]:
        """Offsets, in order, that a reader of this isolation must be shown: it may skip all others."""
        key = (isolation, partition)
        if key not in self._visible:
            offsets = {offset for offset, value in self.final_rows(partition).items() if value not in self.removable}
            if isolation is Isolation.READ_UNCOMMITTED:
                offsets.update(self._uncommitted_offsets(partition))
            self._visible[key] = sorted(offsets)
        return self._visible[key]

    def _uncommitted_offsets(self, partition: TopicPartition) -> Iterator[int]:
        runs = [(run.base_offset, run.values) for s in self.finals for run in s.runs if run.partition == partition]
        for operation, base_offset in self.base_offsets.items():
            invoked = self.invoked[operation]
            if invoked.partition == partition:
                runs.append((base_offset, invoked.values))
        for base_offset, values in runs:
            yield from (offset for offset, value in enumerate(values, base_offset) if value not in self.removable)

    def required(self) -> Iterator[Invoked]:
        """Appends whose values must be there: acknowledged ones outside transactions, and all of committed ones."""
        return (invoked for invoked in self.invoked.values() if self._is_promised(invoked))

    def outcome_of(self, value: bytes) -> Outcome | None:
        """Outcome of the transaction that appended the value; None for a plain append, or a value never appended."""
        operation = self.owners.get(value)
        transaction = None if operation is None else self.invoked[operation].transaction
        return None if transaction is None else self.transactions[transaction].outcome

    def values_of(self, transactions: Iterable[int]) -> Iterator[bytes]:
        """What was appended in these transactions."""
        for transaction in transactions:
            for operation in self.transactions[transaction].operations:
                yield from self.invoked[operation].values

    def same_or_later_commits(self, commit: Commit) -> list[Commit]:
        """Commits of the application, of this version or a later one, that happened or may have; `commit` included."""
        return [
            other
            for other in self.commits.values()
            if other.app == commit.app
            and other.version >= commit.version
            and other.outcome is not Outcome.NOT_COMMITTED
        ]


def table_of(runs: Iterable[Run]) -> Table:
    """The values by partition and offset; where two are at one offset, the first."""
    table: Table = {}
    for run in runs:
        rows = table.setdefault(run.partition, {})
        for offset, value in enumerate(run.values, run.base_offset):
            rows.setdefault(offset, value)
    return table
