"""The driver is killed, and started again on the same directories: every partition comes back with its data.

An application of its own, since a killed driver takes its Spark session with it. The application that recovers from one
kill is the one that is killed next. Clients keep what bootstrap list they have: brokers come back on their ports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_broker import BrokerInfo
from spark_broker.testing.faults import BrokerProcesses, broker_processes, stopped
from tests.spark.application import Application
from tests.spark.failover import Scenario
from tests.support.story import step

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
"""Several waits, each with a deadline of its own that says what was awaited; this bounds their sum."""

CONFIG: dict[str, object] = {"broker.session.timeout.ms": 3000, "replica.lag.time.max.ms": 10_000}


Frozen = Callable[[BrokerProcesses], AbstractContextManager[None]]


@dataclass(frozen=True)
class Cluster:
    """The cluster's directory, the applications that run it one after the other, and Spark for the judgement."""

    directory: Path
    spark: SparkSession
    starts: ExitStack

    @property
    def log_dirs(self) -> Path:
        return self.directory / "logs"

    def start(self, name: str) -> Application:
        config = {**CONFIG, "log.dirs": self.log_dirs, "metadata.dir": self.directory / "metadata"}
        return self.starts.enter_context(Application(self.directory, name, config)).await_ready()

    def restart(self, first: Application, killed: str, frozen: Frozen | None = None) -> Application:
        """Kill these processes ("python", "jvm", "executors", joined by a plus) under load, start again, judge.

        `frozen` stops processes of the broker that leads partition 0, from before the kill to the judgement.
        Returns the application that was started.
        """
        with Scenario(first.bootstrap_servers, str(self.log_dirs)) as scenario, ExitStack() as freezer:
            before = scenario.admin.describe_cluster()
            left = broker_processes(scenario.leader()) if frozen else None
            if frozen and left:
                freezer.enter_context(frozen(left))
            pids = {"python": first.driver_pids[:1], "jvm": first.driver_pids[1:], "executors": first.executor_pids}
            first.kill([pid for name in killed.split("+") for pid in pids[name]])
            first.await_end(but=left.broker if left else -1)
            second = self.start(f"after {killed}{' and a frozen broker' if frozen else ''}")
            after = scenario.admin.describe_cluster()
            assert after.cluster_id == before.cluster_id
            assert after.controller_epoch > before.controller_epoch
            assert [broker.id for broker in after.brokers] == [broker.id for broker in before.brokers]
            for old, new in zip(before.brokers, after.brokers, strict=True):
                assert new.address == old.address or (new.host == old.host and port_was_taken(old.port, new))
            scenario.judge(self.spark)
        first.close()
        return second


def port_was_taken(port: int, broker: BrokerInfo) -> bool:
    """Whether this broker found another process at its port: any process may get it while the cluster is down."""
    return f"port {port} is taken" in Path(broker.log or "").read_text()


@contextmanager
def whole_executor(processes: BrokerProcesses) -> Iterator[None]:
    """JVM, keeper and broker: as when the machine's memory ran out, or a debugger holds them."""
    with stopped(processes.jvm, processes.keeper_daemon, processes.keeper, processes.broker):
        yield


def test_whichever_processes_of_the_application_are_killed_it_comes_back_and_then_ends_in_order(
    tmp_path: Path, spark: SparkSession
) -> None:
    with ExitStack() as starts:
        cluster = Cluster(tmp_path, spark, starts)
        with step("the first start"):
            running = cluster.start("first")
        for killed in ("python", "jvm", "jvm+python", "executors+jvm+python"):
            with step(f"{killed} killed"):
                running = cluster.restart(running, killed)
        with step("jvm+python killed beside a frozen broker, which is ended, and its directory taken over"):
            running = cluster.restart(running, "jvm+python", whole_executor)
        with step("SIGTERM"):
            running.end_in_order()
            assert len(list(cluster.log_dirs.glob("broker-*/.clean"))) == 3
