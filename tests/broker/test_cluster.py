"""A whole cluster of real processes, without Spark: topics, groups, retention, healing, restart."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import UnknownTopicOrPartitionError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, OffsetAndMetadata
from spark_broker.protocol.murmur2 import group_partition
from spark_broker.times import from_ms, from_us
from tests.conftest import WaitUntil
from tests.support.committed import committed_offset
from tests.support.process_cluster import ProcessCluster

EVENTS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", "UTC"))])


@pytest.fixture(scope="module")
def admin(process_cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(process_cluster.bootstrap_servers) as admin:
        yield admin


def drain(
    cluster: ProcessCluster, topic: str, partitions: int, columns: list[str] | None = None
) -> list[tuple[int, int, object]]:
    """Partition, offset and row of every record from the log starts to the high watermarks."""
    wanted = [TopicPartition(topic, number) for number in range(partitions)]
    rows: list[tuple[int, int, object]] = []
    with Consumer(cluster.bootstrap_servers, columns=columns, auto_offset_reset="earliest") as consumer:
        consumer.assign(wanted)
        ends = consumer.end_offsets(wanted)
        while any(consumer.position(partition) < ends[partition] for partition in wanted):
            for batch in consumer.poll(timeout=1.0):
                rows += [(batch.partition, batch.base_offset + i, row) for i, row in enumerate(batch.data.to_pylist())]
    return rows


def slot_of(cluster: ProcessCluster, admin: Admin, broker_id: int | None) -> int:
    """The slot of this broker's process."""
    pid = next(b.pid for b in admin.describe_cluster().brokers if b.id == broker_id)
    return next(slot for slot in range(4) if cluster.pid(slot) == pid)


