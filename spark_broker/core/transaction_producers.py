"""Decisions about a transactional id in Kafka's form: one producer at a time, one writer.

Every end of a transaction raises the producer's epoch, even if nothing was appended. Otherwise a batch that is still on
its way would open the next transaction (KIP-890). A new producer first aborts the transaction that it finds open, which
raises the epoch, and then raises the epoch once more. Its epoch then differs from that of an older producer that only
waited for the abort.
"""

from __future__ import annotations

from spark_broker.core.transaction_changes import Ending, Initialized, PartitionAdded
from spark_broker.core.transaction_decision import AfterEnd, Answered, Decision, Resources, added
from spark_broker.core.transaction_state import (
    PREPARED,
    ProducerIdentity,
    TransactionMetadata,
    TransactionOutcome,
    TransactionState,
)
from spark_broker.errors import (
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidTxnStateError,
    ProducerFencedError,
    TransactionAbortableError,
)
from spark_broker.protocol.messages import (
    AddPartitionToTransactionRequest,
    EndTransactionRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
)

PRODUCER_EPOCH_MAX = 2**15 - 1
"""Only markers name this last epoch."""


def initialize(
    transaction: TransactionMetadata | None, request: InitTransactionsRequest, resources: Resources
) -> Decision:
    """A new producer of the id. An open transaction is aborted first."""
    resources.check_timeout(request.timeout_ms)
    if transaction is None:
        identity = ProducerIdentity(resources.producer_ids.take(), 0)
    elif transaction.state is TransactionState.ONGOING:
        return AfterEnd((_ending(transaction, False, resources),))
    elif transaction.state in PREPARED:
        return AfterEnd()
    else:
        identity = identity_after(transaction.identity, resources)
    change = Initialized(identity.producer_id, identity.producer_epoch, request.timeout_ms)
    return Answered(_answer(identity), (change,))


def add_partition(transaction: TransactionMetadata, request: AddPartitionToTransactionRequest) -> Decision:
    """A batch of this identity has reached a leader. Its partition joins the open transaction, or opens one."""
    identity = ProducerIdentity(request.producer_id, request.producer_epoch)
    if identity != transaction.identity:
        raise _stale(transaction, identity)
    if transaction.state in PREPARED:
        raise InvalidProducerEpochError(f"the transaction of epoch {identity.producer_epoch} is being ended")
    writer = transaction.writers.get(identity.producer_id)
    if writer is not None and (request.topic_id, request.partition) in writer.partitions:
        return Answered(added(transaction))
    return Answered(added(transaction), (PartitionAdded(request.producer_id, request.topic_id, request.partition),))


def end(transaction: TransactionMetadata, request: EndTransactionRequest, resources: Resources) -> Decision:
    """Commit or abort. A repeated request waits for the same end; after that end, it is answered at once."""
    identity = ProducerIdentity(request.producer_id, request.producer_epoch)
    if transaction.last_outcome is not None and identity == transaction.last_outcome.identity:
        _check_same(transaction.last_outcome, request.committed)
        return Answered(_answer(transaction.identity))
    if identity != transaction.identity:
        raise _stale(transaction, identity)
    if transaction.state in PREPARED:
        same = transaction.committing == request.committed
        return AfterEnd(answer=_answer(transaction.next_identity) if same else None)
    ending = _ending(transaction, request.committed, resources)
    return AfterEnd((ending,), InitProducerIdResponse(ending.next_producer_id, ending.next_producer_epoch))


def abort_idle(transaction: TransactionMetadata, resources: Resources) -> Ending:
    """Abort a transaction that has timed out."""
    return _ending(transaction, False, resources)


def identity_after(identity: ProducerIdentity, resources: Resources) -> ProducerIdentity:
    """The identity with the next epoch, or with a new producer id when the epochs run out.

    They run out one epoch early, since markers name one epoch more than batches.
    """
    if identity.producer_epoch + 1 < PRODUCER_EPOCH_MAX:
        return ProducerIdentity(identity.producer_id, identity.producer_epoch + 1)
    return ProducerIdentity(resources.producer_ids.take(), 0)


def _ending(transaction: TransactionMetadata, committed: bool, resources: Resources) -> Ending:
    after = identity_after(transaction.identity, resources)
    return Ending(committed, (), after.producer_id, after.producer_epoch)


def _check_same(outcome: TransactionOutcome, committed: bool) -> None:
    if committed and not outcome.committed:
        raise TransactionAbortableError("the transaction was aborted: it timed out, or somebody ended it")
    if outcome.committed and not committed:
        raise InvalidTxnStateError("the transaction was committed already")


def _stale(transaction: TransactionMetadata, identity: ProducerIdentity) -> Exception:
    """Why an identity that is not the current one is refused."""
    current = transaction.identity
    if transaction.last_outcome is not None and identity == transaction.last_outcome.identity:
        # The producer is still valid: it learns its next epoch when it ends the transaction.
        return InvalidProducerEpochError(f"the transaction of epoch {identity.producer_epoch} has ended")
    if identity.producer_id != current.producer_id:
        return InvalidProducerIdMappingError(
            f"{transaction.transactional_id!r} has producer id {current.producer_id}, not {identity.producer_id}"
        )
    if identity.producer_epoch < current.producer_epoch:
        return ProducerFencedError(
            f"{transaction.transactional_id!r} goes on in epoch {current.producer_epoch}, not {identity.producer_epoch}"
        )
    return InvalidProducerEpochError(f"epoch {identity.producer_epoch} was never given out")


def _answer(identity: ProducerIdentity) -> InitProducerIdResponse:
    return InitProducerIdResponse(identity.producer_id, identity.producer_epoch)
