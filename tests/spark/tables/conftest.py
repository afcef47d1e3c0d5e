"""Brokers, and a tierer with a Spark of its own, for the tests of a topic's table. The shared session is not used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from spark_broker import Admin

if TYPE_CHECKING:
    from tests.spark.history import History
    from tests.support.process_cluster import ProcessCluster
    from tests.support.tierer_process import TiererProcess


@pytest.fixture(scope="module")
def spark(history: History) -> TiererProcess:
    return history.tierer


@pytest.fixture(scope="module")
def brokers(spark: TiererProcess, history: History) -> ProcessCluster:
    """They start while Spark does."""
    return history.brokers


@pytest.fixture(scope="module")
def admin(brokers: ProcessCluster) -> Iterator[Admin]:
    with Admin(brokers.bootstrap_servers) as client:
        yield client
