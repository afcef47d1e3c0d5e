"""What became of appends: acknowledged ones are there, in order; others are there once and whole, or not at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from spark_broker.model import TopicPartition
from spark_broker.testing.checks.facts import Facts, Outcome
from spark_broker.testing.checks.places import Place, places_of
from spark_broker.testing.checks.violations import Violation, ViolationKind
from spark_broker.testing.history import Invoked, Isolation, Stored

NOT_KNOWN = -1
"""The offset of a value whose append was not acknowledged."""


def check_required(facts: Facts, stored: Iterable[Stored]) -> Iterator[Violation]:
    """Every value that was promised is there at the end, at the offset that its writer was given.

    `stored` is consumed only when a value is missing, to see whether it lies in a replica's files.
    """
    doubtful: dict[bytes, Place] = {}
    for invoked in facts.required():
        if invoked.partition in facts.unclean:
            continue
        base_offset = facts.base_offsets.get(invoked.operation)
        rows = facts.final_rows(invoked.partition)
        for at, value in enumerate(invoked.values):
            offset = NOT_KNOWN if base_offset is None else base_offset + at
            final_value = rows.get(offset)
            if final_value is not value and final_value != value:
                doubtful[value] = (invoked.partition, offset)
    if not doubtful:
        return
    places = places_of(
        doubtful, (snapshot for snapshot in facts.finals if snapshot.isolation is Isolation.READ_COMMITTED)
    )
    lost = {value: place for value, place in doubtful.items() if not places[value]}
    missing = {value: place for value, place in lost.items() if value not in facts.removable}
    for value, place in doubtful.items():
        if places[value] and place not in places[value] and place[1] != NOT_KNOWN:
            elsewhere = ", ".join(f"{partition} offset {offset}" for partition, offset in sorted(places[value]))
            yield Violation(ViolationKind.MISPLACED, *place, f"{value!r} is at {elsewhere}")
    if missing:
        yield from _missing(missing, stored)


def _missing(missing: dict[bytes, Place], stored: Iterable[Stored]) -> Iterator[Violation]:
    copies: dict[bytes, set[str]] = defaultdict(set)
    for row in stored:
        if row.value in missing:
            copies[row.value].add(f"{row.where or 'a replica'} has it at {row.partition}, offset {row.offset}")
    for value, place in missing.items():
        if value in copies:
            yield Violation(ViolationKind.NOT_DELIVERED, *place, f"{value!r}; {'; '.join(sorted(copies[value]))}")
        else:
            yield Violation(ViolationKind.LOST, *place, f"{value!r}")


def check_order(facts: Facts) -> Iterator[Violation]:
    """A writer's acknowledged appends to a partition are in the order in which it began them."""
    last: dict[tuple[str, TopicPartition], int] = {}
    for operation in sorted(facts.base_offsets):
        invoked, offset = facts.invoked[operation], facts.base_offsets[operation]
        if invoked.partition in facts.unclean:
            continue
        key = (invoked.writer, invoked.partition)
        if offset <= last.get(key, -1):
            detail = f"operation {operation} of {invoked.writer} lies before its earlier one at {last[key]}"
            yield Violation(ViolationKind.REORDERED, invoked.partition, offset, detail)
        last[key] = max(offset, last.get(key, -1))


def check_whole_batches(facts: Facts) -> Iterator[Violation]:
    """A micro-batch of unknown outcome is there whole, in its partition and in one piece, or not at all."""
    unclear = [
        invoked
        for operation, invoked in facts.invoked.items()
        if operation not in facts.base_offsets
        and invoked.partition not in facts.unclean
        and not facts.final_values.isdisjoint(invoked.values)
    ]
    places = places_of((value for invoked in unclear for value in invoked.values), facts.finals)
    for invoked in unclear:
        yield from _pieces(facts, invoked, places)


def _pieces(facts: Facts, invoked: Invoked, places: dict[bytes, set[Place]]) -> Iterator[Violation]:
    first = min(place for value in invoked.values for place in places.get(value, ()))
    present_values = [value for value in invoked.values if places.get(value)]
    needed_values = [value for value in invoked.values if places.get(value) or value not in facts.removable]
    if len(present_values) < len(needed_values):
        if invoked.transaction is None or facts.transactions[invoked.transaction].outcome is not Outcome.COMMITTED:
            detail = f"{len(present_values)} of {len(invoked.values)} values of operation {invoked.operation} are there"
            yield Violation(ViolationKind.TORN_BATCH, *first, detail)
        return
    begins = first[1] - invoked.values.index(present_values[0])
    for at, value in enumerate(invoked.values):
        if value in present_values and (invoked.partition, begins + at) not in places[value]:
            detail = f"{value!r} of operation {invoked.operation} is not {at} after {invoked.values[0]!r}"
            yield Violation(ViolationKind.TORN_BATCH, *min(places[value]), detail)
            return
