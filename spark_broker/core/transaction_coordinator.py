"""One partition of `__transaction_state`, as a pure state machine: the transactional ids that its leader coordinates.

A request is decided against the state, and the decision gives records. The shell appends them to the partition with
acks=all. Appended records change the state at once. No answer shows a change before it is committed. When the
leadership ends, the shard is dropped, and the next leader replays the log: what was not committed never happened.

`transaction_state.ONE_WRITER` and `MANY_WRITERS` are the transitions of an id, change by change. This table has the
events that cause a change, and what follows once its records are committed (`transaction_log`):

    state of an id   event                                 -> state         what follows once the record is committed
    --------------------------------------------------------------------------------------------------------------
    (none), Empty    InitTransactions                      -> Empty         answer: a new epoch
    Empty            AddPartitionToTransaction             -> Ongoing       answer (one writer)
    (none), Empty    JoinTransaction                       -> Ongoing       answer: a producer id (many writers)
    Empty            EndTransaction                        -> Prepare*      no marker: Ended at once
    Ongoing          JoinTransaction, AddPartition...      -> Ongoing       answer
    Ongoing          EndTransaction, CommitTransaction     -> PrepareCommit markers
    Ongoing          EndTransaction, AbortTransaction      -> PrepareAbort  markers
    Ongoing          InitTransactions, newer execution     -> PrepareAbort  markers; after the end, decided again
    Ongoing          idle for longer than its time-out     -> PrepareAbort  markers
    Prepare*         AddPartitionToTransaction             refused: the epoch is over
    Prepare*         any other request                     waits for the end, then as from Empty
    Prepare*         every marker is committed             -> Empty         requests that wait for it are answered
    Empty            idle for longer than it may be        -> (none)        see `_is_expired`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spark_broker.core import transaction_groups, transaction_producers
from spark_broker.core.machine import Machine, event
from spark_broker.core.transaction_changes import (
    AnyChange,
    AnyRecord,
    Ended,
    Ending,
    Forgotten,
    Settled,
)
from spark_broker.core.transaction_decision import AfterEnd, Answered, Decision, ProducerIdPool, Resources
from spark_broker.core.transaction_groups import GroupedRequest
from spark_broker.core.transaction_log import Loading, records_of
from spark_broker.core.transaction_records import TransactionRecord
from spark_broker.core.transaction_state import (
    PREPARED,
    MarkerTarget,
    TransactionMetadata,
    TransactionState,
    apply_to,
    new_transaction,
)
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InvalidProducerIdMappingError,
    InvalidRequestError,
    InvalidTxnStateError,
    NotLeaderOrFollowerError,
    RequestTimedOutError,
    SparkBrokerError,
    invariant,
)
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    AddPartitionToTransactionRequest,
    CommitTransactionRequest,
    EndTransactionRequest,
    InitTransactionsRequest,
    JoinTransactionRequest,
    Message,
    TransactionDescription,
)

__all__ = [
    "AnswerRequest",
    "AppendRecords",
    "CoordinatorRequest",
    "DecideAgain",
    "Effect",
    "MarkerTarget",
    "ProducerIdPool",
    "Resources",
    "StoreAnew",
    "TransactionShard",
    "WriteMarkers",
    "transactional_id_of",
]

CoordinatorRequest = (
    InitTransactionsRequest
    | AddPartitionToTransactionRequest
    | EndTransactionRequest
    | JoinTransactionRequest
    | CommitTransactionRequest
    | AbortTransactionRequest
)
FORGETTING_INTERVAL_MS = 60_000
"""The age of every id is checked at least this often."""


def transactional_id_of(request: CoordinatorRequest) -> str:
    """The transactional id, or the application's name. Raises InvalidRequestError for an empty one."""
    match request:
        case JoinTransactionRequest() | CommitTransactionRequest() | AbortTransactionRequest():
            name = request.application
        case _:
            name = request.transactional_id
    if not name or (isinstance(request, GroupedRequest) and not request.execution):
        raise InvalidRequestError(f"a {type(request).__name__} without a name")
    return name


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that is not answered yet. `deadline_ms` is a time of the caller's clock."""

    token: object
    request: CoordinatorRequest
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class AppendRecords:
    """Append the records of these changes (`TransactionShard.records`) in one batch at the end of the partition, then
    call `appended`, or `append_refused` if nothing was stored.

    The shell carries out the effects of that call before the next effect, since decisions are made against what was
    appended.
    """

    transactional_id: str
    changes: tuple[AnyChange, ...]
    waiting: Waiting | None
    decision: Decision | None


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """The answer to the request with this token."""

    token: object
    answer: Message | SparkBrokerError


