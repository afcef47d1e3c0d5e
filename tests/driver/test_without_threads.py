"""What is left of what a driver begins at a moment when it can start no thread: nothing that others wait for."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from spark_broker.broker.spec import LOST
from spark_broker.config import ClusterSettings, load_cluster_settings
from spark_broker.driver import keeper_host
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.controller_link import ControllerLink
from spark_broker.driver.directories import choose_directories
from spark_broker.driver.executors import Executor
from spark_broker.driver.hosts import HostListener
from spark_broker.driver.keeper_host import KeeperHost
from spark_broker.driver.launcher import BrokerLauncher
from spark_broker.errors import KafkaStorageError, NoThreadError
from tests.conftest import WaitUntil
from tests.driver.running_host import EXECUTOR, HOST, WAIT_S, RunningHost, spec
from tests.support.no_threads import no_threads


def named(beginning: str) -> Callable[[threading.Thread], bool]:
    return lambda thread: thread.name.startswith(beginning)


class Context:
    """A Spark context of which only jobs are asked for. None of them finds an executor."""

    master = "local-cluster[1,2,1024]"

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.stopped = False
        self._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: self.stopped))

    def setJobGroup(self, *_: object) -> None: ...

    def cancelJobGroup(self, *_: object) -> None: ...


class Listener:
    """Is told of launches that leave. The first time it can do nothing about it."""

    def __init__(self) -> None:
        self.leaving: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._first = True

    def executor_leaving(self, launch: int) -> None:
        self.leaving.put(launch)
        if self._first:
            self._first = False
            raise NoThreadError("no thread")

    def executors_changed(self) -> None: ...

    def executor_lost(self, launch: int) -> None: ...

    def session_ended(self) -> None: ...


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[str]:
    """The executors for which keepers' jobs were submitted."""
    submitted: queue.SimpleQueue[str] = queue.SimpleQueue()

    def submit(_: SparkContext, executor: Executor, row: bytes) -> None:
        del row
        submitted.put(executor.id)
        raise OSError("there is no JVM")

    monkeypatch.setattr(keeper_host, "pinned_rdd", submit)
    return submitted


@contextmanager
def hosting() -> Iterator[KeeperHost]:
    context = Context()
    host = KeeperHost(cast("SparkContext", context), HOST)
    try:
        yield host
    finally:
        context.stopped = True  # nobody would end its launches in order
        host.close()


def test_an_executor_whose_keeper_got_no_thread_is_kept_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch, jobs: queue.SimpleQueue[str]
) -> None:
    """The next launch there found the executor's post, which nobody manned, and waited for ever."""
    with ThreadPoolExecutor(1) as others, hosting() as host:
        with no_threads(monkeypatch, named("keeper-")), pytest.raises(NoThreadError):
            host.run(EXECUTOR, spec(1))
        run = others.submit(host.run, EXECUTOR, spec(2))
        assert jobs.get(timeout=WAIT_S) == EXECUTOR.id
        assert not run.done()
    assert run.result(WAIT_S).reason == LOST


def test_a_launch_that_could_not_be_told_to_leave_is_told_again(
    monkeypatch: pytest.MonkeyPatch, jobs: queue.SimpleQueue[str]
) -> None:
    """It was noted as told, and ended with its executor instead of handing over."""

    def leaving(_: SparkContext, executors: Iterable[Executor]) -> set[str]:
        return {executor.id for executor in executors}

    monkeypatch.setattr(keeper_host, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(keeper_host, "live_executors", lambda _: [EXECUTOR])
    monkeypatch.setattr(keeper_host, "leaving_executors", leaving)
    listener = Listener()
    with ThreadPoolExecutor(1) as others, hosting() as host:
        others.submit(host.run, EXECUTOR, spec(7))
        jobs.get(timeout=WAIT_S)
        host.open(cast("HostListener", listener))
        assert [listener.leaving.get(timeout=WAIT_S) for _ in range(2)] == [7, 7]
        with pytest.raises(queue.Empty):
            listener.leaving.get(timeout=0.1)


def test_a_launch_that_leaves_is_not_noted_before_there_is_a_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = BrokerLauncher(RunningHost(), cast("object", None), cast("object", None))  # type: ignore[arg-type]
    with no_threads(monkeypatch, named("leave-")), pytest.raises(NoThreadError):
        launcher.executor_leaving(1)
    assert launcher._moving == set()


@pytest.fixture
def settings(tmp_path: Path) -> ClusterSettings:
    return load_cluster_settings({"log.dirs": str(tmp_path / "logs"), "controlled.shutdown.timeout.ms": 100})


def controller_of(settings: ClusterSettings) -> ControllerLink:
    directories = choose_directories(settings.cluster, "app")
    return ControllerLink.start(settings, directories, host=HOST, shared_executor=True)


@contextmanager
def cluster_of(settings: ClusterSettings) -> Iterator[tuple[BrokerCluster, int]]:
    """A cluster on a session that is none, and the pid of its controller."""
    session = SimpleNamespace(sparkContext=SimpleNamespace(master="local[4]"))
    controller = controller_of(settings)
    directories = choose_directories(settings.cluster, "app")
    cluster = BrokerCluster(cast("SparkSession", session), settings, directories, controller, RunningHost())
    atexit.unregister(cluster._at_exit)
    try:
        yield cluster, controller.pid
    finally:
        controller.close()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_cluster_ends_whole_after_a_broker_that_got_no_thread(
    settings: ClusterSettings, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """Its end failed half-way: the controller lived on, and the next cluster on the directories was refused."""
    with cluster_of(settings) as (cluster, pid):
        for _ in range(3):
            cluster._launcher.add_slot()
        wait_until(lambda: len(cluster._launcher.running()) == 3, "three launches run")
        with no_threads(monkeypatch, named("broker-slot-3")) as refused, pytest.raises(NoThreadError):
            cluster.add_broker()
        assert refused == ["broker-slot-3"]
        cluster.stop()
        assert is_gone(pid)
        controller_of(settings).close()


def test_a_step_of_a_clusters_end_that_fails_leaves_no_other_out(
    settings: ClusterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster_of(settings) as (cluster, pid):
        error = KafkaStorageError("a step")

        def fail(_: float) -> bool:
            raise error

        monkeypatch.setattr(cluster._launcher, "stop", fail)
        with pytest.raises(KafkaStorageError) as raised:
            cluster.stop()
        assert raised.value is error
        assert is_gone(pid)
        controller_of(settings).close()
