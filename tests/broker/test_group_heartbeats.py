"""Heartbeats at a broker's coordinator, on a real log: answers that are held back, and what wakes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.reply import Answer
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    FencedMemberEpochError,
    GroupIdNotFoundError,
    InvalidSubscriptionError,
    NonEmptyGroupError,
    NotLeaderOrFollowerError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)
from spark_broker.protocol.messages import (
    CommittedOffset,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DeleteGroupRequest,
    DescribeGroupRequest,
    DescribeGroupResponse,
    EmptyResponse,
    GroupListing,
    ListGroupsResponse,
    MemberAbout,
    OffsetCommitRequest,
    OffsetFetchRequest,
    TopicPartitions,
)
from tests.broker.rig import TOPIC_ID
from tests.broker.test_group_coordinator import GroupRig
from tests.conftest import WaitUntil

SESSION_MS = 9000
GROUP = "g"
WHOLE = [TopicPartitions(TOPIC_ID, [0, 1], "t")]


class ManualClock:
    """Time stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def boottime_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic_ms(self) -> int:
        return self.now_ms


class TwoPartitionsRig(GroupRig):
    """The topic `t` has a second partition, which has no leader: nobody reads it here."""

    def image(self, state: PartitionRegistration) -> MetadataImage:
        image = super().image(state)
        topic = image.topics[TOPIC_ID]
        second = PartitionRegistration((1,), (), leader=-1, leader_epoch=0, partition_epoch=0)
        topic = dataclasses.replace(topic, partitions=(*topic.partitions, second))
        return dataclasses.replace(image, topics=MappingProxyType({**image.topics, TOPIC_ID: topic}))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[GroupRig]:
    rig = TwoPartitionsRig(tmp_path, 2)
    rig.publish(0)
    yield rig
    rig.stop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def coordinator(rig: GroupRig, clock: ManualClock) -> GroupCoordinator:
    return GroupCoordinator(rig.brokers[0].manager, ClusterConfig(), clock=clock)


class Member:
    """Sends heartbeats. It takes each answer, and keeps the rules of `core.groups.requests.Heartbeat`."""

    def __init__(self, coordinator: GroupCoordinator, member_id: str, *topics: str) -> None:
        self.coordinator = coordinator
        self.member_id = member_id
        self.about = MemberAbout(list(topics or ("t",)), "", "", "client", "host", SESSION_MS, 60_000, "")
        self.epoch, self.sequence, self.generation = 0, 0, -1
        self.owned: list[TopicPartitions] = []

    def beat(self, *, whole: bool = True) -> list[Answer]:
        """The answer appears in the list."""
        self.sequence += 1
        request = ConsumerGroupHeartbeatRequest(
            GROUP,
            self.member_id,
            self.epoch,
            self.sequence,
            self.generation,
            self.owned if whole else None,
            self.about if whole else None,
        )
        answers: list[Answer] = []
        self.coordinator.heartbeat(request, answers.append)
        return answers

    def take(self, answers: list[Answer]) -> None:
        (answer,) = answers
        assert isinstance(answer, ConsumerGroupHeartbeatResponse), answer
        assert answer.sequence == self.sequence
        self.epoch, self.generation = answer.member_epoch, answer.generation
        if answer.assignment is not None:
            self.owned = answer.assignment

    def settle(self) -> list[Answer]:
        """Go on until an answer is held back; that is returned."""
        for _ in range(10):
            answers = self.beat()
            if not answers:
                return answers
            self.take(answers)
        raise AssertionError(f"{self.member_id} does not come to rest")

    def leave(self) -> list[Answer]:
        self.epoch = -1
        return self.beat(whole=False)

    @property
    def partitions(self) -> list[int]:
        return [number for topic in self.owned for number in topic.partitions]


def test_a_member_gets_every_partition_and_its_next_heartbeat_is_held(coordinator: GroupCoordinator) -> None:
    member = Member(coordinator, "a")
    assert member.settle() == []
    assert member.owned == WHOLE
    assert member.epoch > 0


def test_a_held_heartbeat_is_answered_after_a_third_of_the_session(
    coordinator: GroupCoordinator, clock: ManualClock
) -> None:
    member = Member(coordinator, "a")
    held = member.settle()
    clock.now_ms += SESSION_MS // 3 - 1
    coordinator.tick()
    assert held == []
    clock.now_ms += 1
    coordinator.tick()
    member.take(held)
    assert member.owned == WHOLE


