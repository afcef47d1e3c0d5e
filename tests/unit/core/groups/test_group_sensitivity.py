"""The random schedules find each known bug of consumer groups that is put in on purpose. Numbers are Kafka's issues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from spark_broker.core.groups.assignors import Inputs
from spark_broker.core.groups.machine import GroupShard, no_transactions
from spark_broker.core.groups.reconcile import next_assignment
from spark_broker.core.groups.records import (
    AnyKey,
    AnyValue,
    AssignmentKey,
    AssignmentValue,
    GroupKey,
    GroupRecord,
    MemberKey,
    OffsetKey,
    Partition,
    epochs_of,
)
from spark_broker.core.groups.requests import Decision, Heartbeat, HeartbeatAnswer, Now, TargetReady
from spark_broker.core.groups.sessions import Session
from spark_broker.core.groups.state import Assignment, Group, Groups, Owner
from spark_broker.core.groups.step import Step
from spark_broker.core.groups.topics import Topics
from spark_broker.errors import FencedMemberEpochError, InvariantError
from tests.support.sensitivity import Hunts, near
from tests.unit.core.groups.world import ViolationError, run_schedule
from tests.unit.core.hunt import PutIn

SCHEDULES_MAX = 800

Patch = pytest.MonkeyPatch


def work_out_owners_while_loading(patch: Patch) -> None:
    """KAFKA-19862: a compacted log shows a partition at its next owner while the last one still has it."""
    right = Group.apply

    def buggy(self: Group, record: GroupRecord, *, loading: bool) -> None:
        del loading
        right(self, record, loading=False)

    patch.setattr(Group, "apply", buggy)


def release_what_somebody_else_owns(patch: Patch) -> None:
    """KAFKA-19862: whoever stops having a partition frees it, though a later epoch of another member owns it."""

    def buggy(self: Group, member_id: str, value: AnyValue | None, *, loading: bool) -> None:
        del loading
        before = self.assignments.pop(member_id, Assignment())
        for partition, _ in before.held():
            self.owners.pop(partition, None)
        if isinstance(value, AssignmentValue):
            after = Assignment(value.epoch, value.previous_epoch, epochs_of(value.assigned), epochs_of(value.revoking))
            self.assignments[member_id] = after
            self.owners |= {partition: Owner(member_id, since) for partition, since in after.held()}

    def derive(self: Group) -> None:
        self.instances = {about.instance_id: m for m, about in self.members.items() if about.instance_id}

    patch.setattr(Group, "_put_assignment", buggy)
    patch.setattr(Group, "derive", derive)


def stop_at_a_tombstone_of_something_unknown(patch: Patch) -> None:
    """KAFKA-17306: compaction removed what it deletes."""
    right = Group.apply

    def buggy(self: Group, record: GroupRecord, *, loading: bool) -> None:
        if isinstance(record.key, MemberKey) and record.value is None and record.key.member_id not in self.members:
            raise InvariantError("a tombstone of a member that is not there")
        right(self, record, loading=loading)

    patch.setattr(Group, "apply", buggy)


def use_a_group_id_once(patch: Patch) -> None:
    """KAFKA-4704, 19661: a load stops at records of a group that was deleted before."""
    right = Groups.apply

    def buggy(self: Groups, record: GroupRecord) -> None:
        dead = self.__dict__.setdefault("dead", set())
        if self.loading and isinstance(record.key, GroupKey):
            if record.value is None:
                dead.add(record.key.group_id)
            elif record.key.group_id in dead:
                raise InvariantError("a group that was deleted")
        right(self, record)

    patch.setattr(Groups, "apply", buggy)


def fence_who_did_not_get_the_last_answer(patch: Patch) -> None:
    """KAFKA-19222: only the newest epoch is accepted."""
    right = GroupShard._check_member

    def buggy(self: GroupShard, group: Group, heartbeat: Heartbeat, session: Session) -> None:
        if not heartbeat.joins and heartbeat.member_epoch != group.assignment(heartbeat.member_id).epoch:
            raise FencedMemberEpochError("another epoch")
        right(self, group, heartbeat, session)

    patch.setattr(GroupShard, "_check_member", buggy)


def fence_who_did_not_get_two_answers(patch: Patch) -> None:
    """KAFKA-19235: the previous epoch is the one before, and not the one that the member has named."""
    right = next_assignment

    def buggy(group: Group, member_id: str, said: frozenset[Partition] | None, named_epoch: int) -> Assignment:
        del named_epoch
        return right(group, member_id, said, max(group.assignment(member_id).epoch, 0))

    patch.setattr("spark_broker.core.groups.machine.next_assignment", buggy)


def refuse_a_join_while_revoking(patch: Patch) -> None:
    """KAFKA-19233: a member that was told to give partitions up cannot join again."""
    right = GroupShard._check_member

    def buggy(self: GroupShard, group: Group, heartbeat: Heartbeat, session: Session) -> None:
        if heartbeat.joins and group.assignment(heartbeat.member_id).revoking:
            raise FencedMemberEpochError("it is revoking")
        right(self, group, heartbeat, session)

    patch.setattr(GroupShard, "_check_member", buggy)


def refuse_commits_of_the_epoch_before(patch: Patch) -> None:
    """KAFKA-20066: a commit under way when the epoch changes is refused, and a clean hand-over repeats records."""

    def buggy(self: Group, member_id: str, partition: Partition, epoch: int) -> bool:
        assignment = self.assignment(member_id)
        held = partition in assignment.assigned or partition in assignment.revoking
        return held and epoch == assignment.epoch

    patch.setattr(Group, "is_good_commit", buggy)


def take_commits_of_whoever_is_there(patch: Patch) -> None:
    """KIP-1251: a member's epoch is good, and the partition is no longer its own."""

    def buggy(self: Group, member_id: str, partition: Partition, epoch: int) -> bool:
        del partition
        return epoch <= self.assignment(member_id).epoch

    patch.setattr(Group, "is_good_commit", buggy)


