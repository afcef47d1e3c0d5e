"""Faults of single brokers on real executors: nothing acknowledged is lost, doubled or moved, and all replicas heal.

One Spark session and one cluster for all of them; a writer and a reader are at work during every fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from spark_broker import BrokerInfo
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.executors import live_executors
from spark_broker.testing.faults import (
    BrokerProcesses,
    broker_processes,
    is_running,
    kill_all_python,
    kill_broker,
    kill_executor,
    kill_executor_and_broker,
    stopped,
)
from tests.spark.failover import Scenario, old_leader_client, wait_for

pytestmark = pytest.mark.timeout(600)
"""Several waits, each with a deadline of its own that says what was awaited; this bounds their sum."""

CONFIG = {"broker.session.timeout.ms": 3000, "replica.lag.time.max.ms": 10_000, "replica.reassignment.delay.ms": 2000}
"""A frozen broker is fenced, and a broker that stays away is replaced, within the patience of a test."""

Fault = Callable[[BrokerProcesses], AbstractContextManager[None]]


def lasting(strike: Callable[[BrokerProcesses], None]) -> Fault:
    """A fault that nothing ends."""

    @contextmanager
    def fault(processes: BrokerProcesses) -> Iterator[None]:
        strike(processes)
        yield

    return fault


FAULTS: dict[str, Fault] = {
    "kill-executor": lasting(kill_executor),
    "kill-broker": lasting(kill_broker),
    "kill-executor-and-broker": lasting(kill_executor_and_broker),
    "kill-all-python": lasting(kill_all_python),
    "freeze-broker": lambda processes: stopped(processes.broker),
}


OFTEN = ["kill-executor-and-broker", "kill-broker", "freeze-broker"]
"""What `make test` tries here. Its other tests kill executors alone: all at once, under queries, and in the demo."""


@pytest.fixture(scope="module")
def brokers(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    """Three brokers that fence a silent one after three seconds."""
    log_dirs = tmp_path_factory.mktemp("log-dirs")
    with BrokerCluster.start(spark, 3, {**CONFIG, "log.dirs": str(log_dirs)}) as cluster:
        yield cluster


@pytest.fixture
def scenario(brokers: BrokerCluster) -> Iterator[Scenario]:
    """A topic under load."""
    wait_for(lambda: len(brokers.status().live_brokers) == 3, "three brokers, after the last test's fault")
    with Scenario(brokers.bootstrap_servers, brokers.log_dirs) as started:
        yield started


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OFTEN, marks=pytest.mark.quick, id="often"),
        pytest.param([*FAULTS, next(iter(FAULTS))], marks=pytest.mark.full, id="every kind, and the first again"),
    ],
)
def test_after_faults_of_the_leader_nothing_acknowledged_is_lost_and_its_replicas_come_back(
    scenario: Scenario, spark: SparkSession, names: list[str]
) -> None:
    """Each heals before the next. `make chaos` tries many more orders."""
    for number, name in enumerate(names):
        with old_leader_client(scenario) as behind:
            victim = behind.leader
            processes = broker_processes(victim)
            with FAULTS[name](processes):
                if name == "freeze-broker":
                    behind.send(b"sent while it was frozen, %d" % number)
                scenario.await_leaders_elsewhere(victim)
                scenario.await_writes()
            behind.send(b"sent when it was fenced, %d" % number)
            behind.hear()
            assert behind.acknowledged == 1, name
            assert behind.errors, name
        if name != "freeze-broker":
            wait_for(lambda pid=processes.broker: not is_running(pid), "the end of the fenced broker's process")  # type: ignore[misc]
        scenario.await_healed()

    scenario.judge(spark)


def every_ordered_pair(names: Sequence[str]) -> list[str]:
    """A walk in which every name comes right after every name, itself included, once (a de Bruijn sequence)."""
    walk = [names[0]]
    left = {(first, second) for first in names for second in names}
    while left:
        # The latest name first: then the walk does not come back to its beginning before it has been everywhere.
        second = next(name for name in reversed(names) if (walk[-1], name) in left)
        left.remove((walk[-1], second))
        walk.append(second)
    return walk


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_any_two_faults_in_turn_lose_nothing(scenario: Scenario, spark: SparkSession) -> None:
    """Each strikes the broker that leads after the one before, before that has healed."""
    walk = every_ordered_pair(list(FAULTS))
    assert len(walk) == len(FAULTS) ** 2 + 1
    overlapping = 0
    with ExitStack() as current:
        before: BrokerInfo | None = None
        for name in walk:
            scenario.await_min_isr()
            victim = scenario.leader()
            overlapping += before is not None and before.epoch not in {broker.epoch for broker in scenario.live()}
            fault = ExitStack()
            fault.enter_context(FAULTS[name](broker_processes(victim)))
            scenario.await_leaders_elsewhere(victim)
            current.close()  # What the fault before has frozen goes on, and finds that it does not lead.
            current.push(fault)
            before = victim
    assert overlapping > len(walk) / 2, "most of them came too late"

    scenario.judge(spark)


@pytest.mark.full
def test_a_frozen_executor_does_not_disturb_its_broker(scenario: Scenario, spark: SparkSession) -> None:
    broker = scenario.leader()
    with stopped(broker_processes(broker).jvm):
        scenario.await_writes(more=1000)
        assert broker.pid in {live_broker.pid for live_broker in scenario.live()}

    scenario.judge(spark)


@pytest.mark.full
def test_an_executor_that_spark_is_told_to_remove_hands_over_first(scenario: Scenario, spark: SparkSession) -> None:
    """Spark does not announce the removal. The broker has only the moment after its JVM's end."""
    victim = scenario.leader()
    others = {broker.id: broker.epoch for broker in scenario.live() if broker.id != victim.id}

    assert spark.sparkContext._jsc.sc().killAndReplaceExecutor(victim.executor_id)
    scenario.await_leaders_elsewhere(victim)
    wait_for(lambda: not is_running(victim.pid), "the end of the removed executor's broker")

    wait_for(
        lambda: any(broker.id == victim.id and broker.epoch != victim.epoch for broker in scenario.live()),
        "its replacement",
    )
    assert {broker.id: broker.epoch for broker in scenario.live() if broker.id != victim.id} == others
    scenario.judge(spark)


