"""A broker's coordinator of committed offsets on a real log. It never waits: the test drives every step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.coordinator import GroupCoordinator
from spark_broker.broker.partition import Partition
from spark_broker.broker.reply import Answer
from spark_broker.controller.image import PartitionRegistration
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InvalidRequestError,
    NotLeaderOrFollowerError,
    RequestTimedOutError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import (
    CommittedOffset,
    EmptyResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TransactionalOffsetCommitRequest,
)
from tests.broker.rig import INTERNAL_TOPIC_ID, TOPIC_ID, InternalTopicRig
from tests.conftest import WaitUntil


class GroupRig(InternalTopicRig):
    """Two brokers with one partition of `__consumer_offsets`. Broker 0 leads it, alone in the ISR."""

    internal_topic = CONSUMER_OFFSETS_TOPIC
    log_state = PartitionRegistration((0, 1), (0,), leader=0, leader_epoch=0, partition_epoch=0)

    def log(self, broker: int = 0) -> Partition:
        return self.brokers[broker].manager.partition(INTERNAL_TOPIC_ID, 0)

    def coordinator(self, broker: int = 0, *, snapshot_records: int = 10_000) -> GroupCoordinator:
        return GroupCoordinator(self.brokers[broker].manager, snapshot_records)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[GroupRig]:
    rig = GroupRig(tmp_path, 2)
    rig.publish(0)
    yield rig
    rig.stop()


def commit(coordinator: GroupCoordinator, group: str, offset: int, timeout_ms: int = 30_000) -> list[Answer]:
    """The answer appears in the list."""
    answers: list[Answer] = []
    request = OffsetCommitRequest(group, [CommittedOffset("t", 0, offset, 3)])
    coordinator.commit(request, SYSTEM_CLOCK.boottime_ms() + timeout_ms, answers.append)
    return answers


def fetch(coordinator: GroupCoordinator, group: str, partitions: list[tuple[str, int]] | None = None) -> list[Answer]:
    """The answer appears in the list."""
    answers: list[Answer] = []
    coordinator.fetch(OffsetFetchRequest(group, partitions), SYSTEM_CLOCK.boottime_ms() + 30_000, answers.append)
    return answers


def committed(coordinator: GroupCoordinator, group: str) -> list[int]:
    """What a coordinator answers at once that is alone in its ISR."""
    (answer,) = fetch(coordinator, group)
    return offsets_of(answer)


def awaited(coordinator: GroupCoordinator, group: str, wait_until: WaitUntil) -> list[int]:
    """What a coordinator answers that must ask its followers."""
    answers = fetch(coordinator, group)
    wait_until(lambda: answers != [], "the answer")
    return offsets_of(answers[0])


def offsets_of(answer: Answer) -> list[int]:
    assert isinstance(answer, OffsetFetchResponse), answer
    return [committed.offset for committed in answer.offsets]


def test_a_commit_is_answered_when_it_is_in_the_log_for_good(rig: GroupRig, wait_until: WaitUntil) -> None:
    coordinator = rig.coordinator()
    assert commit(coordinator, "g", 1) == [EmptyResponse()]
    rig.move_log(0, isr=(0, 1), partition_epoch=1)
    answers = commit(coordinator, "g", 2)
    fetched = fetch(coordinator, "g")
    assert answers == fetched == []
    rig.publish(1)
    wait_until(lambda: answers == [EmptyResponse()] and fetched != [], "the commit")
    assert offsets_of(fetched[0]) == [1], "it could still be lost when the answer was made"
    fetched = fetch(coordinator, "g", [("t", 0), ("t", 1)])
    wait_until(lambda: fetched != [], "the answer")
    assert fetched == [OffsetFetchResponse([CommittedOffset("t", 0, 2, 3, topic_id=TOPIC_ID)])]


def test_a_coordinator_that_has_not_learned_of_its_successor_does_not_answer(
    rig: GroupRig, wait_until: WaitUntil
) -> None:
    """Seed 40029335: a group's next member asked the old one, found nothing committed, and began anew."""
    coordinator, successor = rig.coordinator(), rig.coordinator(1)
    assert commit(coordinator, "g", 1) == [EmptyResponse()]
    rig.move_log(0, 1, isr=(0, 1), partition_epoch=1)
    wait_until(lambda: rig.log(1).replica.log_end_offset == 1, "the follower")
    rig.move_log(1, leader=1, leader_epoch=1, partition_epoch=2)
    late = fetch(coordinator, "g")
    assert late == []
    rig.publish(0)
    assert [type(answer) for answer in late] == [NotLeaderOrFollowerError]
    assert awaited(successor, "g", wait_until) == [1]


