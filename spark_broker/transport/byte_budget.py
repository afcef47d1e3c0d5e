"""Bytes that a process holds for its peers. Those of requests are reserved before they come, and given back when
they were worked on. `answer_room.py` says what holds for answers to calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Waiter:
    """`told`: there was room for it since it was refused last."""

    size: int
    there_is_room: Callable[[], object]
    told: bool = False


class ByteBudget:
    """Safe from any thread. A frame that is larger than all of it is taken alone. First come, first served: small
    frames do not keep a large one waiting for ever.

    Invariants, under the lock: `_used` is the sum of what was reserved and not released; whoever waits was refused. If
    there is room for the first who waits, it is told.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._used = 0
        self._waiting: dict[object, _Waiter] = {}  # in the order of their first try

    @property
    def used_bytes(self) -> int:
        """What is reserved now."""
        return self._used

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for room."""
        return bool(self._waiting)

    def reserve(self, size: int, who: object, there_is_room: Callable[[], object]) -> bool:
        """Reserve so many bytes, or return False: then `there_is_room` is called once when there is room, from another
        thread, and `who` tries again, or is to `forget` that it waits. Others wait behind it until then."""
        with self._lock:
            if next(iter(self._waiting), who) is not who or not self._fits(size):
                self._waiting.setdefault(who, _Waiter(size, there_is_room)).told = False
                return False
            self._used += size
            self._waiting.pop(who, None)
            tell = self._next()
        tell()
        return True

    def release(self, size: int) -> None:
        """These bytes are not needed any more."""
        self.change(-size)

    def change(self, size: int) -> None:
        """So many more bytes are held than were reserved, or fewer. There may be too many then: whoever holds them
        cannot wait."""
        with self._lock:
            self._used += size
            tell = self._next()
        tell()

    def forget(self, who: object) -> None:
        """It does not wait any more."""
        with self._lock:
            self._waiting.pop(who, None)
            tell = self._next()
        tell()

    def _fits(self, size: int) -> bool:
        return not self._used or self._used + size <= self._limit

    def _next(self) -> Callable[[], object]:
        """What tells the first who waits that there is room, if there is. Under the lock; it is called outside."""
        waiter = next(iter(self._waiting.values()), None)
        if waiter is None or waiter.told or not self._fits(waiter.size):
            return _nobody
        waiter.told = True
        return waiter.there_is_room


def _nobody() -> None:
    """Nobody waits, or there is no room."""
