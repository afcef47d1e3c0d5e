"""A topic is deleted and created again: what groups had committed for the earlier one is no commit any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import InconsistentTopicIdError, UnknownTopicOrPartitionError
from tests.support.committed import committed_offset
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

T0 = TopicPartition("t", 0)
SETTINGS = {"offsets.topic.num.partitions": 1}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    base: Path = tmp_path_factory.mktemp("recreated")
    with ProcessCluster(base, 2, SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


def create(cluster: ProcessCluster, admin: Admin, records: int) -> None:
    admin.create_topic(NewTopic("t", 1, 2))
    with Producer(cluster.bootstrap_servers) as producer:
        producer.append("t", [{"value": b"%d" % n} for n in range(records)], partition=0).result(30)


def member(cluster: ProcessCluster, group: str) -> Consumer:
    return Consumer(
        cluster.bootstrap_servers,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        metadata_max_age_ms=200,
    )


def read(consumer: Consumer, count: int) -> list[int]:
    """The offsets of so many records."""
    seen: list[int] = []
    while len(seen) < count:
        seen += [offset for batch in consumer.poll(10.0) for offset in batch.offsets.tolist()]
    return seen


@pytest.mark.parametrize("records", [30, 150])
def test_a_group_reads_the_new_topic_from_its_beginning(cluster: ProcessCluster, admin: Admin, records: int) -> None:
    """Story: it went on at the old topic's offset and passed 100 records, or got a misleading LogTruncationError."""
    group = f"readers-{records}"
    create(cluster, admin, 100)
    with member(cluster, group) as consumer:
        consumer.assign([T0])
        assert read(consumer, 100) == list(range(100))
        consumer.commit()
        committed = consumer.committed(T0)
        assert committed is not None
        assert committed.offset == 100
    admin.delete_topic("t")
    create(cluster, admin, records)
    with member(cluster, group) as consumer:
        assert consumer.committed(T0) is None
        consumer.assign([T0])
        assert read(consumer, records) == list(range(records))
        consumer.commit()
        committed = consumer.committed(T0)
        assert committed is not None
        assert committed.offset == records
    admin.delete_topic("t")


def test_a_late_commit_of_the_old_topic_is_refused(cluster: ProcessCluster, admin: Admin) -> None:
    create(cluster, admin, 10)
    with member(cluster, "late") as consumer:
        consumer.assign([T0])
        read(consumer, 10)
        admin.delete_topic("t")
        create(cluster, admin, 5)
        with pytest.raises((InconsistentTopicIdError, UnknownTopicOrPartitionError)):
            consumer.commit()
    with member(cluster, "late") as consumer:
        assert consumer.committed(T0) is None
    admin.delete_topic("t")


def test_a_transaction_does_not_take_offsets_of_the_old_topic(cluster: ProcessCluster, admin: Admin) -> None:
    """Story: they became the new topic's, and the next reader passed as many records."""
    create(cluster, admin, 100)
    servers = cluster.bootstrap_servers
    with member(cluster, "copier") as consumer, Producer(servers, transactional_id="copier") as producer:
        consumer.assign([T0])
        assert read(consumer, 100) == list(range(100))
        identity = consumer.group_metadata()
        admin.delete_topic("t")
        create(cluster, admin, 150)
        with pytest.raises(InconsistentTopicIdError), producer.transaction():
            producer.send_offsets_to_transaction({T0: 100}, identity)
        assert consumer.committed(T0) is None
    admin.delete_topic("t")


def test_a_group_that_loses_one_topic_of_two_commits_the_other(cluster: ProcessCluster, admin: Admin) -> None:
    """Story: all its commits were refused as a whole from then on, and its next member read everything again."""
    kept, lost = TopicPartition("kept", 0), TopicPartition("lost", 0)
    for tp in (kept, lost):
        admin.create_topic(NewTopic(tp.topic, 1, 2))
        with Producer(cluster.bootstrap_servers) as producer:
            producer.append(tp.topic, [{"value": b"x"}] * 5, partition=0).result(30)
    with member(cluster, "both") as consumer:
        consumer.assign([kept, lost])
        read(consumer, 10)
        admin.delete_topic("lost")
        with pytest.raises((InconsistentTopicIdError, UnknownTopicOrPartitionError), match="'lost'"):
            consumer.commit({kept: 3, lost: 3})
        assert committed_offset(consumer, kept) == 3
        eventually(lambda: lost in consumer.errors(), what="the consumer hears of it")
        consumer.commit()
        assert committed_offset(consumer, kept) == 5
