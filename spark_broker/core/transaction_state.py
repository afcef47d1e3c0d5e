"""One transactional id, as a function of its changes. The transition tables of both forms are below.

`transaction_log` has what is stored of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple

from spark_broker.core.transaction_changes import (
    NO_VERSION,
    AnyChange,
    Ended,
    Ending,
    ExecutionStarted,
    Forgotten,
    Initialized,
    Opened,
    PartitionAdded,
    Restored,
    Settled,
    WriterJoined,
)
from spark_broker.core.transaction_records import PartitionKey, WriterKey
from spark_broker.errors import InvariantError, invariant

NO_PRODUCER = -1

REMEMBERED_EXECUTIONS = 32
"""A zombie of an older execution is forgotten, and would count as new. Spark does not run that many at a time."""

JOIN_EPOCH = 0
"""Every join has a producer id of its own, so its epoch need not rise."""


class TransactionState(Enum):
    """The state of a transactional id. The values are Kafka's names."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"


class TransactionEvent(Enum):
    """What a change says has happened."""

    INITIALIZED = auto()
    EXECUTION_STARTED = auto()
    OPENED = auto()
    WRITER_JOINED = auto()
    PARTITION_ADDED = auto()
    COMMIT_DECIDED = auto()
    ABORT_DECIDED = auto()
    SETTLED = auto()
    ENDED = auto()
    FORGOTTEN = auto()


Transitions = dict[tuple[TransactionState, TransactionEvent], TransactionState]

_BOTH_FORMS: Transitions = {
    (TransactionState.ONGOING, TransactionEvent.PARTITION_ADDED): TransactionState.ONGOING,
    (TransactionState.ONGOING, TransactionEvent.COMMIT_DECIDED): TransactionState.PREPARE_COMMIT,
    (TransactionState.ONGOING, TransactionEvent.ABORT_DECIDED): TransactionState.PREPARE_ABORT,
    (TransactionState.PREPARE_COMMIT, TransactionEvent.SETTLED): TransactionState.PREPARE_COMMIT,
    (TransactionState.PREPARE_ABORT, TransactionEvent.SETTLED): TransactionState.PREPARE_ABORT,
    (TransactionState.PREPARE_COMMIT, TransactionEvent.ENDED): TransactionState.EMPTY,
    (TransactionState.PREPARE_ABORT, TransactionEvent.ENDED): TransactionState.EMPTY,
    (TransactionState.EMPTY, TransactionEvent.FORGOTTEN): TransactionState.EMPTY,
}

ONE_WRITER: Transitions = {
    **_BOTH_FORMS,
    (TransactionState.EMPTY, TransactionEvent.INITIALIZED): TransactionState.EMPTY,
    (TransactionState.EMPTY, TransactionEvent.PARTITION_ADDED): TransactionState.ONGOING,
    # Nothing was appended. The producer's epoch ends nevertheless: a batch may be on its way.
    (TransactionState.EMPTY, TransactionEvent.COMMIT_DECIDED): TransactionState.PREPARE_COMMIT,
    (TransactionState.EMPTY, TransactionEvent.ABORT_DECIDED): TransactionState.PREPARE_ABORT,
}

MANY_WRITERS: Transitions = {
    **_BOTH_FORMS,
    **{(state, TransactionEvent.EXECUTION_STARTED): state for state in TransactionState},
    (TransactionState.EMPTY, TransactionEvent.OPENED): TransactionState.ONGOING,
    (TransactionState.ONGOING, TransactionEvent.WRITER_JOINED): TransactionState.ONGOING,
}

PREPARED = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)


class ProducerIdentity(NamedTuple):
    """A producer id and its epoch."""

    producer_id: int
    producer_epoch: int


NOBODY = ProducerIdentity(NO_PRODUCER, -1)


@dataclass(frozen=True, slots=True)
class TransactionOutcome:
    """How the transaction of an identity ended."""

    identity: ProducerIdentity
    committed: bool


