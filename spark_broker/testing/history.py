"""What clients did and saw, in one list: appends and their outcomes, polls, and whole reads at the end.

A history is plain data, so one checker (`checker.check_history`) serves simulated and real runs. Values must be unique:
that is what makes a lost, a doubled and a moved record visible.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition


class Stored(NamedTuple):
    """One record where somebody found it."""

    partition: TopicPartition
    offset: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Invoked:
    """An append of one micro-batch began. `writer`: appends of one writer to one partition keep their order."""

    operation: int
    writer: str
    partition: TopicPartition
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The append's values are at `base_offset`, `base_offset + 1`, ..."""

    operation: int
    base_offset: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The client was given an error. The values may be stored, once, or not at all."""

    operation: int
    error: str


@dataclass(frozen=True, slots=True)
class Positioned:
    """A reader was assigned a partition or sought in it: its next poll may begin anywhere."""

    reader: str
    partition: TopicPartition


@dataclass(frozen=True, slots=True)
class Polled:
    """A reader was handed these values, at `base_offset`, `base_offset + 1`, ..."""

    reader: str
    partition: TopicPartition
    base_offset: int
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that was there, read until caught up, after the last append had its outcome. `source`: who read it."""

    source: str
    rows: tuple[Stored, ...]


Event = Invoked | Acknowledged | Failed | Positioned | Polled | Snapshot


@dataclass(frozen=True, slots=True)
class History:
    """Events, each client's own in the order in which they happened to it."""

    events: tuple[Event, ...]


class HistoryRecorder:
    """Collects events from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._operations = itertools.count()
        self._acknowledged = 0
        self._changed = threading.Condition(self._lock)

    @property
    def acknowledged_count(self) -> int:
        """Appends acknowledged so far."""
        with self._lock:
            return self._acknowledged

    def wait_acknowledged(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` appends are acknowledged; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._acknowledged >= count, timeout_s)

    def invoked(self, writer: str, partition: TopicPartition, values: Iterable[bytes]) -> int:
        """An append begins; returns its operation. Raises InvalidDataError for no values."""
        batch = tuple(values)
        if not batch:
            raise InvalidDataError("an append of no values proves nothing")
        operation = next(self._operations)
        self._add(Invoked(operation, writer, partition, batch))
        return operation

    def acknowledged(self, operation: int, base_offset: int) -> None:
        with self._changed:
            self._events.append(Acknowledged(operation, base_offset))
            self._acknowledged += 1
            self._changed.notify_all()

    def failed(self, operation: int, error: BaseException) -> None:
        self._add(Failed(operation, f"{type(error).__name__}: {error}"))

    def positioned(self, reader: str, partition: TopicPartition) -> None:
        self._add(Positioned(reader, partition))

    def polled(self, reader: str, partition: TopicPartition, base_offset: int, values: Iterable[bytes]) -> None:
        self._add(Polled(reader, partition, base_offset, tuple(values)))

    def snapshot(self, source: str, rows: Iterable[Stored]) -> None:
        self._add(Snapshot(source, tuple(rows)))

    def history(self) -> History:
        """All events so far."""
        with self._lock:
            return History(tuple(self._events))

    def _add(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
