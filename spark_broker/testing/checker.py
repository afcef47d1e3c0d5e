"""Judges a history: is every acknowledged record there, once, where it was acknowledged, for every reader, for good?

The topic must keep everything: no retention, no compaction, no aborted transactions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition
from spark_broker.testing.history import (
    Acknowledged,
    Event,
    Failed,
    History,
    Invoked,
    Polled,
    Positioned,
    Snapshot,
    Stored,
)

SHOWN_MAX = 20
"""Violations that a report spells out."""

Place = tuple[TopicPartition, int]


class Kind(Enum):
    """What can be wrong."""

    LOST = "acknowledged, and nowhere"
    NOT_DELIVERED = "acknowledged and stored, and no reader was given it"
    DUPLICATE = "one value at two offsets"
    INCONSISTENT_OFFSETS = "two values at one offset"
    MISPLACED = "acknowledged at one offset, found at another"
    REORDERED = "one writer's appends to one partition changed their order"
    SKIPPED = "a poll skipped offsets"
    WENT_BACK = "a poll went back"
    CHANGED = "what was read is different later"
    SOURCES_DIFFER = "two readers disagree about what is there"
    UNKNOWN_VALUE = "a value that nobody appended"


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding. `offset` is where it shows."""

    kind: Kind
    partition: TopicPartition
    offset: int
    detail: str

    def __str__(self) -> str:
        return f"{self.kind.name} at {self.partition}, offset {self.offset}: {self.detail} ({self.kind.value})"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The violations, and how much was there to check: a run that acknowledged nothing proves nothing."""

    violations: tuple[Violation, ...]
    acknowledged_values: int
    failed_values: int
    values_read: int

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        counts = f"{self.acknowledged_values} values acknowledged, {self.failed_values} failed, {self.values_read} read"
        shown = [str(violation) for violation in self.violations[:SHOWN_MAX]]
        more = len(self.violations) - len(shown)
        return "\n".join(
            [f"{len(self.violations)} violations; {counts}", *shown, *([f"and {more} more"] if more else [])]
        )


def check_history(history: History, stored: Iterable[Stored] = ()) -> CheckResult:
    """Check a history. `stored`: what the replicas' files hold, to tell a lost value from one that was not delivered.

    Raises InvalidDataError for a history that cannot be judged: a value appended twice, no snapshot at the end.
    """
    facts = _Facts(history.events)
    if not facts.snapshots:
        raise InvalidDataError("the history has no snapshot: nothing says what was there at the end")
    violations = [
        *_check_acknowledgements(facts),
        *_check_order(facts),
        *_check_polls(history.events),
        *_check_changes(facts),
        *_check_values(facts),
        *_check_acknowledged(facts, {row.value for row in stored}),
        *_check_sources(facts.snapshots),
    ]
    return CheckResult(
        tuple(violations),
        acknowledged_values=len(facts.acknowledged),
        failed_values=sum(len(facts.invoked[operation].values) for operation in facts.failed),
        values_read=len(facts.places),
    )


class _Facts:
    """The history, by what the checks look things up by."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.invoked: dict[int, Invoked] = {}
        self.base_offsets: dict[int, int] = {}  # by operation, in order of invocation once sorted
        self.failed: set[int] = set()
        self.values: set[bytes] = set()
        self.reads: list[tuple[str, Stored]] = []  # in order
        self.snapshots: list[Snapshot] = []
        for event in events:
            self._add(event)
        self.acknowledged: dict[bytes, Place] = {
            value: (self.invoked[operation].partition, base_offset + at)
            for operation, base_offset in self.base_offsets.items()
            for at, value in enumerate(self.invoked[operation].values)
        }
        self.places: dict[bytes, set[Place]] = defaultdict(set)
        for _, row in self.reads:
            self.places[row.value].add((row.partition, row.offset))

    def _add(self, event: Event) -> None:
        match event:
            case Invoked():
                if not self.values.isdisjoint(event.values) or len(set(event.values)) < len(event.values):
                    raise InvalidDataError(
                        f"operation {event.operation} appends a value a second time: make them unique"
                    )
                self.values.update(event.values)
                self.invoked[event.operation] = event
            case Acknowledged():
                self.base_offsets[event.operation] = event.base_offset
            case Failed():
                self.failed.add(event.operation)
            case Polled():
                self.reads += [(event.reader, row) for row in rows_of(event)]
            case Snapshot():
                self.reads += [(event.source, row) for row in event.rows]
                self.snapshots.append(event)
            case Positioned():
                pass


def rows_of(polled: Polled) -> Iterator[Stored]:
    """The records of a poll, each with its offset."""
    for at, value in enumerate(polled.values):
        yield Stored(polled.partition, polled.base_offset + at, value)


def _check_acknowledgements(facts: _Facts) -> Iterator[Violation]:
    """No offset is promised to two values."""
    promised: dict[Place, bytes] = {}
    for value, place in facts.acknowledged.items():
        first = promised.setdefault(place, value)
        if first != value:
            yield Violation(Kind.INCONSISTENT_OFFSETS, *place, f"acknowledged for {first!r} and for {value!r}")


