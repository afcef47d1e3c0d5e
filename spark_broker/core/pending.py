"""Appends with acks=all that wait for the high watermark."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from spark_broker.errors import invariant


@dataclass(frozen=True, slots=True)
class PendingAppend:
    """An append that is answered once the high watermark reaches `required_offset`.

    Times are milliseconds of the caller's clock.
    """

    required_offset: int
    base_offset: int
    deadline_ms: int
    token: object


class PendingAppends:
    """Appends in the order of the offsets that they wait for.

    Their number is bounded by the requests that connections may have open.
    """

    def __init__(self) -> None:
        self._waiting: list[PendingAppend] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, append: PendingAppend) -> None:
        if not self._waiting or self._waiting[-1].required_offset <= append.required_offset:
            self._waiting.append(append)
        else:  # It is a retry of a batch that is older than the newest.
            insort(self._waiting, append, key=lambda waiting: waiting.required_offset)

    def take_committed(self, high_watermark: int) -> list[PendingAppend]:
        if not self._waiting:
            return []
        count = 0
        for append in self._waiting:
            if append.required_offset > high_watermark:
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def take_expired(self, now_ms: int) -> list[PendingAppend]:
        waiting = self._waiting
        ordered = not waiting or waiting[0].required_offset <= waiting[-1].required_offset
        invariant(ordered, "appends do not wait in the order of their offsets")
        expired = [append for append in self._waiting if append.deadline_ms <= now_ms]
        if expired:
            self._waiting = [append for append in self._waiting if append.deadline_ms > now_ms]
        return expired

    def take_all(self) -> list[PendingAppend]:
        taken, self._waiting = self._waiting, []
        return taken
