"""A broker's coordinator of groups on a real log. It never waits: the test drives every step."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from spark_broker.broker.append import Append, Marker
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.coordinator_runtime import REFUSED_AGAIN_MS, Led
from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.internal_records import encode_rows
from spark_broker.broker.lease import SETTLED_MS, Lease
from spark_broker.broker.log_cleaner import LogCleaner
from spark_broker.broker.partition import Partition
from spark_broker.broker.reply import Answer
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import PartitionRegistration
from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import OldCommit, OldOffsetKey, OldOffsetValue, encode_record
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InconsistentTopicIdError,
    InvalidRequestError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    StorageFullError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.frame import CONTROL, TRANSACTIONAL
from spark_broker.protocol.messages import (
    CommittedOffset,
    DeleteGroupOffsetsRequest,
    DeleteGroupRequest,
    EmptyResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TransactionalOffsetCommitRequest,
)
from tests.broker.lone_partition import HeldClock
from tests.broker.rig import INTERNAL_TOPIC_ID, TOPIC_ID, InternalTopicRig, Outcome
from tests.conftest import WaitUntil


class GroupRig(InternalTopicRig):
    """Two brokers with one partition of `__consumer_offsets`. Broker 0 leads it, alone in the ISR."""

    internal_topic = CONSUMER_OFFSETS_TOPIC
    internal_config: ClassVar = {"cleanup.policy": "compact", "segment.bytes": "4096", "min.cleanable.dirty.ratio": "0"}
    log_state = PartitionRegistration((0, 1), (0,), leader=0, leader_epoch=0, partition_epoch=0)

    def log(self, broker: int = 0) -> Partition:
        return self.brokers[broker].manager.partition(INTERNAL_TOPIC_ID, 0)

    def coordinator(self, broker: int = 0) -> GroupCoordinator:
        return GroupCoordinator(self.brokers[broker].manager, ClusterConfig())

    def compact(self) -> None:
        cleaner = LogCleaner(self.brokers[0].manager, ClusterConfig())
        partition = cleaner.next_pass()
        assert partition is self.log()
        for _ in cleaner.steps(partition):
            pass


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[GroupRig]:
    rig = GroupRig(tmp_path, 2)
    rig.publish(0)
    yield rig
    rig.stop()


def commit(coordinator: GroupCoordinator, group: str, offset: int) -> list[Answer]:
    """The answer appears in the list."""
    answers: list[Answer] = []
    coordinator.commit(OffsetCommitRequest(group, [CommittedOffset("t", 0, offset, 3)]), 0, answers.append)
    return answers


def fetch(coordinator: GroupCoordinator, group: str, partitions: list[tuple[str, int]] | None = None) -> list[Answer]:
    """The answer appears in the list."""
    answers: list[Answer] = []
    coordinator.fetch(OffsetFetchRequest(group, partitions), answers.append)
    return answers


def committed(coordinator: GroupCoordinator, group: str) -> list[int]:
    """What a coordinator answers at once that is alone in its ISR."""
    (answer,) = fetch(coordinator, group)
    return offsets_of(answer)


def awaited(coordinator: GroupCoordinator, group: str, wait_until: WaitUntil) -> list[int]:
    """What a coordinator answers that must ask its followers."""
    answers = fetch(coordinator, group)
    await_answers(coordinator, wait_until, answers)
    return offsets_of(answers[0])


def await_answers(coordinator: GroupCoordinator, wait_until: WaitUntil, *answers: list[Answer]) -> None:
    """Drive the coordinator until each of the lists has an answer."""

    def answered() -> bool:
        coordinator.tick()
        return all(answers)

    wait_until(answered, "the answers")


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
    await_answers(coordinator, wait_until, answers, fetched)
    assert answers == [EmptyResponse()]
    assert offsets_of(fetched[0]) == [2], "it is committed when the answer is given"
    fetched = fetch(coordinator, "g", [("t", 0), ("t", 1)])
    await_answers(coordinator, wait_until, fetched)
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
    coordinator.tick()
    assert [type(answer) for answer in late] == [NotLeaderOrFollowerError]
    assert awaited(successor, "g", wait_until) == [1]


def test_barriers_are_of_no_group_and_leave_one_record(rig: GroupRig, wait_until: WaitUntil) -> None:
    coordinator = rig.coordinator()
    commit(coordinator, "g", 1)
    rig.move_log(0, 1, isr=(0, 1), partition_epoch=1)
    for _ in range(3):
        assert awaited(coordinator, "g", wait_until) == [1]
    assert rig.log().replica.log_end_offset == 4
    rig.move_log(0, 1, isr=(0,), partition_epoch=2)
    assert committed(rig.coordinator(), "g") == [1]
    assert committed(rig.coordinator(), "") == []


def test_whoever_commits_hears_that_another_broker_leads_now(rig: GroupRig, wait_until: WaitUntil) -> None:
    coordinator, successor = rig.coordinator(), rig.coordinator(1)
    assert commit(coordinator, "g", 1) == [EmptyResponse()]
    rig.move_log(0, 1, isr=(0, 1), partition_epoch=1)
    wait_until(lambda: rig.log(1).replica.log_end_offset == 1, "the follower")
    rig.move_log(1, leader=1, leader_epoch=1, partition_epoch=2)
    late = commit(coordinator, "g", 5)
    assert late == []
    rig.publish(0)
    coordinator.tick()
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


def test_offsets_are_of_topics_that_are_there(rig: GroupRig) -> None:
    coordinator = rig.coordinator()
    for offset, error in (
        (CommittedOffset("nowhere", 0, 1), UnknownTopicOrPartitionError),
        (CommittedOffset("t", 7, 1), UnknownTopicOrPartitionError),
        (CommittedOffset("t", 0, 1, topic_id="12" * 16), UnknownTopicIdError),
        (CommittedOffset("t", 0, 1, topic_id=rig.deleted_id), InconsistentTopicIdError),
    ):
        with pytest.raises(error):
            coordinator.commit(OffsetCommitRequest("g", [offset]), 0, lambda _: None)
    assert rig.log().replica.log_end_offset == 0


def test_the_offsets_of_topics_that_are_there_are_committed_beside_one_that_is_not(rig: GroupRig) -> None:
    coordinator, answers = rig.coordinator(), list[Answer]()
    offsets = [CommittedOffset("gone", 0, 1), CommittedOffset("t", 0, 2)]
    coordinator.commit(OffsetCommitRequest("g", offsets), 0, answers.append)
    assert [type(answer) for answer in answers] == [UnknownTopicOrPartitionError]
    assert committed(coordinator, "g") == [2]


def test_a_compacted_log_says_the_same(rig: GroupRig) -> None:
    coordinator = rig.coordinator()
    for offset in range(60):
        commit(coordinator, f"g{offset % 3}", offset)
    rows = sum(header.row_count for header in rig.log().log.headers(0))
    rig.compact()
    assert sum(header.row_count for header in rig.log().log.headers(0)) < rows
    for reader in (coordinator, rig.coordinator()):
        assert [committed(reader, group) for group in ("g0", "g1", "g2")] == [[57], [58], [59]]


def test_offsets_of_a_transaction_that_compaction_meets_first_count(
    rig: GroupRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: compaction makes plain batches of those that a transaction has committed. A coordinator that had not read
    them yet passed over them.
    """
    slow, writer = rig.coordinator(), rig.coordinator()
    for each in (slow, writer):
        assert committed(each, "g") == []
    monkeypatch.setattr(writer, "_confirm", lambda partition, awaited, *_: partition.confirm(awaited))
    answers: list[Answer] = []
    deadline_ms = SYSTEM_CLOCK.boottime_ms() + 30_000
    request = TransactionalOffsetCommitRequest("g", [CommittedOffset("t", 0, 9, 0)], "id", 5, 0, 0)
    writer.commit(request, deadline_ms, answers.append)
    rig.log().append_marker(Marker(5, 1, True, deadline_ms), Outcome())
    for offset in range(60):
        commit(writer, "others", offset)
    assert answers == [EmptyResponse()]
    rig.compact()
    kept = [header for header in rig.log().log.headers(0) if header.producer_id == 5 and header.row_count]
    assert kept
    assert not [header for header in kept if header.attributes & TRANSACTIONAL and not header.attributes & CONTROL]
    assert committed(slow, "g") == [9]


