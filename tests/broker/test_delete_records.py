"""Deleted records stay deleted: for every reader, after elections, and in the files as far as whole segments go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.broker.fetch_operation import FetchOperation
from spark_broker.broker.notifier import Notifier
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.controller.topic_history import TopicHistory
from spark_broker.core.replica import LeaderAndIsr, Role
from spark_broker.errors import (
    InvalidRequestError,
    InvalidTopicError,
    LogTruncationError,
    OffsetMovedToTieredStorageError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.messages import FetchPartition, FetchRequest
from spark_broker.storage.start_kind import StartKind
from tests.broker.lone_partition import BIG, LonePartition
from tests.broker.rig import TOPIC_ID
from tests.conftest import WaitUntil
from tests.support.process_cluster import ProcessCluster

P0 = TopicPartition("t", 0)
RECORDS = 60
PER_BATCH = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = {"replica.fetch.wait.max.ms": 50}
    with ProcessCluster(tmp_path_factory.mktemp("cluster"), 2, config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


@pytest.fixture
def topic(cluster: ProcessCluster, admin: Admin) -> Iterator[TopicPartition]:
    """Records 0 to 60, in micro-batches of three."""
    admin.create_topic(NewTopic("t", partitions=2, replication_factor=2, config={"segment.bytes": 4096}))
    with Producer(cluster.bootstrap_servers) as producer:
        for first in range(0, RECORDS, PER_BATCH):
            rows = [{"value": str(number).encode() * 100} for number in range(first, first + PER_BATCH)]
            producer.append("t", rows, partition=0).result(20)
    yield P0
    admin.delete_topic("t")


def values(cluster: ProcessCluster) -> list[int]:
    """The numbers of partition 0, from its first record to its last."""
    found: list[int] = []
    with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([P0])
        end = consumer.end_offsets([P0])[P0]
        while consumer.position(P0) < end:
            for batch in consumer.poll(timeout=1.0):
                texts = [value.decode() for value in batch.data.column("value").to_pylist()]
                found += [int(text[: len(text) // 100]) for text in texts]
    return found


def test_readers_begin_at_the_very_offset_even_within_a_batch(
    cluster: ProcessCluster, admin: Admin, topic: TopicPartition
) -> None:
    assert admin.delete_records({topic: 22}) == {topic: 22}
    assert values(cluster) == list(range(22, RECORDS))
    assert admin.list_offsets({topic: "earliest"}) == {topic: 22}
    described = admin.describe_topic("t").partitions[0]
    assert (described.log_start_offset, described.local_log_start_offset) == (22, 22)
    assert admin.delete_records({topic: 5}) == {topic: 22}, "what is deleted does not come back"
    with Consumer(cluster.bootstrap_servers, auto_offset_reset="none") as consumer:
        consumer.assign([topic])
        consumer.seek(topic, 21)
        with pytest.raises(OffsetOutOfRangeError):
            list(iter(lambda: consumer.poll(timeout=1.0), [7]))  # Polls until it raises.


def test_segments_go_on_every_replica_and_the_next_leader_does_not_bring_records_back(
    cluster: ProcessCluster, admin: Admin, topic: TopicPartition, wait_until: WaitUntil
) -> None:
    segments = "logs/broker-*/t-0/*.arrow"
    before = len(list(cluster.base.glob(segments)))
    admin.delete_records({topic: 40})
    wait_until(lambda: len(list(cluster.base.glob(segments))) <= before // 2, "segments are deleted on both replicas")
    leader = admin.describe_topic("t").partitions[0].leader
    pid = next(broker.pid for broker in admin.describe_cluster().brokers if broker.id == leader)
    slot = next(slot for slot in range(2) if cluster.pid(slot) == pid)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: admin.describe_topic("t").partitions[0].leader not in (None, leader), "an election")
    assert values(cluster) == list(range(40, RECORDS))
    cluster.launch(slot)
    cluster.await_live(2)
    wait_until(lambda: len(admin.describe_topic("t").partitions[0].isr) == 2, "both replicas are in sync")
    assert values(cluster) == list(range(40, RECORDS))


def test_all_that_is_committed_may_be_deleted_and_offsets_go_on(
    cluster: ProcessCluster, admin: Admin, topic: TopicPartition
) -> None:
    other = TopicPartition("t", 1)
    assert admin.delete_records({topic: -1, other: -1}) == {topic: RECORDS, other: 0}
    assert values(cluster) == []
    with Producer(cluster.bootstrap_servers) as producer:
        (appended,) = producer.append("t", [{"value": b"7" * 100}], partition=0).result(20)
    assert appended.base_offset == RECORDS
    assert values(cluster) == [7]


def test_what_cannot_be_deleted_is_said_and_nothing_is(
    cluster: ProcessCluster, admin: Admin, topic: TopicPartition
) -> None:
    with pytest.raises(OffsetOutOfRangeError, match="the high watermark is 60"):
        admin.delete_records({topic: RECORDS + 1})
    with pytest.raises(InvalidRequestError):
        admin.delete_records({topic: -2})
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.delete_records({TopicPartition("t", 9): 0})
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.delete_records({TopicPartition("nothing", 0): 0})
    with Consumer(cluster.bootstrap_servers, group_id="g") as consumer:
        consumer.assign([topic])
        consumer.seek(topic, 1)
        consumer.commit()
    with pytest.raises(InvalidTopicError):
        admin.delete_records({TopicPartition("__consumer_offsets", 0): -1})
    assert values(cluster) == list(range(RECORDS))


def test_what_is_latest_is_never_below_what_is_earliest(tmp_path: Path) -> None:
    """Story: records of an open transaction were deleted. Who wanted the latest asked for offsets that were gone, in a
    loop, and went on behind what was appended meanwhile.
    """
    lone = LonePartition(tmp_path / "t-0")
    lone.write(b"open")
    for number in range(10):
        lone.write(b"%d" % number, pid=8, sequence=number, transactional=False)
    lone.partition.records_deleted(5)
    assert lone.partition.reader.offsets(lone.leader_epoch, read_committed=True) == (5, 5)
    bounds = lone.partition.reader.bounds(lone.leader_epoch, read_committed=True)
    assert (bounds.log_start, bounds.latest) == (5, 5)
    assert lone.partition.reader.read(lone.leader_epoch, 5, 1 << 20, read_committed=True).next_offset == 5
    lone.end(1, committed=True)
    assert lone.partition.reader.offsets(lone.leader_epoch, read_committed=True) == (5, 12)


def test_a_time_finds_no_deleted_record(tmp_path: Path) -> None:
    lone = LonePartition(tmp_path / "t-0")
    for number in range(4):
        lone.write(b"x" * BIG, sequence=number, transactional=False)
    lone.partition.records_deleted(2)
    assert lone.partition.reader.offset_at(-1, 0, read_committed=True) is not None
    found = lone.partition.reader.offset_at(-1, 0, read_committed=True)
    assert found is not None
    assert found[0] == 2


def test_who_waits_for_records_hears_that_those_before_are_deleted(tmp_path: Path) -> None:
    """Found by the simulator with seed 140002057: a reader waited at a transaction that was not decided. Its offset was
    out of range from then on, and it heard of that at the end of its wait.
    """
    lone, notifier = LonePartition(tmp_path / "t-0"), Notifier()
    lone.write(b"x", sequence=0, transactional=False)
    lone.partition.listen(notifier, commits=True)
    lone.partition.records_deleted(1)
    assert notifier.take() == [lone.partition.key]


def test_what_is_in_the_table_alone_is_not_out_of_range(tmp_path: Path) -> None:
    """A reader must not begin anew for it. What was deleted, or lies before the table's beginning, is gone."""
    lone = LonePartition(tmp_path / "t-0", {"segment.bytes": "4096", "delta.path": "/lake"})
    for number in range(6):
        lone.write(b"x" * BIG, sequence=number, transactional=False)
    replica = lone.partition.replica
    for table_start, deleted, moved in ((0, 0, [1, 2, 3]), (0, 2, [2, 3]), (3, 0, [3])):
        history = TopicHistory(starts=(table_start,), ends=(4,))
        topic = replace(lone.topic, history=history, log_starts=(deleted,))
        leads = LeaderAndIsr(0, lone.leader_epoch, lone.leader_epoch, (0,), (0,))
        lone.partition.assign(leads, topic, {0: 1})
        lone.partition.advance_log_start(4)
        assert replica.log_start_offset == 4
        for offset in (1, 2, 3):
            expected = OffsetMovedToTieredStorageError if offset in moved else OffsetOutOfRangeError
            with pytest.raises(expected):
                lone.partition.reader.read(-1, offset, 1 << 20, read_committed=True)
        assert lone.partition.reader.read(-1, 4, 1 << 20, read_committed=True).frames
        with pytest.raises(OffsetOutOfRangeError):
            lone.partition.reader.read(-1, 7, 1 << 20, read_committed=True)


