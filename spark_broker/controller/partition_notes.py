"""The controller's log lines about a decision on partitions: elections and ISR changes, with epochs and the reason.

Each change of a partition is one line (`PartitionChanged`). A decision on many partitions has one line for each kind
of change above them. A fenced broker may have led hundreds of partitions: a reader of warnings then sees one line.

The metadata log bounds the number of lines: each change is a committed record, and a flapping partition gets at most
one change for each answer of the controller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spark_broker.controller.effects import Note
from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.controller.partition_line import PartitionChanged
from spark_broker.controller.records import MetadataRecord, PartitionChangeRecord, PartitionRecord
from spark_broker.model import NO_LEADER

EXAMPLES = 3
"""How many partitions are named in a line about many."""


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    before: PartitionRegistration
    after: PartitionRegistration
    unclean: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of change. `many`: the text about many partitions. `expected`: as in Note."""

    many: Callable[[Sequence[_Change]], str]
    expected: bool = True


def notes(
    before: MetadataImage,
    after: MetadataImage,
    records: Sequence[MetadataRecord],
    why: str,
    *,
    leaderless_expected: bool = False,
) -> list[Note | PartitionChanged]:
    """The lines about these records, which turned `before` into `after`.

    `leaderless_expected`: the cluster starts or stops, so partitions without a leader are expected.
    """
    by_kind: dict[_Kind | None, list[_Change]] = {kind: [] for kind in (*KINDS, None)}
    for change in _changes(before, after, records):
        by_kind[_kind_of(change)].append(change)
    lines: list[Note | PartitionChanged] = []
    for kind, changes in by_kind.items():
        expected = kind is None or kind.expected or (kind is LEADERLESS and leaderless_expected)
        if kind is not None and (len(changes) > 1 or (changes and kind is UNCLEAN)):
            lines.append(Note(_line(kind, changes, why), expected=expected))
            expected = True  # The line above is the warning.
        lines += [PartitionChanged(c.name, c.before, c.after, why, c.unclean, expected) for c in changes]
    return lines + _created(after, records, why)


def _created(after: MetadataImage, records: Iterable[MetadataRecord], why: str) -> list[PartitionChanged]:
    return [
        PartitionChanged(f"{after.topics[record.topic_id].name}-{record.partition}", None, state, why)
        for record in records
        if isinstance(record, PartitionRecord)
        and (state := after.partition(record.topic_id, record.partition)) is not None
    ]


def _changes(before: MetadataImage, after: MetadataImage, records: Iterable[MetadataRecord]) -> list[_Change]:
    """The total change of each partition, in the order of the first changes."""
    changed = [record for record in records if isinstance(record, PartitionChangeRecord)]
    unclean = {(record.topic_id, record.partition) for record in changed if record.unclean}
    changes = []
    for key in dict.fromkeys((record.topic_id, record.partition) for record in changed):
        old, new = before.partition(*key), after.partition(*key)
        if old is not None and new is not None:
            changes.append(_Change(f"{after.topics[key[0]].name}-{key[1]}", old, new, key in unclean))
    return changes


def _kind_of(change: _Change) -> _Kind | None:
    before, after = change.before, change.after
    if change.unclean:
        return UNCLEAN if after.leader != NO_LEADER else COMPARED
    if after.leader == NO_LEADER and before.leader != NO_LEADER:
        return LEADERLESS
    if after.leader != NO_LEADER and after.leader_epoch != before.leader_epoch:
        return LED_ON if after.leader == before.leader else ELECTED
    return None if set(after.isr) == set(before.isr) else ISR


def _line(kind: _Kind, changes: Sequence[_Change], why: str) -> str:
    named = ", ".join(f"{change.name} epoch {change.after.leader_epoch}" for change in changes[:EXAMPLES])
    more = ", ..." if len(changes) > EXAMPLES else ""
    return f"{kind.many(changes)} ({named}{more}): {why}"


def _many_unclean(changes: Sequence[_Change]) -> str:
    if len(changes) == 1:
        leader, epoch = changes[0].after.leader, changes[0].after.leader_epoch
        elected = f"unclean election: broker {leader} leads {changes[0].name} from leader epoch {epoch} on"
        return f"{elected}; acknowledged records that it does not have are lost"
    elected = f"{len(changes)} unclean elections: {_leaders(changes)}"
    return f"{elected}; acknowledged records that the new leaders do not have are lost"


def _many_compared(changes: Sequence[_Change]) -> str:
    return f"{len(changes)} partitions wait until all their replicas were compared"


def _many_leaderless(changes: Sequence[_Change]) -> str:
    return f"{len(changes)} partitions have no leader"


def _many_elected(changes: Sequence[_Change]) -> str:
    return f"{len(changes)} partitions have new leaders: {_leaders(changes)}"


def _many_led_on(changes: Sequence[_Change]) -> str:
    return f"{len(changes)} partitions have a new leader epoch and the same leaders: {_leaders(changes)}"


def _many_isr(changes: Sequence[_Change]) -> str:
    leave = Counter(broker for c in changes for broker in c.before.isr if broker not in c.after.isr)
    join = Counter(broker for c in changes for broker in c.after.isr if broker not in c.before.isr)
    moves = [f"broker {broker} leaves {count}" for broker, count in sorted(leave.items())]
    moves += [f"broker {broker} joins {count}" for broker, count in sorted(join.items())]
    return f"{len(changes)} partitions have another ISR: {', '.join(moves)}"


def _leaders(changes: Sequence[_Change]) -> str:
    counts = Counter(change.after.leader for change in changes)
    return ", ".join(f"{count} on broker {broker}" for broker, count in sorted(counts.items()))


UNCLEAN = _Kind(_many_unclean, expected=False)
COMPARED = _Kind(_many_compared)
LEADERLESS = _Kind(_many_leaderless, expected=False)
ELECTED = _Kind(_many_elected)
LED_ON = _Kind(_many_led_on)
ISR = _Kind(_many_isr)

KINDS = (UNCLEAN, COMPARED, LEADERLESS, ELECTED, LED_ON, ISR)
