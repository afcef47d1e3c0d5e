"""The thread that drives a coordinator of this broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from spark_broker.broker.coordinator_runtime import CoordinatorRuntime
from spark_broker.threads import Worker

TICK_S = 0.1


class CoordinatorThread(Worker):
    """Pumps when it is woken, and ticks from time to time, until `stop`."""

    def __init__(self, name: str, on_bug: Callable[[BaseException], None]) -> None:
        super().__init__(name, on_bug)
        self._news = threading.Event()
        self._stopped = False
        self.coordinator: CoordinatorRuntime[Any] | None = None

    def wake(self) -> None:
        """There is something to `pump`. Called from any thread."""
        self._news.set()

    def stop(self) -> None:
        self._stopped = True
        self._news.set()

    def work(self) -> None:
        tick_due_s = 0.0
        while not self._stopped and self.coordinator is not None:
            self._news.wait(max(tick_due_s - time.monotonic(), 0))
            self._news.clear()
            self.coordinator.pump()
            if time.monotonic() >= tick_due_s:
                tick_due_s = time.monotonic() + TICK_S
                self.coordinator.tick()
