"""Plain `local[2]`, as in a notebook on two cores: in a process of its own, because a process has one Spark session."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

NOTEBOOK = textwrap.dedent(
    """
    import json, os, signal, sys, threading, time
    from pyspark.sql import SparkSession
    from spark_broker.driver.cluster import BrokerCluster
    from spark_broker.driver.session import configure_spark
    from tests.support.waiting import eventually

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = configure_spark(builder).getOrCreate()
    with BrokerCluster.start(spark, 3, {"log.dirs": sys.argv[1]}) as cluster:
        before = cluster.describe().brokers
        total = spark.range(0, 1000, numPartitions=4).selectExpr("sum(id) AS total").collect()[0].total
        os.kill(before[0].pid, signal.SIGKILL)
        def is_back():
            broker = cluster.describe().brokers[0]
            return broker.pid != before[0].pid and not broker.fenced
        eventually(is_back, 60, "the killed broker's replacement")
        after = cluster.describe().brokers
        added = cluster.add_broker()
    pids = [broker.pid for broker in (*before, *after)]
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 20, "the brokers' end")
    spark.stop()
    said = {"total": total, "before": [b.pid for b in before], "after": [b.pid for b in after], "added": added}
    print(json.dumps(said))
    """
)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The run of the notebook's cells."""
    log_dirs = tmp_path_factory.mktemp("log-dirs")
    return subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(log_dirs)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_three_brokers_and_a_query_fit_into_two_task_slots(notebook: subprocess.CompletedProcess[str]) -> None:
    assert notebook.returncode == 0, notebook.stderr
    said = json.loads(notebook.stdout.splitlines()[-1])

    assert said["total"] == 499_500
    assert len(set(said["before"])) == 3
    assert said["added"] == 3


def test_a_killed_broker_comes_back_and_the_others_stay(notebook: subprocess.CompletedProcess[str]) -> None:
    assert notebook.returncode == 0, notebook.stderr
    said = json.loads(notebook.stdout.splitlines()[-1])

    assert said["after"][0] != said["before"][0]
    assert said["after"][1:] == said["before"][1:]


def test_it_says_once_that_all_brokers_share_one_executor(notebook: subprocess.CompletedProcess[str]) -> None:
    assert notebook.stderr.count("all 3 brokers share it") == 1