@pytest.mark.full
def test_all_executors_at_once_come_back_with_every_partitions_data(scenario: Scenario, spark: SparkSession) -> None:
    before = scenario.live()
    everyone = [broker_processes(broker) for broker in before]

    for processes in everyone:
        kill_executor(processes)

    wait_for(lambda: not any(is_running(p.broker) for p in everyone), "the end of every broker")
    scenario.judge(spark)
    assert {broker.id for broker in scenario.live()} == {broker.id for broker in before}
    assert {broker.pid for broker in scenario.live()}.isdisjoint({broker.pid for broker in before})


@pytest.mark.full
def test_the_replicas_of_an_executor_that_never_comes_back_are_made_anew_on_the_others(
    brokers: BrokerCluster, spark: SparkSession
) -> None:
    wait_for(lambda: len(brokers.status().live_brokers) == 3, "three brokers, after the last test's fault")
    with Scenario(brokers.bootstrap_servers, brokers.log_dirs, replicas=2, min_isr=1) as scenario:
        victim = scenario.leader()
        with executors_limited(spark, 2):
            kill_executor(broker_processes(victim))
            wait_for(
                lambda: all(victim.id not in p.replicas and len(p.isr) == 2 for p in scenario.described()),
                "two replicas of every partition on the brokers that are left",
            )
            scenario.judge(spark, brokers=2)
    wait_for(lambda: len(brokers.status().live_brokers) == 3, "the executor that is wanted again")


@contextmanager
def executors_limited(spark: SparkSession, executors: int) -> Iterator[None]:
    """For as long as the block lasts, Spark wants only this many executors: one that dies is not replaced."""
    sc = spark.sparkContext
    before = len(live_executors(sc))
    want_executors(sc, executors)
    try:
        yield
    finally:
        want_executors(sc, before)


def want_executors(sc: SparkContext, executors: int) -> None:
    """Tell Spark's master how many executors the application wants. The master ends no executor because of that."""
    jvm = sc._jvm
    assert jvm is not None
    nowhere = jvm.PythonUtils.toScalaMap(jvm.java.util.HashMap())
    assert sc._jsc.sc().requestTotalExecutors(executors, 0, nowhere)
