"""What the invariants remember: the committed log of each partition, and what each machine's replica holds of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from spark_broker.protocol.frame import BatchHeader
from spark_broker.testing.simulation.violation import ViolationError

Key = tuple[str, int]


@dataclass(slots=True)
class CommittedLog:
    """Every batch that ever was below a replica's high watermark. It only grows.

    `values`: by base offset, kept only where retention may remove them from every replica.
    """

    name: str
    headers: list[BatchHeader] = field(default_factory=list)
    values: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    end_offset: int = 0

    def at(self, base_offset: int) -> BatchHeader | None:
        """The batch that begins there."""
        index = bisect_left(self.headers, base_offset, key=_base)
        header = self.headers[index] if index < len(self.headers) else None
        return header if header is not None and header.base_offset == base_offset else None

    def between(self, start: int, end: int) -> list[BatchHeader]:
        """The batches that begin from `start` to `end` (exclusive)."""
        first, stop = (bisect_left(self.headers, offset, key=_base) for offset in (start, end))
        return self.headers[first:stop]

    def extend(self, headers: Iterable[BatchHeader], high_watermark: int, who: str) -> bool:
        """Add the batches below a replica's high watermark; returns whether any of them is new."""
        grown = False
        for header in headers:
            if header.base_offset >= high_watermark:
                break
            if header.base_offset < self.end_offset:
                continue
            self.headers.append(header)
            self.end_offset = header.next_offset
            grown = True
        if high_watermark > self.end_offset:
            message = f"{who} has a high watermark of {high_watermark}, its log ends before"
            raise ViolationError("committed records exist", message, self.name)
        return grown


@dataclass(slots=True)
class ReplicaShadow:
    """One machine's replica as it was after the last event.

    `matched`: up to this offset it holds exactly what is committed; below `start_offset` that is assumed.
    `interrupted`: its process ended while it changed the files, which may be ahead of this shadow or behind it.
    """

    headers: list[BatchHeader] = field(default_factory=list)
    start_offset: int = 0
    end_offset: int = 0
    matched: int = 0
    high_watermark: int = 0
    process: str = ""
    interrupted: bool = False
    state: tuple[object, ...] = ()

    def as_committed(self) -> CommittedLog:
        """What it holds, as if all of it were committed."""
        return CommittedLog(self.process, self.headers, end_offset=self.end_offset)

    def cut(self, end_offset: int) -> None:
        """The log ends there now."""
        self.headers = self.headers[: bisect_left(self.headers, end_offset, key=_base)]
        self.end_offset = end_offset
        self.matched = min(self.matched, end_offset)

    def begin_at(self, start_offset: int) -> None:
        """The log begins there now; nothing below is checked any more."""
        self.start_offset = start_offset
        self.matched = max(self.matched, start_offset)

    def append(self, headers: Iterable[BatchHeader]) -> None:
        """Add the batches that were written since."""
        self.headers += headers
        if self.headers:
            self.end_offset = self.headers[-1].next_offset

    def match(self, committed: CommittedLog) -> BatchHeader | None:
        """Compare with what is committed; returns the first batch that differs from the committed one."""
        if self.matched >= committed.end_offset:
            return None
        index = bisect_left(self.headers, self.matched, key=_base)
        theirs = bisect_left(committed.headers, self.matched, key=_base)
        while index < len(self.headers) and theirs < len(committed.headers):
            if self.headers[index] != committed.headers[theirs]:
                return self.headers[index]
            self.matched = self.headers[index].next_offset
            index += 1
            theirs += 1
        return None


def _base(header: BatchHeader) -> int:
    return header.base_offset