def test_commits_by_the_names_of_topics_are_taken_once(rig: GroupRig) -> None:
    """They are of an earlier version. Those of topics that are not there any more are none."""
    records = [
        OldCommit(OldOffsetKey("g", "t", 0), OldOffsetValue(5, 3, "note")),
        OldCommit(OldOffsetKey("g", "gone", 0), OldOffsetValue(6, 3, "")),
        OldCommit(OldOffsetKey("h", "t", 0), OldOffsetValue(7, 3, "", 1, TOPIC_ID)),
    ]
    rows = [encode_record(record) for record in records]
    topic, outcome = rig.log().topic, Outcome()
    message = encode_rows(rows, topic.schemas[-1], topic.schema_id, 0)
    rig.log().append(Append(message, 0, -1, 0, SYSTEM_CLOCK.boottime_ms() + 30_000), outcome)
    ends = []
    for _ in range(2):
        coordinator = rig.coordinator()
        assert fetch(coordinator, "g") == [OffsetFetchResponse([CommittedOffset("t", 0, 5, 3, "note", TOPIC_ID)])]
        assert committed(coordinator, "h") == [7]
        ends.append(rig.log().replica.log_end_offset)
    assert ends[0] == ends[1] > 3


def test_what_was_decided_and_is_not_appended_has_not_happened(rig: GroupRig) -> None:
    coordinator = rig.coordinator()
    assert commit(coordinator, "g", 1) == [EmptyResponse()]
    lease = rig.brokers[0].lease
    lease.session_lost()
    with pytest.raises(CoordinatorNotAvailableError):
        commit(coordinator, "g", 2)
    lease.extend(SYSTEM_CLOCK.boottime_ms(), 3_600_000)
    assert committed(coordinator, "g") == [1]


