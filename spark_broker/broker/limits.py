"""The limits of this process: the log says once in a while that one was reached."""

from __future__ import annotations

import logging
import threading

from spark_broker.broker.clock import Clock
from spark_broker.errors import ProcessLimitError, SparkBrokerError, StorageRefusedError

logger = logging.getLogger(__name__)

QUIET_MS = 30_000
"""A limit that is reached refuses many things: the log has one line in this time."""


class Limits:
    """Safe from any thread, also under partitions' locks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said_ms: int | None = None  # Guarded by _lock.

    def refused(self, error: StorageRefusedError) -> None:
        """Something was refused because a limit of the process is reached."""
        now_ms = self._clock.boottime_ms()
        with self._lock:
            if self._said_ms is not None and now_ms - self._said_ms < QUIET_MS:
                return
            self._said_ms = now_ms
        logger.warning("this broker has reached a limit of its process, and refuses what does not fit: %s", error)


def is_news(before: SparkBrokerError | None, error: SparkBrokerError) -> bool:
    """Whether something fails for another reason than before. What a limit has left differs each time, and is none."""
    if type(before) is type(error) and isinstance(error, ProcessLimitError):
        return False
    return before is None or before.message != error.message
