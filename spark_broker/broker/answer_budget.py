"""Limits the size of answers to fetches, so that all that are on their way to clients fit into the broker's memory.

An answer gets at most half of what is free. So clients that do not read never use up the budget: the first one that
stalls holds a half, the next a quarter, and something is always left for clients that read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spark_broker.errors import invariant

FLOOR_BYTES = 65_536
"""An answer may always have this much, however little is free: otherwise no client would make progress."""


class Share:
    """What one answer may have; `keep` gives back what it does not need."""

    __slots__ = ("_budget", "bytes")

    def __init__(self, budget: AnswerBudget, size: int) -> None:
        self._budget = budget
        self.bytes = size

    def keep(self, size: int) -> None:
        """Set the actual size of the answer. It may be larger than the share, because a batch is never cut."""
        self._budget.add(size - self.bytes)
        self.bytes = size


class AnswerBudget:
    """One budget for all streams of a broker. `total_bytes` bounds all answers together. Thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all answers that are being made, or that their clients have not taken yet."""
        return self._used_bytes

    @contextmanager
    def share(self, wanted_bytes: int) -> Iterator[Share]:
        """A share of at most `wanted_bytes`. It counts as used until the block ends."""
        with self._lock:
            free = self._total_bytes - self._used_bytes
            share = Share(self, min(wanted_bytes, max(free // 2, FLOOR_BYTES)))
            self._used_bytes += share.bytes
        try:
            yield share
        finally:
            self.add(-share.bytes)

    def add(self, size: int) -> None:
        """Used by `Share`."""
        with self._lock:
            self._used_bytes += size
            invariant(self._used_bytes >= 0, "answers have given back %d bytes too many", -self._used_bytes)
