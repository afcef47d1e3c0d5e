"""A client that goes on in a thread of its own until it is stopped, whatever the cluster does meanwhile."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from spark_broker.errors import RequestTimedOutError, SparkBrokerError
from spark_broker.threads import Worker

STOP_S = 120.0
BLOCK_END_S = 10.0


class ClientThread(ABC):
    """Runs `step` again and again. A SparkBrokerError is added to `errors`, and the client replaced.

    Any other error ends the thread.
    `step` returns within seconds while the cluster is well.
    """

    def __init__(self, name: str, pause_s: float) -> None:
        self.name = name
        self.pause_s = pause_s
        self.errors: list[SparkBrokerError] = []
        self._stopping = threading.Event()
        self._fatal: BaseException | None = None
        self._thread = Worker(name, self._died, self._run)

    @abstractmethod
    def step(self) -> None:
        """Do one thing. Raises SparkBrokerError when the cluster did not let it."""

    @abstractmethod
    def renew(self) -> None:
        """Close the client after an error; the next step makes another."""

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended yet."""
        return self._thread.is_alive()

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Stop after the step that is under way. Raises RequestTimedOutError, or the error that ended the thread."""
        self._stopping.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RequestTimedOutError(f"{self.name} did not end within {timeout_s} s")
        if self._fatal is not None:
            raise self._fatal

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self.pause_s):
                try:
                    self.step()
                except SparkBrokerError as error:
                    self.errors.append(error)
                    self.renew()
        finally:
            self.renew()

    def _died(self, error: BaseException) -> None:
        self._fatal = error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(BLOCK_END_S)
