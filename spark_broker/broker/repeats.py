"""Keeps repeated lines out of the log: what is tried ten times a second is logged once a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

INTERVAL_S = 1.0
MAX_LINES = 1000
"""How many different lines are remembered. Beyond it, the oldest is forgotten."""


class Repeats(logging.Filter):
    """Drops a line if the same text was let through less than INTERVAL_S ago. For a handler, not a logger."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._said_s: dict[tuple[str, int, str], float] = {}  # in the order in which they were let through

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is to be written."""
        key, now_s = (record.name, record.levelno, record.getMessage()), self._clock_s()
        with self._lock:
            last_s = self._said_s.get(key)
            if last_s is not None and now_s - last_s < INTERVAL_S:
                return False
            self._said_s.pop(key, None)
            self._said_s[key] = now_s
            if len(self._said_s) > MAX_LINES:
                del self._said_s[next(iter(self._said_s))]
        return True
