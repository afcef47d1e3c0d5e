"""Spark's ordinary life around the brokers: whatever happens to tasks, no broker ends, no leadership moves.

After each fault every broker has the process and the epoch that it had, and is kept by a task again. After all of them
every acknowledged batch is there once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import RDD
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_broker.broker.hosting import KEEPER_VARIABLE
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.executors import with_environment
from spark_broker.model import BrokerInfo
from spark_broker.testing.faults import broker_processes, kill_keeper, kill_keeper_daemon, stopped
from tests.spark.failover import Scenario, wait_for
from tests.support.spark_ui import SparkUi

pytestmark = pytest.mark.timeout(600)
"""Several waits, each with a deadline of its own that says what was awaited; this bounds their sum."""

CONFIG = {"broker.session.timeout.ms": 3000, "replica.lag.time.max.ms": 10_000}


WRITE_INTERVAL_S = 0.02
"""Nothing moves a leader here: so there is no moment that more writes would meet, and queries need the processor."""


@pytest.fixture(scope="module")
def brokers(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    """One cluster for all of them: nothing here may end a broker."""
    with BrokerCluster.start(spark, 3, {**CONFIG, "log.dirs": str(tmp_path_factory.mktemp("log-dirs"))}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def topic_under_load(brokers: BrokerCluster, spark: SparkSession) -> Iterator[Scenario]:
    """One topic for all of them. What its clients saw is judged at the end."""
    with Scenario(brokers.bootstrap_servers, brokers.log_dirs, interval_s=WRITE_INTERVAL_S) as started:
        yield started
        started.judge(spark)


@pytest.fixture
def scenario(brokers: BrokerCluster, topic_under_load: Scenario) -> Scenario:
    """A topic under load, on brokers that are kept."""
    wait_for(lambda: all(keeper_of(broker) for broker in brokers.describe().brokers), "a keeper of every broker")
    return topic_under_load


def keeper_of(broker: BrokerInfo) -> int | None:
    return broker_processes(broker).keeper


@contextmanager
def unharmed(scenario: Scenario, *, lost: Iterable[BrokerInfo] | None = None) -> Iterator[None]:
    """The fault ends no broker and moves no leader.

    `lost`: brokers whose keepers it takes, which then get others; None: all of them.
    """
    before = {broker.id: (broker.epoch, broker.pid) for broker in scenario.live()}
    leaders = [(partition.leader, partition.leader_epoch) for partition in scenario.described()]
    lost = list(scenario.live() if lost is None else lost)
    keepers = {broker.id: keeper_of(broker) for broker in lost}
    yield
    scenario.await_writes()
    wait_for(
        lambda: all(keeper_of(broker) not in (None, keepers[broker.id]) for broker in lost),
        "another keeper of every broker",
    )
    scenario.await_writes()
    assert {broker.id: (broker.epoch, broker.pid) for broker in scenario.live()} == before
    assert [(partition.leader, partition.leader_epoch) for partition in scenario.described()] == leaders


def test_a_killed_keeper_is_replaced_and_its_broker_leads_on(scenario: Scenario) -> None:
    leader = scenario.leader()
    with unharmed(scenario, lost=[leader]):
        kill_keeper(broker_processes(leader))


@pytest.mark.full
def test_a_killed_daemon_of_keepers_ends_no_broker(scenario: Scenario, spark: SparkSession) -> None:
    leader = scenario.leader()
    with unharmed(scenario, lost=[]):
        kill_keeper_daemon(broker_processes(leader))
        scenario.await_writes()
    # The broker's next keeper has another daemon.
    spark.sparkContext.cancelAllJobs()
    wait_for(lambda: all(keeper_of(broker) for broker in scenario.live()), "a keeper of every broker")


@pytest.mark.full
@pytest.mark.parametrize("what", ["keeper", "keeper_daemon", "jvm"])
def test_a_frozen_process_beside_a_broker_does_not_disturb_it(scenario: Scenario, what: str) -> None:
    leader = scenario.leader()
    with unharmed(scenario, lost=[]), stopped(getattr(broker_processes(leader), what)):
        scenario.await_writes(more=250)


def test_cancelling_every_job_cancels_no_broker(scenario: Scenario, spark: SparkSession) -> None:
    with unharmed(scenario):
        spark.sparkContext.cancelAllJobs()


def test_ctrl_c_in_a_notebook_cancels_the_users_query_and_no_broker(scenario: Scenario, spark: SparkSession) -> None:
    """pyspark's own handler of SIGINT cancels every job of the session.

    It cannot while the main thread is inside a call of py4j. So the main thread waits outside of one here.
    """
    failures: list[Exception] = []
    ended = threading.Event()

    def query() -> None:
        try:
            spark.range(0, 10**13, numPartitions=2).selectExpr("sum(id % 7)").collect()
        except Py4JError as error:
            failures.append(error)
        finally:
            ended.set()

    with unharmed(scenario):
        threading.Thread(target=query, daemon=True).start()
        wait_for(lambda: len(spark.sparkContext.statusTracker().getActiveStageIds()) == 4, "the user's query")
        interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            ended.wait(60)
        assert ended.wait(60)
    assert "cancelled" in str(failures[0])


@pytest.mark.full
@pytest.mark.parametrize("what", ["stages", "jobs"])
def test_killing_the_brokers_stage_on_sparks_page_ends_no_broker(
    scenario: Scenario, spark: SparkSession, what: str
) -> None:
    page = SparkUi(str(spark.sparkContext.uiWebUrl))
    with unharmed(scenario):
        assert page.kill(what) == 3


@pytest.mark.full
def test_interrupts_that_meet_the_start_of_a_keepers_worker_end_no_broker(
    scenario: Scenario, spark: SparkSession
) -> None:
    """An interrupted task that waits for its worker makes Spark end the daemon of that worker.

    Speculation does it: it kills the slower copy with an interrupt.
    """
    context = spark.sparkContext._jsc.sc()
    tracker = spark.sparkContext.statusTracker()
    pause = threading.Event()
    with unharmed(scenario):
        spark.sparkContext.cancelAllJobs()
        struck = 0
        for attempt in range(200):
            pause.wait(0.01 + 0.002 * (attempt % 50))
            for task in running_tasks(spark, tracker.getActiveStageIds()):
                context.killTaskAttempt(task, True, "interrupted on purpose")
                struck += 1
            if struck >= 12:
                break
        assert struck >= 12


@pytest.mark.full
def test_users_jobs_that_are_cancelled_while_their_workers_start_end_no_broker(
    scenario: Scenario, spark: SparkSession
) -> None:
    """A cancel is an interrupt, which makes Spark end the daemon of users' workers. Each query needs a new daemon."""
    sc = spark.sparkContext
    pause = threading.Event()

    def query(number: int) -> None:
        context = with_environment(sc, "USERS_QUERY", str(number))
        sc.setJobGroup("users", "a query", interruptOnCancel=True)
        with suppress(Py4JError):
            RDD(sc.parallelize(range(6), 6)._jrdd, context).mapPartitions(lambda rows: rows).collect()

    with unharmed(scenario, lost=[]):
        for number in range(20):
            user = threading.Thread(target=query, args=(number,))
            user.start()
            pause.wait(0.05 + 0.05 * number)
            sc.cancelJobGroup("users")
            user.join(60)
            assert not user.is_alive()


