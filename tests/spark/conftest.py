"""One real Spark application for all tests of a run, and one tierer for those of Delta history.

A session takes 16 to 23 s to start, and a process has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_broker.driver.cluster import BrokerCluster
    from tests.spark.history import History

MASTER = "local-cluster[3,2,1024]"

UNKIND = {
    "spark.speculation": "true",
    "spark.speculation.task.duration.threshold": "20s",
    "spark.task.reaper.enabled": "true",
    "spark.task.reaper.killTimeout": "60s",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
}
"""Settings that a user may have made. They must end no broker. A killed task that does not end ends its executor."""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Three executor JVMs of two cores each: one core for a broker, one for queries."""
    from pyspark.sql import SparkSession

    from spark_broker.driver.session import configure_spark

    builder = SparkSession.builder.master(MASTER).appName("spark-broker tests")
    for name, value in UNKIND.items():
        builder = builder.config(name, value)
    session = configure_spark(builder).getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def cluster(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    """Three brokers, shared by a module's tests. Not by the whole run: two clusters would leave queries no core."""
    from spark_broker.driver.cluster import BrokerCluster

    log_dirs = tmp_path_factory.mktemp("log-dirs")
    with BrokerCluster.start(spark, 3, {"log.dirs": str(log_dirs)}) as started:
        yield started


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    """What the tests of Delta history share. Nothing of it runs until a test asks for it."""
    from tests.spark.history import History

    with History(tmp_path_factory.mktemp("history")) as shared:
        yield shared
