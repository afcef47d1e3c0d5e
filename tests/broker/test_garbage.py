"""What a broker lets go of is freed at once: nothing of it waits for a collection that stops all threads."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import SparkBrokerError
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


@pytest.mark.full
def test_groups_transactions_and_refusals_leave_no_garbage(tmp_path: Path, directory: Path) -> None:
    entry = "tests.support.garbage_census:run_broker"
    config = {"default.api.timeout.ms": 2000}
    with ProcessCluster(tmp_path / "cluster", 3, entry=entry) as cluster, Admin(cluster.bootstrap_servers) as admin:
        servers = cluster.bootstrap_servers
        admin.create_topic(NewTopic("t", 4, 3))

        def members_come_and_go() -> None:
            for number in range(4):
                with Consumer(servers, group_id=f"g{number % 2}", topics="t", auto_offset_reset="earliest") as consumer:
                    while not consumer.assignment():
                        consumer.poll(0.5)
                    consumer.poll(0.1)
                    consumer.commit()

        def transactions_end() -> None:
            for number in range(4):
                with Producer(servers, transactional_id=f"x{number % 2}") as producer:
                    with producer.transaction():
                        producer.append("t", [{"value": b"x"}] * 10)
                    producer.begin_transaction()
                    producer.append("t", [{"value": b"y"}])
                    producer.abort_transaction()

        def requests_are_refused() -> None:
            for _ in range(4):
                with pytest.raises(SparkBrokerError):
                    admin.create_topic(NewTopic("t", 1, 1))
                with pytest.raises(SparkBrokerError):
                    admin.describe_topic("nothing")
                with Consumer(servers, config=config) as consumer:
                    consumer.assign([TopicPartition("t", 0)])
                    consumer.seek(TopicPartition("t", 0), 10**9)
                    consumer.poll(0.2)

        def leaders_move() -> None:
            os.kill(cluster.pid(2), signal.SIGKILL)
            cluster.await_live(2)
            cluster.launch(2)
            cluster.await_live(3)
            eventually(lambda: all(len(part.isr) == 3 for part in admin.describe_topic("t").partitions), 60)
            admin.elect_leaders()

        works = (transactions_end, members_come_and_go, requests_are_refused, leaders_move)
        for work in works:
            work()
        for slot in (0, 1):
            garbage(cluster, directory, slot)  # of the first use of each
        found = {}
        for work in works:
            work()
            for slot in (0, 1):
                if left := garbage(cluster, directory, slot):
                    found[work.__name__, slot] = left
        assert found == {}