def test_shards_of_partitions_that_others_lead_are_forgotten(rig: GroupRig) -> None:
    """The next leadership reads the log again."""
    coordinator = rig.coordinator()
    commit(coordinator, "g", 1)
    rig.move_log(0, leader=1, leader_epoch=1, isr=(0, 1), partition_epoch=1)
    coordinator.tick()
    with pytest.raises(CoordinatorNotAvailableError):
        fetch(coordinator, "g")
    rig.move_log(0, leader=0, leader_epoch=2, isr=(0,), partition_epoch=2)
    assert committed(coordinator, "g") == [1]


def late(coordinator: GroupCoordinator, offset: int, sequence: int, *, epoch: int = 0, by: str = "c") -> Answer:
    """The answer to a commit as a client sends it; an error that is raised is one, too."""
    answers: list[Answer] = []
    offsets = [CommittedOffset("t", 0, offset, 3)]
    request = OffsetCommitRequest("g", offsets, coordinator_epoch=epoch, committer=by, sequence=sequence)
    try:
        coordinator.commit(request, 0, answers.append)
    except SparkBrokerError as error:
        return error
    return answers[0]


def test_a_commit_that_comes_late_does_not_take_the_group_back(rig: GroupRig) -> None:
    coordinator = rig.coordinator()
    assert isinstance(late(coordinator, 5, 1), EmptyResponse)
    assert isinstance(late(coordinator, 9, 2), EmptyResponse)
    assert isinstance(late(coordinator, 5, 1), InvalidRequestError)
    assert isinstance(late(coordinator, 9, 2), EmptyResponse), "the same one may be sent again"
    assert committed(coordinator, "g") == [9]
    assert isinstance(late(coordinator, 3, 0, by="another"), EmptyResponse), "seeks to an earlier offset, say"
    assert committed(coordinator, "g") == [3]


def test_the_order_of_commits_outlasts_an_append_that_is_refused(rig: GroupRig) -> None:
    """Story: a refused append makes the shard load anew. The order was forgotten, though the leadership went on."""
    coordinator = rig.coordinator()
    assert isinstance(late(coordinator, 5, 1), EmptyResponse)
    assert isinstance(late(coordinator, 9, 2), EmptyResponse)
    replica = rig.log().replica
    replica.configure(2)
    assert isinstance(late(coordinator, 1, 0, by="another"), CoordinatorNotAvailableError)
    replica.configure(1)
    coordinator.tick()
    assert isinstance(late(coordinator, 5, 1), InvalidRequestError)
    assert committed(coordinator, "g") == [9]


