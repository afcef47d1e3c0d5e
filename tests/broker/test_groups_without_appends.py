"""Groups while their log takes no appends, as its ISR is too small: what writes nothing goes on, and the rest waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType

import pytest

from spark_broker.broker.coordinator_runtime import Led
from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.partition import Partition
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.core.groups.machine import GroupShard
from spark_broker.errors import CoordinatorNotAvailableError
from spark_broker.protocol.messages import EmptyResponse, TopicPartitions
from tests.broker.rig import TOPIC_ID
from tests.broker.test_group_coordinator import GroupRig, commit, committed
from tests.broker.test_group_heartbeats import SESSION_MS, WHOLE, ManualClock, Member, clock, coordinator, rig

__all__ = ["clock", "coordinator", "rig"]

Refuse = Callable[[bool], None]


@pytest.fixture
def refuse(rig: GroupRig) -> Refuse:
    """Whether the log takes no appends."""
    return lambda refused: rig.log().replica.configure(2 if refused else 1)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The partitions of `__consumer_offsets` that were read from their logs."""
    loads: list[int] = []
    load = GroupCoordinator._load

    def counted(self: GroupCoordinator, number: int, partition: Partition) -> Led[GroupShard]:
        loads.append(number)
        return load(self, number, partition)

    monkeypatch.setattr(GroupCoordinator, "_load", counted)
    return loads


@pytest.fixture
def grow(rig: GroupRig, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The topic gets a third partition."""

    def grow() -> None:
        image = rig.image

        def grown(state: PartitionRegistration) -> MetadataImage:
            before = image(state)
            topic = before.topics[TOPIC_ID]
            topic = dataclasses.replace(topic, partitions=(*topic.partitions, topic.partitions[1]))
            return dataclasses.replace(before, topics=MappingProxyType({**before.topics, TOPIC_ID: topic}))

        monkeypatch.setattr(rig, "image", grown)
        rig.publish(0)

    return grow


def refused(member: Member, *, whole: bool = True) -> None:
    """The member's heartbeat would write."""
    with pytest.raises(CoordinatorNotAvailableError, match="1 of the 2 replicas"):
        member.beat(whole=whole)


def test_a_member_that_cannot_join_throws_nothing_away(
    coordinator: GroupCoordinator, clock: ManualClock, loads: list[int], refuse: Refuse
) -> None:
    """Story: one consumer that tried to join had the whole log of the shard read again each second, under the lock of
    all groups, and nobody could read committed offsets meanwhile.
    """
    assert commit(coordinator, "another", 1) == [EmptyResponse()]
    settled = Member(coordinator, "m1")
    held = settled.settle()
    loads.clear()
    refuse(True)
    joining = Member(coordinator, "m2")
    for _ in range(5):
        refused(joining)
        clock.now_ms += SESSION_MS // 3
        coordinator.tick()
        assert committed(coordinator, "another") == [1]
        settled.take(held)
        held = settled.beat(whole=False)
        assert not held, "a member that has nothing to do is heard, and its answer is held back"
    refuse(False)
    joining.take(joining.beat())
    settled.take(held)
    assert not loads


def test_no_member_loses_its_session_by_what_could_not_be_written(
    coordinator: GroupCoordinator, clock: ManualClock, refuse: Refuse
) -> None:
    """Whoever was refused may be alive, and may have given up what it was told to."""
    first, second = Member(coordinator, "m1"), Member(coordinator, "m2")
    first.settle()
    second.take(second.beat())
    first.take(first.beat())  # It is told to give a partition up.
    refuse(True)
    for _ in range(8):
        refused(first)
        clock.now_ms += SESSION_MS
        coordinator.tick()
    refuse(False)
    coordinator.tick()
    for member in (first, second, first, second):
        member.settle()
    assert sorted(len(t.partitions) for member in (first, second) for t in member.owned) == [1, 1]


def test_whoever_was_silent_meanwhile_is_gone_a_session_later(
    coordinator: GroupCoordinator, clock: ManualClock, refuse: Refuse
) -> None:
    silent, other = Member(coordinator, "m1"), Member(coordinator, "m2")
    silent.settle()
    refuse(True)
    clock.now_ms += SESSION_MS
    coordinator.tick()
    refused(other)
    refuse(False)
    coordinator.tick()
    other.take(other.beat())
    clock.now_ms += SESSION_MS - 1
    coordinator.tick()
    assert not other.settle()
    assert not other.owned
    clock.now_ms += 1
    coordinator.tick()
    other.settle()
    assert other.owned == WHOLE


def test_a_heartbeat_that_is_refused_says_nothing(coordinator: GroupCoordinator, refuse: Refuse) -> None:
    """A copy of it that comes late must not be answered as if its subscription had been taken."""
    member = Member(coordinator, "m1")
    member.settle()
    member.about = Member(coordinator, "m1", "another").about
    refuse(True)
    refused(member)
    member.sequence -= 1
    refused(member)
    refuse(False)
    member.sequence -= 1
    member.take(member.beat())
    assert member.owned == [], "it has left the topic"


def test_topics_that_change_meanwhile_are_taken_into_account_afterwards(
    rig: GroupRig, coordinator: GroupCoordinator, refuse: Refuse, grow: Callable[[], None]
) -> None:
    member = Member(coordinator, "m1")
    held = member.settle()
    grow()
    refuse(True)
    coordinator.tick()
    assert not held
    assert committed(coordinator, "g") == []
    refuse(False)
    coordinator.tick()
    member.take(held)
    member.settle()
    assert member.owned == [TopicPartitions(TOPIC_ID, [0, 1, 2], "t")]


def test_a_coordinator_is_loaded_while_its_log_takes_no_appends(
    rig: GroupRig,
    coordinator: GroupCoordinator,
    clock: ManualClock,
    loads: list[int],
    refuse: Refuse,
    grow: Callable[[], None],
) -> None:
    """Story: what a new leader had to write first was refused, so nobody could read what was committed."""
    member = Member(coordinator, "m1")
    member.settle()
    assert commit(coordinator, "another", 1) == [EmptyResponse()]
    loads.clear()
    successor = GroupCoordinator(rig.brokers[0].manager, ClusterConfig(), clock=clock)
    grow()
    refuse(True)
    for _ in range(5):
        successor.tick()
        clock.now_ms += SESSION_MS // 3
    assert committed(successor, "another") == [1]
    member.coordinator = successor
    refuse(False)
    member.settle()
    assert member.owned == [TopicPartitions(TOPIC_ID, [0, 1, 2], "t")]
    assert len(loads) == 1
