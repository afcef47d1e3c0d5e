"""The lasting state of the groups of one partition of `__consumer_offsets`, as a function of its records.

There is one `apply`. Everything that follows from the records (who owns a partition, what a member waits for, the state
of a group, whether a commit is good) is a function here and is stored nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple, TypeVar

from spark_broker.core.groups.records import (
    AnyValue,
    AssignmentKey,
    AssignmentValue,
    GroupKey,
    GroupRecord,
    GroupValue,
    MemberKey,
    MemberValue,
    OffsetKey,
    OffsetValue,
    Partition,
    Rebalance,
    TargetEpochKey,
    TargetEpochValue,
    TargetKey,
    TargetValue,
    epochs_of,
    grouped_epochs,
    partitions_of,
)
from spark_broker.core.groups.undecided import UndecidedOffsets
from spark_broker.errors import invariant

K = TypeVar("K")
V = TypeVar("V")

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
AWAY_EPOCH = -2
"""A static member has left and will come back: its part of the target is kept for it until its session ends."""


class GroupPhase(Enum):
    """The state of a group. The values are Kafka's names."""

    DEAD = "Dead"
    """Nothing is left of the group."""
    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    """The target of the epoch is being computed."""
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class MemberKind(Enum):
    """What keeps a member from its target."""

    STABLE = "stable"
    REVOKING = "revoking"
    """It has been told to give partitions up."""
    WAITING = "waiting"
    """Its next heartbeat moves it on, or somebody else still holds what it is to get."""
    AWAY = "away"


class Owner(NamedTuple):
    """A member that owns a partition, or has not given it up yet, since this epoch of the member."""

    member_id: str
    since_epoch: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a member owns: `since_epoch` by partition.

    Invariants: `previous_epoch <= epoch`, but for a member that is away; no partition is in both; every `since_epoch`
    is at most `epoch`; a member that is away holds nothing.
    """

    epoch: int = JOIN_EPOCH
    previous_epoch: int = JOIN_EPOCH
    assigned: dict[Partition, int] = field(default_factory=dict)
    revoking: dict[Partition, int] = field(default_factory=dict)

    def held(self) -> Iterator[tuple[Partition, int]]:
        """What nobody else may get yet."""
        return chain(self.assigned.items(), self.revoking.items())

    def holds(self, partitions: frozenset[Partition]) -> bool:
        """Whether the member holds all of these."""
        return all(partition in self.assigned or partition in self.revoking for partition in partitions)

    def value(self) -> AssignmentValue:
        """The value of the record that makes this the member's assignment."""
        return AssignmentValue(
            self.epoch, self.previous_epoch, grouped_epochs(self.assigned), grouped_epochs(self.revoking)
        )


NOTHING = Assignment()