def take_commits_from_before_the_assignment(patch: Patch) -> None:
    """KIP-1251: the partition went to another member and came back, and then a commit from before comes."""

    def buggy(self: Group, member_id: str, partition: Partition, epoch: int) -> bool:
        assignment = self.assignment(member_id)
        return (partition in assignment.assigned or partition in assignment.revoking) and epoch <= assignment.epoch

    patch.setattr(Group, "is_good_commit", buggy)


def _hash_of(part: Callable[[Inputs], object]) -> Callable[[Inputs], str]:
    return lambda inputs: msgspec.json.encode(part(inputs)).decode()


def keep_the_target_when_a_topic_grows(patch: Patch) -> None:
    """KAFKA-19899: numbers of partitions are no input, so nobody reads the new ones."""
    patch.setattr(Inputs, "hash", _hash_of(lambda inputs: (inputs.assignor, inputs.members)))


def keep_the_target_when_a_subscription_changes(patch: Patch) -> None:
    """KAFKA-20434: subscriptions are no input."""
    patch.setattr(Inputs, "hash", _hash_of(lambda inputs: ([m.identity for m in inputs.members], inputs.topics)))


def take_a_target_of_other_inputs(patch: Patch) -> None:
    """KAFKA-20442: a target that comes late is taken for the present epoch's."""

    def buggy(self: GroupShard, ready: TargetReady, now: Now) -> Decision[None]:
        step = self._step(now)
        group = step.group(ready.group_id)
        if group.target_epoch < group.epoch:
            step.install(ready.group_id, ready.target)
        return self._decide("target_ready", step, None)

    patch.setattr(GroupShard, "target_ready", buggy)


def leave_the_target_of_who_has_left(patch: Patch) -> None:
    """KAFKA-19720: an empty group has an older target."""

    def buggy(self: Step, group_id: str, member_id: str) -> None:
        if member_id in self.group(group_id).assignments:
            self.write(AssignmentKey(group_id, member_id), None)
        self.write(MemberKey(group_id, member_id), None)
        self._removed.setdefault(group_id, []).append(member_id)

    patch.setattr(Step, "remove_member", buggy)


def give_a_new_topic_the_offsets_of_its_name(patch: Patch) -> None:
    """KAFKA-19141, 19154: a topic that is created again begins where the old one ended."""
    right = GroupShard.topics_changed

    def buggy(self: GroupShard, topics: Topics, deleted: set[str], now: Now) -> Decision[None]:
        step = self._step(now)
        for group_id, group in sorted(self.state.groups.items()):
            for (topic_id, number), value in sorted(group.offsets.items()):
                if topic_id in deleted and (topic := topics.by_name.get(value.topic)) is not None:
                    step.write(OffsetKey(group_id, topic.topic_id, number), value)
        decision = right(self, topics, deleted, now)
        return Decision(None, (*step.records, *decision.records), decision.effects)

    patch.setattr(GroupShard, "topics_changed", buggy)


