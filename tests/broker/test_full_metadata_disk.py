"""`metadata.dir` lies beside `log.dirs`, as it does by default: a full disk can still be freed by what the docs say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_broker import Admin, NewTopic, Producer, TopicPartition
from spark_broker.errors import RequestTimedOutError, SparkBrokerError
from tests.conftest import WaitUntil
from tests.support.process_cluster import ProcessCluster
from tests.support.small_disk import fill_disk, small_disk

DISK_MB = 24
SETTINGS = {"log.dir.room.bytes": 1 << 20, "log.retention.check.interval.ms": 200}
CONFIG = {"segment.bytes": 1 << 20}
RECORDS = [{"key": None, "value": bytes(50_000)}] * 4
T0 = TopicPartition("t", 0)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[ProcessCluster]:
    """A cluster whose one disk has no byte left, with a topic that filled it."""
    with small_disk(tmp_path / "disk", DISK_MB) as disk, ProcessCluster(disk, 2, SETTINGS) as brokers:
        with Admin(brokers.bootstrap_servers) as admin:
            admin.create_topic(NewTopic("t", 1, 2, config=CONFIG))
        with pytest.raises(RequestTimedOutError, match="STORAGE_FULL"):
            append_until_refused(brokers)
        fill_disk(disk)
        yield brokers


def append_until_refused(brokers: ProcessCluster) -> None:
    while True:
        append(brokers, 2.0)


def append(brokers: ProcessCluster, timeout_s: float = 60.0) -> None:
    with Producer(brokers.bootstrap_servers, delivery_timeout_ms=int(timeout_s * 1000), linger_ms=0) as producer:
        producer.append("t", RECORDS, partition=0).result(timeout_s + 30)


@pytest.mark.full
def test_lower_retention_frees_it(full: ProcessCluster, wait_until: WaitUntil) -> None:
    with Admin(full.bootstrap_servers) as admin:
        admin.alter_topic_config("t", {"retention.bytes": 2 << 20})

        def freed() -> bool:
            return (admin.describe_topic("t").partitions[0].log_start_offset or 0) > 0

        wait_until(freed, "a log start above 0")
        append(full)


@pytest.mark.full
def test_deleted_records_free_it(full: ProcessCluster) -> None:
    with Admin(full.bootstrap_servers) as admin:
        end = admin.describe_topic("t").partitions[0].high_watermark or 0
        assert admin.delete_records({T0: end}) == {T0: end}
        append(full)


@pytest.mark.full
def test_a_deleted_topic_frees_it(full: ProcessCluster, wait_until: WaitUntil) -> None:
    with Admin(full.bootstrap_servers) as admin:
        admin.delete_topic("t")
        admin.create_topic(NewTopic("t", 1, 2, config=CONFIG))

        def works() -> bool:
            try:
                append(full, 2.0)
            except SparkBrokerError:
                return False
            return True

        wait_until(works, "an append to the new topic")


def test_a_controller_takes_over_on_it(full: ProcessCluster) -> None:
    """The first thing that it does is a record of its epoch."""
    full.restart_controller()
    with Admin(full.bootstrap_servers) as admin:
        admin.alter_topic_config("t", {"retention.bytes": 2 << 20})
    append(full)
