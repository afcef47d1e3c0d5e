"""The transaction coordinator of the fake cluster: all transactional ids in one table, decided and marked at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spark_broker.errors import (
    AlreadyCommittedError,
    CoordinatorNotAvailableError,
    InconsistentTopicIdError,
    InvalidProducerEpochError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    NotLeaderOrFollowerError,
    ProducerFencedError,
    TransactionAbortableError,
)
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    CallRequest,
    CommittedOffset,
    CommitTransactionRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EmptyResponse,
    EndTransactionRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
    JoinTransactionRequest,
    Message,
    TransactionalOffsetCommitRequest,
    TransactionDescription,
)

MAX_TIMEOUT_MS = 900_000

Key = tuple[str, int]
"""Topic id and partition."""


@dataclass
class Writer:
    """One producer identity; its open transaction touches `partitions` and commits `offsets` for groups."""

    producer_id: int
    epoch: int = 0
    partitions: list[Key] = field(default_factory=list)
    offsets: list[tuple[str, CommittedOffset]] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)
    outcome: bool | None = None


@dataclass
class Transaction:
    """`writers` has one entry in Kafka's form."""

    writers: dict[int, Writer] = field(default_factory=dict)
    version: int = -1
    execution: str = ""
    executions: list[str] = field(default_factory=list)
    last_committed: int = -1
    open: bool = False
    timeout_ms: int = 0


MarkerWriter = Callable[[Key, int, int, bool], None]
"""Writes a marker: partition, producer id, epoch that begins after it, committed."""