@dataclass(frozen=True, slots=True)
class MarkerTarget:
    """A marker to be written to one partition. `producer_epoch` is the epoch that begins after it (KIP-890)."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    committed: bool
    topic_id: str
    partition: int


@dataclass(slots=True)
class Writer:
    """A producer of the open transaction, and the partitions that it may have written to, in the order of adding."""

    producer_epoch: int
    partitions: dict[tuple[str, int], None] = field(default_factory=dict)


@dataclass(slots=True)
class TransactionMetadata:
    """The transactional id with its open transaction, if there is one.

    Invariants: `writers` is empty while EMPTY; `winners` is empty except in PREPARE_COMMIT, and a subset of the writers
    until the first of them is settled; `next_identity` is NOBODY except in a PREPARED state of the one-writer form;
    `identity` changes only while EMPTY, and never to one that was used before; `last_committed` never falls, and
    `version > last_committed` while not EMPTY (many-writer form).
    """

    transactional_id: str
    grouped: bool  # many writers: the id is an application's
    state: TransactionState = TransactionState.EMPTY
    timeout_ms: int = 0
    writers: dict[int, Writer] = field(default_factory=dict)
    # one writer
    identity: ProducerIdentity = NOBODY
    next_identity: ProducerIdentity = NOBODY
    last_outcome: TransactionOutcome | None = (
        None  # of the identity before this one; None: a new producer has begun since
    )
    # many writers
    version: int = NO_VERSION
    execution: str = ""
    winners: frozenset[int] = frozenset()
    executions: tuple[str, ...] = ()  # the newest is the last
    last_committed: int = NO_VERSION
    closed: int = NO_VERSION  # the highest version that the newest execution has ended
    single_use: bool = False  # the application has one version
    # not in the log
    active_ms: int = 0

    @property
    def newest_execution(self) -> str:
        return self.executions[-1] if self.executions else ""

    @property
    def committing(self) -> bool:
        return self.state is TransactionState.PREPARE_COMMIT

    def apply(self, change: AnyChange) -> None:
        """Take the next change."""
        try:
            self._apply(change)
            self.check()
        except InvariantError as error:
            error.concerning(f"transactional id {self.transactional_id!r}", str(self), [str(change)])
            raise

    def check(self) -> None:
        """Raises InvariantError where an invariant does not hold."""
        empty, prepared = self.state is TransactionState.EMPTY, self.state in PREPARED
        invariant(not (empty and self.writers), "writers outside of a transaction")
        invariant(not self.winners or self.committing, "winners of what is not being committed")
        invariant(self.next_identity == NOBODY or (prepared and not self.grouped), "a next identity before its time")
        ahead = empty or not self.grouped or self.version > self.last_committed
        invariant(ahead, "version %d is open, %d is committed", self.version, self.last_committed)

    def _apply(self, change: AnyChange) -> None:
        self.advance(change)
        match change:
            case Restored():
                self._restore(change)
            case WriterJoined(producer_id):
                self.writers[producer_id] = Writer(JOIN_EPOCH)
            case PartitionAdded():
                self._add_partition(change)
            case Settled(keys):
                for key in keys:
                    self._settle(key)
            case Ended():
                self.writers = {}
            case _:
                pass  # Nothing about writers.

    def advance(self, change: AnyChange) -> None:
        """All of a change but what it does to the writers, which a copy may share with its original."""
        match change:
            case Initialized(producer_id, producer_epoch, timeout_ms):
                self._move(TransactionEvent.INITIALIZED)
                self.identity, self.timeout_ms = ProducerIdentity(producer_id, producer_epoch), timeout_ms
                self.last_outcome = None
            case ExecutionStarted(execution, single_use):
                self._move(TransactionEvent.EXECUTION_STARTED)
                self.single_use = single_use
                earlier_executions = tuple(older for older in self.executions if older != execution)
                self.executions = (*earlier_executions, execution)[-REMEMBERED_EXECUTIONS:]
                self.closed = NO_VERSION
            case Opened(version, execution, timeout_ms):
                self._move(TransactionEvent.OPENED)
                self.version, self.execution, self.timeout_ms = version, execution, timeout_ms
            case WriterJoined():
                self._move(TransactionEvent.WRITER_JOINED)
            case PartitionAdded():
                self._move(TransactionEvent.PARTITION_ADDED)
            case Ending():
                self._prepare(change)
            case Settled():
                self._move(TransactionEvent.SETTLED)
            case Ended():
                self._end()
            case Forgotten():
                self._move(TransactionEvent.FORGOTTEN)
            case Restored():
                pass  # It replaces everything.

    def _move(self, event: TransactionEvent) -> None:
        transitions = MANY_WRITERS if self.grouped else ONE_WRITER
        invariant((self.state, event) in transitions, f"{self.transactional_id}: {event.name} while {self.state.value}")
        self.state = transitions[self.state, event]

    def _restore(self, change: Restored) -> None:
        self.grouped = change.grouped
        self.state = TransactionState(change.state)
        self.timeout_ms = change.timeout_ms
        self.identity = ProducerIdentity(change.producer_id, change.producer_epoch)
        self.next_identity = ProducerIdentity(change.next_producer_id, change.next_producer_epoch)
        ended = ProducerIdentity(change.ended_producer_id, change.ended_producer_epoch)
        self.last_outcome = None if ended == NOBODY else TransactionOutcome(ended, change.ended_committed)
        self.version, self.execution = change.version, change.execution
        self.executions = change.executions
        self.last_committed, self.closed = change.last_committed, change.closed
        self.winners = frozenset(change.winners)
        self.single_use = change.single_use
        self.writers = {
            producer_id: Writer(epoch, {(change.topic_ids[topic], number): None for topic, number in partitions})
            for producer_id, epoch, partitions in change.writers
        }

    def _add_partition(self, change: PartitionAdded) -> None:
        if not self.grouped:  # The first partition opens the transaction.
            self.writers.setdefault(self.identity.producer_id, Writer(self.identity.producer_epoch))
        invariant(
            change.producer_id in self.writers, "a partition added by producer %d, not a writer", change.producer_id
        )
        self.writers[change.producer_id].partitions[change.topic_id, change.partition] = None

    def _settle(self, key: WriterKey | PartitionKey) -> None:
        if isinstance(key, PartitionKey):
            del self.writers[key.producer_id].partitions[key.topic_id, key.partition]
        else:
            del self.writers[key.producer_id]

    def _prepare(self, change: Ending) -> None:
        self._move(TransactionEvent.COMMIT_DECIDED if change.committed else TransactionEvent.ABORT_DECIDED)
        self.winners = frozenset(change.winners)
        invariant(self.winners <= self.writers.keys(), "a winner that has not joined")
        if not self.grouped:
            self.next_identity = ProducerIdentity(change.next_producer_id, change.next_producer_epoch)

    def _end(self) -> None:
        committed = self.committing
        self._move(TransactionEvent.ENDED)
        if self.grouped:
            if committed:
                invariant(self.version > self.last_committed, "a version committed twice")
                self.last_committed = self.version
            if self.execution == self.newest_execution:
                self.closed = max(self.closed, self.version)
        else:
            self.last_outcome = TransactionOutcome(self.identity, committed)
            self.identity, self.next_identity = self.next_identity, NOBODY
        self.winners = frozenset()

    def markers(self) -> list[MarkerTarget]:
        """The markers that the decision requires."""
        invariant(self.state in PREPARED, "markers without a decision")
        return [
            MarkerTarget(self.transactional_id, producer_id, writer.producer_epoch + 1, committed, topic_id, partition)
            for producer_id, writer in self.writers.items()
            for committed in (self.committing and (not self.grouped or producer_id in self.winners),)
            for topic_id, partition in writer.partitions
        ]

    def end(self, keys_max: int) -> Ended | Settled:
        """The change that ends the transaction, or a first part of its keys where it has more than `keys_max`."""
        keys = tuple(islice(self.open_keys(), keys_max + 1))
        return Ended() if len(keys) <= keys_max else Settled(keys[:keys_max])

    def open_keys(self) -> Iterator[WriterKey | PartitionKey]:
        """The keys of the open transaction, each writer after its partitions."""
        for producer_id, writer in self.writers.items():
            for topic_id, partition in writer.partitions:
                yield PartitionKey(self.transactional_id, producer_id, topic_id, partition)
            if self.grouped:
                yield WriterKey(self.transactional_id, producer_id)


def new_transaction(transactional_id: str, change: AnyChange) -> TransactionMetadata:
    """An id before its first change."""
    grouped = isinstance(change, ExecutionStarted) or (isinstance(change, Restored) and change.grouped)
    return TransactionMetadata(transactional_id, grouped)


def apply_to(transactions: dict[str, TransactionMetadata], transactional_id: str, change: AnyChange) -> None:
    """Apply a change of one of these ids, or of a new one. A forgotten id is taken out."""
    transaction = transactions.get(transactional_id)
    if isinstance(change, Forgotten):
        if transaction is not None:
            transaction.apply(change)
            del transactions[transactional_id]
        return
    if transaction is None:
        transaction = transactions[transactional_id] = new_transaction(transactional_id, change)
    transaction.apply(change)
