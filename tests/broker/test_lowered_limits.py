"""`max.message.bytes` goes up and down under producers that send, on real brokers that are killed meanwhile."""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, RecordMetadata
from spark_broker.errors import SparkBrokerError
from tests.support.meanwhile import meanwhile
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

PARTITIONS = 2
LIMITS = (2000, 4000, 1_048_576)
"""A record has less than 200 bytes, and a batch of `send` up to a hundred records."""

RECORDS = 20_000
PAUSE_S = 0.05
KILLED_AT = RECORDS // 2


def change_limits(servers: str, ended: threading.Event) -> None:
    rng = random.Random(5)
    with Admin(servers) as admin:
        while not ended.wait(PAUSE_S):
            try:
                admin.alter_topic_config("t", {"max.message.bytes": rng.choice(LIMITS)})
            except SparkBrokerError as error:
                if not error.retriable:
                    raise


@pytest.mark.full
@pytest.mark.timeout(300)
def test_each_record_of_send_is_stored_once_and_in_order_whatever_the_limit_is_meanwhile(tmp_path: Path) -> None:
    sent: list[tuple[int, int, Future[RecordMetadata]]] = []
    with ProcessCluster(tmp_path, 3) as brokers, Admin(brokers.bootstrap_servers) as admin:
        servers = brokers.bootstrap_servers
        config: dict[str, object] = {"min.insync.replicas": 2, "segment.bytes": 65_536}
        admin.create_topic(NewTopic("t", PARTITIONS, replication_factor=3, config=config))
        with meanwhile(lambda ended: change_limits(servers, ended)), Producer(servers, linger_ms=50) as producer:
            pause = threading.Event()
            for n in range(RECORDS):
                if n % 100 == 0:
                    pause.wait(0.02)  # so that limits change while records come
                partition = n % PARTITIONS
                sent.append((partition, n, producer.send("t", b"%06d" % n + b"." * 100, partition=partition)))
                if n == KILLED_AT:
                    leader = admin.describe_topic("t").partitions[0].leader
                    (pid,) = (broker.pid for broker in admin.describe_cluster().brokers if broker.id == leader)
                    os.kill(pid, signal.SIGKILL)
            producer.flush(120)
            assert producer.metrics()["divided_batches"] > 0
        failures = {str(future.exception(0)) for _, _, future in sent if future.exception(0) is not None}
        assert failures == set()
        there: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
        with Consumer(servers, topics="t", auto_offset_reset="earliest") as consumer:
            while sum(map(len, there.values())) < RECORDS:
                batches = consumer.poll(30)
                assert batches
                for batch in batches:
                    assert batch.base_offset == len(there[batch.partition]), "no offset is missing or twice"
                    there[batch.partition] += [int(value[:6]) for value in batch.data["value"].to_pylist()]
        for partition, numbers in there.items():
            assert numbers == list(range(partition, RECORDS, PARTITIONS))
        offsets = {(p, n): future.result(0).offset for p, n, future in sent}
        assert all(there[p][offset] == n for (p, n), offset in offsets.items() if offset is not None)
        eventually(lambda: all(len(p.isr) >= 2 for p in admin.describe_topic("t").partitions), 30, "replicas in sync")
