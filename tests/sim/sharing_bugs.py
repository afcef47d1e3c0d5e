"""Known bugs of groups whose members share partitions, put back for the simulator.

Random schedules of the core alone find more of them (`tests/unit/core/groups/test_group_sensitivity.py`). The rules
that a member keeps by itself are in `tests/unit/test_membership.py`: a commit of an earlier life, and a revocation that
no answer has confirmed.
"""

from __future__ import annotations

from functools import partial

from spark_broker.broker.coordinator_runtime import Led
from spark_broker.broker.group_shards import GroupShards
from spark_broker.client.commit_queue import CommitQueue
from spark_broker.client.consumer_effects import Offsets
from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.group_reading import Change
from spark_broker.client.membership import Membership, SendHeartbeat
from spark_broker.client.partition_position import PartitionPosition
from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import MemberValue
from spark_broker.core.groups.requests import Decision
from spark_broker.errors import UnknownTopicOrPartitionError
from spark_broker.model import OffsetAndMetadata, TopicPartition
from tests.sim import bugs
from tests.sim.bugs import Patch
from tests.sim.kinds import has_sharing

bug = partial(bugs.bug, quick=False, shows=has_sharing)


@bug("46")
def remove_who_has_not_heard_what_to_give_up(patch: Patch) -> None:
    """The answer was lost that says what to give up; the member reads on until its session ends, which is later."""
    patch.setattr(MemberValue, "revocation_ms", property(lambda self: self.rebalance_timeout_ms))


@bug("43")
def take_any_answer(patch: Patch) -> None:
    """KAFKA-14422: an answer that comes late moves the member back."""

    def buggy(self: Membership, sent: SendHeartbeat) -> bool:
        return sent.request.member_id == self.member_id and self.phase.value == "in"

    patch.setattr(Membership, "_counts", buggy)


@bug("39")
def read_on_after_the_session(patch: Patch) -> None:
    """A member that nobody answers keeps what it reads."""
    patch.setattr(Membership, "_check_time", lambda self, now_ms: None)


@bug("45")
def give_up_before_the_commit(patch: Patch) -> None:
    """librdkafka 5488: the commit comes after the partition has gone, and is refused."""

    def buggy(self: ConsumerMachine, change: Change, deadline_ms: float) -> bool:
        del change, deadline_ms
        return True

    patch.setattr(ConsumerMachine, "prepare", buggy)


@bug("47", rare=True)
def stop_at_a_partition_that_the_metadata_lacks(patch: Patch) -> None:
    """The group hears of a new partition before its members' metadata has it."""
    right = ConsumerMachine._check_partition

    def buggy(self: ConsumerMachine, position: PartitionPosition, now_ms: float) -> bool:
        topic = self.view.topic(position.tp.topic)
        if topic is not None and position.tp.partition >= len(topic.partitions):
            position.error = UnknownTopicOrPartitionError("no such partition")
        return right(self, position, now_ms)

    patch.setattr(ConsumerMachine, "_check_partition", buggy)


@bug("48")
def commit_the_same_again_and_again(patch: Patch) -> None:
    """Where a commit takes longer than the time between two, each is sent while the one before is under way."""

    def buggy(self: CommitQueue, offsets: Offsets) -> dict[TopicPartition, OffsetAndMetadata]:
        return self.changed(offsets)

    patch.setattr(CommitQueue, "new", buggy)


@bug("44")
def answer_before_it_is_committed(patch: Patch) -> None:
    """A member is told what the next coordinator does not know."""

    def buggy(self: GroupShards, led: Led[GroupShard], reply: object, answer: object) -> None:
        self._outbox.append(lambda: reply(answer))  # type: ignore[operator]

    patch.setattr(GroupShards, "_answer", buggy)


@bug("41")
def wake_nobody(patch: Patch) -> None:
    """What changes for a member whose heartbeat is held back, it hears when the time is over."""
    right = GroupShards._carry_out

    def buggy(self: GroupShards, led: Led[GroupShard], decision: Decision[object]) -> None:
        right(self, led, Decision(decision.answer, decision.records, (), decision.moves))

    patch.setattr(GroupShards, "_carry_out", buggy)