def test_commits_that_the_log_does_not_take_throw_nothing_away(rig: GroupRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: while the ISR was too small, each commit had the whole log of the shard read again, under the lock of all
    groups.
    """
    coordinator = rig.coordinator()
    assert commit(coordinator, "g", 1) == [EmptyResponse()]
    loads: list[Partition] = []
    load = GroupCoordinator._load

    def counted(self: GroupCoordinator, number: int, partition: Partition) -> Led[GroupShard]:
        loads.append(partition)
        return load(self, number, partition)

    monkeypatch.setattr(GroupCoordinator, "_load", counted)
    rig.log().replica.configure(2)
    for _ in range(5):
        with pytest.raises(CoordinatorNotAvailableError, match="1 of the 2 replicas"):
            commit(coordinator, "g", 2)
        coordinator.tick()
    assert committed(coordinator, "g") == [1], "who only asks is answered"
    rig.log().replica.configure(1)
    assert commit(coordinator, "g", 3) == [EmptyResponse()]
    assert not loads


def test_a_shard_whose_append_was_refused_is_not_read_again_at_once(
    rig: GroupRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no one can know before: a disk without room."""
    clock = HeldClock()
    coordinator = GroupCoordinator(rig.brokers[0].manager, ClusterConfig(), clock=clock)
    assert commit(coordinator, "g", 1) == [EmptyResponse()]
    appends = 0

    def full(*_: object) -> None:
        nonlocal appends
        appends += 1
        raise StorageFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(rig.log(), "append", full)
        with pytest.raises(StorageFullError):
            commit(coordinator, "g", 2)
        for _ in range(5):
            with pytest.raises(CoordinatorNotAvailableError, match="tried again soon"):
                commit(coordinator, "g", 2)
            coordinator.tick()
    assert appends == 1
    clock.passed_ms += REFUSED_AGAIN_MS
    assert committed(coordinator, "g") == [1]
    assert commit(coordinator, "g", 3) == [EmptyResponse()]


def test_a_commit_for_another_leadership_is_sent_again(rig: GroupRig) -> None:
    """Story: the coordinator moved away and came back, and with it what it remembers of each committer was gone."""
    coordinator = rig.coordinator()
    assert isinstance(late(coordinator, 5, 1), EmptyResponse)
    rig.move_log(0, leader=1, leader_epoch=1, isr=(0, 1), partition_epoch=1)
    rig.move_log(0, leader=0, leader_epoch=2, isr=(0,), partition_epoch=2)
    for epoch in (0, 3):
        assert isinstance(late(coordinator, 3, 0, epoch=epoch), CoordinatorNotAvailableError)
    assert committed(coordinator, "g") == [5]
    assert isinstance(late(coordinator, 9, 2, epoch=2), EmptyResponse)
    assert committed(coordinator, "g") == [9]


def test_a_deletion_for_another_leadership_deletes_nothing(rig: GroupRig) -> None:
    coordinator = rig.coordinator()
    assert isinstance(late(coordinator, 5, 1), EmptyResponse)
    answers: list[Answer] = []
    coordinator.delete(DeleteGroupRequest("g", coordinator_epoch=1), answers.append)
    assert isinstance(answers.pop(), CoordinatorNotAvailableError)
    assert committed(coordinator, "g") == [5]
    coordinator.delete(DeleteGroupRequest("g", coordinator_epoch=0), answers.append)
    assert isinstance(answers.pop(), EmptyResponse)
    assert committed(coordinator, "g") == []


def test_a_deletion_for_an_earlier_topic_of_the_name_deletes_nothing(rig: GroupRig) -> None:
    """Story: the answer was lost, and the nightly reload came before the next try. The group began anew."""
    coordinator = rig.coordinator()
    commit(coordinator, "g", 5)
    answers: list[Answer] = []
    for topic_id in (uuid.uuid4().hex, TOPIC_ID):
        assert committed(coordinator, "g") == [5]
        coordinator.delete(DeleteGroupOffsetsRequest("g", [("t", 0)], topic_ids={"t": topic_id}), answers.append)
    assert answers == [EmptyResponse(), EmptyResponse()]
    assert committed(coordinator, "g") == []


def test_an_older_client_names_neither(rig: GroupRig) -> None:
    coordinator = rig.coordinator()
    for offset in (5, 3):
        assert isinstance(commit(coordinator, "g", offset)[0], EmptyResponse)
        assert committed(coordinator, "g") == [offset]


def test_offsets_do_not_expire_by_a_clock_that_was_set_a_moment_ago(rig: GroupRig) -> None:
    clock = HeldClock()
    coordinator = GroupCoordinator(rig.brokers[0].manager, ClusterConfig(), clock=clock)
    assert commit(coordinator, "g", 1) == [EmptyResponse()]
    lease = rig.log().lease = Lease(clock)
    for passed_ms, left in ((SETTLED_MS - 1, [1]), (SETTLED_MS, [])):
        lease.extend(clock.boottime_ms(), 10 * SETTLED_MS)
        clock.ahead_ms = 8 * 86_400_000
        clock.passed_ms += passed_ms
        coordinator.tick()
        assert committed(coordinator, "g") == left