def _check_order(facts: _Facts) -> Iterator[Violation]:
    """A writer's acknowledged appends to a partition are in the order in which it began them."""
    last: dict[tuple[str, TopicPartition], int] = {}
    for operation in sorted(facts.base_offsets):
        invoked, offset = facts.invoked[operation], facts.base_offsets[operation]
        key = (invoked.writer, invoked.partition)
        if offset <= last.get(key, -1):
            detail = f"operation {operation} of {invoked.writer} lies before its earlier one at {last[key]}"
            yield Violation(Kind.REORDERED, invoked.partition, offset, detail)
        last[key] = max(offset, last.get(key, -1))


def _check_polls(events: Iterable[Event]) -> Iterator[Violation]:
    """Inside one assignment a reader is given every offset, one after the other."""
    expected: dict[tuple[str, TopicPartition], int] = {}
    for event in events:
        if isinstance(event, Positioned):
            expected.pop((event.reader, event.partition), None)
        if not isinstance(event, Polled):
            continue
        key = (event.reader, event.partition)
        due = expected.get(key, event.base_offset)
        if event.base_offset != due:
            kind = Kind.SKIPPED if event.base_offset > due else Kind.WENT_BACK
            yield Violation(kind, event.partition, event.base_offset, f"{event.reader} was due {due}")
        expected[key] = event.base_offset + len(event.values)


def _check_changes(facts: _Facts) -> Iterator[Violation]:
    """Every read of an offset gives one value, the acknowledged one, and goes on giving it."""
    promised = {place: value for value, place in facts.acknowledged.items()}
    seen: dict[Place, tuple[str, bytes]] = {}
    for source, row in facts.reads:
        place = (row.partition, row.offset)
        first_source, first = seen.setdefault(place, (source, row.value))
        if first != row.value:
            kind = Kind.INCONSISTENT_OFFSETS if first_source == source else Kind.CHANGED
            yield Violation(kind, *place, f"{first_source} read {first!r}, then {source} {row.value!r}")
        elif promised.get(place, row.value) != row.value:
            detail = f"acknowledged for {promised[place]!r}, and {source} read {row.value!r}"
            yield Violation(Kind.INCONSISTENT_OFFSETS, *place, detail)
    left = {(row.partition, row.offset) for snapshot in facts.snapshots for row in snapshot.rows}
    for place, (source, value) in seen.items():
        if place not in left:
            yield Violation(Kind.CHANGED, *place, f"{source} read {value!r}, and at the end nothing is there")


def _check_values(facts: _Facts) -> Iterator[Violation]:
    """Every value that was read was appended, and lies at one offset."""
    for value, places in facts.places.items():
        first, *others = sorted(places)
        if value not in facts.values:
            yield Violation(Kind.UNKNOWN_VALUE, *first, f"{value!r}")
        for place in others:
            yield Violation(Kind.DUPLICATE, *place, f"{value!r} is also at {first[0]}, offset {first[1]}")
    for snapshot in facts.snapshots:
        yield from _check_repeats(snapshot)


def _check_repeats(snapshot: Snapshot) -> Iterator[Violation]:
    """No row comes twice in one read."""
    seen: set[Stored] = set()
    for row in snapshot.rows:
        if row in seen:
            detail = f"{snapshot.source} was given {row.value!r} twice"
            yield Violation(Kind.DUPLICATE, row.partition, row.offset, detail)
        seen.add(row)


def _check_acknowledged(facts: _Facts, stored: set[bytes]) -> Iterator[Violation]:
    """Every acknowledged value is there at the end, where the writer was told."""
    found: Mapping[bytes, set[Place]] = defaultdict(set)
    for snapshot in facts.snapshots:
        for row in snapshot.rows:
            found[row.value].add((row.partition, row.offset))
    for value, place in facts.acknowledged.items():
        if not found[value]:
            yield Violation(Kind.NOT_DELIVERED if value in stored else Kind.LOST, *place, f"{value!r}")
        elif place not in found[value]:
            elsewhere = ", ".join(f"{partition} offset {offset}" for partition, offset in sorted(found[value]))
            yield Violation(Kind.MISPLACED, *place, f"{value!r} is at {elsewhere}")


def _check_sources(snapshots: list[Snapshot]) -> Iterator[Violation]:
    """Whoever reads everything reads the same."""
    first, *others = snapshots
    expected = set(first.rows)
    for other in others:
        rows = set(other.rows)
        for row in sorted(expected - rows):
            detail = f"{first.source} has {row.value!r}, {other.source} does not"
            yield Violation(Kind.SOURCES_DIFFER, row.partition, row.offset, detail)
        for row in sorted(rows - expected):
            detail = f"{other.source} has {row.value!r}, {first.source} does not"
            yield Violation(Kind.SOURCES_DIFFER, row.partition, row.offset, detail)
