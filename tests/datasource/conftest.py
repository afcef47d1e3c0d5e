"""A fake cluster, and a way to run a read without Spark: the planner and the tasks, pickled between as Spark does."""

from __future__ import annotations

import pickle  # noqa: TID251 - Spark itself carries readers and partitions to its processes this way
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pyspark_spark_broker import DefaultSource
from tests.client.fake_broker import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    found = FakeCluster(3)
    yield found
    found.close()
    assert [broker.bugs for broker in found.brokers] == [[], [], []]


@dataclass
class Read:
    """A query: planned when it is made, as Spark plans it; run by `table`."""

    reader: DataSourceReader
    partitions: list[InputPartition]
    schema: StructType

    def batches(self) -> Iterator[pa.RecordBatch]:
        for partition in self.partitions or [InputPartition(None)]:
            reader = pickle.loads(pickle.dumps(self.reader))
            yield from reader.read(pickle.loads(pickle.dumps(partition)))

    def table(self) -> pa.Table:
        """All rows; every batch has exactly the schema that Spark compares it with."""
        expected = to_arrow_schema(self.schema, timezone="UTC")
        batches = list(self.batches())
        assert all(expected.equals(batch.schema) for batch in batches)
        for batch in batches:
            batch.validate(full=True)
        return pa.Table.from_batches(batches, expected)


MakeRead = Callable[..., Read]


@pytest.fixture
def read(cluster: FakeCluster) -> MakeRead:
    """`read(subscribe="t")` or `read(schema="a int", ...)`: options as keywords."""

    def make(*, schema: StructType | None = None, **options: str) -> Read:
        values = {"bootstrap.servers": cluster.bootstrap, "retry.backoff.ms": "5", **options}
        source = DefaultSource(CaseInsensitiveDict(values))
        declared = source.schema() if schema is None else schema
        reader = pickle.loads(pickle.dumps(source)).reader(declared)
        return Read(reader, list(reader.partitions()), declared)

    return make
