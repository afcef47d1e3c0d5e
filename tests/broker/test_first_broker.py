"""A client that is there before the second broker: what coordinators keep survives the first one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC
from tests.conftest import WaitUntil
from tests.support.process_cluster import Place, ProcessCluster

T0 = TopicPartition("t", 0)


def in_sync(admin: Admin) -> set[int]:
    """How many replicas of partitions of internal topics are in sync."""
    names = (CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC)
    return {len(partition.isr) for name in names for partition in admin.describe_topic(name).partitions}


def send(servers: str, value: bytes) -> int:
    """One record in a transaction of `writer`; returns its offset."""
    with Producer(servers, transactional_id="writer") as producer:
        producer.begin_transaction()
        stored = producer.append("t", [{"value": value}], partition=0)
        producer.commit_transaction()
        return stored.result(30)[0].base_offset or 0


@pytest.mark.full
def test_positions_and_transactions_outlast_the_broker_that_was_alone_when_they_began(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Story: internal topics had as many replicas as there were brokers when the first client came, for good."""
    with ProcessCluster(tmp_path, 1, places=[Place()] * 3) as cluster:
        first = cluster.bootstrap_servers
        with Admin(first) as admin:
            admin.create_topic(NewTopic("t", 1, 1))
            assert send(first, b"before") == 0
            with Consumer(first, group_id="g") as consumer:
                consumer.commit({T0: 1})
            assert in_sync(admin) == {1}
        cluster.launch(1)
        cluster.launch(2)
        cluster.await_live(3)
        servers = cluster.bootstrap_servers
        with Admin(servers) as admin:
            wait_until(lambda: in_sync(admin) == {3}, "a replica on each broker", timeout_s=120)
            admin.create_topic(NewTopic("other", 1, 2))
            os.kill(cluster.pid(0), signal.SIGKILL)
            with Consumer(servers, group_id="g") as consumer:
                committed = consumer.committed(T0)
            assert committed is not None
            assert committed.offset == 1
            with Producer(servers, transactional_id="writer") as producer:
                producer.begin_transaction()
                stored = producer.append("other", [{"value": b"after"}])
                producer.commit_transaction()
            assert stored.result(30)[0].base_offset == 0