def test_who_is_sent_to_the_table_hears_where_the_log_begins(tmp_path: Path) -> None:
    """From there on the log also has the records that the table has refused."""
    lone = LonePartition(tmp_path / "t-0", {"segment.bytes": "4096", "delta.path": "/lake"})
    for number in range(6):
        lone.write(b"x" * BIG, sequence=number, transactional=False)
    topic = replace(lone.topic, history=TopicHistory(starts=(0,), ends=(6,)))
    leads = LeaderAndIsr(0, lone.leader_epoch, lone.leader_epoch, (0,), (0,))
    lone.partition.assign(leads, topic, {0: 1})
    lone.partition.advance_log_start(4)
    hosted = SimpleNamespace(find=lambda *_: lone.partition, partition=lambda *_: lone.partition)
    operation = FetchOperation(cast("ReplicaManager", hosted))
    wanted = FetchPartition(TOPIC_ID, 0, leader_epoch=-1, offset=1, max_bytes=1 << 20)
    operation.received(FetchRequest(1, 0, 1, 1 << 20, [wanted]), 0)
    answer = operation.try_answer(0, 1 << 20)
    assert answer is not None
    (said,) = answer.response.partitions
    assert (said.error_code, said.log_start_offset) == (OffsetMovedToTieredStorageError.code, 4)


