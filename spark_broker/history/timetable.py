"""When the cluster tiers which topic. Pure: times in ms of any clock that never goes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class RunKind(Enum):
    """What a run is for."""

    RECORDS = "records"  # only if there are new ones: they are due in the table
    WHOLE = "whole"  # retention, deletions and what an earlier run left, too


@dataclass
class _Entry:
    commit_interval_ms: int
    began_ms: int  # the last run of any kind
    whole_ms: int  # the last run of the whole kind


class Timetable:
    """Topics by their id. A topic is due `interval_ms` after its last whole run, and its records
    `delta.commit.interval.ms` after the last run of any kind.
    """

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._entries: dict[str, _Entry] = {}

    def show(self, commit_intervals_ms: Mapping[str, int], now_ms: int) -> None:
        """These are the topics now, with their `delta.commit.interval.ms` (-1: none). A new one's times begin now."""
        entries = {}
        for topic_id, interval_ms in commit_intervals_ms.items():
            entry = self._entries.get(topic_id) or _Entry(interval_ms, now_ms, now_ms)
            entry.commit_interval_ms = interval_ms
            entries[topic_id] = entry
        self._entries = entries

    def due(self, now_ms: int) -> list[tuple[str, RunKind]]:
        """What is to run now, with what has waited longest first."""
        waiting = sorted((at_ms, topic_id) for topic_id in self._entries if (at_ms := self.next_ms(topic_id)) <= now_ms)
        return [(topic_id, self._kind(self._entries[topic_id], now_ms)) for _, topic_id in waiting]

    def ran(self, topic_id: str, kind: RunKind, began_ms: int) -> None:
        """A run has ended, whatever came of it. `began_ms`: records from before it are in the table if it succeeded."""
        entry = self._entries.get(topic_id)
        if entry is not None:
            entry.began_ms = began_ms
            if kind is RunKind.WHOLE:
                entry.whole_ms = began_ms

    def next_ms(self, topic_id: str) -> int:
        """When the topic is due. Raises KeyError."""
        entry = self._entries[topic_id]
        whole = entry.whole_ms + self._interval_ms
        return whole if entry.commit_interval_ms < 0 else min(whole, entry.began_ms + entry.commit_interval_ms)

    def wait_ms(self, now_ms: int, longest_ms: int) -> int:
        """How long nothing is due; at most `longest_ms`."""
        times = [self.next_ms(topic_id) - now_ms for topic_id in self._entries]
        return max(0, min([longest_ms, self._interval_ms, *times]))

    def _kind(self, entry: _Entry, now_ms: int) -> RunKind:
        return RunKind.WHOLE if entry.whole_ms + self._interval_ms <= now_ms else RunKind.RECORDS