@dataclass(slots=True)
class Group:
    """One group, as a function of its records.

    Invariants: `target_epoch <= epoch`; a partition has one owner at most; a member whose epoch is `target_epoch` and
    which is not revoking has nothing that is not in its target; targets and assignments are of members; a group without
    members has no target.
    """

    group_id: str
    epoch: int = 0  # 0: the group has never had a member
    inputs_hash: str = ""
    assignor: str = ""
    rebalances: tuple[Rebalance, ...] = ()
    target_epoch: int = 0
    members: dict[str, MemberValue] = field(default_factory=dict)
    targets: dict[str, frozenset[Partition]] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    offsets: dict[Partition, OffsetValue] = field(default_factory=dict)
    # These follow from the others. They are derived once after loading, and then kept.
    owners: dict[Partition, Owner] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)  # member id by instance id

    @property
    def is_nothing(self) -> bool:
        """Nothing is left: every key of the group has a tombstone."""
        return not (self.epoch or self.target_epoch or self.members or self.targets or self.assignments or self.offsets)

    @property
    def phase(self) -> GroupPhase:
        if self.is_nothing:
            return GroupPhase.DEAD
        if not self.members:
            return GroupPhase.EMPTY
        if self.target_epoch < self.epoch:
            return GroupPhase.ASSIGNING
        settled = (MemberKind.STABLE, MemberKind.AWAY)
        for member_id in self.members:
            if self.kind(member_id) not in settled:
                return GroupPhase.RECONCILING
        return GroupPhase.STABLE

    def assignment(self, member_id: str) -> Assignment:
        return self.assignments.get(member_id, NOTHING)

    def target(self, member_id: str) -> frozenset[Partition]:
        return self.targets.get(member_id, frozenset())

    def kind(self, member_id: str) -> MemberKind:
        assignment = self.assignments.get(member_id, NOTHING)
        if assignment.revoking:
            return MemberKind.REVOKING
        if assignment.epoch != self.target_epoch:
            return MemberKind.AWAY if assignment.epoch == AWAY_EPOCH else MemberKind.WAITING
        has_all = len(assignment.assigned) == len(self.targets.get(member_id, ()))
        return MemberKind.STABLE if has_all else MemberKind.WAITING

    def identity(self, member_id: str) -> str:
        """What a target is for. A static member keeps its identity when its process starts again under another id."""
        instance_id = self.members[member_id].instance_id
        return f"instance/{instance_id}" if instance_id else f"member/{member_id}"

    def is_good_commit(self, member_id: str, partition: Partition, epoch: int) -> bool:
        """`assigned_at <= epoch <= member epoch` (KIP-1251): an older epoch is good while the partition stays there.

        KAFKA-20066: with equality alone, a commit that meets a new epoch is refused, and a clean hand-over lost.
        """
        assignment = self.assignment(member_id)
        assigned_at = assignment.assigned.get(partition, assignment.revoking.get(partition))
        return assigned_at is not None and assigned_at <= epoch <= assignment.epoch

    def apply(self, record: GroupRecord, *, loading: bool) -> None:
        """Take a record. A tombstone of something unknown is nothing (KAFKA-17306)."""
        key, value = record
        match key:
            case OffsetKey(_, topic_id, number):
                _put(self.offsets, (topic_id, number), value if isinstance(value, OffsetValue) else None)
            case MemberKey(_, member_id):
                self._put_member(member_id, value, loading=loading)
            case TargetKey(_, member_id):
                _put(self.targets, member_id, partitions_of(value) if isinstance(value, TargetValue) else None)
            case AssignmentKey(_, member_id):
                self._put_assignment(member_id, value, loading=loading)
            case GroupKey():
                kept = value if isinstance(value, GroupValue) else GroupValue(0, "", "")
                self.epoch, self.inputs_hash = kept.epoch, kept.inputs_hash
                self.assignor, self.rebalances = kept.assignor, kept.rebalances
            case TargetEpochKey():
                self.target_epoch = value.epoch if isinstance(value, TargetEpochValue) else 0

    def _put_member(self, member_id: str, value: AnyValue | None, *, loading: bool) -> None:
        before = self.members.get(member_id)
        member = value if isinstance(value, MemberValue) else None
        _put(self.members, member_id, member)
        if loading:
            return
        if before is not None and self.instances.get(before.instance_id) == member_id:
            del self.instances[before.instance_id]
        if member is not None and member.instance_id:
            self.instances[member.instance_id] = member_id

    def _put_assignment(self, member_id: str, value: AnyValue | None, *, loading: bool) -> None:
        before = self.assignments.get(member_id)
        after = NOTHING
        if isinstance(value, AssignmentValue):
            after = Assignment(value.epoch, value.previous_epoch, epochs_of(value.assigned), epochs_of(value.revoking))
            self.assignments[member_id] = after
        else:
            self.assignments.pop(member_id, None)
        if loading:
            return
        if before is not None:
            self._release(member_id, before)
        for partition, since_epoch in after.held():
            owner = self.owners.get(partition)
            invariant(owner is None, "group %s: %s owns %s, %s gets it", self.group_id, owner, partition, member_id)
            self.owners[partition] = Owner(member_id, since_epoch)

    def _release(self, member_id: str, assignment: Assignment) -> None:
        """Only the epoch that owns a partition releases it (KAFKA-19862)."""
        for partition, since_epoch in assignment.held():
            if self.owners.get(partition) == (member_id, since_epoch):
                del self.owners[partition]

    def derive(self) -> None:
        """Work out owners and instances from what was loaded. Of two claims, the later epoch owns."""
        self.owners = {}
        for member_id, assignment in sorted(self.assignments.items()):
            for partition, since_epoch in assignment.held():
                owner = self.owners.get(partition)
                if owner is None or owner.since_epoch < since_epoch:
                    self.owners[partition] = Owner(member_id, since_epoch)
        self.instances = {
            member.instance_id: member_id for member_id, member in sorted(self.members.items()) if member.instance_id
        }

    def check(self) -> None:
        """Raises InvariantError where an invariant does not hold. It takes as long as the group is large."""
        invariant(self.target_epoch <= self.epoch, "the target's epoch is %d of %d", self.target_epoch, self.epoch)
        invariant(self.assignments.keys() <= self.members.keys(), "the assignment of a member that is not there")
        invariant(self.targets.keys() <= self.members.keys(), "the target of a member that is not there")
        for member_id in self.assignments:
            self.check_member(member_id)

    def check_member(self, member_id: str) -> None:
        """Raises InvariantError where an invariant of the member's assignment does not hold."""
        assignment = self.assignments[member_id]
        away = assignment.epoch == AWAY_EPOCH
        ordered = away or assignment.previous_epoch <= assignment.epoch <= self.epoch
        invariant(ordered, "%s: epochs %s", member_id, assignment)
        invariant(not away or not any(assignment.held()), "%s is away and holds %s", member_id, assignment)
        invariant(assignment.assigned.keys().isdisjoint(assignment.revoking), "%s: both", member_id)
        settled = assignment.epoch == self.target_epoch and not assignment.revoking
        within = not settled or assignment.assigned.keys() <= self.target(member_id)
        invariant(within, "%s has more than its target", member_id)
        for partition, since_epoch in assignment.held():
            owner = self.owners.get(partition)
            invariant(owner == (member_id, since_epoch), "%s holds %s of %s", member_id, partition, owner)
            invariant(since_epoch <= assignment.epoch, "%s has %s from the future", member_id, partition)


def _put(mapping: dict[K, V], key: K, value: V | None) -> None:
    if value is None:
        mapping.pop(key, None)
    else:
        mapping[key] = value


class Groups:
    """The groups of one partition. While `loading`, records may come in any order of their keys, each key's last value
    last: owners are derived once at the end, because a log that was compacted shows no moment as it was.
    """

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.undecided = UndecidedOffsets()
        self.loading = True

    def apply(self, record: GroupRecord, *, decided: bool = False) -> None:
        """Take a record, while loading or live. A group id may be used again after its last tombstone.

        `decided`: it was written earlier, by a transaction that is committed now.
        """
        if isinstance(record.key, OffsetKey) and not decided:
            self.undecided.supersede(record.key)
        group_id = record.key.group_id
        group = self.groups.get(group_id)
        if group is None:
            if record.value is None:
                return
            group = self.groups[group_id] = Group(group_id)
        group.apply(record, loading=self.loading)
        if record.value is None and group.is_nothing:
            del self.groups[group_id]

    def loaded(self) -> None:
        """Every record of the log is applied."""
        for group in self.groups.values():
            group.derive()
        self.loading = False

    def group(self, group_id: str) -> Group:
        """The group, or one without anything that is not kept."""
        return self.groups.get(group_id) or Group(group_id)
