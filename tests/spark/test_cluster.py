"""A cluster in a user's session: what it says of itself, what it refuses, how it ends and comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from spark_broker import Admin, NewTopic
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.errors import (
    ClusterStartError,
    InvalidConfigError,
    MetadataStoreError,
    SparkBrokerError,
)
from spark_broker.protocol.messages import MetadataRequest, MetadataResponse
from spark_broker.transport.client import Connection
from tests.support.waiting import eventually


def metadata_from(address: str) -> MetadataResponse:
    host, _, port = address.rpartition(":")
    connection = Connection(host, int(port))
    try:
        answer = connection.call(MetadataRequest(), timeout_ms=10_000)
    finally:
        connection.close()
    assert isinstance(answer, MetadataResponse)
    return answer


def refuses(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, int(port))) != 0


def test_every_bootstrap_server_knows_the_whole_cluster(cluster: BrokerCluster) -> None:
    addresses = cluster.bootstrap_servers.split(",")

    assert len(addresses) == 3
    for address in addresses:
        answer = metadata_from(address)
        assert answer.cluster_id == cluster.cluster_id
        assert sorted(f"{b.host}:{b.port}" for b in answer.brokers) == sorted(addresses)


def test_the_processes_of_a_session_are_its_controller_and_its_brokers(
    cluster: BrokerCluster, spark: SparkSession
) -> None:
    """The processes that a failed start must not leave are found where a cluster runs."""
    assert {broker.pid for broker in cluster.describe().brokers} < processes_of(spark)


def test_each_broker_runs_on_an_executor_of_its_own(cluster: BrokerCluster) -> None:
    brokers = cluster.describe().brokers

    assert [broker.id for broker in brokers] == [0, 1, 2]
    assert len({broker.executor_id for broker in brokers}) == 3
    for broker in brokers:
        os.kill(broker.pid, 0)
        command = Path(f"/proc/{broker.executor_pid}/cmdline").read_text().split("\0")
        assert command[command.index("--executor-id") + 1] == broker.executor_id


def test_a_topic_that_does_not_say_has_a_replica_on_each_of_three_executors(cluster: BrokerCluster) -> None:
    """Story: executors die routinely, and the default was one replica."""
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(NewTopic("unsaid"))
        (partition,) = admin.describe_topic("unsaid").partitions
    assert len(partition.replicas) == 3


def test_queries_run_beside_the_brokers(cluster: BrokerCluster, spark: SparkSession) -> None:
    assert cluster.status().live_brokers
    assert spark.range(0, 1000, numPartitions=6).selectExpr("sum(id) AS total").collect()[0].total == 499_500


def test_a_notebook_shows_a_row_for_each_broker(cluster: BrokerCluster) -> None:
    shown = cluster._repr_html_()

    assert shown.count("<tr>") == 1 + 3
    assert all(address in shown for address in cluster.bootstrap_servers.split(","))


def test_without_a_free_executor_no_broker_is_added(cluster: BrokerCluster) -> None:
    with pytest.raises(ClusterStartError, match="no executor is free"):
        cluster.add_broker()


def test_a_killed_controller_comes_back_and_every_broker_finds_it(cluster: BrokerCluster) -> None:
    epoch = cluster.describe().controller_epoch
    pids = [broker.pid for broker in cluster.describe().brokers]

    os.kill(cluster._controller.pid, signal.SIGKILL)

    def is_back() -> bool:
        try:
            description = cluster.describe()
        except SparkBrokerError:
            return False
        return description.controller_epoch > epoch and all(not broker.fenced for broker in description.brokers)

    eventually(is_back, 60, "a controller with a higher epoch")
    assert [broker.pid for broker in cluster.describe().brokers] == pids
    assert all(not refuses(address) for address in cluster.bootstrap_servers.split(","))


def test_more_brokers_than_executors_is_refused_at_once(spark: SparkSession) -> None:
    with pytest.raises(ClusterStartError, match="4 brokers need 4 executors"):
        BrokerCluster.start(spark, 4)


def test_an_unknown_setting_names_the_nearest(spark: SparkSession) -> None:
    with pytest.raises(InvalidConfigError, match=r"did you mean 'log\.dirs'"):
        BrokerCluster.start(spark, 3, {"log.dir": "x"})


@pytest.mark.parametrize(
    ("config", "error"),
    [
        pytest.param({"metadata.dir": "memory://cluster"}, MetadataStoreError, marks=pytest.mark.full),
        pytest.param({"broker.host": "192.0.2.1"}, InvalidConfigError, marks=pytest.mark.full),
        ({"broker.start.timeout.ms": 1000}, ClusterStartError),
    ],
)
def test_a_start_that_fails_leaves_no_directory_and_no_process(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, object],
    error: type[SparkBrokerError],
) -> None:
    """The first has no usable metadata, the second an address of another machine, the third no time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = processes_of(spark)

    with pytest.raises(error):
        BrokerCluster.start(spark, 2, config)  # The other tests' cluster may run, and leaves three slots.

    assert list(tmp_path.iterdir()) == []
    eventually(lambda: processes_of(spark) <= before, 20, "the end of controller and brokers")


def processes_of(spark: SparkSession) -> set[int]:
    """Controllers and brokers of this session: other tests have theirs. A broker's environment is its executor's."""
    application = f"appId={spark.sparkContext.applicationId}"
    pids = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_broker = "spark_broker.broker" in process.cmdline() and application in str(process.environ())
            is_controller = "spark_broker.driver.controller_process" in process.cmdline()
            if is_broker or (is_controller and process.ppid() == os.getpid()):
                pids.add(process.pid)
    return pids
