"""Where values lie: one value an offset, one offset a value, and every reader reads the same, for good."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from spark_broker.model import TopicPartition
from spark_broker.testing.checks.facts import Facts, Outcome, Read, Table, table_of
from spark_broker.testing.checks.violations import Violation, ViolationKind
from spark_broker.testing.history import Isolation, Snapshot, rows_of

Place = tuple[TopicPartition, int]


def check_promises(facts: Facts) -> Iterator[Violation]:
    """No offset is promised to two values."""
    promised: Table = {}
    for operation, base_offset in facts.base_offsets.items():
        invoked = facts.invoked[operation]
        rows = promised.setdefault(invoked.partition, {})
        for offset, value in enumerate(invoked.values, base_offset):
            first = rows.setdefault(offset, value)
            if first is not value and invoked.partition not in facts.unclean:
                detail = f"acknowledged for {first!r} and for {value!r}"
                yield Violation(ViolationKind.INCONSISTENT_OFFSETS, invoked.partition, offset, detail)
    for read in settled_reads(facts):
        rows = promised.get(read.run.partition, {})
        if read.run.partition in facts.unclean:
            continue
        for offset, value in enumerate(read.run.values, read.run.base_offset):
            first = rows.get(offset, value)
            if first is not value and first != value:
                detail = f"acknowledged for {first!r}, and {read.source} read {value!r}"
                yield Violation(ViolationKind.INCONSISTENT_OFFSETS, read.run.partition, offset, detail)


def check_reads(facts: Facts) -> Iterator[Violation]:
    """All reads of an offset give the same value. Every value that is read was appended, and is at one offset."""
    seen: Table = {}
    others: list[tuple[Place, bytes]] = []
    for read in settled_reads(facts):
        partition = read.run.partition
        rows = seen.setdefault(partition, {})
        for offset, value in enumerate(read.run.values, read.run.base_offset):
            first = rows.setdefault(offset, value)
            if first is not value and first != value:
                others.append(((partition, offset), value))
                yield _changed(facts, read.source, (partition, offset), first, value)
    yield from _gone(facts, seen)
    yield from _doubled_or_unknown(facts, seen, others)


def settled_reads(facts: Facts) -> Iterator[Read]:
    """Reads that must all agree. After an unclean election in a partition, only its reads at the end must."""
    return (read for read in facts.reads if read.final or read.run.partition not in facts.unclean)


def _changed(facts: Facts, source: str, place: Place, first: bytes, value: bytes) -> Violation:
    first_source = next(
        read.source
        for read in facts.reads
        if read.run.partition == place[0]
        and read.run.base_offset <= place[1] < read.run.next_offset
        and read.run.values[place[1] - read.run.base_offset] == first
    )
    kind = ViolationKind.INCONSISTENT_OFFSETS if first_source == source else ViolationKind.CHANGED
    return Violation(kind, *place, f"{first_source} read {first!r}, then {source} {value!r}")


def _gone(facts: Facts, seen: Table) -> Iterator[Violation]:
    """What a reader was given is there at the end, except aborted records that a reader of uncommitted ones saw."""
    gone = {p: offsets for p, rows in seen.items() if (offsets := rows.keys() - facts.final_rows(p).keys())}
    if not gone:
        return
    reported: set[Place] = set()
    for read in settled_reads(facts):
        missing = gone.get(read.run.partition, ())
        for offset, value in enumerate(read.run.values, read.run.base_offset):
            place = (read.run.partition, offset)
            if offset not in missing or place in reported:
                continue
            outcome = facts.outcome_of(value)
            # An aborted value under read_committed has a kind of its own; under read_uncommitted it is ordinary.
            hidden = outcome is Outcome.NOT_COMMITTED or (
                outcome is Outcome.UNKNOWN and read.isolation is Isolation.READ_UNCOMMITTED
            )
            if not hidden:
                reported.add(place)
                yield Violation(
                    ViolationKind.CHANGED, *place, f"{read.source} read {value!r}, and at the end nothing is there"
                )


def _doubled_or_unknown(facts: Facts, seen: Table, others: list[tuple[Place, bytes]]) -> Iterator[Violation]:
    values: set[bytes] = set()
    for rows in seen.values():
        values.update(rows.values())
    values.update(value for _, value in others)
    unknown = values - facts.owners.keys()
    if not unknown and len(values) == sum(map(len, seen.values())) + len(others):
        return
    places: dict[bytes, set[Place]] = defaultdict(set)
    for partition, rows in seen.items():
        for offset, value in rows.items():
            places[value].add((partition, offset))
    for place, value in others:
        places[value].add(place)
    for value, value_places in places.items():
        first, *further = sorted(value_places)
        if value in unknown:
            yield Violation(ViolationKind.UNKNOWN_VALUE, *first, f"{value!r}")
        for place in further:
            if place[0] in facts.unclean:
                continue  # The producer's state was lost with the records, so a retry is stored once more.
            yield Violation(ViolationKind.DUPLICATE, *place, f"{value!r} is also at {first[0]}, offset {first[1]}")


def check_snapshots(facts: Facts) -> Iterator[Violation]:
    """No row comes twice in one whole read, and all whole reads agree."""
    for isolation in Isolation:
        snapshots = [snapshot for snapshot in facts.finals if snapshot.isolation is isolation]
        tables = [table_of(snapshot.runs) for snapshot in snapshots]
        for snapshot, table in zip(snapshots, tables, strict=True):
            yield from _repeats(snapshot, table)
        for snapshot, table in zip(snapshots[1:], tables[1:], strict=True):
            if table != tables[0]:
                yield from _missing(facts, snapshots[0].source, tables[0], snapshot.source, table)
                yield from _missing(facts, snapshot.source, table, snapshots[0].source, tables[0])
        if isolation is Isolation.READ_UNCOMMITTED and snapshots:
            yield from _missing(facts, "the reader of committed records", facts.final, snapshots[0].source, tables[0])


def _repeats(snapshot: Snapshot, table: Table) -> Iterator[Violation]:
    if sum(len(run.values) for run in snapshot.runs) == sum(map(len, table.values())):
        return
    seen: set[tuple[TopicPartition, int, bytes]] = set()
    for row in rows_of(snapshot.runs):
        key = (row.partition, row.offset, row.value)
        if key in seen:
            detail = f"{snapshot.source} was given {row.value!r} twice"
            yield Violation(ViolationKind.DUPLICATE, row.partition, row.offset, detail)
        seen.add(key)


def _missing(facts: Facts, having: str, table: Table, lacking: str, other: Table) -> Iterator[Violation]:
    for partition in sorted(table):
        rows, there = table[partition], other.get(partition, {})
        differing = [offset for offset, value in rows.items() if there.get(offset) != value]
        for offset in sorted(offset for offset in differing if offset in there or rows[offset] not in facts.removable):
            detail = f"{having} has {rows[offset]!r}, {lacking} does not"
            yield Violation(ViolationKind.SOURCES_DIFFER, partition, offset, detail)


def places_of(values: Iterable[bytes], snapshots: Iterable[Snapshot]) -> dict[bytes, set[Place]]:
    """Where these values are in whole reads."""
    wanted = set(values)
    places: dict[bytes, set[Place]] = defaultdict(set)
    if not wanted:
        return places
    for snapshot in snapshots:
        for run in snapshot.runs:
            if not wanted.isdisjoint(run.values):
                for offset, value in enumerate(run.values, run.base_offset):
                    if value in wanted:
                        places[value].add((run.partition, offset))
    return places
