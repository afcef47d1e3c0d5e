"""A session whose JVM was started without Delta's JARs: whoever tiers there says what is missing, and how to get it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs import submitted
from spark_broker import Admin, BrokerCluster, NewTopic
from spark_broker.model import HistoryInfo
from spark_broker.spark.delta_session import SUBMITTED, downloaded_jars
from tests.spark.application import ROOT
from tests.support.waiting import eventually

JOB = ROOT / "jobs" / "tier.py"


def history_of(admin: Admin) -> HistoryInfo:
    history = admin.describe_topic("t").history
    assert history is not None
    return history


def test_the_clusters_own_schedule_says_so_in_the_topics_description(spark: SparkSession, tmp_path: Path) -> None:
    with (
        BrokerCluster.start(spark, 1, {"log.dirs": str(tmp_path / "logs"), "tiering.interval.ms": 50}) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        admin.create_topic(NewTopic("t", 1, replication_factor=1, config={"delta.path": str(tmp_path / "table")}))
        eventually(lambda: history_of(admin).stopped, 30, "the description")
        stopped = history_of(admin).stopped or ""
        assert "own schedule" in stopped
        assert "JARs" in stopped
        assert not (tmp_path / "table").exists()


@pytest.mark.full
def test_the_job_names_the_jars_that_spark_submit_was_started_without(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process."""
    with BrokerCluster.start(spark, 1, {"log.dirs": str(tmp_path / "logs")}) as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topic(NewTopic("t", 1, replication_factor=1, config={"delta.path": str(tmp_path / "table")}))
        monkeypatch.setenv(SUBMITTED, "1")
        monkeypatch.setattr(submitted, "quiet_spark", lambda: None)  # The session goes on, and is to log as before.
        monkeypatch.setattr(sys, "path", [*sys.path])
        arguments = ["--bootstrap-servers", cluster.bootstrap_servers, "--topic", "t", "--include-active-segments"]
        monkeypatch.setattr(sys, "argv", [str(JOB), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(JOB), run_name="__main__")
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "error: [MISSING_DEPENDENCY]" in said
    assert f"--jars {','.join(map(str, downloaded_jars()))}" in said
