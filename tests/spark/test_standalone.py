"""A standalone cluster of several hosts: speculation, decommissioning, and an application that its master kills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_broker.testing.faults import broker_processes, is_running
from tests.spark.application import Application
from tests.spark.failover import Scenario, wait_for
from tests.spark.standalone import StandaloneCluster
from tests.support.spark_ui import SparkUi, free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

CONFIG: dict[str, object] = {"broker.session.timeout.ms": 3000, "replica.lag.time.max.ms": 10_000}

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.task.duration.threshold": "3s",
    "spark.speculation.interval": "200ms",
}


@contextmanager
def application(
    directory: Path, master: str, brokers: int, spark_settings: dict[str, str], **config: object
) -> Iterator[Application]:
    """A cluster application on that master."""
    settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", **spark_settings}
    given = {**CONFIG, **config, "log.dirs": directory / "logs", "metadata.dir": directory / "metadata"}
    with Application(directory, "cluster", given, master=master, brokers=brokers, spark_settings=settings) as started:
        yield started.await_ready()


def test_a_speculated_copy_of_a_keeper_on_another_host_ends_no_broker(tmp_path: Path, spark: SparkSession) -> None:
    port = free_port()
    settings = {**SPECULATION, "spark.ui.enabled": "true", "spark.ui.port": str(port)}
    with (
        StandaloneCluster(tmp_path, workers=2) as hosts,
        application(tmp_path, hosts.master, 2, settings) as started,
        Scenario(started.bootstrap_servers, str(tmp_path / "logs"), replicas=2) as scenario,
    ):
        before = {broker.id: (broker.epoch, broker.pid, broker.host) for broker in scenario.live()}
        assert {host for _, _, host in before.values()} == {"127.0.0.1", "127.0.0.2"}
        page = SparkUi(f"http://127.0.0.1:{port}")

        wait_for(lambda: page.speculated() >= 3, "copies of keepers")
        scenario.await_writes()

        assert {broker.id: (broker.epoch, broker.pid, broker.host) for broker in scenario.live()} == before
        scenario.judge(spark, brokers=2)


def test_a_decommissioned_executors_broker_leaves_in_order_and_moves(tmp_path: Path, spark: SparkSession) -> None:
    settings = {"spark.decommission.enabled": "true"}
    with (
        StandaloneCluster(tmp_path, 3, "-Dspark.decommission.enabled=true") as hosts,
        application(tmp_path, hosts.master, 2, settings) as started,
        Scenario(started.bootstrap_servers, str(tmp_path / "logs"), replicas=2, min_isr=1) as scenario,
    ):
        leaver = scenario.leader()
        others = {broker.id: (broker.epoch, broker.pid) for broker in scenario.live() if broker.id != leaver.id}

        hosts.decommission(leaver.host)
        wait_for(lambda: not is_running(leaver.pid), "the end of the leaver's process")
        assert "Spark is about to take its executor away" in started.log
        wait_for(
            lambda: (
                all(broker.host != leaver.host and broker.pid != leaver.pid for broker in scenario.live())
                and len(scenario.live()) == 2
            ),
            "the broker on another host",
        )

        assert (tmp_path / "logs" / f"broker-{leaver.id}").exists()
        now = {broker.id: (broker.epoch, broker.pid) for broker in scenario.live() if broker.id != leaver.id}
        assert now == others
        scenario.judge(spark, brokers=2)


def test_an_application_that_its_master_kills_leaves_nothing(tmp_path: Path) -> None:
    with (
        StandaloneCluster(tmp_path, workers=2) as hosts,
        application(tmp_path, hosts.master, 2, {}) as started,
        Scenario(started.bootstrap_servers, str(tmp_path / "logs"), replicas=2) as scenario,
    ):
        keepers = [broker_processes(broker) for broker in scenario.live()]

        hosts.kill_application()

        started.await_end()
        everything = [pid for keeper in keepers for pid in (keeper.jvm, *keeper.python)]
        wait_for(lambda: not any(is_running(pid) for pid in everything), "the end of executors and keepers")
