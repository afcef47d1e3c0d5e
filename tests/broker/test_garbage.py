"""What a broker lets go of is freed at once: nothing of it waits for a collection that stops all threads."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from tests.support import garbage_census
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

CLIENTS = 20
PARTITIONS = 12


def garbage(cluster: ProcessCluster, directory: Path, slot: int) -> dict[str, int]:
    """How many objects of each of our types were garbage since the last question."""
    asked = directory / str(cluster.pid(slot))
    answer = asked.with_suffix(".json")
    answer.unlink(missing_ok=True)
    asked.touch()
    eventually(answer.exists, 30)
    found: dict[str, int] = msgspec.json.decode(answer.read_bytes())
    return found


def replicas(cluster: ProcessCluster, topic: str) -> int:
    return sum(path.name.startswith(f"{topic}-") for broker in cluster.log_dirs.iterdir() for path in broker.iterdir())


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(garbage_census.TELL_IN, str(tmp_path))
    return tmp_path


def test_connections_replicas_and_sessions_are_freed_without_a_collection(tmp_path: Path, directory: Path) -> None:
    entry = "tests.support.garbage_census:run_broker"
    with ProcessCluster(tmp_path / "cluster", 3, entry=entry) as cluster, Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(NewTopic("kept", 3, 3))
        for slot in range(3):
            garbage(cluster, directory, slot)  # what a start leaves behind does not count

        for _ in range(CLIENTS):
            with Producer(cluster.bootstrap_servers) as producer:
                producer.append("kept", [{"value": b"x"}]).result()
            with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
                consumer.assign([TopicPartition("kept", number) for number in range(3)])
                assert consumer.poll(10.0)
        admin.create_topic(NewTopic("deleted", PARTITIONS, 3))
        eventually(lambda: replicas(cluster, "deleted") == 3 * PARTITIONS, 30)
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(PARTITIONS):
                producer.append("deleted", [{"value": b"x"}], partition=number).result()
        admin.delete_topic("deleted")
        eventually(lambda: replicas(cluster, "deleted") == 0, 30)
        os.kill(cluster.pid(2), signal.SIGKILL)  # the sessions of followers end by an error
        cluster.await_live(2)
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(3):
                producer.append("kept", [{"value": b"y"}], partition=number).result()

        assert [garbage(cluster, directory, slot) for slot in (0, 1)] == [{}, {}]