def test_a_held_heartbeat_is_no_sign_of_life(coordinator: GroupCoordinator, clock: ManualClock) -> None:
    member = Member(coordinator, "a")
    member.settle()
    clock.now_ms += SESSION_MS
    coordinator.tick()
    assert [type(answer) for answer in member.beat()] == [UnknownMemberIdError]
    assert _state(coordinator) == "Empty"


def test_two_members_share_and_hear_of_each_other_at_once(coordinator: GroupCoordinator) -> None:
    first, second = Member(coordinator, "a"), Member(coordinator, "b")
    held = first.settle()
    second.take(second.beat())
    assert second.partitions == [], "the first one has not given anything up yet"
    coordinator.pump()
    first.take(held)
    assert len(first.partitions) == 1
    first.settle()
    second.settle()
    assert sorted(first.partitions + second.partitions) == [0, 1]


def test_whoever_leaves_leaves_its_partitions_to_the_others_at_once(coordinator: GroupCoordinator) -> None:
    first, second = Member(coordinator, "a"), Member(coordinator, "b")
    first.settle()
    second.take(second.beat())
    first.settle()
    held = second.settle()
    assert [type(answer) for answer in first.leave()] == [ConsumerGroupHeartbeatResponse]
    coordinator.pump()
    second.take(held)
    second.settle()
    assert second.partitions == [0, 1]


def test_a_newer_heartbeat_ends_the_wait_of_the_one_before(coordinator: GroupCoordinator) -> None:
    member = Member(coordinator, "a")
    held = member.settle()
    again = member.beat()
    coordinator.pump()
    assert [answer.sequence for answer in held if isinstance(answer, ConsumerGroupHeartbeatResponse)] == [
        member.sequence - 1
    ]
    assert again == []


def test_a_late_heartbeat_leaves_the_newest_one_where_it_waits(coordinator: GroupCoordinator) -> None:
    member = Member(coordinator, "a")
    held = member.settle()
    member.sequence -= 2
    assert len(member.beat()) == 1
    coordinator.pump()
    assert held == []


def test_held_heartbeats_end_when_another_broker_leads(rig: GroupRig, coordinator: GroupCoordinator) -> None:
    member = Member(coordinator, "a")
    held = member.settle()
    rig.move_log(0, leader=1, leader_epoch=1, isr=(0, 1), partition_epoch=1)
    coordinator.tick()
    assert [type(answer) for answer in held] == [NotLeaderOrFollowerError]
    with pytest.raises(CoordinatorNotAvailableError):
        member.beat()


def test_a_group_goes_on_with_the_next_coordinator(
    rig: GroupRig, coordinator: GroupCoordinator, clock: ManualClock
) -> None:
    member = Member(coordinator, "a")
    member.settle()
    epoch = member.epoch
    member.coordinator = GroupCoordinator(rig.brokers[0].manager, ClusterConfig(), clock=clock)
    member.settle()
    assert (member.epoch, member.owned) == (epoch, WHOLE)


def test_an_answer_waits_until_what_it_shows_is_committed(
    rig: GroupRig, coordinator: GroupCoordinator, wait_until: WaitUntil
) -> None:
    rig.move_log(0, isr=(0, 1), partition_epoch=1)
    answers = Member(coordinator, "a").beat()
    assert answers == []
    rig.publish(1)
    wait_until(lambda: _pumped(coordinator, answers), "the answer")
    assert [type(answer) for answer in answers] == [ConsumerGroupHeartbeatResponse]


def _pumped(coordinator: GroupCoordinator, answers: list[Answer]) -> bool:
    coordinator.tick()
    return bool(answers)


def test_a_large_groups_target_is_computed_elsewhere(rig: GroupRig, clock: ManualClock) -> None:
    elsewhere: list[Callable[[], None]] = []
    coordinator = GroupCoordinator(
        rig.brokers[0].manager, ClusterConfig(), clock=clock, compute=lambda name, work: elsewhere.append(work)
    )
    coordinator.compute_beyond(0)
    member = Member(coordinator, "a")
    held = member.beat()
    assert held == [], "there is nothing to say yet"
    (work,) = elsewhere
    work()
    coordinator.pump()
    member.take(held)
    assert member.partitions == [0, 1]


