"""How large an answer to a fetch may be, so that all that are on their way to clients fit into the broker's memory.

An answer gets at most half of what is free. So a client that takes nothing never takes everything: the first one that
stalls holds a half, the next a quarter, and there is always something left for those who read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spark_broker.errors import invariant

FLOOR_BYTES = 65_536
"""What an answer may always have, however little is free: else nobody would get on."""


class Share:
    """What one answer may have; `keep` gives back what it does not need."""

    __slots__ = ("_budget", "bytes")

    def __init__(self, budget: AnswerBudget, size: int) -> None:
        self._budget = budget
        self.bytes = size

    def keep(self, size: int) -> None:
        """The answer has this size; it may be larger than the share, because a batch is never cut."""
        self._budget.add(size - self.bytes)
        self.bytes = size


class AnswerBudget:
    """One for all streams of a broker. `total_bytes`: of all answers at a time. For many threads."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Of all answers that are being made, or have not been taken by their clients."""
        return self._used_bytes

    @contextmanager
    def share(self, wanted_bytes: int) -> Iterator[Share]:
        """As long as the block lasts, this answer counts."""
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
