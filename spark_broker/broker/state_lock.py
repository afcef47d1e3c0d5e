"""A lock around state that is changed in several steps."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final

from spark_broker.errors import InvariantError, SparkBrokerError


class ForeseenError(Exception):
    """Base of errors that are no SparkBrokerError, and are raised under a lock on purpose: nothing is half changed."""


EXPECTED: Final = (SparkBrokerError, InvariantError, ForeseenError)
"""Code under a lock raises these when it has left the state as it has to be, or says itself that it has not."""


class StateLock:
    """Reentrant. An exception that nobody expects leaves its block as an InvariantError, and so ends the process: the
    state may be half changed, and no later holder could rely on it.

    Elsewhere such an exception ends only the call in hand (`transport/server.py`). A block that only reads holds
    `reading`: what goes wrong there has changed nothing.
    """

    __slots__ = ("reading",)

    def __init__(self) -> None:
        self.reading: Final = threading.RLock()

    def __enter__(self) -> None:
        self.reading.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reading.release()
        if isinstance(error, Exception) and not isinstance(error, EXPECTED):
            raise InvariantError(f"a change of what a lock guards failed half-way: {error!r}") from error
