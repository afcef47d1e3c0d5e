"""The partitions that a member of a group reads: how they come and go.

What the group decides is a `Change`, one at a time. The caller's thread carries it out, between two records: it commits
and tells the listener first, then `carried_out`. A partition that is given up waits for that, so no record is handed
out by two members when a partition moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from spark_broker.client.membership import Key, MemberPhase, Membership
from spark_broker.client.partition_position import PartitionPosition, Start
from spark_broker.errors import SparkBrokerError
from spark_broker.model import TopicPartition

Positions = dict[TopicPartition, PartitionPosition]


class ChangeKind(Enum):
    """In the words of a listener."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Change:
    """Partitions come or go. `partitions`: those of `keys` whose topics have a name."""

    kind: ChangeKind
    keys: frozenset[Key]
    partitions: tuple[TopicPartition, ...]


@dataclass(slots=True)
class GroupReading:
    """Of one consumer, whose `positions` and `sought` these are. `add` begins the reading of a partition, and `forget`
    ends it.

    What was sought before the first assignment counts for it, and for topics that are not there yet (`is_absent`).
    Another partition that comes later was another member's, and goes on where that one has committed.
    """

    membership: Membership
    positions: Positions
    forget: Callable[[TopicPartition], None]
    add: Callable[[PartitionPosition], None]
    is_absent: Callable[[str], bool]
    reset: Start
    sought: dict[str, Start]
    sought_any: Start | None = None  # every topic that a pattern finds first
    has_listener: bool = False
    prepared: Change | None = None  # what `ConsumerMachine.prepare` has begun

    @property
    def is_changing(self) -> bool:
        """Whether there is a change to carry out. Asked for each record."""
        member = self.membership
        return member.pending is not None or member.phase is MemberPhase.LOST

    def next_change(self) -> Change | None:
        """What the caller's thread is to carry out now. A repeated call returns the same."""
        member = self.membership
        if member.phase is MemberPhase.LOST:
            return self._change(ChangeKind.LOST, member.owned)
        if member.pending is None:
            return None
        if gone := member.owned - member.pending:
            return self._change(ChangeKind.REVOKED, gone)
        return self._change(ChangeKind.ASSIGNED, member.pending - member.owned)

    def still_holds(self, change: Change) -> bool:
        """Whether the change is still to be carried out: the group may have decided otherwise meanwhile."""
        now = self.next_change()
        return now is not None and now.kind is change.kind and now.keys == change.keys

    def everything(self) -> Change:
        """What goes when the member leaves."""
        return self._change(ChangeKind.REVOKED, self.membership.owned)

    def _change(self, kind: ChangeKind, keys: Iterable[Key]) -> Change:
        names = self.membership.topics
        partitions = sorted(TopicPartition(names[id_], number) for id_, number in keys if id_ in names)
        return Change(kind, frozenset(keys), tuple(partitions))

    def carried_out(self, change: Change, now_ms: float) -> None:
        """The caller has committed what it wanted to, and knows of the change."""
        self.prepared = None
        match change.kind:
            case ChangeKind.LOST:
                self._drop(change)
                self.membership.told(now_ms)
            case ChangeKind.REVOKED:
                self._drop(change)
                self.membership.released(change.keys)
            case ChangeKind.ASSIGNED:
                self.membership.took(change.keys)
                self._add(change)

    def take_up(self, now_ms: float) -> bool:
        """Begin at once to read what is assigned, if nothing goes and no listener is to hear of it first. Whether
        partitions have come.
        """
        change = None if self.has_listener or not self.is_changing else self.next_change()
        if change is None or change.kind is not ChangeKind.ASSIGNED:
            return False
        self.carried_out(change, now_ms)
        return True

    def left(self, now_ms: float, reason: str = "") -> None:
        """The caller leaves the group, and knows that everything is gone."""
        self._drop(self.everything())
        self.membership.leave(now_ms, reason)

    def _drop(self, change: Change) -> None:
        names = self.membership.topics
        for topic_id, number in change.keys:
            tp = TopicPartition(names.get(topic_id, ""), number)
            position = self.positions.get(tp)
            if position is not None and position.topic_id == topic_id:
                self.forget(tp)

    def _add(self, change: Change) -> None:
        names = self.membership.topics
        for topic_id, number in sorted(change.keys):
            name = names.get(topic_id)
            if name is None:
                continue
            sought = self.sought.get(name, self.sought_any)
            start, chosen = sought or Start.COMMITTED, sought is not None
            self.add(PartitionPosition(TopicPartition(name, number), start, self.reset, topic_id, chosen=chosen))
        given = {names.get(topic_id) for topic_id, _ in change.keys}
        for name in [name for name in self.sought if name in given or not self.is_absent(name)]:
            del self.sought[name]
        self.sought_any = None

    def take_failure(self) -> SparkBrokerError | None:
        """Why the group refuses this member, once; again and again where it will not pass."""
        failure = self.membership.failure
        if not self.membership.is_fatal:
            self.membership.failure = None
        return failure
