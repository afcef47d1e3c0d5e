"""Collects the history of clients that run in many threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition
from spark_broker.testing.history import (
    Acknowledged,
    Assigned,
    CommitInvoked,
    CommitRefused,
    CommitUnknown,
    Event,
    Failed,
    Gone,
    History,
    Invoked,
    Isolation,
    LatestShown,
    OffsetsCommitted,
    OffsetsFetched,
    Polled,
    Positioned,
    ReaderOpened,
    Revoked,
    Run,
    Snapshot,
    SnapshotBegan,
    Stored,
    TransactionAborted,
    TransactionBegan,
    TransactionCommitted,
    runs_of,
)


class HistoryRecorder:
    """Events in the order in which they were recorded. Every value is kept once, however often it is read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._events: list[Event] = []
        self._operations = itertools.count()
        self._transactions = itertools.count()
        self._commits = itertools.count()
        self._values: dict[bytes, bytes] = {}
        self._open: dict[int, tuple[int, int | None]] = {}  # operation: how many values, and its transaction
        self._in_transactions: dict[int, int] = {}  # transaction: values acknowledged
        self._committing: dict[int, tuple[int, ...]] = {}
        self._committed: set[int] = set()
        self._acknowledged = 0
        self._acknowledged_values = 0

    @property
    def acknowledged_count(self) -> int:
        """Appends acknowledged so far."""
        with self._lock:
            return self._acknowledged

    @property
    def acknowledged_values(self) -> int:
        """Values promised so far: of acknowledged plain appends, and of committed transactions."""
        with self._lock:
            return self._acknowledged_values

    @property
    def event_count(self) -> int:
        """Events so far."""
        with self._lock:
            return len(self._events)

    def wait_acknowledged(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` appends are acknowledged; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._acknowledged >= count, timeout_s)

    def invoked(
        self,
        writer: str,
        partition: TopicPartition,
        values: Iterable[bytes],
        transaction: int | None = None,
        *,
        keys: tuple[bytes, ...] = (),
        tombstones: tuple[int, ...] = (),
    ) -> int:
        """An append begins; returns its operation. `keys`, `tombstones`: see `history.Invoked`.

        Raises InvalidDataError for no values.
        """
        batch = tuple(values)
        if not batch:
            raise InvalidDataError("an append of no values proves nothing")
        with self._lock:
            operation = next(self._operations)
            self._values.update(zip(batch, batch, strict=True))
            self._open[operation] = (len(batch), transaction)
            self._events.append(Invoked(operation, writer, partition, batch, transaction, keys, tombstones))
        return operation

    def acknowledged(self, operation: int, base_offset: int) -> None:
        with self._changed:
            count, transaction = self._open.pop(operation)
            self._events.append(Acknowledged(operation, base_offset))
            self._acknowledged += 1
            if transaction is None or transaction in self._committed:
                self._acknowledged_values += count
            else:
                self._in_transactions[transaction] = self._in_transactions.get(transaction, 0) + count
            self._changed.notify_all()

    def failed(self, operation: int, error: BaseException) -> None:
        with self._lock:
            self._open.pop(operation, None)
            self._events.append(Failed(operation, described(error)))

    def began(
        self, writer: str, *, transactional_id: str = "", app: str = "", version: int = -1, execution: str = ""
    ) -> int:
        """A transaction begins, or a task attempt joins one; returns its number."""
        with self._lock:
            transaction = next(self._transactions)
            self._events.append(TransactionBegan(transaction, writer, transactional_id, app, version, execution))
        return transaction

    def committing(self, transactions: Sequence[int], *, app: str = "", version: int = -1) -> int:
        """A commit is about to be asked for; returns its number."""
        with self._lock:
            commit = next(self._commits)
            self._committing[commit] = tuple(transactions)
            self._events.append(CommitInvoked(commit, tuple(transactions), app, version))
        return commit

    def committed(self, commit: int) -> None:
        with self._changed:
            self._events.append(TransactionCommitted(commit))
            for transaction in self._committing.pop(commit):
                self._committed.add(transaction)  # One of its appends may be acknowledged only after this.
                self._acknowledged_values += self._in_transactions.pop(transaction, 0)
            self._changed.notify_all()

    def commit_refused(self, commit: int, error: BaseException, *, already_committed: bool = False) -> None:
        self._add(CommitRefused(commit, described(error), already_committed))

    def commit_unknown(self, commit: int, error: BaseException) -> None:
        self._add(CommitUnknown(commit, described(error)))

    def aborted(self, transaction: int) -> None:
        self._add(TransactionAborted(transaction))

    def opened(self, reader: str, *, isolation: Isolation = Isolation.READ_COMMITTED, group: str = "") -> None:
        self._add(ReaderOpened(reader, isolation, group))

    def positioned(self, reader: str, partition: TopicPartition, offset: int | None = None) -> None:
        self._add(Positioned(reader, partition, offset))

    def polled(self, reader: str, partition: TopicPartition, base_offset: int, values: Iterable[bytes]) -> None:
        self._add(Polled(reader, partition, base_offset, self._kept(values)))

    def assigned(self, reader: str, partitions: Sequence[TopicPartition], epoch: int) -> None:
        self._add(Assigned(reader, tuple(partitions), epoch))

    def revoked(self, reader: str, partitions: Sequence[TopicPartition], *, lost: bool = False) -> None:
        self._add(Revoked(reader, tuple(partitions), lost))

    def gone(self, reader: str) -> None:
        self._add(Gone(reader))

    def latest_shown(self, observer: str, partition: TopicPartition, offset: int) -> None:
        self._add(LatestShown(observer, partition, offset))

    def offsets_committed(
        self,
        group: str,
        partition: TopicPartition,
        offset: int,
        transaction: int | None = None,
        *,
        reader: str = "",
        began: int = -1,
    ) -> None:
        """`began`: the `event_count` from before the commit was asked for."""
        self._add(OffsetsCommitted(group, partition, offset, transaction, reader, began))

    def offsets_fetched(self, group: str, partition: TopicPartition, offset: int | None, *, began: int = -1) -> None:
        """`began`: the `event_count` from before the offset was asked for."""
        self._add(OffsetsFetched(group, partition, offset, began))

    def snapshot_began(self, source: str) -> None:
        self._add(SnapshotBegan(source))

    def snapshot(
        self,
        source: str,
        rows: Iterable[Stored],
        *,
        isolation: Isolation = Isolation.READ_COMMITTED,
        final: bool = True,
    ) -> None:
        self.snapshot_of_runs(source, runs_of(rows), isolation=isolation, final=final)

    def snapshot_of_runs(
        self,
        source: str,
        runs: Iterable[Run],
        *,
        isolation: Isolation = Isolation.READ_COMMITTED,
        final: bool = True,
    ) -> None:
        kept = tuple(Run(run.partition, run.base_offset, self._kept(run.values)) for run in runs)
        self._add(Snapshot(source, kept, isolation, final))

    def add(self, event: Event) -> None:
        """Any other event, as it is."""
        self._add(event)

    @property
    def count(self) -> int:
        """How many events there are so far."""
        return len(self._events)

    def history(self) -> History:
        """All events so far."""
        with self._lock:
            return History(tuple(self._events))

    def _kept(self, values: Iterable[bytes]) -> tuple[bytes, ...]:
        interned = self._values
        return tuple([interned.get(value, value) for value in values])

    def _add(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


def described(error: BaseException) -> str:
    """An error as the history keeps it."""
    return f"{type(error).__name__}: {error}"
