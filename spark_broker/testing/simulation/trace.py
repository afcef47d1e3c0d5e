"""What happened in a schedule: every event for the comparison of two runs, and notes for people."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class TraceKind(StrEnum):
    """What a note is about. It decides how the transcript shows the note."""

    FAULT = "fault"
    PROCESS = "process"
    METADATA = "metadata"
    REPLICA = "replica"
    CLIENT = "client"
    VIOLATION = "violation"


@dataclass(frozen=True, slots=True)
class TraceNote:
    """One line of the story. `partition`: which one it is about, if it is about one."""

    time_us: int
    who: str
    kind: TraceKind
    text: str
    partition: str = ""


class Trace:
    """Bounded by the schedule. `counts`: how often things happened, for the coverage of many schedules."""

    def __init__(self, *, keep_notes: bool = True) -> None:
        self.notes: list[TraceNote] = []
        self.counts: dict[str, int] = {}
        self.now_us = 0
        self._keep_notes = keep_notes
        self._events: list[tuple[int, str, str]] = []

    def event(self, time_us: int, who: str, label: str) -> None:
        self.now_us = time_us
        self._events.append((time_us, who, label))

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def wants_notes(self) -> bool:
        """Whether notes are kept: otherwise a caller need not compose a text."""
        return self._keep_notes

    def note(self, who: str, kind: TraceKind, text: str, partition: str = "") -> None:
        if self._keep_notes:
            self.notes.append(TraceNote(self.now_us, who, kind, text, partition))

    def digest(self) -> str:
        """A hash of everything that happened, and when: two runs of a seed have the same."""
        digest = hashlib.sha256()
        for event in self._events:
            digest.update(repr(event).encode())
        for note in self.notes:
            digest.update(repr(note).encode())
        return digest.hexdigest()
