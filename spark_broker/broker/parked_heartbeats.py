"""Heartbeats of consumer groups whose answers are held back, because their members have nothing to do."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spark_broker.broker.reply import Reply

NEVER_MS = 2**62

ENTRIES_MIN = 1000
"""Entries of heartbeats that were answered early stay in the heap. Beyond this number, half of it may be such ones."""


class ParkedKey(NamedTuple):
    """`number`: of the shard's partition."""

    number: int
    group_id: str
    member_id: str


@dataclass(frozen=True, slots=True)
class Parked:
    """A heartbeat. `due_ms`: boot-time clock; it is answered then, whatever happens."""

    sequence: int
    reply: Reply
    due_ms: int


class ParkedHeartbeats:
    """One heartbeat of each member: its latest."""

    def __init__(self) -> None:
        self._parked: dict[ParkedKey, Parked] = {}
        self._due: list[tuple[int, ParkedKey]] = []

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, key: ParkedKey, parked: Parked) -> None:
        """Hold an answer back. The member has no other one here."""
        self._parked[key] = parked
        heapq.heappush(self._due, (parked.due_ms, key))
        if len(self._due) > ENTRIES_MIN and len(self._due) > 2 * len(self._parked):
            self._due = [(parked.due_ms, key) for key, parked in self._parked.items()]
            heapq.heapify(self._due)

    def take(self, key: ParkedKey) -> Parked | None:
        return self._parked.pop(key, None)

    def take_of(self, number: int) -> Iterator[Parked]:
        """Every heartbeat of a shard."""
        for key in [key for key in self._parked if key.number == number]:
            yield self._parked.pop(key)

    @property
    def next_due_ms(self) -> int:
        """No answer is due before this time."""
        return self._due[0][0] if self._due else NEVER_MS

    def take_due(self, now_ms: int) -> Iterator[tuple[ParkedKey, Parked]]:
        """The heartbeats that are to be answered now."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, key = heapq.heappop(self._due)
            parked = self._parked.get(key)
            if parked is not None and parked.due_ms == due_ms:
                yield key, self._parked.pop(key)