@dataclass(frozen=True, slots=True)
class DecideAgain:
    """The request need not wait any longer: hand it to `decide`."""

    waiting: Waiting


@dataclass(frozen=True, slots=True)
class WriteMarkers:
    """Have these markers written, however long it takes. Call `marked` for each that is committed."""

    targets: tuple[MarkerTarget, ...]


@dataclass(frozen=True, slots=True)
class StoreAnew:
    """The log has records of an earlier version. Append these in order, and call `stored_anew` for each append.

    Without them nothing else may be appended: what the log has of an id counts until its last one of these is there.
    When all are committed, everything before the first of them may go.
    """

    records: tuple[AnyRecord, ...]


Effect = StoreAnew | AppendRecords | AnswerRequest | DecideAgain | WriteMarkers


@dataclass(frozen=True, slots=True)
class _HeldAnswer:
    """The answer is given once the append with number `position` is committed.

    `answer` None: the request is then decided again.
    """

    position: int
    waiting: Waiting
    answer: Message | SparkBrokerError | None


@dataclass(frozen=True, slots=True)
class _HeldDecision:
    """The append with number `position` holds the id's decision. Once it is committed, the markers may be written."""

    position: int
    transactional_id: str


class CoordinatorStanding(NamedTuple):
    """Where a shard stands between two events: how many appends it has made, and how many of them are committed."""

    appended: int
    committed: int
    ids: int

    def __str__(self) -> str:
        return f"{self.appended} appended, {self.committed} committed, {self.ids} ids"


