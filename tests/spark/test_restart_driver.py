"""The driver is killed, and started again on the same directories: every partition comes back with its data.

An application of its own, since a killed driver takes its Spark session with it. Clients keep what bootstrap list they
have: brokers come back on their ports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_broker import BrokerInfo
from spark_broker.testing.faults import BrokerProcesses, broker_processes, stopped
from tests.spark.application import Application
from tests.spark.failover import Scenario

pytestmark = pytest.mark.timeout(600)
"""Several waits, each with a deadline of its own that says what was awaited; this bounds their sum."""

CONFIG: dict[str, object] = {"broker.session.timeout.ms": 3000, "replica.lag.time.max.ms": 10_000}


Frozen = Callable[[BrokerProcesses], AbstractContextManager[None]]


def restart(directory: Path, spark: SparkSession, killed: str, frozen: Frozen | None = None) -> None:
    """Start, kill these processes ("python", "jvm", "executors", joined by a plus) under load, start again, judge.

    `frozen` stops processes of the broker that leads partition 0, from before the kill to the end of the test.
    """
    config = {**CONFIG, "log.dirs": directory / "logs", "metadata.dir": directory / "metadata"}
    with (
        Application(directory, "first", config) as first,
        Scenario(first.await_ready().bootstrap_servers, str(directory / "logs")) as scenario,
        ExitStack() as freezer,
    ):
        before = scenario.admin.describe_cluster()
        left = broker_processes(scenario.leader()) if frozen else None
        if frozen and left:
            freezer.enter_context(frozen(left))
        pids = {"python": first.driver_pids[:1], "jvm": first.driver_pids[1:], "executors": first.executor_pids}
        first.kill([pid for name in killed.split("+") for pid in pids[name]])
        first.await_end(but=left.broker if left else -1)
        with Application(directory, "second", config) as second:
            second.await_ready()
            after = scenario.admin.describe_cluster()
            assert after.cluster_id == before.cluster_id
            assert after.controller_epoch > before.controller_epoch
            assert [broker.id for broker in after.brokers] == [broker.id for broker in before.brokers]
            for old, new in zip(before.brokers, after.brokers, strict=True):
                assert new.address == old.address or (new.host == old.host and port_was_taken(old.port, new))
            scenario.judge(spark)


def port_was_taken(port: int, broker: BrokerInfo) -> bool:
    """Whether this broker found another process at its port: any process may get it while the cluster is down."""
    return f"port {port} is taken" in Path(broker.log or "").read_text()


@contextmanager
def whole_executor(processes: BrokerProcesses) -> Iterator[None]:
    """JVM, keeper and broker: as when the machine's memory ran out, or a debugger holds them."""
    with stopped(processes.jvm, processes.keeper_daemon, processes.keeper, processes.broker):
        yield


@pytest.mark.full
@pytest.mark.parametrize("killed", ["python", "jvm", "jvm+python", "executors+jvm+python"])
def test_whichever_processes_of_the_application_are_killed_it_comes_back(
    tmp_path: Path, spark: SparkSession, killed: str
) -> None:
    restart(tmp_path, spark, killed)


@pytest.mark.full
def test_a_frozen_broker_of_the_killed_application_is_ended_and_its_directory_taken_over(
    tmp_path: Path, spark: SparkSession
) -> None:
    restart(tmp_path, spark, "jvm+python", whole_executor)
