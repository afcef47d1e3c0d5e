"""Failures of appends that nobody has looked at: counted, so that `close` can tell of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from spark_broker.errors import SparkBrokerError, again

T = TypeVar("T")

Callback = Callable[[Future[T]], object]


class Unseen:
    """How many Futures failed that nobody has looked at, by the type of their error. Safe for use by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[type[SparkBrokerError], SparkBrokerError] = {}
        self._counts: dict[type[SparkBrokerError], int] = {}

    def failed(self, error: SparkBrokerError, count: int) -> None:
        """So many Futures failed with this error, and nobody has looked at them yet."""
        kind = type(error)
        with self._lock:
            self._first.setdefault(kind, again(error))  # Its frames would keep the producer alive.
            self._counts[kind] = self._counts.get(kind, 0) + count

    def seen(self, error: SparkBrokerError) -> None:
        """Somebody looks at one of them."""
        with self._lock:
            self._counts[type(error)] -= 1

    def report(self) -> tuple[int, SparkBrokerError] | None:
        """How many there are, and the first error of the first kind. None: there are none."""
        with self._lock:
            kinds = [kind for kind in self._first if self._counts[kind]]
            return (sum(self._counts.values()), self._first[kinds[0]]) if kinds else None


def ending_itself(callback: Callback[T]) -> Callback[T]:
    """A callback that is to run in a thread of the client: SystemExit and the like end it, and not the thread."""

    def call(future: Future[T]) -> None:
        try:
            callback(future)
        except Exception:
            raise  # A Future logs it and calls the next.
        except BaseException as error:
            raise RuntimeError(f"a done-callback raised {error!r}, which ends nothing but the callback") from error

    return call


class WatchedFuture(Future[T], Generic[T]):
    """A Future that counts as unseen when it fails, until somebody asks for its result, its error or a callback."""

    def __init__(self, unseen: Unseen) -> None:
        super().__init__()
        self._unseen = unseen
        self._failure: SparkBrokerError | None = None
        self._looked_at = False

    def set_exception(self, exception: BaseException | None) -> None:
        with self._condition:
            if isinstance(exception, SparkBrokerError) and not self._looked_at:
                self._failure = exception
                self._unseen.failed(exception, 1)
        super().set_exception(exception)

    def result(self, timeout: float | None = None) -> T:
        try:
            return super().result(timeout)
        except SparkBrokerError:
            self._look()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._look()
        return error

    def add_done_callback(self, fn: Callback[T]) -> None:
        self._look()
        super().add_done_callback(fn if self.done() else ending_itself(fn))

    def _look(self) -> None:
        with self._condition:
            failure, self._failure, self._looked_at = self._failure, None, True
        if failure is not None:
            self._unseen.seen(failure)