class TransactionShard(Machine[CoordinatorStanding]):
    """The shell calls one method at a time, carries out its effects in order, and drops the shard with its leadership.

    Positions count appends. Invariants: committed <= appended; `_held` is in order of positions, all past `committed`;
    an id has targets in `_unmarked` only while it is PREPARED, and its decision is committed then.
    """

    remembered = Machine.remembered | {
        MarkerTarget,
        InitTransactionsRequest,
        AddPartitionToTransactionRequest,
        EndTransactionRequest,
    }

    def __init__(self, resources: Resources, *, id_expiration_ms: int = -1, name: str = "a shard") -> None:
        super().__init__(f"coordinator of {name}")
        self._resources = resources
        self._id_expiration_ms = id_expiration_ms
        self._forgetting_due_ms = 0
        self.transactions: dict[str, TransactionMetadata] = {}
        self._loading = Loading()
        self.appended_count = 0
        self.committed_count = 0
        self._held: deque[_HeldAnswer | _HeldDecision] = deque()
        # Requests that wait for the end of the id's transaction, each with its answer. None: decide the request again.
        self._enders: dict[str, list[tuple[Waiting, Message | None]]] = {}
        self._unmarked: dict[str, set[MarkerTarget]] = {}
        self._to_end: dict[str, None] = {}  # Every marker of these ids is committed. `Ended` is not appended yet.
        self._open: dict[str, None] = {}  # These ids are Ongoing: their transactions may time out.

    def check(self) -> CoordinatorStanding:
        appended, committed, held = self.appended_count, self.committed_count, self._held
        invariant(0 <= committed <= appended, "%d of %d appends are committed", committed, appended)
        if held:
            first, last = held[0].position, held[-1].position
            invariant(committed < first <= last <= appended, "answers are held for appends %d to %d", first, last)
        return CoordinatorStanding(appended, committed, len(self.transactions))

    def check_step(self, name: str, before: CoordinatorStanding, after: CoordinatorStanding) -> bool:
        """Neither count ever falls. The shard moved if `committed` rose."""
        risen = after.appended >= before.appended and after.committed >= before.committed
        invariant(risen, "%s takes the shard back from %s to %s", name, before, after)
        return after.committed > before.committed

    def describe_state(self) -> str:
        standing = CoordinatorStanding(self.appended_count, self.committed_count, len(self.transactions))
        unmarked, to_end = sorted(self._unmarked)[:10], list(self._to_end)[:10]
        return f"{standing}; {len(self._held)} held; markers are missing of {unmarked}; to be ended: {to_end}"

    def replay(self, record: AnyRecord) -> None:
        """Take a committed record while the shard is being loaded."""
        self._loading.replay(record)

    @event
    def loaded(self, now_ms: int) -> list[Effect]:
        """Every record is replayed: go on with what the last leader had decided. Time-outs begin again."""
        self._restore()
        effects: list[Effect] = []
        anew = tuple(self._loading.stored_anew(self.transactions))
        self._loading = Loading()
        if anew:
            effects.append(StoreAnew(anew))
        for transaction in self.transactions.values():
            transaction.active_ms = now_ms
            if transaction.state in PREPARED:
                effects += self._mark(transaction.transactional_id)
        return effects

    def _restore(self) -> None:
        """Make the state from what was replayed."""
        self.transactions = self._loading.transactions()
        for transactional_id in self.transactions:
            self._note_open(transactional_id)

    def stored_anew(self) -> None:
        """A part of `StoreAnew` is at the end of the log: it is counted like other appends."""
        self.appended_count += 1

    def records(self, append: AppendRecords) -> list[TransactionRecord]:
        """The records of changes that are to be appended now."""
        transactional_id, changes = append.transactional_id, append.changes
        transaction = self.transactions.get(transactional_id) or new_transaction(transactional_id, changes[0])
        return records_of(transaction, changes)

    def _apply(self, transactional_id: str, change: AnyChange) -> None:
        apply_to(self.transactions, transactional_id, change)
        self._note_open(transactional_id)

    def _note_open(self, transactional_id: str) -> None:
        transaction = self.transactions.get(transactional_id)
        if transaction is not None and transaction.state is TransactionState.ONGOING:
            self._open[transactional_id] = None
        else:
            self._open.pop(transactional_id, None)

    @event
    def request(self, token: object, request: CoordinatorRequest, deadline_ms: int, now_ms: int) -> list[Effect]:
        """Decide; the answer comes as an effect, now or later."""
        return self.decide(Waiting(token, request, deadline_ms), now_ms)

    @event
    def decide(self, waiting: Waiting, now_ms: int) -> list[Effect]:
        """Decide a new request, or one that has waited for the end of an earlier transaction."""
        request = waiting.request
        try:
            transactional_id = transactional_id_of(request)
            decision = self._decision(transactional_id, request)
        except SparkBrokerError as error:
            return self._answer(waiting, error)
        transaction = self.transactions.get(transactional_id)
        if transaction is not None:
            transaction.active_ms = now_ms
        if decision.changes:
            return [AppendRecords(transactional_id, decision.changes, waiting, decision)]
        return self._follow(transactional_id, waiting, decision)

    def _decision(self, transactional_id: str, request: CoordinatorRequest) -> Decision:
        transaction, resources = self.transactions.get(transactional_id), self._resources
        if isinstance(request, GroupedRequest):
            _check_form(transaction, grouped=True)
            group = transaction or TransactionMetadata(transactional_id, grouped=True)
            match request:
                case JoinTransactionRequest():
                    return transaction_groups.join(group, request, resources)
                case CommitTransactionRequest():
                    return transaction_groups.commit(group, request, resources)
                case AbortTransactionRequest():
                    return transaction_groups.abort(group, request, resources)
        if isinstance(request, InitTransactionsRequest):
            _check_form(transaction, grouped=False)
            return transaction_producers.initialize(transaction, request, resources)
        if transaction is None:
            raise InvalidProducerIdMappingError(f"the transactional id {transactional_id!r} is not known")
        if isinstance(request, AddPartitionToTransactionRequest):
            if transaction.grouped:
                return transaction_groups.add_partition(transaction, request)
            return transaction_producers.add_partition(transaction, request)
        _check_form(transaction, grouped=False)
        return transaction_producers.end(transaction, request, resources)

    def _follow(self, transactional_id: str, waiting: Waiting | None, decision: Decision | None) -> list[Effect]:
        """The decision's records (if any) are appended. Answer its request now, or at the end of the transaction."""
        if waiting is None:
            return []
        if isinstance(decision, Answered):
            return self._answer(waiting, decision.answer)
        invariant(isinstance(decision, AfterEnd), "a request without a decision")
        answer = decision.answer if isinstance(decision, AfterEnd) else None
        self._enders.setdefault(transactional_id, []).append((waiting, answer))
        return []

    def _answer(self, waiting: Waiting, answer: Message | SparkBrokerError) -> list[Effect]:
        """Hold the answer until every append that it may depend on is committed."""
        if self.appended_count == self.committed_count:
            return [AnswerRequest(waiting.token, answer)]
        self._held.append(_HeldAnswer(self.appended_count, waiting, answer))
        return []

    @event
    def appended(self, append: AppendRecords, now_ms: int) -> list[Effect]:
        """The records are at the end of the log. This counts appends; `committed` names such a count."""
        self.appended_count += 1
        transactional_id = append.transactional_id
        effects: list[Effect] = []
        for change in append.changes:
            self._apply(transactional_id, change)
            if isinstance(change, Settled):
                effects.append(self._next_end(transactional_id))
            elif isinstance(change, Ending):
                self._held.append(_HeldDecision(self.appended_count, transactional_id))
            elif isinstance(change, Ended):
                self._to_end.pop(transactional_id, None)
                # The waiting requests are taken now: later ones may wait for the end of the next transaction.
                enders = self._enders.pop(transactional_id, [])
                self._held += [_HeldAnswer(self.appended_count, waiting, answer) for waiting, answer in enders]
        transaction = self.transactions.get(transactional_id)
        if transaction is not None:
            transaction.active_ms = now_ms
        return effects + self._follow(transactional_id, append.waiting, append.decision)

    @event
    def append_refused(self, append: AppendRecords, error: SparkBrokerError) -> list[Effect]:
        """Nothing was stored, so nothing has happened. `tick` repeats appends that no client asked for."""
        if append.waiting is None:
            return []
        refused = CoordinatorNotAvailableError(f"the transaction's record was refused: {error.message}")
        return self._answer(append.waiting, refused)

    @event
    def committed(self, count: int) -> list[Effect]:
        """The first `count` appends are committed."""
        invariant(self.committed_count <= count <= self.appended_count, "commits of what was not appended")
        self.committed_count = count
        effects: list[Effect] = []
        while self._held and self._held[0].position <= count:
            held = self._held.popleft()
            if isinstance(held, _HeldDecision):
                effects += self._mark(held.transactional_id)
            elif held.answer is None:
                effects.append(DecideAgain(held.waiting))
            else:
                effects.append(AnswerRequest(held.waiting.token, held.answer))
        return effects

    def _mark(self, transactional_id: str) -> list[Effect]:
        invariant(transactional_id in self.transactions, "a decision about the unknown id %s", transactional_id)
        targets = self.transactions[transactional_id].markers()
        if not targets:
            return self._end(transactional_id)
        self._unmarked[transactional_id] = set(targets)
        return [WriteMarkers(tuple(targets))]

    @event
    def marked(self, target: MarkerTarget) -> list[Effect]:
        """The marker is committed, or its topic is gone. Repetitions change nothing."""
        unmarked = self._unmarked.get(target.transactional_id)
        if unmarked is None:
            return []
        unmarked.discard(target)
        if unmarked:
            return []
        del self._unmarked[target.transactional_id]
        return self._end(target.transactional_id)

    def _end(self, transactional_id: str) -> list[Effect]:
        self._to_end[transactional_id] = None
        return [self._next_end(transactional_id)]

    def _next_end(self, transactional_id: str) -> AppendRecords:
        """What ends the transaction, or the next part of it: one part at a time, so that `Ended` is never without the
        parts before it."""
        change = self.transactions[transactional_id].end(self._resources.end_keys_max)
        return AppendRecords(transactional_id, (change,), None, None)

    @event
    def tick(self, now_ms: int) -> list[Effect]:
        """Abort idle transactions, append missing `Ended` records, forget old ids and refuse late requests."""
        effects: list[Effect] = [self._next_end(transactional_id) for transactional_id in self._to_end]
        for transactional_id in self._open:
            transaction = self.transactions[transactional_id]
            if now_ms - transaction.active_ms >= transaction.timeout_ms:
                effects += self._abort_idle(transaction)
        return effects + self._forget_idle(now_ms) + self._expire(now_ms)

    def _abort_idle(self, transaction: TransactionMetadata) -> list[Effect]:
        if transaction.grouped:
            return [AppendRecords(transaction.transactional_id, (transaction_groups.ABORT,), None, None)]
        try:
            ending = transaction_producers.abort_idle(transaction, self._resources)
        except CoordinatorNotAvailableError:
            return []  # The next tick may find producer ids again.
        return [AppendRecords(transaction.transactional_id, (ending,), None, None)]

    def _forget_idle(self, now_ms: int) -> list[Effect]:
        if now_ms < self._forgetting_due_ms:
            return []
        self._forgetting_due_ms = now_ms + min(FORGETTING_INTERVAL_MS, self._resources.timeout_max_ms)
        return [
            AppendRecords(transactional_id, (Forgotten(),), None, None)
            for transactional_id, transaction in self.transactions.items()
            if transaction.state is TransactionState.EMPTY and self._is_expired(transaction, now_ms)
        ]

    def _is_expired(self, transaction: TransactionMetadata, now_ms: int) -> bool:
        idle_ms = now_ms - transaction.active_ms
        # A task attempt that joins later opens a transaction that is never committed. Its time-out aborts it.
        over = transaction.single_use and idle_ms >= self._resources.timeout_max_ms
        return over or 0 <= self._id_expiration_ms <= idle_ms

    def _expire(self, now_ms: int) -> list[Effect]:
        """Answer requests whose clients no longer wait. The work that these requests began goes on."""
        late = [waiting.token for waiting in self._waiting() if waiting.deadline_ms <= now_ms]
        if late:
            in_time = (
                held for held in self._held if isinstance(held, _HeldDecision) or held.waiting.deadline_ms > now_ms
            )
            self._held = deque(in_time)
            self._enders = {
                transactional_id: [ender for ender in enders if ender[0].deadline_ms > now_ms]
                for transactional_id, enders in self._enders.items()
            }
        return [AnswerRequest(token, RequestTimedOutError("the transaction has not ended in time")) for token in late]

    @event
    def dropped(self) -> list[AnswerRequest]:
        """The leadership is over: clients that wait must ask the next leader."""
        moved = NotLeaderOrFollowerError("the coordinator moved before it could answer")
        tokens = [waiting.token for waiting in self._waiting()]
        self._held.clear()
        self._enders.clear()
        return [AnswerRequest(token, moved) for token in tokens]

    def _waiting(self) -> Iterator[Waiting]:
        """The requests that have no answer yet."""
        for held in self._held:
            if isinstance(held, _HeldAnswer):
                yield held.waiting
        for enders in self._enders.values():
            for waiting, _ in enders:
                yield waiting

    def describe(
        self, transactional_ids: Iterable[str] | None, now_ms: int, leader_epoch: int = -1
    ) -> list[TransactionDescription]:
        """Describe these ids (None: all). Ids that are not in this shard are left out."""
        wanted = sorted(self.transactions) if transactional_ids is None else transactional_ids
        return [
            _describe(self.transactions[transactional_id], now_ms, leader_epoch)
            for transactional_id in wanted
            if transactional_id in self.transactions
        ]


def _check_form(transaction: TransactionMetadata | None, *, grouped: bool) -> None:
    if transaction is not None and transaction.grouped != grouped:
        form = "an application with many writers" if transaction.grouped else "a producer"
        raise InvalidTxnStateError(f"the transactional id {transaction.transactional_id!r} belongs to {form}")


def _describe(transaction: TransactionMetadata, now_ms: int, leader_epoch: int) -> TransactionDescription:
    open_ = transaction.state is not TransactionState.EMPTY
    writers = [(producer_id, writer.producer_epoch) for producer_id, writer in transaction.writers.items()]
    if not transaction.grouped:
        writers = [(transaction.identity.producer_id, transaction.identity.producer_epoch)]
    partitions = sorted({key for writer in transaction.writers.values() for key in writer.partitions})
    return TransactionDescription(
        transaction.transactional_id,
        transaction.state.value,
        transaction.version if open_ and transaction.grouped else -1,
        transaction.execution if open_ else transaction.newest_execution,
        transaction.last_committed,
        transaction.timeout_ms,
        max(now_ms - transaction.active_ms, 0),
        writers,
        partitions,
        leader_epoch,
    )