class FakeTransactions:
    """Used under the cluster's lock."""

    def __init__(self, next_producer_id: Callable[[], int], write_marker: MarkerWriter) -> None:
        self._next_producer_id = next_producer_id
        self._write_marker = write_marker
        self.by_id: dict[str, Transaction] = {}
        self.committed_offsets: Callable[[str, CommittedOffset], None] = lambda group, one: None
        self.has_topic: Callable[[str], bool] = lambda topic_id: True

    def add(self, transactional_id: str, producer_id: int, epoch: int, key: Key) -> None:
        """A leader adds its partition before it takes a batch."""
        writer = self._writer(transactional_id, producer_id, epoch)
        if self.by_id[transactional_id].executions and not self.by_id[transactional_id].open:
            raise InvalidTxnStateError("the transaction has ended")
        if key not in writer.partitions:
            writer.partitions.append(key)

    def time_out(self, transactional_id: str) -> None:
        """Abort what is open, as the coordinator does after the transaction's time-out."""
        transaction = self.by_id[transactional_id]
        transaction.open = False
        for writer in transaction.writers.values():
            self._end(writer, committed=False)

    def answer(self, request: CallRequest) -> Message | None:
        match request:
            case InitTransactionsRequest():
                return self._init(request)
            case EndTransactionRequest():
                return self._end_one(request)
            case JoinTransactionRequest():
                return self._join(request)
            case CommitTransactionRequest():
                return self._commit(request)
            case AbortTransactionRequest():
                transaction = self.by_id.get(request.application, Transaction())
                if transaction.open and (transaction.version, transaction.execution) == (
                    request.version,
                    request.execution,
                ):
                    self.time_out(request.application)
                return EmptyResponse()
            case TransactionalOffsetCommitRequest():
                return self._offsets(request)
            case DescribeTransactionsRequest():
                return self._describe(request)
            case _:
                return None

    def _writer(self, transactional_id: str, producer_id: int, epoch: int) -> Writer:
        transaction = self.by_id.get(transactional_id)
        writer = None if transaction is None else transaction.writers.get(producer_id)
        if writer is None or epoch != writer.epoch:
            raise InvalidProducerEpochError(f"producer {producer_id} has another epoch than {epoch}")
        return writer

    def _init(self, request: InitTransactionsRequest) -> InitProducerIdResponse:
        if request.timeout_ms > MAX_TIMEOUT_MS:
            raise InvalidTransactionTimeoutError(f"{request.timeout_ms} ms")
        transaction = self.by_id.setdefault(request.transactional_id, Transaction())
        transaction.timeout_ms = request.timeout_ms
        if not transaction.writers:
            producer_id = self._next_producer_id()
            transaction.writers[producer_id] = Writer(producer_id)
            return InitProducerIdResponse(producer_id, 0)
        (writer,) = transaction.writers.values()
        if writer.partitions:
            self._end(writer, committed=False)
        writer.epoch += 1
        writer.outcome = None
        return InitProducerIdResponse(writer.producer_id, writer.epoch)

    def _end_one(self, request: EndTransactionRequest) -> InitProducerIdResponse:
        writer = self.by_id[request.transactional_id].writers[request.producer_id]
        if writer.outcome is not None and request.producer_epoch == writer.epoch - 1:
            if writer.outcome != request.committed:
                raise TransactionAbortableError("the transaction has timed out")
        elif request.producer_epoch != writer.epoch:
            raise ProducerFencedError("a newer producer has taken over")
        else:
            self._end(writer, committed=request.committed)
        return InitProducerIdResponse(writer.producer_id, writer.epoch)

    def _end(self, writer: Writer, *, committed: bool) -> None:
        writer.epoch += 1
        for key in writer.partitions:
            if self.has_topic(key[0]):
                self._write_marker(key, writer.producer_id, writer.epoch, committed)
        for group, offset in writer.offsets:
            if committed:
                self.committed_offsets(group, offset)
        writer.partitions, writer.offsets, writer.sequences, writer.outcome = [], [], {}, committed

    def _join(self, request: JoinTransactionRequest) -> InitProducerIdResponse:
        transaction = self.by_id.setdefault(request.application, Transaction())
        if request.version <= transaction.last_committed:
            raise AlreadyCommittedError(f"version {request.version}")
        if request.execution in transaction.executions[:-1]:
            raise ProducerFencedError(f"execution {request.execution!r} is not the newest")
        same = (transaction.version, transaction.execution) == (request.version, request.execution)
        if same and not transaction.open:
            raise InvalidTxnStateError("the transaction of this execution has ended")
        if not same:
            self.time_out(request.application)
            if request.execution not in transaction.executions:
                transaction.executions.append(request.execution)
            transaction.version, transaction.execution, transaction.open = request.version, request.execution, True
            transaction.writers = {}
        producer_id = self._next_producer_id()
        transaction.writers[producer_id] = Writer(producer_id)
        return InitProducerIdResponse(producer_id, 0)

    def _commit(self, request: CommitTransactionRequest) -> EmptyResponse:
        transaction = self.by_id.setdefault(request.application, Transaction())
        if request.version <= transaction.last_committed:
            raise AlreadyCommittedError(f"version {request.version}")
        joined = set(transaction.writers) if transaction.open else set()
        if not set(request.winners) <= joined:
            raise InvalidTxnStateError("a winner has not joined")
        written = [key for winner in request.winners for key in transaction.writers[winner].partitions]
        if not all(self.has_topic(topic_id) for topic_id, _ in written):
            raise InconsistentTopicIdError("a topic was deleted meanwhile")
        for writer in transaction.writers.values():
            self._end(writer, committed=writer.producer_id in request.winners)
        transaction.open, transaction.last_committed = False, request.version
        return EmptyResponse()

    def _offsets(self, request: TransactionalOffsetCommitRequest) -> EmptyResponse:
        writer = self._writer(request.transactional_id, request.producer_id, request.producer_epoch)
        expected = writer.sequences.get(request.group_id, 0)
        if request.sequence == expected:
            writer.sequences[request.group_id] = expected + 1
            writer.offsets += [(request.group_id, offset) for offset in request.offsets]
        elif request.sequence != expected - 1:
            raise InvalidTxnStateError(f"sequence {request.sequence} where {expected} is next")
        return EmptyResponse()

    def _describe(self, request: DescribeTransactionsRequest) -> DescribeTransactionsResponse:
        return DescribeTransactionsResponse(
            [
                TransactionDescription(
                    transactional_id=name,
                    state="Ongoing" if transaction.open else "Empty",
                    version=transaction.version,
                    execution=transaction.execution,
                    last_committed=transaction.last_committed,
                    timeout_ms=transaction.timeout_ms,
                    idle_ms=0,
                    writers=[(writer.producer_id, writer.epoch) for writer in transaction.writers.values()],
                    partitions=[key for writer in transaction.writers.values() for key in writer.partitions],
                )
                for name, transaction in self.by_id.items()
                if request.transactional_ids is None or name in request.transactional_ids
            ]
        )


def coordinated_id(request: CallRequest) -> str | None:
    """The transactional id whose coordinator must answer the request; None: any broker may."""
    match request:
        case InitTransactionsRequest() | EndTransactionRequest():
            return request.transactional_id
        case JoinTransactionRequest() | CommitTransactionRequest() | AbortTransactionRequest():
            return request.application
        case _:
            return None


def check_coordinator(leaders: list[int], partition: int, broker: int) -> None:
    """Raises the error of a broker that does not lead the partition."""
    if not leaders:
        raise CoordinatorNotAvailableError("there is no topic of transactions")
    if leaders[partition] != broker:
        raise NotLeaderOrFollowerError("not the coordinator")