@pytest.mark.parametrize(
    ("known", "begins"),
    [
        ({"history": TopicHistory(starts=(0,), ends=(9,))}, 9),
        ({"log_starts": (8,)}, 8),
        ({"history": TopicHistory(starts=(0,), ends=(2,))}, 6),
        ({"history": TopicHistory(starts=(0,), ends=(2,), end_epochs=(0,))}, 6),
        ({"history": TopicHistory(starts=(0,), ends=(2,), end_epochs=(-1,))}, 6),
        ({"history": TopicHistory(starts=(0,), ends=(2,), end_epochs=(7,))}, 2),
        ({"history": TopicHistory(starts=(0,), ends=(2,), end_epochs=(7,)), "log_starts": (4,)}, 4),
    ],
)
def test_a_leader_whose_log_is_not_the_topics_begins_where_the_topic_goes_on(
    tmp_path: Path, known: dict[str, object], begins: int
) -> None:
    """An unclean election may cut what is in the table already, or was deleted. Or it may elect a log that has other
    records than the table: of another epoch at the table's end.
    """
    lone = LonePartition(tmp_path / "t-0", {"segment.bytes": "4096", "delta.path": "/lake"})
    for number in range(6):
        lone.write(b"x" * BIG, sequence=number, transactional=False)
    replica, topic = lone.partition.replica, replace(lone.topic, **known)  # type: ignore[arg-type]
    follows = LeaderAndIsr(1, lone.leader_epoch + 1, lone.leader_epoch + 1, (0, 1), (1,))
    lone.partition.assign(follows, topic, {0: 1, 1: 1})
    assert (replica.role, replica.log_end_offset) == (Role.FOLLOWER, 6), "a follower asks its leader"
    leads = LeaderAndIsr(0, lone.leader_epoch + 2, lone.leader_epoch + 2, (0,), (0,))
    lone.partition.assign(leads, topic, {0: 1})
    assert (replica.role, replica.log_end_offset, replica.high_watermark) == (Role.LEADER, begins, begins)
    assert replica.log_start_offset == (begins if begins != 6 else 0)
    lone.leader_epoch += 2
    lone.write(b"x" * BIG, pid=8, sequence=0, transactional=False)
    assert replica.log_end_offset == begins + 1
    lone.reopen(StartKind.PROCESS_CRASH)
    assert lone.partition.replica.log_end_offset == begins + 1
    reader = lone.partition.reader
    reader.check_lineage(-1, begins, 0)
    with pytest.raises(LogTruncationError):
        reader.check_lineage(-1, begins + 1, 0)


def test_a_replica_that_lags_keeps_what_it_does_not_know_to_be_committed(tmp_path: Path) -> None:
    """The controller's record may come before the replica knows how far records are committed."""
    lone = LonePartition(tmp_path / "t-0", {"segment.bytes": "4096"})
    for number in range(6):
        lone.write(b"x" * BIG, sequence=number, transactional=False)
    assignment = LeaderAndIsr(0, lone.leader_epoch, lone.leader_epoch, (0,), (0,))
    assert lone.partition.assign(assignment, replace(lone.topic, log_starts=(1000,)), {0: 1}), "records may go"
    replica = lone.partition.replica
    assert replica.first_offset == replica.high_watermark == 6
    lone.partition.apply_retention()
    assert replica.log_start_offset == 4, "the last segment stays"
