"""Where a producer's transaction stands: which appends may take part in it, and what each answer means.

A state machine without thread, clock or socket: `TransactionState` puts a lock around it, the simulator runs it as it
is. Events are looked up in `TRANSITIONS`; an event without an entry is refused.

    phase          event                                    next
    -------------  ---------------------------------------  ------------------------------------------------
    UNINITIALIZED  IDENTITY: the coordinator gave one       READY
    READY          BEGIN                                    OPEN
    OPEN           APPEND_FAILED, for good                  ABORTABLE
    OPEN           COMMIT                                   FLUSHING: no more appends, those under way go on
    OPEN           ABORT                                    DISCARDING: no more appends
    FLUSHING       APPEND_FAILED, for good                  ABORTABLE
    FLUSHING       INTERRUPTED                              OPEN
    FLUSHING       QUIET: every append is acknowledged      COMMITTING: the coordinator is asked
    ABORTABLE      ABORT                                    DISCARDING
    DISCARDING     INTERRUPTED                              ABORTABLE
    DISCARDING     QUIET: every append has its outcome      ABORTING: the coordinator is asked
    COMMITTING     IDENTITY: it committed                   READY, under the identity that it gave
    COMMITTING     REFUSED: it has aborted instead          ABORTABLE
    ABORTING       IDENTITY: it aborted                     READY, under the identity that it gave
    any            FAIL: fenced, or a bug                   FAILED: only close is left

Without an answer the phase stays COMMITTING or ABORTING: the outcome is not known, and is asked for again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NoReturn

from spark_broker.errors import (
    BootstrapUnreachableError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    ProducerFencedError,
    SparkBrokerError,
    TransactionAbortableError,
)


class Phase(Enum):
    """See the table at the top."""

    UNINITIALIZED = "not initialized"
    READY = "not in a transaction"
    OPEN = "in a transaction"
    ABORTABLE = "in a transaction that can only be aborted"
    FLUSHING = "about to commit its transaction"
    DISCARDING = "about to abort its transaction"
    COMMITTING = "waiting for the outcome of its commit"
    ABORTING = "waiting for the outcome of its abort"
    FAILED = "fenced"


class ProducerTransactionEvent(Enum):
    """See the table at the top. A value completes the error for an event without an entry: "cannot ..."."""

    IDENTITY = "take an identity"
    BEGIN = "begin a transaction"
    APPEND_FAILED = "fail an append"
    COMMIT = "commit"
    ABORT = "abort"
    INTERRUPTED = "be interrupted"
    QUIET = "ask the coordinator"
    REFUSED = "be refused"


TRANSITIONS: Mapping[tuple[Phase, ProducerTransactionEvent], Phase] = {
    (Phase.UNINITIALIZED, ProducerTransactionEvent.IDENTITY): Phase.READY,
    (Phase.READY, ProducerTransactionEvent.BEGIN): Phase.OPEN,
    (Phase.OPEN, ProducerTransactionEvent.APPEND_FAILED): Phase.ABORTABLE,
    (Phase.OPEN, ProducerTransactionEvent.COMMIT): Phase.FLUSHING,
    (Phase.OPEN, ProducerTransactionEvent.ABORT): Phase.DISCARDING,
    (Phase.FLUSHING, ProducerTransactionEvent.APPEND_FAILED): Phase.ABORTABLE,
    (Phase.FLUSHING, ProducerTransactionEvent.INTERRUPTED): Phase.OPEN,
    (Phase.FLUSHING, ProducerTransactionEvent.QUIET): Phase.COMMITTING,
    (Phase.ABORTABLE, ProducerTransactionEvent.ABORT): Phase.DISCARDING,
    (Phase.DISCARDING, ProducerTransactionEvent.INTERRUPTED): Phase.ABORTABLE,
    (Phase.DISCARDING, ProducerTransactionEvent.QUIET): Phase.ABORTING,
    (Phase.COMMITTING, ProducerTransactionEvent.IDENTITY): Phase.READY,
    (Phase.COMMITTING, ProducerTransactionEvent.REFUSED): Phase.ABORTABLE,
    (Phase.ABORTING, ProducerTransactionEvent.IDENTITY): Phase.READY,
}


class TransactionMachine:
    """Invariants: `cause` is set in ABORTABLE, DISCARDING, ABORTING and FAILED. `touched` is set whenever the
    coordinator may know of the transaction."""

    def __init__(self) -> None:
        self.phase = Phase.UNINITIALIZED
        self.touched = False
        self.cause: SparkBrokerError | None = None

    @property
    def awaits_outcome(self) -> bool:
        """Whether the coordinator was asked and has not answered yet."""
        return self.phase in (Phase.COMMITTING, Phase.ABORTING)

    def identified(self) -> None:
        """The producer has an identity, and no transaction is open. Nothing changes once FAILED."""
        if self.phase is not Phase.FAILED:
            self._move(ProducerTransactionEvent.IDENTITY)
            self.cause, self.touched = None, False

    def begin(self) -> None:
        """Raises InvalidTxnStateError unless READY."""
        self._move(ProducerTransactionEvent.BEGIN)

    def check_append(self) -> None:
        """Raises InvalidTxnStateError, TransactionAbortableError or ProducerFencedError when no append is admitted."""
        if self.phase is not Phase.OPEN:
            self._refuse("append")

    def admit(self) -> None:
        """An append becomes a part of the transaction. Raises what `check_append` raises."""
        self.check_append()
        self.touched = True

    def append_failed(self, error: SparkBrokerError) -> SparkBrokerError | None:
        """An append failed for good, so its transaction must not be committed.

        Returns the error that refuses appends from here on. None: nothing changes.
        """
        if isinstance(error, ProducerFencedError):
            return self.fail(error)
        after = TRANSITIONS.get((self.phase, ProducerTransactionEvent.APPEND_FAILED))
        if after is None:
            return None
        self.phase, self.cause = after, error
        return self._abortable()

    def fail(self, error: SparkBrokerError) -> SparkBrokerError | None:
        """From here on the producer can only be closed. Returns what `append_failed` returns."""
        if self.phase is Phase.FAILED:
            return None
        self.phase, self.cause = Phase.FAILED, error
        return error

    def close(self, *, committing: bool) -> None:
        """Admit no more appends.

        Raises InvalidTxnStateError without a transaction. Raises TransactionAbortableError for a commit after an append
        has failed.
        """
        self._move(ProducerTransactionEvent.COMMIT if committing else ProducerTransactionEvent.ABORT)
        if not committing:
            self.cause = self.cause or TransactionAbortableError("it was being aborted")

    def reopen(self) -> None:
        """The end of the transaction was interrupted. The caller may try again."""
        if self.phase in (Phase.FLUSHING, Phase.DISCARDING):
            self._move(ProducerTransactionEvent.INTERRUPTED)

    def end(self) -> None:
        """Every append has its outcome. From here on the coordinator decides the transaction's outcome.

        Raises TransactionAbortableError when an append of a transaction to commit has failed.
        """
        self._move(ProducerTransactionEvent.QUIET)

    def refused(self, error: SparkBrokerError) -> SparkBrokerError | None:
        """The coordinator has answered the end of the transaction with an error. Returns the error for the caller.

        None: the outcome of the transaction is not known, and the coordinator is to be asked again.
        """
        if isinstance(error, InvalidProducerEpochError):
            error = ProducerFencedError(error.message)
        elif isinstance(error, TransactionAbortableError) and self.phase is Phase.COMMITTING:
            # The coordinator has aborted the transaction. The next identity comes with the answer to an abort.
            self._move(ProducerTransactionEvent.REFUSED)
            self.cause = error
            return error
        elif error.retriable or isinstance(error, BootstrapUnreachableError):
            return None
        self.fail(error)
        return error

    def raise_failure(self) -> None:
        """Raises what made the producer FAILED."""
        if self.phase is Phase.FAILED:
            self._refuse("go on")

    def _move(self, event: ProducerTransactionEvent) -> None:
        after = TRANSITIONS.get((self.phase, event))
        if after is None:
            self._refuse(event.value)
        self.phase = after

    def _refuse(self, what: str) -> NoReturn:
        if self.phase is Phase.FAILED and self.cause is not None:
            raise type(self.cause)(self.cause.message)
        if self.phase is Phase.ABORTABLE:
            raise self._abortable() from self.cause
        raise InvalidTxnStateError(f"cannot {what}: the producer is {self.phase.value}")

    def _abortable(self) -> SparkBrokerError:
        cause = self.cause
        if cause is None or isinstance(cause, TransactionAbortableError):
            return TransactionAbortableError("" if cause is None else cause.message)
        return TransactionAbortableError(f"an append failed: {cause.name}: {cause.message}")