def test_barriers_are_of_no_group_and_no_snapshot_has_them(rig: GroupRig, wait_until: WaitUntil) -> None:
    coordinator = rig.coordinator(snapshot_records=1)
    commit(coordinator, "g", 1)
    rig.move_log(0, 1, isr=(0, 1), partition_epoch=1)
    for _ in range(3):
        assert awaited(coordinator, "g", wait_until) == [1]
    assert rig.log().replica.log_end_offset == 4
    coordinator.write_snapshots()
    wait_until(lambda: rig.log().replica.high_watermark == 5, "a snapshot of one record")
    coordinator.write_snapshots()
    assert rig.log().replica.log_start_offset == 4
    rig.move_log(0, 1, isr=(0,), partition_epoch=2)
    assert committed(rig.coordinator(), "g") == [1]
    assert committed(rig.coordinator(), "") == []


def test_a_commit_that_the_followers_do_not_get_is_given_up_at_its_deadline(rig: GroupRig) -> None:
    coordinator = rig.coordinator()
    rig.move_log(0, isr=(0, 1), partition_epoch=1)
    answers = commit(coordinator, "g", 2, timeout_ms=-1)
    rig.log().tick({0: 1, 1: 1})
    assert [type(answer) for answer in answers] == [RequestTimedOutError]


def test_whoever_commits_hears_that_another_broker_leads_now(rig: GroupRig, wait_until: WaitUntil) -> None:
    coordinator, successor = rig.coordinator(), rig.coordinator(1)
    assert commit(coordinator, "g", 1) == [EmptyResponse()]
    rig.move_log(0, 1, isr=(0, 1), partition_epoch=1)
    wait_until(lambda: rig.log(1).replica.log_end_offset == 1, "the follower")
    rig.move_log(1, leader=1, leader_epoch=1, partition_epoch=2)
    late = commit(coordinator, "g", 5)
    assert late == []
    rig.publish(0)
    assert [type(answer) for answer in late] == [NotLeaderOrFollowerError]
    with pytest.raises(CoordinatorNotAvailableError):
        commit(coordinator, "g", 6)
    with pytest.raises(CoordinatorNotAvailableError):
        fetch(coordinator, "g")
    wait_until(lambda: rig.log(1).replica.high_watermark == 1, "what the new leader knows to be committed")
    assert awaited(successor, "g", wait_until) == [1]


def test_a_commit_that_makes_no_sense_is_refused(rig: GroupRig) -> None:
    coordinator = rig.coordinator()
    for group, offset in (("", 1), ("g", -1)):
        with pytest.raises(InvalidRequestError):
            commit(coordinator, group, offset)
    answers: list[Answer] = []
    coordinator.commit(OffsetCommitRequest("g", []), 0, answers.append)
    assert answers == [EmptyResponse()]
    assert rig.log().replica.log_end_offset == 0


@pytest.mark.parametrize(("topic", "partition"), [("nowhere", 0), ("t", 7)])
def test_offsets_of_a_partition_that_does_not_exist_are_refused_in_a_transaction(
    rig: GroupRig, topic: str, partition: int
) -> None:
    request = TransactionalOffsetCommitRequest("g", [CommittedOffset(topic, partition, 1, 0)], "id", 5, 0, 0)
    answers: list[Answer] = []
    with pytest.raises(UnknownTopicOrPartitionError, match=f"topic '{topic}'"):
        rig.coordinator().commit(request, SYSTEM_CLOCK.boottime_ms() + 30_000, answers.append)
    assert answers == []
    assert rig.log().replica.log_end_offset == 0


