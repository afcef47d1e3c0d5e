"""`add_broker` waits for its own broker, and leaves nothing behind where that does not come up."""

from __future__ import annotations

import atexit
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark.sql import SparkSession

from spark_broker.broker.spec import FAILED, STOPPED, BrokerOutcome, BrokerSpec
from spark_broker.config import load_cluster_settings
from spark_broker.driver import launcher as launcher_module
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.controller_link import ControllerLink
from spark_broker.driver.controller_pipe import BrokerStatus
from spark_broker.driver.directories import choose_directories
from spark_broker.driver.executors import Executor
from spark_broker.errors import ClusterStartError, InconsistentClusterIdError, NotControllerError
from tests.conftest import WaitUntil
from tests.driver.running_host import HOST, RunningHost

ANOTHER = BrokerOutcome(
    reason=FAILED, error_code=InconsistentClusterIdError.code, error_message="the directory is another cluster's"
)
"""A failure that no repetition mends."""

SLOW_LOOKS = 3
"""A broker is live when the cluster looks for the fourth time after its start."""


class Host(RunningHost):
    """Its first launches end as they are told to; later ones run until they are stopped."""

    def __init__(self, executors: int = 0) -> None:
        super().__init__()
        self.shared_executor = executors == 0
        self.ends: list[BrokerOutcome] = []
        self.runs: dict[int, threading.Event] = {}
        self.launched: list[int] = []
        self._there = [Executor(str(number), HOST, 2) for number in range(max(executors, 1))]

    def executors(self) -> list[Executor]:
        return list(self._there)

    def run(self, executor: Executor, launch: BrokerSpec) -> BrokerOutcome:
        self.launched.append(launch.launch)
        if self.ends:
            return self.ends.pop(0)
        stopped = self.runs[launch.launch] = threading.Event()
        stopped.wait(20)
        del self.runs[launch.launch]
        return BrokerOutcome(reason=STOPPED)

    def close(self) -> None:
        super().close()
        for stopped in list(self.runs.values()):
            stopped.set()


class Controller:
    """Each broker has the number of its launch, and is live some time after its start, unless it is too `slow`."""

    cluster_id, earlier_launches, host, port = "c", -1, HOST, 1

    def __init__(self, host: Host) -> None:
        self.slow = False
        self._brokers = host
        self._numbers = itertools.count(1)
        self._looks: dict[int, int] = {}

    def watch(self, failed: object) -> None: ...

    def close(self) -> None: ...

    def stop_brokers(self, timeout_s: float) -> None:
        for stopped in list(self._brokers.runs.values()):
            stopped.set()

    def new_launch(self) -> int:
        return next(self._numbers)

    def spark_loss(self, launch: int) -> None: ...

    def stop_broker(self, launch: int) -> None:
        if self.slow:
            raise NotControllerError("the launch has not registered yet")
        self._brokers.runs[launch].set()

    def live_brokers(self) -> list[BrokerStatus]:
        live = []
        for launch in sorted(self._brokers.runs):
            self._looks[launch] = self._looks.get(launch, 0) + 1
            if not self.slow and self._looks[launch] > SLOW_LOOKS:
                live.append(cast("BrokerStatus", SimpleNamespace(id=launch, launch=launch)))
        return live


@contextmanager
def cluster_on(host: Host, directory: Path) -> Iterator[tuple[BrokerCluster, Controller]]:
    session = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None, master="local[4]", getConf=dict[str, str]))
    settings = load_cluster_settings({"log.dirs": str(directory / "logs"), "broker.start.timeout.ms": 1000})
    controller = Controller(host)
    directories = choose_directories(settings.cluster, "app")
    cluster = BrokerCluster(
        cast("SparkSession", session), settings, directories, cast("ControllerLink", controller), host
    )
    atexit.unregister(cluster._at_exit)
    try:
        yield cluster, controller
    finally:
        cluster.stop()


def test_a_broker_that_is_added_is_not_refused_for_a_failure_that_is_over(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Story: weeks after a launch had found another cluster's directory, each call raised that error. Its broker came
    up all the same, so each repetition added one more."""
    host = Host()
    host.ends = [ANOTHER]
    with cluster_on(host, tmp_path) as (cluster, _):
        cluster._launcher.add_slot()
        wait_until(lambda: len(cluster._launcher.running()) == 1, "the launch after the failure runs")
        assert cluster.add_broker() == 3


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(launcher_module, "LEAVE_AGAIN_S", 0.01)


def slots_are(cluster: BrokerCluster, count: int) -> Callable[[], bool]:
    return lambda: cluster._launcher.task_slots == count


@pytest.mark.usefixtures("quick")
def test_a_broker_that_cannot_come_up_is_given_up_with_its_error(tmp_path: Path, wait_until: WaitUntil) -> None:
    host = Host(executors=2)
    with cluster_on(host, tmp_path) as (cluster, _):
        cluster._launcher.add_slot()
        wait_until(lambda: bool(host.runs), "the first broker runs")
        host.ends = [ANOTHER] * 100
        with pytest.raises(InconsistentClusterIdError, match="another cluster's"):
            cluster.add_broker()
        wait_until(slots_are(cluster, 1), "the slot of the broker that failed is gone")
        host.ends = []
        assert cluster._launcher.free_executors() == 1
        assert cluster.add_broker() in host.runs
        assert len(host.runs) == 2


@pytest.mark.usefixtures("quick")
def test_a_broker_that_comes_up_after_its_call_has_failed_is_asked_to_leave(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Story: the call had failed at its deadline, and the cluster had one more broker all the same."""
    host = Host()
    with cluster_on(host, tmp_path) as (cluster, controller):
        controller.slow = True
        with pytest.raises(ClusterStartError, match=r"the broker is not live after broker\.start\.timeout\.ms"):
            cluster.add_broker()
        assert list(host.runs) == [1]
        controller.slow = False
        wait_until(lambda: not host.runs, "the broker has left")
        wait_until(slots_are(cluster, 0), "its slot is gone")
        assert host.launched == [1]


def test_an_executor_whose_broker_is_about_to_be_launched_again_is_not_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Story: in the pause between two launches the executor counted as free, and a broker was added that had none."""
    monkeypatch.setattr(launcher_module, "BACKOFF_FIRST_S", 20.0)
    host = Host(executors=1)
    host.ends = [ANOTHER]
    with cluster_on(host, tmp_path) as (cluster, _):
        cluster._launcher.add_slot()
        wait_until(lambda: bool(cluster._launcher.failures()), "the launch has failed")
        with pytest.raises(ClusterStartError, match="no executor is free"):
            cluster.add_broker()
