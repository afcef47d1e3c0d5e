"""Bytes of requests that a process holds: reserved before they are received, given back when they were worked on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ByteBudget:
    """Safe from any thread. A frame that is larger than all of it is taken alone.

    Invariants, under the lock: `_used` is the sum of what was reserved and not released; whoever waits was refused.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._used = 0
        self._waiting: dict[object, Callable[[], object]] = {}

    @property
    def used_bytes(self) -> int:
        """What is reserved now."""
        return self._used

    def reserve(self, size: int, who: object, there_is_room: Callable[[], object]) -> bool:
        """Reserve so many bytes, or return False: then `there_is_room` is called once when some were released, from
        another thread, and `who` tries again."""
        with self._lock:
            if self._used and self._used + size > self._limit:
                self._waiting[who] = there_is_room
                return False
            self._used += size
            self._waiting.pop(who, None)
            return True

    def release(self, size: int) -> None:
        """These bytes are not needed any more."""
        with self._lock:
            self._used -= size
            waiting, self._waiting = (self._waiting, {}) if size else ({}, self._waiting)
        for there_is_room in waiting.values():
            there_is_room()

    def forget(self, who: object) -> None:
        """It does not wait any more."""
        with self._lock:
            self._waiting.pop(who, None)