def test_a_snapshot_shortens_the_log_and_says_the_same(rig: GroupRig) -> None:
    coordinator = rig.coordinator(snapshot_records=10)
    for offset in range(9):
        commit(coordinator, f"g{offset % 3}", offset)
    coordinator.write_snapshots()
    assert rig.log().replica.log_end_offset == 9, "it is not time yet"
    commit(coordinator, "g0", 9)
    coordinator.write_snapshots()
    coordinator.write_snapshots()
    assert rig.log().replica.log_start_offset == 10
    assert rig.log().replica.log_end_offset == 13
    coordinator.write_snapshots()
    assert rig.log().replica.log_end_offset == 13, "a snapshot is no reason for another"
    for reader in (coordinator, rig.coordinator()):
        assert [committed(reader, group) for group in ("g0", "g1", "g2")] == [[9], [7], [8]]
    successor = rig.coordinator(snapshot_records=10)
    for offset in range(10, 17):
        commit(successor, "g1", offset)
    for _ in range(2):
        successor.write_snapshots()
    assert rig.log().replica.log_start_offset == 10, "the new coordinator knows what its predecessor has written"


def test_a_snapshot_takes_nothing_back_that_was_committed_while_it_was_written(
    rig: GroupRig, wait_until: WaitUntil
) -> None:
    """It covers what was committed when it was made, and is appended after a commit that was on its way."""
    coordinator = rig.coordinator(snapshot_records=1)
    commit(coordinator, "g", 1)
    rig.move_log(0, isr=(0, 1), partition_epoch=1)
    answers = commit(coordinator, "g", 2)
    coordinator.write_snapshots()
    assert rig.log().replica.log_end_offset == 3
    assert rig.log().replica.high_watermark == 1
    rig.publish(1)
    wait_until(lambda: answers == [EmptyResponse()] and rig.log().replica.high_watermark == 3, "the commit")
    assert awaited(coordinator, "g", wait_until) == [2]
    coordinator.write_snapshots()
    assert rig.log().replica.log_start_offset == 1
    assert awaited(rig.coordinator(), "g", wait_until) == [2]


def test_more_groups_than_a_batch_holds_are_a_snapshot_of_several(
    rig: GroupRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_broker.broker.offsets_shard.SNAPSHOT_BATCH_BYTES", 40)
    coordinator = rig.coordinator(snapshot_records=20)
    for number in range(20):
        commit(coordinator, f"group-{number}", number)
    for _ in range(2):
        coordinator.write_snapshots()
    log = rig.log()
    assert (log.replica.log_start_offset, log.replica.log_end_offset) == (20, 40)
    assert len(list(log.log.headers(20))) > 1
    assert [committed(rig.coordinator(), f"group-{number}") for number in range(20)] == [[n] for n in range(20)]


def test_a_snapshot_that_the_log_does_not_take_is_written_later(rig: GroupRig) -> None:
    coordinator = rig.coordinator(snapshot_records=2)
    for offset in (1, 2):
        commit(coordinator, "g", offset)
    lease = rig.brokers[0].lease
    lease.session_lost()
    coordinator.write_snapshots()
    lease.extend(SYSTEM_CLOCK.boottime_ms(), 3_600_000)
    assert rig.log().replica.log_end_offset == 2
    for offset in (3, 4):
        commit(coordinator, "g", offset)
    for _ in range(2):
        coordinator.write_snapshots()
    assert rig.log().replica.log_start_offset == 4
    assert committed(coordinator, "g") == [4]


def test_shards_of_partitions_that_others_lead_are_forgotten(rig: GroupRig) -> None:
    """The next leadership reads the log again."""
    coordinator = rig.coordinator(snapshot_records=1)
    commit(coordinator, "g", 1)
    rig.move_log(0, leader=1, leader_epoch=1, isr=(0, 1), partition_epoch=1)
    coordinator.write_snapshots()
    assert rig.log().replica.log_end_offset == 1, "this broker does not lead"
    rig.move_log(0, leader=0, leader_epoch=2, isr=(0,), partition_epoch=2)
    assert committed(coordinator, "g") == [1]
