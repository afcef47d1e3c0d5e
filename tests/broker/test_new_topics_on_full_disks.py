"""A topic is created while no disk has room, or no further file can be made: brokers go on, and readers read."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import RequestTimedOutError, SparkBrokerError, StorageFullError, TopicAlreadyExistsError
from tests.conftest import WaitUntil
from tests.support.process_cluster import ProcessCluster
from tests.support.small_disk import fill_disk, small_disk, use_up_files

BROKERS = 3
RECORDS = 300
SETTINGS = {"log.dir.room.bytes": 1 << 20, "broker.session.timeout.ms": 4000, "offsets.topic.num.partitions": 3}
T0 = TopicPartition("t", 0)


def read_all(brokers: ProcessCluster) -> int:
    with Consumer(brokers.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        seen = 0
        while seen < RECORDS:
            seen += sum(batch.data.num_rows for batch in consumer.poll(1.0))
        return seen


def create_until_refused(admin: Admin) -> None:
    """The first topic takes the brokers unawares; then they tell the controller."""
    for number in range(1000):
        try:
            admin.create_topic(NewTopic(f"new{number}", 2, BROKERS))
        except SparkBrokerError:
            return
    raise AssertionError("every topic was created")


def is_created(admin: Admin, topic: str) -> bool | None:
    """Whether the topic could be created. None: there was no answer in the short time that this client waits."""
    try:
        admin.create_topic(NewTopic(topic, 2, BROKERS))
    except StorageFullError:
        return False
    except RequestTimedOutError:
        return None
    except TopicAlreadyExistsError:  # by a try that was not answered in time
        return True
    return True


@pytest.mark.parametrize("use_up", [fill_disk, pytest.param(use_up_files, marks=pytest.mark.full)])
def test_nothing_ends_and_reads_go_on_and_the_topic_is_there_when_there_is_room(
    tmp_path: Path, use_up: Callable[[Path], Path], wait_until: WaitUntil
) -> None:
    """Story: every broker ended with STORAGE_FULL at the creation, and again at each start; nothing was readable."""
    disk = tmp_path / "disk"
    with (
        small_disk(disk, 48, files_max=2000),
        ProcessCluster(disk, BROKERS, SETTINGS, output=tmp_path) as brokers,
        Admin(brokers.bootstrap_servers, default_api_timeout_ms=1500) as admin,
    ):
        admin.create_topic(NewTopic("t", 1, BROKERS, config={"min.insync.replicas": 2}))
        with Producer(brokers.bootstrap_servers) as producer:
            producer.append("t", [{"value": b"%d" % n} for n in range(RECORDS)], partition=0).result(60)
        filler = use_up(disk)
        create_until_refused(admin)
        wait_until(lambda: is_created(admin, "another") is False, "the refusal")
        with Consumer(brokers.bootstrap_servers, group_id="g", default_api_timeout_ms=1500) as consumer:
            consumer.assign([T0])
            consumer.poll(1.0)  # A group waits for its topic, in which it finds its offsets.
            with suppress(SparkBrokerError):
                consumer.commit()
        assert read_all(brokers) == RECORDS
        assert brokers.launch_ended() == []
        shutil.rmtree(filler) if filler.is_dir() else filler.unlink()

        wait_until(lambda: is_created(admin, "another") is True, "the disks to have room")
        for name in ("new0", "another"):
            with Producer(brokers.bootstrap_servers) as producer:
                producer.append(name, [{"value": b"v"}], partition=0).result(60)
        assert brokers.launch_ended() == []


@pytest.mark.full
def test_a_broker_that_starts_on_a_full_disk_serves_what_it_has(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 48), ProcessCluster(disk, BROKERS, SETTINGS, output=tmp_path) as brokers:
        with (
            Admin(brokers.bootstrap_servers, default_api_timeout_ms=1500) as admin,
            Producer(brokers.bootstrap_servers) as producer,
        ):
            admin.create_topic(NewTopic("t", 1, BROKERS, config={"min.insync.replicas": 2}))
            producer.append("t", [{"value": b"%d" % n} for n in range(RECORDS)], partition=0).result(60)
            fill_disk(disk)
            create_until_refused(admin)
        for slot in range(BROKERS):
            os.kill(brokers.pid(slot), signal.SIGKILL)
            brokers.launch(slot)
        brokers.await_live(BROKERS)
        assert read_all(brokers) == RECORDS


@pytest.mark.full
def test_internal_topics_come_when_there_is_room(tmp_path: Path, wait_until: WaitUntil) -> None:
    disk = tmp_path / "disk"
    with (
        small_disk(disk, 48),
        ProcessCluster(disk, BROKERS, SETTINGS, output=tmp_path) as brokers,
        Admin(brokers.bootstrap_servers, default_api_timeout_ms=1500) as admin,
    ):
        admin.create_topic(NewTopic("t", 1, BROKERS))
        with Producer(brokers.bootstrap_servers) as producer:
            producer.append("t", [{"value": b"v"}] * RECORDS, partition=0).result(60)
        filler = fill_disk(disk)
        with Consumer(brokers.bootstrap_servers, group_id="g", auto_offset_reset="earliest") as consumer:
            consumer.assign([T0])
            assert consumer.poll(30.0)
            with suppress(SparkBrokerError):  # A last few bytes may have been enough for this group's partition.
                consumer.commit()
            filler.unlink()

            def commits() -> bool:
                try:
                    consumer.commit()
                except SparkBrokerError:
                    return False
                return True

            wait_until(commits, "a commit")
            assert consumer.committed(T0) is not None
        assert brokers.launch_ended() == []
