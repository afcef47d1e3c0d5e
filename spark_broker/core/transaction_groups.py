"""Decisions about a transactional id with many writers: an application whose versions are committed once each.

The first request of a newer execution (Spark's run) fences the older ones for good. A version is closed for an
execution once its transaction has ended, whatever the outcome: a late task cannot open it again.
"""

from __future__ import annotations

from spark_broker.core.transaction_changes import (
    AnyChange,
    Ending,
    ExecutionStarted,
    Opened,
    PartitionAdded,
    WriterJoined,
)
from spark_broker.core.transaction_decision import AfterEnd, Answered, Decision, Resources, added
from spark_broker.core.transaction_state import JOIN_EPOCH, PREPARED, TransactionMetadata, TransactionState
from spark_broker.errors import (
    AlreadyCommittedError,
    InconsistentTopicIdError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidTxnStateError,
    ProducerFencedError,
)
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    AddPartitionToTransactionRequest,
    CommitTransactionRequest,
    EmptyResponse,
    InitProducerIdResponse,
    JoinTransactionRequest,
)

WRITERS_MAX = 100_000
"""A commit can name this many winners."""

ABORT = Ending(committed=False)

GroupedRequest = JoinTransactionRequest | CommitTransactionRequest | AbortTransactionRequest


def join(transaction: TransactionMetadata, request: JoinTransactionRequest, resources: Resources) -> Decision:
    """Add a writer. The first one opens the version."""
    resources.check_timeout(request.timeout_ms)
    opening = _open(transaction, request, request.timeout_ms)
    if isinstance(opening, AfterEnd):
        return opening
    if len(transaction.writers) >= WRITERS_MAX:
        raise InvalidTxnStateError(f"version {request.version} has {WRITERS_MAX} writers already")
    producer_id = resources.producer_ids.take()
    return Answered(InitProducerIdResponse(producer_id, JOIN_EPOCH), (*opening, WriterJoined(producer_id)))


def commit(transaction: TransactionMetadata, request: CommitTransactionRequest, resources: Resources) -> Decision:
    """Commit a version. Without winners the commit only records that the version is done.

    All of what the winners wrote is there then, or nothing is. After the decision a topic may go, as it may later.
    """
    winners = tuple(sorted(set(request.winners)))
    same = (transaction.version, transaction.execution) == (request.version, request.execution)
    if transaction.committing and same and transaction.winners == frozenset(winners):
        return AfterEnd(answer=EmptyResponse())
    if winners:
        _check_not_committed(transaction, request.version)
        _check_not_fenced(transaction, request.execution)
        if transaction.state not in PREPARED:
            _check_joined(transaction, request.version, request.execution, winners)
            _check_topics(transaction, winners, resources)
    opening = _open(transaction, request, resources.timeout_max_ms)
    if isinstance(opening, AfterEnd):
        return opening
    return AfterEnd((*opening, Ending(True, winners)), EmptyResponse())


def abort(transaction: TransactionMetadata, request: AbortTransactionRequest, resources: Resources) -> Decision:
    """Abort what was written for the version by this execution. Later joins are refused."""
    same = (transaction.version, transaction.execution) == (request.version, request.execution)
    if same and transaction.state is TransactionState.PREPARE_ABORT:
        return AfterEnd(answer=EmptyResponse())
    if transaction.state not in PREPARED and _is_closed(transaction, request.version, request.execution):
        _check_not_committed(transaction, request.version)
        return Answered(EmptyResponse())
    opening = _open(transaction, request, resources.timeout_max_ms)
    if isinstance(opening, AfterEnd):
        return opening
    return AfterEnd((*opening, ABORT), EmptyResponse())


def add_partition(transaction: TransactionMetadata, request: AddPartitionToTransactionRequest) -> Decision:
    """A joined writer's batch reached a leader."""
    writer = transaction.writers.get(request.producer_id)
    if writer is None:
        raise InvalidProducerIdMappingError(
            f"producer {request.producer_id} is no writer of {transaction.transactional_id!r}, "
            "or its transaction has ended"
        )
    if transaction.state in PREPARED or request.producer_epoch != writer.producer_epoch:
        raise InvalidProducerEpochError(f"the transaction of producer {request.producer_id} is being ended")
    if (request.topic_id, request.partition) in writer.partitions:
        return Answered(added(transaction))
    return Answered(added(transaction), (PartitionAdded(request.producer_id, request.topic_id, request.partition),))


def _open(
    transaction: TransactionMetadata, request: GroupedRequest, timeout_ms: int
) -> tuple[AnyChange, ...] | AfterEnd:
    """The changes that open this version for this execution, or the transaction that must end first."""
    version, execution = request.version, request.execution
    _check_not_committed(transaction, version)
    _check_not_fenced(transaction, execution)
    # The first request of an execution fences older executions, whatever the decision about the request is.
    started = () if execution == transaction.newest_execution else (ExecutionStarted(execution, request.single_use),)
    if transaction.state in PREPARED:
        return AfterEnd(started)
    if _is_closed(transaction, version, execution):
        raise InvalidTxnStateError(f"version {version} of execution {execution!r} has ended")
    if transaction.state is TransactionState.ONGOING:
        same = (transaction.version, transaction.execution) == (version, execution)
        return () if same else AfterEnd((*started, ABORT))
    return (*started, Opened(version, execution, timeout_ms))


def _is_closed(transaction: TransactionMetadata, version: int, execution: str) -> bool:
    """Whether the version has ended for this execution, or is below the version that the execution has open."""
    if execution != transaction.newest_execution:
        return False
    passed = (
        transaction.state is TransactionState.ONGOING
        and transaction.execution == execution
        and version < transaction.version
    )
    return passed or version <= transaction.closed


def _check_not_committed(transaction: TransactionMetadata, version: int) -> None:
    if version <= transaction.last_committed:
        raise AlreadyCommittedError(
            f"version {version} of {transaction.transactional_id!r}: version {transaction.last_committed} is committed"
        )


def _check_not_fenced(transaction: TransactionMetadata, execution: str) -> None:
    if execution in transaction.executions and execution != transaction.newest_execution:
        raise ProducerFencedError(f"execution {execution!r} gave way to {transaction.newest_execution!r}")


def _check_joined(transaction: TransactionMetadata, version: int, execution: str, winners: tuple[int, ...]) -> None:
    """Check that every winner is a writer of exactly this open version and execution. Raises InvalidTxnStateError."""
    if (transaction.version, transaction.execution) != (
        version,
        execution,
    ) or transaction.state is not TransactionState.ONGOING:
        raise InvalidTxnStateError(f"version {version} of execution {execution!r} is not open")
    strangers = [producer_id for producer_id in winners if producer_id not in transaction.writers]
    if strangers:
        raise InvalidTxnStateError(f"producers {strangers[:5]} have not joined version {version}")


def _check_topics(transaction: TransactionMetadata, winners: tuple[int, ...], resources: Resources) -> None:
    """Check that the topics that the winners wrote to are there. Raises InconsistentTopicIdError."""
    written = {topic_id for winner in winners for topic_id, _ in transaction.writers[winner].partitions}
    gone = sorted(topic_id for topic_id in written if not resources.has_topic(topic_id))
    if gone:
        raise InconsistentTopicIdError(
            f"version {transaction.version} of {transaction.transactional_id!r} cannot be committed: a topic that it "
            f"was written to was deleted meanwhile (its id was {gone[0]})"
        )
