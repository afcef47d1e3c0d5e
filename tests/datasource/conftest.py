"""A fake cluster, and a way to run a read without Spark: the planner and the tasks, pickled between as Spark does."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - Spark itself carries readers and partitions to its processes this way
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pyspark_spark_broker import DefaultSource
from tests.client.fake_broker import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    fake_cluster = FakeCluster(3)
    yield fake_cluster
    fake_cluster.close()
    assert [broker.bugs for broker in fake_cluster.brokers] == [[], [], []]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that no broker shows counts as absent after a tenth of a second."""
    monkeypatch.setattr("spark_broker.client.retry.UNKNOWN_TOPIC_GRACE_MS", 100)


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


@dataclass
class Stream:
    """A streaming query as Spark runs one: its checkpoint outlives `restart`, everything else does not."""

    make_reader: Callable[[], DataSourceStreamReader]
    schema: StructType
    offset_log: list[str] = field(default_factory=list)
    committed: int = 0
    available_now: bool = False

    def __post_init__(self) -> None:
        self.reader = self._new_reader()

    def _new_reader(self) -> DataSourceStreamReader:
        reader = self.make_reader()
        if self.available_now:
            assert isinstance(reader, SupportsTriggerAvailableNow)
            reader.prepareForTriggerAvailableNow()
        return reader

    def restart(self) -> pa.Table | None:
        """Stop and start again. Returns the rows of the batch that is repeated, if one was not committed."""
        self.reader.stop()
        self.reader = self._new_reader()
        return self.run() if len(self.offset_log) > self.committed else None

    def plan(self, *, unlimited: bool = False) -> bool:
        """Write the next batch into the offset log, if there is one."""
        start = self._start()
        limit = ReadAllAvailable() if unlimited else self.reader.getDefaultReadLimit()
        end = json.dumps(self.reader.latestOffset(json.loads(start), limit))
        json.dumps(self.reader.reportLatestOffset())
        if self.offset_log and end == self.offset_log[-1]:
            return False
        self.offset_log.append(end)
        if self.committed:
            self.reader.commit(json.loads(self.offset_log[self.committed - 1]))
        return True

    def trigger(self, *, unlimited: bool = False) -> pa.Table | None:
        """Run one batch and commit it. None: there is nothing to read."""
        return self.run() if self.plan(unlimited=unlimited) else None

    def numbers(self) -> list[int]:
        """The column `n` of the next batch."""
        table = self.trigger()
        return [] if table is None else table["n"].to_pylist()

    def run(self) -> pa.Table:
        """Run the batch that was planned last, and commit it."""
        start, end = json.loads(self._start()), json.loads(self.offset_log[-1])
        partitions = [pickle.loads(pickle.dumps(partition)) for partition in self.reader.partitions(start, end)]
        again = [partition.value for partition in self.reader.partitions(start, end)]
        assert [partition.value for partition in partitions] == again, "Spark may ask twice"
        task = self.make_reader()
        batches = [batch for partition in partitions for batch in task.read(partition)]
        self.committed = len(self.offset_log)
        return pa.Table.from_batches(batches, to_arrow_schema(self.schema, timezone="UTC"))

    def _start(self) -> str:
        """Spark asks for the initial offset twice in the first batch."""
        json.dumps(self.reader.initialOffset())
        return self.offset_log[self.committed - 1] if self.committed else json.dumps(self.reader.initialOffset())


MakeStream = Callable[..., Stream]


@pytest.fixture
def stream(cluster: FakeCluster) -> Iterator[MakeStream]:
    """`stream(subscribe="t")`: a query that has not run yet."""
    made: list[Stream] = []

    def make(*, schema: StructType | None = None, available_now: bool = False, **options: str) -> Stream:
        values = {"bootstrap.servers": cluster.bootstrap, "retry.backoff.ms": "5", **options}
        source = DefaultSource(CaseInsensitiveDict(values))
        declared = source.schema() if schema is None else schema

        def make_reader() -> DataSourceStreamReader:
            reader: DataSourceStreamReader = pickle.loads(
                pickle.dumps(pickle.loads(pickle.dumps(source)).streamReader(declared))
            )
            return reader

        made.append(Stream(make_reader, declared, available_now=available_now))
        return made[-1]

    yield make
    for query in made:
        query.reader.stop()
