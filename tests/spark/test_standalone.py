"""A standalone cluster of several hosts: speculation, decommissioning, and an application that its master kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_broker.testing.faults import broker_processes, is_running
from tests.spark.application import Application
from tests.spark.failover import Scenario, wait_for
from tests.spark.standalone import StandaloneCluster
from tests.support.ports import free_port
from tests.support.spark_ui import SparkUi
from tests.support.story import step

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

CONFIG: dict[str, object] = {"broker.session.timeout.ms": 3000, "replica.lag.time.max.ms": 10_000}

SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.speculation": "true",
    "spark.speculation.task.duration.threshold": "3s",
    "spark.speculation.interval": "200ms",
    "spark.decommission.enabled": "true",
    "spark.ui.enabled": "true",
}


def test_an_application_on_hosts_bears_speculation_and_decommissioning_and_leaves_nothing_when_it_is_killed(
    tmp_path: Path, spark: SparkSession
) -> None:
    config = {**CONFIG, "log.dirs": tmp_path / "logs", "metadata.dir": tmp_path / "metadata"}
    port = free_port()
    settings = {**SETTINGS, "spark.ui.port": str(port)}
    with (
        StandaloneCluster(tmp_path, 2, "-Dspark.decommission.enabled=true") as hosts,
        Application(tmp_path, "cluster", config, master=hosts.master, brokers=2, spark_settings=settings) as started,
    ):
        started.await_ready()
        with step("a speculated copy of a keeper on another host ends no broker"):
            see_speculated_copies(started, tmp_path, spark, SparkUi(f"http://127.0.0.1:{port}"))
        with step("a decommissioned executor's broker leaves in order and moves to a host that is new"):
            hosts.add_worker()
            decommission_a_leader(started, tmp_path, spark, hosts)
        with step("an application that its master kills leaves nothing"):
            kill_by_its_master(started, tmp_path, hosts)


def see_speculated_copies(started: Application, directory: Path, spark: SparkSession, page: SparkUi) -> None:
    with Scenario(started.bootstrap_servers, str(directory / "logs"), replicas=2) as scenario:
        before = {broker.id: (broker.epoch, broker.pid, broker.host) for broker in scenario.live()}
        assert {host for _, _, host in before.values()} == {"127.0.0.1", "127.0.0.2"}

        wait_for(lambda: page.speculated() >= 3, "copies of keepers")
        scenario.await_writes()

        assert {broker.id: (broker.epoch, broker.pid, broker.host) for broker in scenario.live()} == before
        scenario.judge(spark, brokers=2)


def decommission_a_leader(started: Application, directory: Path, spark: SparkSession, hosts: StandaloneCluster) -> None:
    with Scenario(started.bootstrap_servers, str(directory / "logs"), replicas=2, min_isr=1) as scenario:
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

        assert (directory / "logs" / f"broker-{leaver.id}").exists()
        now = {broker.id: (broker.epoch, broker.pid) for broker in scenario.live() if broker.id != leaver.id}
        assert now == others
        scenario.judge(spark, brokers=2)


def kill_by_its_master(started: Application, directory: Path, hosts: StandaloneCluster) -> None:
    with Scenario(started.bootstrap_servers, str(directory / "logs"), replicas=2) as scenario:
        keepers = [broker_processes(broker) for broker in scenario.live()]

        hosts.kill_application()

        started.await_end()
        everything = [pid for keeper in keepers for pid in (keeper.jvm, *keeper.python)]
        wait_for(lambda: not any(is_running(pid) for pid in everything), "the end of executors and keepers")