def running_tasks(spark: SparkSession, stages: list[int]) -> list[int]:
    """Ids of the tasks that run in these stages."""
    store = spark.sparkContext._jsc.sc().statusStore()
    task_ids = []
    for stage in stages:
        tasks = store.taskList(stage, 0, 100)
        task_ids += [int(tasks.apply(i).taskId()) for i in range(tasks.size()) if tasks.apply(i).status() == "RUNNING"]
    return task_ids


def crash(rows: Iterable[int]) -> Iterator[int]:
    os.kill(os.getpid(), signal.SIGSEGV)
    yield from rows


def kill_own_daemon(rows: Iterable[int]) -> Iterator[int]:
    os.kill(os.getppid(), signal.SIGKILL)
    yield from rows


def eat_memory(rows: Iterable[int]) -> Iterator[int]:
    """Takes more memory than this worker may have, which is far less than the machine has."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
    yield from (len(bytearray(row << 30)) for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("function", [kill_own_daemon, crash, eat_memory])
def test_a_users_function_that_crashes_or_eats_memory_ends_no_broker(
    scenario: Scenario, spark: SparkSession, function: Callable[[Iterable[int]], Iterator[int]]
) -> None:
    with unharmed(scenario, lost=[]), suppress(Py4JJavaError, PySparkException):
        spark.sparkContext.parallelize(range(1, 7), 6).mapPartitions(function).collect()


@pytest.mark.full
def test_streaming_queries_that_start_and_stop_end_no_broker(scenario: Scenario, spark: SparkSession) -> None:
    with unharmed(scenario, lost=[]):
        for number in range(3):
            query = (
                spark.readStream.format("rate")
                .option("rowsPerSecond", 1000)
                .load()
                .writeStream.format("memory")
                .queryName(f"stream_{number}")
                .trigger(processingTime="200 milliseconds")
                .start()
            )
            wait_for(lambda query=query: query.lastProgress is not None, "a first batch")  # type: ignore[misc]
            query.stop()


def test_a_keeper_shares_its_daemon_with_no_users_task(brokers: BrokerCluster, spark: SparkSession) -> None:
    def daemons(_: Iterable[int]) -> Iterator[int]:
        yield os.getppid()

    users = set(spark.sparkContext.parallelize(range(12), 12).mapPartitions(daemons).collect())
    keepers = {broker_processes(broker).keeper_daemon for broker in brokers.describe().brokers}

    assert None not in keepers
    assert users.isdisjoint(keepers)


def limits_of(pid: int) -> list[str]:
    """All but that of open files, of which a broker takes what it may have (`storage/descriptors.py`)."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return [line for line in lines if not line.startswith("Max open files")]


def test_what_a_broker_inherits_is_the_executors_and_not_the_keepers(brokers: BrokerCluster) -> None:
    for broker in brokers.describe().brokers:
        environment = Path(f"/proc/{broker.pid}/environ").read_bytes()
        assert KEEPER_VARIABLE.encode() not in environment
        stderr = Path(f"/proc/{broker.pid}/fd/2").readlink()
        assert stderr == Path(f"/proc/{broker.executor_pid}/fd/2").readlink()
        assert limits_of(broker.pid) == limits_of(broker.executor_pid)
        assert Path(f"/proc/{broker.pid}/cgroup").read_text() == Path(f"/proc/{broker.executor_pid}/cgroup").read_text()


@pytest.mark.full
def test_every_adoption_is_one_line_of_the_drivers_log_with_its_reason(
    scenario: Scenario, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    def adoptions() -> list[str]:
        return [record.getMessage() for record in caplog.records if "adopted" in record.getMessage()]

    with caplog.at_level("INFO", logger="spark_broker"):
        with unharmed(scenario):
            spark.sparkContext.cancelAllJobs()
        # A keeper's process is there before the driver has heard what it keeps.
        wait_for(lambda: len(adoptions()) == 3, "a line for every adoption")

    assert all("cancelled as part of cancellation of all jobs" in line for line in adoptions())