def _commit(coordinator: GroupCoordinator, member_id: str, epoch: int) -> list[Answer]:
    answers: list[Answer] = []
    request = OffsetCommitRequest(GROUP, [CommittedOffset("t", 0, 7)], member_id, epoch)
    coordinator.commit(request, 0, answers.append)
    return answers


def test_only_members_commit_while_there_are_any(coordinator: GroupCoordinator) -> None:
    assert _commit(coordinator, "", -1) == [EmptyResponse()]
    member = Member(coordinator, "a")
    member.settle()
    assert [type(answer) for answer in _commit(coordinator, "", -1)] == [UnknownMemberIdError]
    assert [type(answer) for answer in _commit(coordinator, "b", 1)] == [UnknownMemberIdError]
    assert [type(answer) for answer in _commit(coordinator, "a", member.epoch + 1)] == [FencedMemberEpochError]
    assert _commit(coordinator, "a", member.epoch) == [EmptyResponse()]
    other = Member(coordinator, "b")
    other.take(other.beat())
    member.settle()
    other.settle()
    expected = EmptyResponse if 0 in member.partitions else StaleMemberEpochError
    assert [type(answer) for answer in _commit(coordinator, "a", member.epoch)] == [expected]


def test_a_stale_epoch_is_not_taken_for_no_offset(coordinator: GroupCoordinator) -> None:
    member = Member(coordinator, "a")
    member.settle()
    answers: list[Answer] = []
    coordinator.fetch(OffsetFetchRequest(GROUP, None, False, "a", member.epoch + 5), answers.append)
    assert [type(answer) for answer in answers] == [StaleMemberEpochError]


def test_a_subscription_to_nothing_is_refused(coordinator: GroupCoordinator) -> None:
    member = Member(coordinator, "a")
    member.about = MemberAbout([], "", "", "", "", SESSION_MS, 60_000, "")
    assert [type(answer) for answer in member.beat()] == [InvalidSubscriptionError]


def _describe(coordinator: GroupCoordinator, group: str = GROUP) -> DescribeGroupResponse:
    answers: list[Answer] = []
    coordinator.describe(DescribeGroupRequest(group), answers.append)
    (answer,) = answers
    assert isinstance(answer, DescribeGroupResponse)
    return answer


def _state(coordinator: GroupCoordinator) -> str:
    return _describe(coordinator).state


def test_groups_are_listed_described_and_deleted(coordinator: GroupCoordinator) -> None:
    assert _describe(coordinator, "nobody").state == "Dead"
    member = Member(coordinator, "a")
    member.settle()
    assert _list(coordinator) == ListGroupsResponse([GroupListing(GROUP, "Stable", 1)], [(0, 0)])
    described = _describe(coordinator)
    (shown,) = described.members
    assert (described.state, described.epoch, shown.epoch) == ("Stable", member.epoch, member.epoch)
    assert (shown.kind, shown.assigned, shown.target, shown.revoking) == ("stable", WHOLE, WHOLE, [])
    assert (shown.about.host, shown.about.client_id) == ("host", "client")
    assert [each.reason for each in described.rebalances] == ["a joined"]
    assert [type(answer) for answer in _delete(coordinator)] == [NonEmptyGroupError]
    member.leave()
    assert _delete(coordinator) == [EmptyResponse()]
    assert [type(answer) for answer in _delete(coordinator)] == [GroupIdNotFoundError]


def test_a_list_names_the_partitions_that_it_is_of(rig: GroupRig, clock: ManualClock) -> None:
    """Who has not heard of its leadership, or has lost it, does not look like a broker that has no groups."""
    first, second = (GroupCoordinator(rig.brokers[n].manager, ClusterConfig(), clock=clock) for n in (0, 1))
    assert _commit(first, "", -1) == [EmptyResponse()]
    rig.publish(1)
    assert _list(second) == ListGroupsResponse([], [])
    rig.move_log(0, leader=1, leader_epoch=1, isr=(0, 1), partition_epoch=1)
    assert _list(first) == ListGroupsResponse([], [])


def _list(coordinator: GroupCoordinator) -> ListGroupsResponse:
    answers: list[Answer] = []
    coordinator.list_groups(answers.append)
    (answer,) = answers
    assert isinstance(answer, ListGroupsResponse)
    return answer


def _delete(coordinator: GroupCoordinator) -> list[Answer]:
    answers: list[Answer] = []
    coordinator.delete(DeleteGroupRequest(GROUP), answers.append)
    return answers
