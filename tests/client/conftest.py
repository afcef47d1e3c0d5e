"""A fake cluster for each test, and batches of Kafka's record."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from spark_broker.protocol.schema import DEFAULT_SCHEMA, conform
from tests.client.fake_broker import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    fake_cluster = FakeCluster(3)
    yield fake_cluster
    fake_cluster.close()
    assert [broker.bugs for broker in fake_cluster.brokers] == [[], [], []]


@pytest.fixture(scope="session")
def values() -> Callable[..., pa.RecordBatch]:
    """`values("a", "b")`: a batch with these values and no keys."""

    def make(*names: str) -> pa.RecordBatch:
        batch = pa.RecordBatch.from_arrays([pa.array([name.encode() for name in names], pa.binary())], names=["value"])
        return conform(batch, DEFAULT_SCHEMA)

    return make
