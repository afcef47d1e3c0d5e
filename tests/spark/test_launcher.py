"""The launcher on real executors, with a stand-in for the broker: where launches run, and what follows their end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_broker.broker.spec import BrokerSpec, new_secret
from spark_broker.driver.executors import Executor
from spark_broker.driver.keeper_host import KeeperHost
from spark_broker.driver.launcher import BrokerLauncher
from tests.support.waiting import eventually

STAND_IN = "tests.support.stand_in_broker:run"


@dataclass
class RecordingController:
    """Gives out launch numbers and remembers the losses that are reported to it."""

    lost: list[int] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def new_launch(self) -> int:
        with self._lock:
            return next(self._numbers)

    def spark_loss(self, launch: int) -> None:
        with self._lock:
            self.lost.append(launch)

    def stop_broker(self, launch: int) -> None:
        raise AssertionError(f"nobody wants launch {launch} stopped")


@dataclass(frozen=True)
class Announced:
    """What a stand-in said about its launch."""

    launch: int
    pid: int
    executor_id: str
    executor_pid: int
    replaces: list[int]


class Brokers:
    """Stand-ins under a real launcher on the shared session."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.controller = RecordingController()
        self._directory = directory
        self.launcher = BrokerLauncher(
            KeeperHost(spark.sparkContext, "127.0.0.1", entry=STAND_IN), self.controller, self._spec
        )

    def _spec(self, launch: int, executor: Executor) -> BrokerSpec:
        return BrokerSpec(
            cluster_id="test",
            controller_host="127.0.0.1",
            controller_port=1,
            launch=launch,
            log_dirs=str(self._directory),
            host=executor.host,
            rack=None,
            executor_id=executor.id,
            settings={},
            topic_defaults={},
            secret=new_secret(),
        )

    def announced(self) -> list[Announced]:
        """By launch number."""
        said = [Announced(**json.loads(p.read_text(encoding="utf-8"))) for p in self._directory.glob("launch-*")]
        return sorted(said, key=lambda one: one.launch)

    def wait_launches(self, count: int) -> list[Announced]:
        eventually(lambda: len(self.announced()) >= count, 60, f"{count} launches")
        return self.announced()

    def stop_one(self, launch: int) -> None:
        (self._directory / f"stop-{launch}").touch()

    def stop(self) -> bool:
        self.launcher.begin_stop()
        (self._directory / "stop").touch()
        return self.launcher.stop(timeout_s=20)


@pytest.fixture
def brokers(spark: SparkSession, tmp_path: Path) -> Iterator[Brokers]:
    """Three stand-ins on three executors."""
    made = Brokers(spark, tmp_path)
    assert len(made.launcher.wait_executors(lambda alive: len(alive) == 3, timeout_s=60)) == 3
    for _ in range(3):
        made.launcher.add_slot()
    made.wait_launches(3)
    yield made
    made.stop()


def test_each_broker_has_an_executor_of_its_own_and_queries_run_beside_them(
    brokers: Brokers, spark: SparkSession
) -> None:
    launches = brokers.announced()

    assert len({broker.executor_id for broker in launches}) == 3
    assert len({broker.executor_pid for broker in launches}) == 3
    assert {broker.executor_pid for broker in launches}.isdisjoint({broker.pid for broker in launches})
    assert spark.range(0, 1000, numPartitions=6).selectExpr("sum(id) AS total").collect()[0].total == 499_500


def test_a_killed_broker_is_reported_under_its_launch_and_launched_again_on_its_executor(brokers: Brokers) -> None:
    victim = brokers.announced()[0]

    os.kill(victim.pid, signal.SIGKILL)
    replacement = brokers.wait_launches(4)[-1]

    assert brokers.controller.lost == [victim.launch]
    assert replacement.launch > victim.launch
    assert replacement.replaces == [victim.launch]
    assert replacement.executor_id == victim.executor_id


@pytest.mark.full
def test_a_killed_executor_is_replaced_and_the_other_brokers_never_notice(brokers: Brokers) -> None:
    victim, *others = brokers.announced()

    os.kill(victim.executor_pid, signal.SIGKILL)
    replacement = brokers.wait_launches(4)[-1]

    assert victim.launch in brokers.controller.lost
    assert replacement.replaces == [victim.launch]
    assert replacement.executor_id not in {broker.executor_id for broker in others}
    assert replacement.executor_pid != victim.executor_pid
    assert [p.launch for p in brokers.launcher.running()] == [*(broker.launch for broker in others), replacement.launch]
    eventually(lambda: not Path(f"/proc/{victim.pid}").exists(), what="the end of the killed executor's broker")


@pytest.mark.full
def test_a_broker_that_left_in_order_is_not_launched_again_and_frees_its_executor(brokers: Brokers) -> None:
    leaving = brokers.announced()[1]

    brokers.stop_one(leaving.launch)
    eventually(lambda: brokers.launcher.free_executors() == 1, what="a free executor")
    brokers.launcher.add_slot()
    newcomer = brokers.wait_launches(4)[-1]

    assert newcomer.executor_id == leaving.executor_id
    assert brokers.controller.lost == []


def test_stop_waits_for_brokers_to_leave_and_leaves_no_process_behind(brokers: Brokers) -> None:
    pids = [broker.pid for broker in brokers.announced()]

    assert brokers.stop()

    assert brokers.launcher.running() == []
    assert brokers.launcher.failures() == []
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the end of the brokers")


@pytest.mark.full
def test_stop_ends_brokers_by_force_that_do_not_leave(brokers: Brokers) -> None:
    pids = [broker.pid for broker in brokers.announced()]

    assert not brokers.launcher.stop(timeout_s=0.1)

    assert brokers.launcher.running() == []
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the end of the brokers")
