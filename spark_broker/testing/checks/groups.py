"""Committed offsets of groups: never past records that were not handed out, never forgotten."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from spark_broker.model import TopicPartition
from spark_broker.testing.checks.facts import Facts, Outcome
from spark_broker.testing.checks.violations import Violation, ViolationKind
from spark_broker.testing.history import Isolation, OffsetsCommitted, OffsetsFetched, Polled, Positioned, Truncated

Key = tuple[str, TopicPartition]


@dataclass(slots=True)
class _Progress:
    """What one group has read and committed of one partition."""

    isolation: Isolation
    checked: int  # All visible records below were handed out, or lie before the group's beginning.
    handed_out: list[tuple[int, int]] = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)
    """The commits that count, as (position, the largest offset up to there), in order."""

    def committed_before(self, position: int) -> int:
        """The largest offset whose commit is recorded before this position; -1: none is."""
        at = bisect_left(self.committed, (position,))
        return self.committed[at - 1][1] if at else -1


def check_groups(facts: Facts) -> Iterator[Violation]:
    """Judge the committed offsets of every group, in the order of events."""
    groups: dict[Key, _Progress] = {}
    if facts.kinds.isdisjoint({OffsetsCommitted, OffsetsFetched}):
        return
    for position, event in enumerate(facts.events):
        match event:
            case Positioned() | Polled() if event.reader in facts.readers and facts.readers[event.reader].group:
                _follow(facts, groups, event)
            case Truncated() if event.reader in facts.readers and facts.readers[event.reader].group:
                _cut(groups.get((facts.readers[event.reader].group, event.partition)), event.offset)
            case OffsetsCommitted():
                progress = groups.setdefault((event.group, event.partition), _Progress(Isolation.READ_COMMITTED, 0))
                yield from _check_commit(facts, progress, event, position)
            case OffsetsFetched():
                progress = groups.setdefault((event.group, event.partition), _Progress(Isolation.READ_COMMITTED, 0))
                offset = -1 if event.offset is None else event.offset
                committed = progress.committed_before(position if event.began < 0 else event.began)
                if offset < committed:
                    detail = f"group {event.group!r} had committed {committed}"
                    yield Violation(ViolationKind.OFFSET_LOST, event.partition, offset, detail)
            case _:
                pass


def _follow(facts: Facts, groups: dict[Key, _Progress], event: Positioned | Polled) -> None:
    opened = facts.readers[event.reader]
    key = (opened.group, event.partition)
    if key not in groups:
        begins = event.offset if isinstance(event, Positioned) else event.base_offset
        if begins is None:
            return  # It begins where its first poll does.
        groups[key] = _Progress(opened.isolation, begins)
    if isinstance(event, Polled):
        groups[key].handed_out.append((event.base_offset, event.base_offset + len(event.values)))


def _cut(progress: _Progress | None, offset: int) -> None:
    """A member was notified of a truncation (KIP-320): what the group read and committed past it counts no more."""
    if progress is not None:
        progress.checked = min(progress.checked, offset)
        progress.committed = [(position, min(committed, offset)) for position, committed in progress.committed]
        progress.handed_out = [(begin, min(end, offset)) for begin, end in progress.handed_out if begin < offset]


def _check_commit(facts: Facts, progress: _Progress, event: OffsetsCommitted, position: int) -> Iterator[Violation]:
    visible = facts.visible(progress.isolation, event.partition)
    reached = progress.checked
    for begin, end in [*sorted(progress.handed_out), (event.offset, event.offset)]:
        stop = min(begin, event.offset)
        first = bisect_left(visible, reached)
        if first < len(visible) and visible[first] < stop and event.partition not in facts.unnoticed:
            count = bisect_left(visible, stop) - first
            detail = (
                f"group {event.group!r} committed {event.offset}; {count} records from {visible[first]} on were not"
            )
            yield Violation(
                ViolationKind.OFFSET_PASSED_RECORDS, event.partition, visible[first], f"{detail} handed out"
            )
        reached = max(reached, end, stop)
    progress.checked = max(progress.checked, event.offset)
    progress.handed_out = [(begin, end) for begin, end in progress.handed_out if end > progress.checked]
    certain = event.transaction is None or facts.transactions[event.transaction].outcome is Outcome.COMMITTED
    if certain:
        progress.committed.append((position, max(progress.committed_before(position), event.offset)))
