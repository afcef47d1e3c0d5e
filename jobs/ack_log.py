"""The log of acknowledgements that a producer job leaves behind: one line of JSON for each acknowledged batch."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from spark_broker.model import RecordMetadata


class Ack(msgspec.Struct, frozen=True):
    """`count` rows from `base_offset` on are acknowledged; `time_s` is seconds since 1970."""

    time_s: float
    partition: int
    base_offset: int
    count: int


class AckLog:
    """Collects acknowledgements, and writes them to a file when there is one. Safe for use by many threads."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = path.open("ab", buffering=0) if path else None
        self._lock = threading.Lock()
        self._acks: list[Ack] = []
        self._rows = 0

    @property
    def rows(self) -> int:
        """Rows acknowledged so far."""
        return self._rows

    def add(self, acknowledged: Iterable[RecordMetadata]) -> None:
        """Log the batches of one append, acknowledged now."""
        now = time.time()
        acks = [Ack(now, stored.partition, _offset(stored), stored.count) for stored in acknowledged]
        lines = b"".join(msgspec.json.encode(ack) + b"\n" for ack in acks)
        with self._lock:
            self._acks += acks
            self._rows += sum(ack.count for ack in acks)
            if self._file is not None:
                self._file.write(lines)

    def longest_gap_s(self) -> float:
        """The longest time between two consecutive acknowledgements."""
        with self._lock:
            return longest_gap_s(self._acks)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _offset(stored: RecordMetadata) -> int:
    """The base offset of an acknowledged batch. Every batch has one, because the job's producer uses acks=all."""
    if stored.base_offset is None:
        raise ValueError(f"{stored} has no offset")
    return stored.base_offset


class AckTail:
    """Follows a log that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.acks: list[Ack] = []
        self.rows = 0

    def read(self) -> int:
        """Take in the lines that are new and whole; returns the rows acknowledged so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            new = [msgspec.json.decode(line, type=Ack) for line in whole.splitlines()]
            self.acks += new
            self.rows += sum(ack.count for ack in new)
        return self.rows


def longest_gap_s(acks: Sequence[Ack]) -> float:
    """The longest time between two consecutive acknowledgements; 0 for fewer than two."""
    times = sorted(ack.time_s for ack in acks)
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)