def test_keyed_rows_keep_their_order_and_their_partition(process_cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic(
        NewTopic("events", partitions=4, replication_factor=3, schema=EVENTS, config={"key.columns": "name"})
    )
    with Producer(process_cluster.bootstrap_servers) as producer:
        for start in range(0, 500, 50):
            producer.append("events", [{"id": i, "name": f"k{i % 7}", "at": i} for i in range(start, start + 50)])
        producer.flush()
    rows = sorted(drain(process_cluster, "events", 4), key=lambda row: row[:2])
    assert sorted(row["id"] for _, _, row in rows) == list(range(500))  # type: ignore[index]
    for key in {row["name"] for _, _, row in rows}:  # type: ignore[index]
        rows_of_key = [(partition, row["id"]) for partition, _, row in rows if row["name"] == key]  # type: ignore[index]
        assert len({partition for partition, _ in rows_of_key}) == 1
        assert [id_ for _, id_ in rows_of_key] == sorted(id_ for _, id_ in rows_of_key)


def test_a_consumer_may_name_the_columns_that_it_wants(process_cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic(NewTopic("wide", partitions=1, replication_factor=1, schema=EVENTS))
    with Producer(process_cluster.bootstrap_servers) as producer:
        producer.append("wide", [{"id": 1, "name": "a", "at": 5}]).result(20)
    assert [row for _, _, row in drain(process_cluster, "wide", 1, columns=["name"])] == [{"name": "a"}]


def test_lookup_by_time_finds_the_first_record_at_or_after_it(process_cluster: ProcessCluster, admin: Admin) -> None:
    config = {"timestamp.column": "at"}
    admin.create_topic(NewTopic("timed", partitions=1, replication_factor=3, schema=EVENTS, config=config))
    times_ms = [1000, 3000, 2000, 5000, 4000]  # out of order on purpose (KAFKA-3163)
    with Producer(process_cluster.bootstrap_servers) as producer:
        for i, time_ms in enumerate(times_ms):
            producer.append("timed", [{"id": i, "name": "", "at": time_ms * 1000}]).result(20)
    partition = TopicPartition("timed", 0)
    for time_ms in (0, 1000, 1500, 3000, 3500, 5000):
        scan = next(i for i, t in enumerate(times_ms) if t >= time_ms)
        assert admin.list_offsets({partition: from_ms(time_ms)}) == {partition: scan}
    assert admin.list_offsets({partition: from_ms(5001)}) == {partition: None}


SINCE_1970_US = [0, 1, 999, 1000, 1001, 253_402_300_799_999_999]
"""Up to the year 9999. Records without a schema of their own have these, as Kafka's."""

EVER_US = [-62_135_596_800_000_000, -1_000_001, -1000, -2, -1, *SINCE_1970_US]
"""From the year 1 on. In milliseconds and in microseconds, -1 and -2 are times as others."""


@pytest.mark.parametrize("typed", [True, False])
def test_each_record_is_found_by_its_own_time(process_cluster: ProcessCluster, admin: Admin, typed: bool) -> None:
    name, column, times_us = ("own", "at", EVER_US) if typed else ("kafka", "timestamp", SINCE_1970_US)
    schema, config = (EVENTS, {"timestamp.column": "at"}) if typed else (None, {})
    admin.create_topic(NewTopic(name, partitions=1, replication_factor=3, schema=schema, config=config))
    filler = {"id": 1, "name": ""} if typed else {"value": b""}
    partition = TopicPartition(name, 0)
    with Producer(process_cluster.bootstrap_servers) as producer:
        producer.append(name, [{**filler, column: from_us(time_us)} for time_us in times_us[:4]]).result(20)
        for time_us in times_us[4:]:
            producer.append(name, [{**filler, column: from_us(time_us)}]).result(20)
    with Consumer(process_cluster.bootstrap_servers) as consumer:
        consumer.assign([partition])
        consumer.seek_to_beginning()
        records = list(itertools.islice(consumer, len(times_us)))
        assert [record.timestamp for record in records] == [from_us(time_us) for time_us in times_us]
        for record in records:
            assert consumer.offsets_for_times({partition: record.timestamp}) == {partition: record.offset}
            assert admin.list_offsets({partition: record.timestamp}) == {partition: record.offset}
        after = from_us(times_us[-2] + 1)
        assert consumer.offsets_for_times({partition: after}) == {partition: len(times_us) - 1}


def test_a_record_without_a_time_is_found_by_when_it_was_appended(
    process_cluster: ProcessCluster, admin: Admin
) -> None:
    """Story: it was passed over if another record of its batch had an early time."""
    admin.create_topic(NewTopic("untimed", partitions=1, replication_factor=3))
    times = pa.array([from_us(5), None], pa.timestamp("us", "UTC"))
    with Producer(process_cluster.bootstrap_servers) as producer:
        producer.append("untimed", pa.table({"value": [b"a", b"b"], "timestamp": times})).result(20)
    partition = TopicPartition("untimed", 0)
    assert admin.list_offsets({partition: from_us(6)}) == {partition: 1}


def test_what_is_sealed_and_decided_may_be_tiered(process_cluster: ProcessCluster, admin: Admin) -> None:
    servers = process_cluster.bootstrap_servers
    config = {"segment.bytes": str(1024 * 1024)}
    admin.create_topic(NewTopic("sealed", partitions=1, replication_factor=3, config=config))

    def sealed() -> int | None:
        return admin.describe_topic("sealed").partitions[0].sealed_offset

    def append(producer: Producer) -> None:
        for _ in range(5):
            producer.append("sealed", [{"value": os.urandom(300 * 1024)}])
        producer.flush()

    assert sealed() == 0, "a log without a record"
    with Producer(servers) as producer:
        append(producer)
    assert sealed() == 3, "the active segment has the rest"
    with Producer(servers, transactional_id="sealed") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        append(producer)
        assert sealed() == 5, "no record of an open transaction"
        producer.commit_transaction()
        decided = sealed()
        assert decided is not None
        assert decided > 5


def test_committed_offsets_survive_the_death_of_their_coordinator(
    process_cluster: ProcessCluster, admin: Admin, wait_until: WaitUntil
) -> None:
    admin.create_topic(NewTopic("read", partitions=2, replication_factor=3))
    partition = TopicPartition("read", 1)
    with Producer(process_cluster.bootstrap_servers) as producer:
        producer.append("read", [{"value": b"%d" % i} for i in range(10)], partition=1).result(20)
    with Consumer(process_cluster.bootstrap_servers, group_id="g", enable_auto_commit=False) as consumer:
        consumer.assign([partition])
        consumer.seek(partition, 0)
        wait_until(lambda: consumer.poll(timeout=0.5) != [], "records")
        assert consumer.committed(partition) is None
        consumer.commit({partition: OffsetAndMetadata(4, metadata="note")})
        assert committed_offset(consumer, partition) == 4
    offsets = admin.describe_topic(CONSUMER_OFFSETS_TOPIC)
    leader = offsets.partitions[group_partition("g", len(offsets.partitions))].leader
    slot = slot_of(process_cluster, admin, leader)
    os.kill(process_cluster.pid(slot), signal.SIGKILL)
    with Consumer(process_cluster.bootstrap_servers, group_id="g") as consumer:
        consumer.assign([partition])
        assert consumer.position(partition) == 4
        committed = consumer.committed(partition)
        assert committed is not None
        assert (committed.offset, committed.metadata) == (4, "note")
    process_cluster.launch(slot)
    process_cluster.await_live(3)


def test_retention_removes_old_segments_and_the_log_start_rises_on_every_replica(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    config = {"log.retention.check.interval.ms": 50, "replica.fetch.wait.max.ms": 50}
    with ProcessCluster(tmp_path, 2, config) as cluster, Admin(cluster.bootstrap_servers) as admin:
        topic_config = {"segment.bytes": 4096, "retention.bytes": 8192}
        admin.create_topic(NewTopic("short", partitions=1, replication_factor=2, config=topic_config))
        with Producer(cluster.bootstrap_servers) as producer:
            for i in range(60):
                producer.append("short", [{"value": b"%d" % i * 300}]).result(20)
        wait_until(lambda: (admin.describe_topic("short").partitions[0].log_start_offset or 0) > 40, "retention")
        start = admin.describe_topic("short").partitions[0].log_start_offset
        offsets = [offset for _, offset, _ in drain(cluster, "short", 1)]
        assert offsets == list(range(offsets[0], 60))
        assert start is not None
        assert offsets[0] >= start, "retention may go on meanwhile; it never goes back"
        segments = "logs/broker-*/short-0/*.arrow"
        wait_until(lambda: len(list(tmp_path.glob(segments))) <= 8, "the follower to delete segments too")


def test_a_deleted_topic_leaves_no_files_and_may_be_created_again(
    process_cluster: ProcessCluster, admin: Admin, wait_until: WaitUntil
) -> None:
    logs = process_cluster.base / "logs"
    for count in (3, 5):
        admin.create_topic(NewTopic("again", partitions=1, replication_factor=3))
        with Producer(process_cluster.bootstrap_servers) as producer:
            for _ in range(count):
                producer.append("again", [{"value": b"x"}]).result(20)
        assert len(drain(process_cluster, "again", 1)) == count
        admin.delete_topic("again")
        wait_until(lambda: "again" not in admin.list_topics(), "every broker to hear of it")
        wait_until(lambda: not list(logs.glob("broker-*/again-*")), "the replicas' directories to go")
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.describe_topic("again")


def test_replicas_of_a_broker_that_never_comes_back_are_made_anew_on_the_others(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    config = {"replica.reassignment.delay.ms": 500, "broker.session.timeout.ms": 3000}
    with ProcessCluster(tmp_path, 4, config) as cluster, Admin(cluster.bootstrap_servers) as admin:
        topic_config = {"min.insync.replicas": 2}
        admin.create_topic(NewTopic("heals", partitions=8, replication_factor=3, config=topic_config))
        with Producer(cluster.bootstrap_servers) as producer:
            for i in range(80):
                producer.append("heals", [{"value": b"%d" % i}], partition=i % 8)
            producer.flush()
        lost = slot_of(cluster, admin, admin.describe_topic("heals").partitions[0].leader)
        gone = next(b.id for b in admin.describe_cluster().brokers if b.pid == cluster.pid(lost))
        os.kill(cluster.pid(lost), signal.SIGKILL)

        def healed() -> bool:
            partitions = admin.describe_topic("heals").partitions
            return all(gone not in p.replicas and len(p.isr) == 3 for p in partitions)

        wait_until(healed, "three in-sync replicas of every partition on the three that are left", 60)
        values = sorted(row["value"] for _, _, row in drain(cluster, "heals", 8))  # type: ignore[index]
        assert values == sorted(b"%d" % i for i in range(80))


def test_everything_comes_back_after_the_end_of_all_processes(tmp_path: Path) -> None:
    with ProcessCluster(tmp_path, 3) as cluster, Admin(cluster.bootstrap_servers) as admin:
        addresses, cluster_id = set(cluster.bootstrap_servers.split(",")), admin.describe_cluster().cluster_id
        epoch = admin.describe_cluster().controller_epoch
        admin.create_topic(NewTopic("kept", partitions=6, replication_factor=3, config={"min.insync.replicas": 2}))
        with Producer(cluster.bootstrap_servers) as producer:
            acknowledged = [producer.append("kept", [{"value": b"%d" % i}], partition=i % 6) for i in range(60)]
            places = {(m.partition, m.base_offset) for future in acknowledged for m in future.result(20)}
        before = drain(cluster, "kept", 6)
    # Leaving the block kills every process with SIGKILL.
    with ProcessCluster(tmp_path, 3) as cluster, Admin(cluster.bootstrap_servers) as admin:
        assert set(cluster.bootstrap_servers.split(",")) == addresses, "a bootstrap list survives"
        assert admin.describe_cluster().cluster_id == cluster_id
        assert admin.describe_cluster().controller_epoch > epoch
        after = drain(cluster, "kept", 6)
        assert sorted(after, key=str) == sorted(before, key=str)
        assert {(partition, offset) for partition, offset, _ in after} == places


def test_a_controller_that_is_killed_and_comes_back_loses_nothing(tmp_path: Path, wait_until: WaitUntil) -> None:
    with ProcessCluster(tmp_path, 3) as cluster, Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(NewTopic("steady", partitions=3, replication_factor=3, config={"min.insync.replicas": 2}))
        with Producer(cluster.bootstrap_servers) as producer:
            producer.append("steady", [{"value": b"before"}], partition=0).result(20)
            cluster.restart_controller()
            producer.append("steady", [{"value": b"after"}], partition=0).result(60)
        wait_until(lambda: len(admin.describe_topic("steady").partitions[0].isr) == 3, "the whole ISR")
        assert [row["value"] for _, _, row in drain(cluster, "steady", 3)] == [b"before", b"after"]  # type: ignore[index]
