"""Real processes: the metadata store fails for a while. Leaders go on; no leader is elected until it works again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_broker import Admin, NewTopic, Producer
from spark_broker.errors import RequestTimedOutError
from tests.chaos.disks import away
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

CONFIG = {"broker.session.timeout.ms": 1500, "request.timeout.ms": 2000}
"""A session that is not kept alive ends sooner than the outage."""

TOPIC = "t"
PARTITIONS = 6


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ProcessCluster]:
    """A test's parameter, if it has one, is the session's time-out (ms)."""
    config = {**CONFIG, "broker.session.timeout.ms": getattr(request, "param", CONFIG["broker.session.timeout.ms"])}
    with ProcessCluster(tmp_path, 3, config) as cluster:
        yield cluster


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(NewTopic(TOPIC, PARTITIONS, 3, config={"min.insync.replicas": 2}))
        yield admin


class Writer:
    """Appends to every partition, one after the other; a failed append fails the test."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._producer = Producer(cluster.bootstrap_servers, acks="all")
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None
        self.appended = [0] * PARTITIONS

    def _run(self) -> None:
        try:
            while not self._stopping.wait(0.01):
                for partition in range(PARTITIONS):
                    self._producer.send(TOPIC, value=b"v", partition=partition).result(60)
                    with self._changed:
                        self.appended[partition] += 1
                        self._changed.notify_all()
        except BaseException as error:
            self._error = error
            raise

    def await_more(self, count: int) -> None:
        """Wait until every partition has taken this many more."""
        with self._changed:
            goal = [number + count for number in self.appended]
            reached = lambda: self._error or all(n >= g for n, g in zip(self.appended, goal, strict=True))  # noqa: E731
            assert self._changed.wait_for(reached, 60)
            assert self._error is None

    @contextmanager
    def at_work(self) -> Iterator[Writer]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            self._thread.join(60)
            self._producer.close()
        assert self._error is None


def ask_for_topic(cluster: ProcessCluster) -> None:
    """Ask for a topic; the request times out for now."""
    with (
        Admin(cluster.bootstrap_servers, default_api_timeout_ms=5000) as admin,
        pytest.raises(RequestTimedOutError),
    ):
        admin.create_topic(NewTopic("asked-for", 1, 3))


def epochs(admin: Admin) -> dict[int, int]:
    return {broker.id: broker.epoch for broker in admin.describe_cluster().brokers}


@pytest.mark.full
@pytest.mark.parametrize(("cluster", "outage_s"), [(6000, 25)], indirect=["cluster"])
def test_an_outage_of_the_metadata_store_stalls_nobody_and_is_over_when_it_is_over(
    cluster: ProcessCluster, admin: Admin, outage_s: float
) -> None:
    """A session that is not kept alive ends sooner, but one that a busy machine delays for a second or two does not."""
    before = epochs(admin)
    with Writer(cluster).at_work() as writer:
        writer.await_more(3)
        with away(cluster.base / "metadata"):
            ask_for_topic(cluster)
            threading.Event().wait(outage_s)
            writer.await_more(10)
        eventually(lambda: "asked-for" in admin.list_topics(), 10, "what was asked for meanwhile")
        writer.await_more(10)

    assert cluster.controller.alive
    assert epochs(admin) == before


def test_a_leader_that_dies_while_the_metadata_store_fails_is_replaced_when_it_is_back(
    cluster: ProcessCluster, admin: Admin
) -> None:
    with Writer(cluster).at_work() as writer:
        writer.await_more(3)
        with away(cluster.base / "metadata"):
            os.kill(cluster.pid(0), signal.SIGKILL)
            ask_for_topic(cluster)
            assert len(epochs(admin)) == 3, "nothing is decided"
        writer.await_more(10)
    cluster.launch_ended()
    cluster.await_live(3)


@pytest.mark.full
def test_a_cluster_whose_metadata_store_fails_can_be_stopped(cluster: ProcessCluster, admin: Admin) -> None:
    with away(cluster.base / "metadata"):
        with pytest.raises(RequestTimedOutError, match="metadata store fails"):
            cluster.controller.new_launch()
        cluster.stop()
    assert not cluster.controller.alive