def expire_offsets_without_a_record(patch: Patch) -> None:
    """Redpanda 4900: what expired is back after the next load."""
    right = Step.write

    def buggy(self: Step, key: AnyKey, value: AnyValue | None) -> None:
        before = len(self.records)
        right(self, key, value)
        if value is None and isinstance(key, OffsetKey) and not self.group(key.group_id).members:
            del self.records[before:]

    patch.setattr(Step, "write", buggy)


def leave_a_part_of_a_deleted_group(patch: Patch) -> None:
    """Redpanda 31483: the deletion of a group forgets one of its keys."""

    def buggy(self: GroupShard, step: Step, group_id: str) -> None:
        if step.group(group_id).epoch:
            step.write(GroupKey(group_id), None)

    patch.setattr(GroupShard, "_forget", buggy)


def expire_offsets_under_an_open_transaction(patch: Patch) -> None:
    """Redpanda 31483: the transaction's commits would be all that the group has."""
    right = GroupShard._expire
    patch.setattr(GroupShard, "_expire", lambda self, step, _: right(self, step, no_transactions))


def take_late_heartbeats_for_news(patch: Patch) -> None:
    """KAFKA-14422: an older heartbeat that comes late says what the member owned then."""
    right = GroupShard._go_on

    def buggy(self: GroupShard, step: Step, heartbeat: Heartbeat) -> HeartbeatAnswer:
        self._sessions.get(heartbeat.group_id, heartbeat.member_id).sequence = -1
        return right(self, step, heartbeat)

    patch.setattr(GroupShard, "_go_on", buggy)


def believe_heartbeats_from_before_the_load(patch: Patch) -> None:
    """A heartbeat that was on its way while the shard was loaded says what its member owned before."""
    right = GroupShard._go_on

    def buggy(self: GroupShard, step: Step, heartbeat: Heartbeat) -> HeartbeatAnswer:
        return right(self, step, replace(heartbeat, generation=self.generation))

    patch.setattr(GroupShard, "_go_on", buggy)


def wake_nobody_when_a_partition_gets_free(patch: Patch) -> None:
    """A member whose answer is held back does not hear that it may go on."""
    right = Step.wake

    def buggy(self: Step, acting: str) -> None:
        self._freed.clear()
        right(self, acting)

    patch.setattr(Step, "wake", buggy)


BUGS: list[PutIn] = [
    work_out_owners_while_loading,
    release_what_somebody_else_owns,
    stop_at_a_tombstone_of_something_unknown,
    use_a_group_id_once,
    fence_who_did_not_get_the_last_answer,
    fence_who_did_not_get_two_answers,
    refuse_a_join_while_revoking,
    refuse_commits_of_the_epoch_before,
    take_commits_of_whoever_is_there,
    take_commits_from_before_the_assignment,
    keep_the_target_when_a_topic_grows,
    keep_the_target_when_a_subscription_changes,
    take_a_target_of_other_inputs,
    leave_the_target_of_who_has_left,
    give_a_new_topic_the_offsets_of_its_name,
    expire_offsets_without_a_record,
    leave_a_part_of_a_deleted_group,
    expire_offsets_under_an_open_transaction,
    take_late_heartbeats_for_news,
    believe_heartbeats_from_before_the_load,
    wake_nobody_when_a_partition_gets_free,
]


def find(name: str, schedules: int, first_seed: int = 0) -> dict[str, object]:
    """How many schedules it took to find the bug; 0 if none found it."""
    put_in = next(bug for bug in BUGS if bug.__name__ == name)
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch)
        for seed in range(first_seed, first_seed + schedules):
            try:
                run_schedule(seed)
            except (ViolationError, InvariantError):
                return {"after": seed - first_seed + 1, "seed": seed}
    return {"after": 0}


def find_near(name: str, schedules: int) -> dict[str, object]:
    """`find`, from the seed that is recorded."""
    return find(name, schedules, near("core").get(name, 0))


FIND = find_near

pytestmark = pytest.mark.slow  # hunts in a process of its own


@pytest.mark.parametrize(("name", "tries"), [(bug.__name__, SCHEDULES_MAX) for bug in BUGS])
def test_random_schedules_find_the_bug(name: str, tries: int, hunts: Hunts) -> None:
    assert hunts[name].result()["after"], f"{tries} schedules did not find it"
