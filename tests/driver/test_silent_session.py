"""A Spark session that does not answer for a moment has not ended: the cluster goes on."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import cast

import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from spark_broker.broker.spec import FAILED, BrokerOutcome, BrokerSpec
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.config import AdminConfig
from spark_broker.driver import keeper_host
from spark_broker.driver import launcher as launcher_module
from spark_broker.driver.executors import Executor
from spark_broker.driver.hosts import HostListener
from spark_broker.driver.keeper_host import KeeperHost
from spark_broker.driver.launcher import BrokerLauncher, LaunchController
from spark_broker.errors import NotControllerError, RequestTimedOutError
from spark_broker.history.schedule import LEADERLESS_MS, TieringSchedule
from spark_broker.history.timetable import RunKind
from spark_broker.protocol.messages import MetadataResponse, PartitionMetadata, TopicMetadata
from tests.conftest import WaitUntil
from tests.driver.running_host import EXECUTOR, HOST, RunningHost, spec


class Context:
    """A Spark context. While it is `silent`, its JVM answers nothing."""

    master = "local-cluster[1,2,1024]"

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.silent = False
        self.asked = 0
        self._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=self._is_stopped))

    def answer(self) -> None:
        self.asked += 1
        if self.silent:
            raise Py4JError("java.lang.OutOfMemoryError: unable to create native thread")

    def _is_stopped(self) -> bool:
        self.answer()
        return False

    def cancelJobGroup(self, *_: object) -> None: ...


class Listener:
    """Notes whether the session has ended, and the executors."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def session_ended(self) -> None:
        self.ended.set()

    def executors_changed(self) -> None: ...


def test_a_session_that_is_silent_for_a_moment_has_not_ended_and_one_that_stays_silent_has(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """Story: one call of the JVM failed, at a limit of its threads, and the whole cluster ended."""
    context, listener, there = Context(), Listener(), [EXECUTOR]

    def live(_: object) -> list[Executor]:
        context.answer()
        return there

    monkeypatch.setattr(keeper_host, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(keeper_host, "live_executors", live)
    monkeypatch.setattr(keeper_host, "leaving_executors", lambda *_: set[str]())
    host = KeeperHost(cast("SparkContext", context), HOST)
    try:
        host.open(cast("HostListener", listener))
        context.silent = True
        before = context.asked
        wait_until(lambda: context.asked > before + 3, "the session is asked again")
        there = [EXECUTOR, Executor("2", HOST, 2)]
        context.silent = False
        wait_until(lambda: len(host.executors()) == 2, "a new executor is seen")
        assert not listener.ended.is_set()
        monkeypatch.setattr(keeper_host, "SILENT_S", 0.1)
        context.silent = True
        assert listener.ended.wait(20)
    finally:
        host.close()


def test_tiering_goes_on_after_a_moment_in_which_the_session_was_silent(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """Story: the thread of the schedule ended in silence, and nothing reached the topics' tables any more."""
    context, rounds = Context(), 0

    def metadata() -> MetadataResponse:
        nonlocal rounds
        rounds += 1
        context.answer()
        raise RequestTimedOutError("the controller is away")

    schedule = TieringSchedule(
        cast("SparkSession", SimpleNamespace(sparkContext=context)), 10, metadata, str, lambda _: None
    )
    context.silent = True
    schedule.start()
    try:
        wait_until(lambda: rounds > 2, "another round follows")
        context.silent = False
        before = rounds
        wait_until(lambda: rounds > before + 1, "rounds go on")
    finally:
        schedule._stopping.set()
        schedule._thread.join(20)


def test_a_broker_that_is_to_leave_is_asked_until_it_has_left(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """Story: it had not registered yet when Spark wanted its executor. It was never asked again, and the drain hung."""
    monkeypatch.setattr(launcher_module, "LEAVE_AGAIN_S", 0.01)
    host, asked = RunningHost(), 0

    def stop_broker(_: int) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise NotControllerError("it is away")

    controller = SimpleNamespace(new_launch=lambda: 1, spark_loss=lambda _: None, stop_broker=stop_broker)
    launcher = BrokerLauncher(host, cast("LaunchController", controller), lambda *_: spec(1))
    launcher.add_slot()
    wait_until(lambda: bool(launcher.running()), "a broker runs")
    launcher.executor_leaving(1)
    wait_until(lambda: asked > 3, "it is asked again")
    launcher.stop(0.01)
    wait_until(lambda: "leave-1" not in {thread.name for thread in threading.enumerate()}, "nobody asks any more")


def test_a_stop_waits_for_no_broker_of_a_session_that_has_ended_meanwhile(wait_until: WaitUntil) -> None:
    controller = SimpleNamespace(new_launch=lambda: 1, spark_loss=lambda _: None)
    launcher = BrokerLauncher(RunningHost(), cast("LaunchController", controller), lambda *_: spec(1))
    launcher.add_slot()
    wait_until(lambda: bool(launcher.running()), "a broker runs")
    threading.Timer(0.2, launcher.session_ended).start()
    assert not launcher.stop(1e6)


class BadExecutorHost(RunningHost):
    """On one of its executors no broker starts."""

    shared_executor = False
    all = (Executor("1", "host-1", 2), Executor("2", "host-2", 2), Executor("3", "host-1", 2))
    bad = "2"

    def executors(self) -> list[Executor]:
        return list(self.all)

    def run(self, executor: Executor, launch: BrokerSpec) -> BrokerOutcome:
        return BrokerOutcome(reason=FAILED) if executor.id == self.bad else super().run(executor, launch)


def test_an_executor_on_which_no_broker_lasts_comes_after_those_that_are_free(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """Story: a broken disk of one executor, which was always the first choice. A free one was never tried."""
    monkeypatch.setattr(launcher_module, "BACKOFF_MAX_S", 0.1)
    numbers = itertools.count(1)
    controller = SimpleNamespace(new_launch=lambda: next(numbers), spark_loss=lambda _: None)
    launcher = BrokerLauncher(BadExecutorHost(), cast("LaunchController", controller), lambda launch, _: spec(launch))
    for _ in range(2):
        launcher.add_slot()
    wait_until(lambda: {placement.executor.id for placement in launcher.running()} == {"1", "3"}, "both brokers run")
    launcher.stop(0.01)


def test_a_topic_without_a_leader_does_not_hold_up_the_tables_of_others() -> None:
    """Story: each run waited 60 s for the leader of each such topic. With five of them, others had no other runs."""

    def topic(*leaders: int) -> TopicMetadata:
        partitions = [PartitionMetadata(number, leader, 0, [0], [0], 0) for number, leader in enumerate(leaders)]
        return TopicMetadata("t", "12" * 16, partitions, [], {})

    waits: list[int] = []
    schedule = TieringSchedule(cast("SparkSession", None), 1, MetadataResponse, str, lambda _: None)  # type: ignore[arg-type]
    schedule._missing = lambda: None  # type: ignore[method-assign]
    schedule._tier = lambda client, config, topic: waits.append(config.default_api_timeout_ms)  # type: ignore[method-assign]
    due = [(each, RunKind.WHOLE) for each in (topic(0, 1), topic(0, -1))]
    schedule._run_due(cast("ClusterMetadata", None), AdminConfig(), due)
    assert waits == [AdminConfig().default_api_timeout_ms, LEADERLESS_MS]
