"""Clusters that end: in order, with their data or without. A later cluster starts on what they left."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_broker.driver.cluster import BrokerCluster
from spark_broker.errors import (
    ClosedError,
    ClusterInUseError,
    InconsistentClusterIdError,
    SparkBrokerError,
    StaleControllerEpochError,
)
from tests.support.waiting import eventually


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_cluster_comes_back_on_its_directories_with_ids_and_ports(spark: SparkSession, tmp_path: Path) -> None:
    config = {"log.dirs": str(tmp_path)}
    with BrokerCluster.start(spark, 3, config) as first:
        before, bootstrap = first.describe(), first.bootstrap_servers
    with BrokerCluster.start(spark, 3, config) as second:
        after = second.describe()
        assert second.bootstrap_servers == bootstrap

    assert after.cluster_id == before.cluster_id
    assert after.controller_epoch > before.controller_epoch
    assert [(b.id, b.port) for b in after.brokers] == [(b.id, b.port) for b in before.brokers]
    assert {b.pid for b in after.brokers}.isdisjoint({b.pid for b in before.brokers})


def test_stop_leaves_no_process_no_temporary_data_and_a_closed_cluster(spark: SparkSession) -> None:
    cluster = BrokerCluster.start(spark, 3)
    pids = [*(broker.pid for broker in cluster.describe().brokers), cluster._controller.pid]
    assert Path(cluster.log_dirs).is_dir()

    cluster.stop()
    cluster.stop()

    eventually(lambda: all(is_gone(pid) for pid in pids), 20, "the end of brokers and controller")
    assert not Path(cluster.log_dirs).exists()
    with pytest.raises(ClosedError):
        cluster.describe()


@pytest.mark.full
def test_log_directories_without_their_metadata_are_refused_and_not_touched(
    spark: SparkSession, tmp_path: Path
) -> None:
    with BrokerCluster.start(spark, 1, {"log.dirs": str(tmp_path)}):
        pass
    shutil.rmtree(tmp_path / "metadata")
    meta = (tmp_path / "broker-0" / "meta.json").read_bytes()

    with pytest.raises(SparkBrokerError, match="cluster"):
        BrokerCluster.start(spark, 1, {"log.dirs": str(tmp_path)})

    assert (tmp_path / "broker-0" / "meta.json").read_bytes() == meta


@pytest.mark.full
def test_the_directories_of_two_clusters_do_not_mix(spark: SparkSession, tmp_path: Path) -> None:
    for name in ("one", "two"):
        with BrokerCluster.start(spark, 1, {"log.dirs": str(tmp_path / name)}):
            pass
    mixed = {"log.dirs": str(tmp_path / "one"), "metadata.dir": str(tmp_path / "two" / "metadata")}

    with pytest.raises(InconsistentClusterIdError):
        BrokerCluster.start(spark, 1, mixed)


@pytest.mark.full
def test_fewer_brokers_than_before_start_with_the_directories_that_they_claim(
    spark: SparkSession, tmp_path: Path
) -> None:
    config = {"log.dirs": str(tmp_path)}
    with BrokerCluster.start(spark, 2, config):
        pass

    with BrokerCluster.start(spark, 1, config) as smaller:
        live = [broker for broker in smaller.describe().brokers if not broker.fenced]
        assert len(live) == 1
        os.kill(live[0].pid, 0)
        added = smaller.add_broker()

        assert added != live[0].id
        assert len(smaller.bootstrap_servers.split(",")) == 2


@pytest.mark.full
def test_a_second_cluster_on_the_directories_of_a_running_one_is_refused_and_disturbs_nobody(
    spark: SparkSession, tmp_path: Path
) -> None:
    config = {"log.dirs": str(tmp_path)}
    with BrokerCluster.start(spark, 1, config) as running:
        before = running.describe()
        with pytest.raises(ClusterInUseError, match=f"in use by pid {os.getpid()} on host"):
            BrokerCluster.start(spark, 1, config)

        assert running.describe() == before
        os.kill(before.brokers[0].pid, 0)


@pytest.mark.full
def test_a_cluster_that_is_taken_over_ends_with_the_reason_and_the_other_has_its_brokers(
    spark: SparkSession, tmp_path: Path
) -> None:
    config = {"log.dirs": str(tmp_path)}
    deposed = BrokerCluster.start(spark, 1, config)
    before = deposed.describe()

    with BrokerCluster.start(spark, 1, config, take_over=True) as current:
        eventually(lambda: deposed.stopped, 30, "the end of the deposed cluster")
        with pytest.raises(ClosedError, match="another controller"):
            deposed.describe()
        assert isinstance(deposed.failure, StaleControllerEpochError)
        eventually(lambda: is_gone(before.brokers[0].pid), 30, "the end of its broker")
        after = current.describe()
        assert [broker.id for broker in after.brokers] == [broker.id for broker in before.brokers]
        assert before.controller is not None
        assert after.controller is not None
        assert after.controller.epoch > before.controller.epoch
        assert after.controller.pid == os.getpid()
    deposed.stop()


@pytest.mark.full
def test_after_a_controller_that_was_killed_with_its_cluster_the_directories_are_free(
    spark: SparkSession, tmp_path: Path
) -> None:
    config = {"log.dirs": str(tmp_path)}
    with BrokerCluster.start(spark, 1, config) as first:
        first._controller._closed.set()  # so that it is not restarted
        os.kill(first._controller.pid, signal.SIGKILL)

    with BrokerCluster.start(spark, 1, config) as second:
        assert len(second.describe().brokers) == 1
