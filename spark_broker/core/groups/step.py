"""One event of a shard: the records that it writes, each applied at once, and whom they concern."""

from __future__ import annotations

from collections.abc import Callable

from spark_broker.core.groups.assignors import ASSIGNORS, Inputs, Target, assign, inputs_of
from spark_broker.core.groups.records import (
    AnyKey,
    AnyValue,
    AssignmentKey,
    GroupKey,
    GroupRecord,
    GroupValue,
    MemberKey,
    OldCommit,
    Partition,
    Rebalance,
    TargetEpochKey,
    TargetEpochValue,
    TargetKey,
    target_value,
)
from spark_broker.core.groups.requests import REASON_MAX, ComputeTarget, Effect, GroupSettings, Now, Wake
from spark_broker.core.groups.state import Group, GroupPhase, Groups, MemberKind
from spark_broker.core.groups.topics import Topics


class Heirs:
    """Whose target a partition is in. Worked out when a partition becomes free, once for each target."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Partition, str]] = {}

    def of(self, group: Group) -> dict[Partition, str]:
        """Member id by partition."""
        heirs = self._known.get(group.group_id)
        if heirs is None:
            heirs = {partition: member_id for member_id, target in group.targets.items() for partition in target}
            self._known[group.group_id] = heirs
        return heirs

    def forget(self, group_id: str) -> None:
        """A target of the group changes."""
        self._known.pop(group_id, None)


class Step:
    """Writes records, and works out at the end who is to be woken.

    A refusal comes before the first record: a record that is applied and never appended would be lost with the leader,
    and nobody would know. So does that of a log that takes no appends now: `check_takes` raises it.
    """

    def __init__(
        self,
        state: Groups,
        topics: Topics,
        settings: GroupSettings,
        now: Now,
        heirs: Heirs,
        check_takes: Callable[[], None],
    ) -> None:
        self.state = state
        self.topics = topics
        self.settings = settings
        self.now = now
        self.heirs = heirs
        self.check_takes = check_takes
        self.records: list[GroupRecord | OldCommit] = []
        self.effects: list[Effect] = []
        self.phases: dict[str, GroupPhase] = {}  # of the groups that are written to, before
        self.epochs: dict[str, int] = {}  # of the same groups, before
        self.moved: dict[tuple[str, str], None] = {}  # members whose assignment is written
        self._reasons: dict[str, list[str]] = {}
        self._target_epochs: dict[str, int] = {}
        self._freed: dict[str, set[Partition]] = {}
        self._removed: dict[str, list[str]] = {}

    def group(self, group_id: str) -> Group:
        return self.state.group(group_id)

    def write(self, key: AnyKey, value: AnyValue | None) -> None:
        """Write a record, and apply it. Raises what `check_takes` raises, before the first one."""
        if not self.records:
            self.check_takes()
        group_id = key.group_id
        group = self.group(group_id)
        if group_id not in self.phases:
            self.phases[group_id], self.epochs[group_id] = group.phase, group.epoch
            self._target_epochs[group_id] = group.target_epoch
        if isinstance(key, TargetKey):
            self.heirs.forget(group_id)
        held: dict[Partition, int] = {}
        if isinstance(key, AssignmentKey):
            self.moved[group_id, key.member_id] = None
            held = dict(group.assignment(key.member_id).held())
        record = GroupRecord(key, value)
        self.records.append(record)
        self.state.apply(record)
        if held:
            owners = self.group(group_id).owners
            freed = [partition for partition in held if partition not in owners]
            self._freed.setdefault(group_id, set()).update(freed)

    def because(self, group_id: str, reason: str) -> None:
        """Why the group's next epoch begins, if one does."""
        self._reasons.setdefault(group_id, []).append(reason)

    def reason(self, group_id: str) -> str:
        return "; ".join(self._reasons.get(group_id, ()))[:REASON_MAX]

    def remove_member(self, group_id: str, member_id: str) -> None:
        group = self.group(group_id)
        if member_id in group.assignments:
            self.write(AssignmentKey(group_id, member_id), None)
        if member_id in group.targets:
            self.write(TargetKey(group_id, member_id), None)
        self.write(MemberKey(group_id, member_id), None)
        self._removed.setdefault(group_id, []).append(member_id)

    def refresh(self, group_id: str) -> bool:
        """Begin a new epoch if the inputs of the target have changed. A small target is computed at once.

        Returns whether they have. KAFKA-19899, 20434: an epoch whose inputs are not compared keeps a target of others.
        """
        group = self.group(group_id)
        inputs = self._inputs(group)
        inputs_hash = inputs.hash()
        if inputs_hash == group.inputs_hash:
            return False
        epoch = group.epoch + 1
        rebalance = Rebalance(epoch, self.now.wall_ms, self.reason(group_id))
        rebalances = (*group.rebalances, rebalance)[-self.settings.rebalances_kept :]
        self.write(GroupKey(group_id), GroupValue(epoch, inputs_hash, inputs.assignor, rebalances))
        self.aim(group_id, inputs)
        return True

    def _inputs(self, group: Group) -> Inputs:
        members = {group.identity(member_id): member for member_id, member in group.members.items()}
        wishes = [member.assignor or self.settings.default_assignor for member in members.values()]
        wished = max(ASSIGNORS, key=wishes.count) if wishes else self.settings.default_assignor
        return inputs_of(members, self.topics, wished)

    def aim(self, group_id: str, inputs: Inputs | None = None) -> None:
        """Make the target of the group's epoch, here or elsewhere. An empty group has none, and no older one either."""
        group = self.group(group_id)
        inputs = inputs or self._inputs(group)
        previous = {group.identity(member_id): group.target(member_id) for member_id in group.members}
        if not group.members or inputs.size <= self.settings.inline_size_max:
            self.install(group_id, assign(inputs, previous))
        else:
            self.effects.append(ComputeTarget(group_id, group.epoch, inputs, previous))

    def install(self, group_id: str, target: Target) -> None:
        """This is the target of the group's epoch."""
        group = self.group(group_id)
        for member_id in sorted(group.members):
            partitions = target.get(group.identity(member_id), frozenset())
            if partitions != group.target(member_id):
                self.write(TargetKey(group_id, member_id), target_value(partitions) if partitions else None)
        self.write(TargetEpochKey(group_id), TargetEpochValue(group.epoch))

    def wake(self, acting: str) -> None:
        """Wake members for whom something changed, but for the one whose event it is."""
        for group_id in self.phases:
            group = self.group(group_id)
            woken = set(self._removed.get(group_id, ()))
            if group.target_epoch != self._target_epochs[group_id]:
                woken |= {m for m in group.members if group.kind(m) is not MemberKind.AWAY}
            elif freed := self._freed.get(group_id):
                of = self.heirs.of(group)
                woken |= {of[p] for p in freed if p in of and group.kind(of[p]) is MemberKind.WAITING}
            woken.discard(acting)
            if woken:
                self.effects.append(Wake(group_id, tuple(sorted(woken))))
