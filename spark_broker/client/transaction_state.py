"""Where a producer's transaction stands, and which appends may take part in it.

    phase           event                               next
    --------------  ----------------------------------  ----------------------------------------------
    UNINITIALIZED   the coordinator gave an identity    READY
    READY           begin                               OPEN
    OPEN            an append failed for good           ABORTABLE
    OPEN            commit or abort                     CLOSING: no more appends, those under way go on
    CLOSING         an append failed for good (commit)  ABORTABLE
    CLOSING         every append is acknowledged        ENDING: the coordinator is asked
    ABORTABLE       abort                               CLOSING
    ENDING          the coordinator answered            READY, under the identity that it gave
    ENDING          it refused the commit               ABORTABLE
    ENDING          no answer                           ENDING: the outcome is not known, and is asked for again
    any             fenced, or a bug                    FAILED: only close is left

An append that was admitted belongs to the transaction that was open then: a transaction ends only when none is under
way, so none of its batches can slip into the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import NoReturn, Self

from spark_broker.client.retry import Deadline
from spark_broker.errors import (
    InvalidTxnStateError,
    ProducerFencedError,
    RequestTimedOutError,
    SparkBrokerError,
    TransactionAbortableError,
)


class Phase(Enum):
    """See the table at the top."""

    UNINITIALIZED = "not initialized"
    READY = "not in a transaction"
    OPEN = "in a transaction"
    ABORTABLE = "in a transaction that can only be aborted"
    CLOSING = "about to end its transaction"
    ENDING = "waiting for the outcome of its transaction"
    FAILED = "fenced"


class TransactionState:
    """Safe for use by many threads. As a context manager it admits one append, and knows when that is done.

    Invariants: `committing` says what CLOSING and ENDING are about; `cause` is set in ABORTABLE and FAILED; `touched`
    whenever the coordinator may know of the transaction.
    """

    def __init__(self, on_abortable: Callable[[SparkBrokerError], None]) -> None:
        self.phase = Phase.UNINITIALIZED
        self.committing = False
        self.touched = False
        self.cause: SparkBrokerError | None = None
        self._on_abortable = on_abortable  # called without the lock, before the append that failed counts as done
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._under_way = 0

    def __enter__(self) -> Self:
        """Raises InvalidTxnStateError, TransactionAbortableError or ProducerFencedError when no append is admitted."""
        with self._lock:
            self._require("append", Phase.OPEN)
            self._under_way += 1
            self.touched = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._under_way -= 1
            if not self._under_way:
                self._changed.notify_all()

    def check(self) -> None:
        """Raises what an append would raise."""
        with self._lock:
            self._require("append", Phase.OPEN)

    def raise_failure(self) -> None:
        """Raises what made the producer FAILED."""
        with self._lock:
            if self.phase is Phase.FAILED:
                self._refuse("go on")

    def failed(self, error: SparkBrokerError) -> None:
        """An append failed for good: its transaction must not be committed."""
        if isinstance(error, ProducerFencedError):
            self.fail(error)
            return
        with self._changed:
            if self.phase is not Phase.OPEN and not (self.phase is Phase.CLOSING and self.committing):
                return
            self.phase, self.cause = Phase.ABORTABLE, error
            self._changed.notify_all()
        self._on_abortable(self._abortable())

    def fail(self, error: SparkBrokerError) -> None:
        """Nothing but close is left."""
        with self._changed:
            if self.phase is Phase.FAILED:
                return
            self.phase, self.cause = Phase.FAILED, error
            self._changed.notify_all()
        self._on_abortable(error)

    # ---- steps of the thread that begins and ends transactions -------------------------------------------------------

    def begin(self) -> None:
        """Raises InvalidTxnStateError unless READY."""
        with self._lock:
            self._require("begin a transaction", Phase.READY)
            self.phase = Phase.OPEN

    def close(self, *, committing: bool) -> None:
        """Admit no more appends. Raises InvalidTxnStateError without a transaction, TransactionAbortableError for a
        commit that an append's failure forbids."""
        with self._lock:
            if committing:
                self._require("commit", Phase.OPEN)
            else:
                self._require("abort", Phase.OPEN, Phase.ABORTABLE)
                self.cause = self.cause or TransactionAbortableError("it was being aborted")
            self.phase, self.committing = Phase.CLOSING, committing

    def reopen(self) -> None:
        """What was to end the transaction was interrupted: it is as it was before."""
        with self._lock:
            if self.phase is Phase.CLOSING:
                self.phase = Phase.OPEN if self.cause is None else Phase.ABORTABLE

    def await_quiet(self, deadline: Deadline) -> None:
        """Wait until no append is under way. Raises RequestTimedOutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._under_way, deadline.remaining_s):
                raise RequestTimedOutError("an append of another thread is still under way")

    def end(self) -> None:
        """From here on the outcome is the coordinator's. Raises TransactionAbortableError when an append failed."""
        with self._lock:
            self._require("commit" if self.committing else "abort", Phase.CLOSING)
            self.phase = Phase.ENDING

    def refused(self, error: SparkBrokerError) -> None:
        """The coordinator has aborted what was to be committed; its next identity comes with an abort."""
        with self._lock:
            self.phase, self.cause = Phase.ABORTABLE, error

    def ready(self) -> None:
        """There is an identity, and no transaction."""
        with self._lock:
            if self.phase is not Phase.FAILED:
                self.phase, self.cause, self.touched = Phase.READY, None, False

    def _require(self, what: str, *phases: Phase) -> None:
        if self.phase not in phases:
            self._refuse(what)

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
