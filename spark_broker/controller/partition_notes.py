"""What the controller's log says of a decision on partitions: elections and ISR changes, with epochs and the reason.

A kind of change is one line, however many partitions it is about: a broker that is fenced may have led hundreds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spark_broker.controller.effects import Note
from spark_broker.controller.image import MetadataImage, PartitionState
from spark_broker.controller.records import MetadataRecord, PartitionChangeRecord
from spark_broker.model import NO_LEADER

EXAMPLES = 3
"""How many partitions a line names that is about many."""


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    before: PartitionState
    after: PartitionState
    unclean: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of change: the words for one partition, and for many. `expected`: as in Note."""

    one: Callable[[_Change], str]
    many: Callable[[Sequence[_Change]], str]
    expected: bool = True


def notes(
    before: MetadataImage,
    after: MetadataImage,
    records: Sequence[MetadataRecord],
    why: str,
    *,
    leaderless_expected: bool = False,
) -> list[Note]:
    """The lines about these records, which made `after` of `before`.

    `leaderless_expected`: the cluster begins or ends, so that nobody leads is the ordinary course of things.
    """
    by_kind: dict[_Kind, list[_Change]] = {kind: [] for kind in KINDS}
    for change in _changes(before, after, records):
        kind = _kind_of(change)
        if kind is not None:
            by_kind[kind].append(change)
    return [
        Note(_line(kind, changes, why), expected=kind.expected or (kind is LEADERLESS and leaderless_expected))
        for kind, changes in by_kind.items()
        if changes
    ]


def _changes(before: MetadataImage, after: MetadataImage, records: Iterable[MetadataRecord]) -> list[_Change]:
    """What became of each partition in sum, in the order of the first change."""
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
        return UNCLEAN
    if after.leader == NO_LEADER and before.leader != NO_LEADER:
        return LEADERLESS
    if after.leader != NO_LEADER and after.leader_epoch != before.leader_epoch:
        return LED_ON if after.leader == before.leader else ELECTED
    return None if set(after.isr) == set(before.isr) else ISR


def _line(kind: _Kind, changes: Sequence[_Change], why: str) -> str:
    if len(changes) == 1:
        return f"{kind.one(changes[0])}: {why}"
    named = ", ".join(f"{change.name} epoch {change.after.leader_epoch}" for change in changes[:EXAMPLES])
    more = ", ..." if len(changes) > EXAMPLES else ""
    return f"{kind.many(changes)} ({named}{more}): {why}"


# ---- one partition ---------------------------------------------------------------------------------------------


def _unclean(change: _Change) -> str:
    return (
        f"unclean election: broker {change.after.leader} leads {change.name} from leader epoch "
        f"{change.after.leader_epoch} on; acknowledged records that it does not have are lost"
    )


def _elected(change: _Change) -> str:
    before, after = change.before, change.after
    leader, was = _broker(after.leader), _broker(before.leader)
    return f"{change.name}: {leader} leads in leader epoch {after.leader_epoch} (was {was}), ISR {_ids(after.isr)}"


def _led_on(change: _Change) -> str:
    after = change.after
    return f"{change.name}: broker {after.leader} leads on in leader epoch {after.leader_epoch}, ISR {_ids(after.isr)}"


def _isr(change: _Change) -> str:
    before, after = change.before, change.after
    return f"{change.name}: ISR {_ids(after.isr)} (was {_ids(before.isr)}) in leader epoch {after.leader_epoch}"


def _broker(broker_id: int) -> str:
    return "nobody" if broker_id == NO_LEADER else f"broker {broker_id}"


def _ids(brokers: Iterable[int]) -> str:
    return ", ".join(map(str, brokers)) or "empty"


# ---- many partitions -------------------------------------------------------------------------------------------


def _many_unclean(changes: Sequence[_Change]) -> str:
    return (
        f"{len(changes)} unclean elections: {_leaders(changes)}; "
        "acknowledged records that the new leaders do not have are lost"
    )


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


UNCLEAN = _Kind(_unclean, _many_unclean, expected=False)
LEADERLESS = _Kind(_elected, _many_leaderless, expected=False)
ELECTED = _Kind(_elected, _many_elected)
LED_ON = _Kind(_led_on, _many_led_on)
ISR = _Kind(_isr, _many_isr)

KINDS = (UNCLEAN, LEADERLESS, ELECTED, LED_ON, ISR)
