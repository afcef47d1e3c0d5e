"""Wakes one waiting stream when its partitions have news."""

from __future__ import annotations

import threading
from collections.abc import Hashable

WAIT_MAX_MS = 60_000
"""The longest that a client may want to wait for news: as long as fetch.max.wait.ms may be. A request that waits takes
room, and a thread."""


class Notifier:
    """Which partitions have news since the last `take`; bounded by the number of partitions that a stream names."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._news: dict[Hashable, None] = {}  # in order of arrival, which depends on no hash
        self._interrupted = False

    def notify(self, key: Hashable) -> None:
        with self._condition:
            self._news[key] = None
            self._condition.notify()

    def interrupt(self) -> None:
        """End every wait, now and from now on: the client that would get the news has left."""
        with self._condition:
            self._interrupted = True
            self._condition.notify()

    def wait(self, timeout_s: float) -> bool:
        """Wait for news; False when there is none in time, or the wait was interrupted."""
        with self._condition:
            self._condition.wait_for(lambda: bool(self._news) or self._interrupted, timeout_s)
            return bool(self._news)

    def take(self) -> list[Hashable]:
        with self._condition:
            news, self._news = self._news, {}
            return list(news)
