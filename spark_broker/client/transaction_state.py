"""A producer's transaction, for many threads: a lock around `TransactionMachine`, which has the rules.

An admitted append belongs to the transaction that is open then. A transaction ends only when no append is under way. So
none of its batches can slip into the next transaction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from spark_broker.client.retry import Deadline
from spark_broker.client.transaction_machine import Phase, TransactionMachine
from spark_broker.errors import RequestTimedOutError, SparkBrokerError, TransactionAbortableError
from spark_broker.interrupts import Condition


class ProducerTransaction:
    """Safe for use by many threads. As a context manager it admits one append, and learns when that is done. An append
    that ends in an exception of another kind than ours may have been done in part: the transaction can only be aborted.

    `on_refusal` is called without the lock, with the error that refuses appends from then on. It is called before the
    append that failed counts as done. The methods raise what the machine's methods of the same names raise.
    """

    def __init__(self, on_refusal: Callable[[SparkBrokerError], None]) -> None:
        self._machine = TransactionMachine()
        self._on_refusal = on_refusal
        self._lock = threading.Lock()
        self._quiet = Condition(self._lock)
        self._under_way: dict[int, int] = {}  # appends, by thread

    @property
    def phase(self) -> Phase:
        return self._machine.phase

    @property
    def touched(self) -> bool:
        return self._machine.touched

    @property
    def awaits_outcome(self) -> bool:
        return self._machine.awaits_outcome

    def __enter__(self) -> Self:
        """Raises InvalidTxnStateError, TransactionAbortableError or ProducerFencedError when no append is admitted."""
        here = threading.get_ident()
        with self._lock:
            self._machine.admit()
            self._under_way[here] = self._under_way.get(here, 0) + 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        here = threading.get_ident()
        if error is not None and not isinstance(error, SparkBrokerError):
            # Ctrl-C, say. Nobody knows how much of the append is in the transaction.
            self.append_failed(TransactionAbortableError(f"a call was ended by {type(error).__name__}"))
        with self._lock:
            left = self._under_way.pop(here, 0) - 1
            if left > 0:
                self._under_way[here] = left
            else:
                self._quiet.notify_all()

    def check(self) -> None:
        """Raises what an append would raise."""
        with self._lock:
            self._machine.check_append()

    def raise_failure(self) -> None:
        with self._lock:
            self._machine.raise_failure()

    def append_failed(self, error: SparkBrokerError) -> None:
        with self._lock:
            refusal = self._machine.append_failed(error)
        if refusal is not None:
            self._on_refusal(refusal)

    def begin(self) -> None:
        with self._lock:
            self._machine.begin()

    def close(self, *, committing: bool) -> None:
        with self._lock:
            self._machine.close(committing=committing)

    def reopen(self) -> None:
        with self._lock:
            self._machine.reopen()

    def await_quiet(self, deadline: Deadline) -> None:
        """Wait until no append of another thread is under way. Raises RequestTimedOutError.

        One of this thread that still counts was interrupted by a signal handler before it was left.
        """
        with self._lock:
            self._under_way.pop(threading.get_ident(), None)
            if not self._quiet.wait_for(lambda: not self._under_way, deadline.remaining_s):
                raise RequestTimedOutError("an append of another thread is still under way")

    def end(self) -> None:
        with self._lock:
            self._machine.end()

    def refused(self, error: SparkBrokerError) -> SparkBrokerError | None:
        with self._lock:
            answer = self._machine.refused(error)
            failed = self._machine.phase is Phase.FAILED
        if failed and answer is not None:
            self._on_refusal(answer)
        return answer

    def identified(self) -> None:
        with self._lock:
            self._machine.identified()
