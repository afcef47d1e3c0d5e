"""Topics of a real cluster as DataFrames, without `register()`: what was produced, once each, at its offsets."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict

from pyspark_spark_broker import DefaultSource
from spark_broker import Admin, NewTopic, Producer, TransactionGroup
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.times import from_ms
from tests.support.waiting import eventually

FLIGHTS = pa.schema([("dest", pa.string()), ("delay", pa.int32()), ("n", pa.int64())])
DESTINATIONS = ("BOS", "LAX", "ORD", "SEA", "IAH", "MIA", "ATL")


def flights(start: int, end: int) -> pa.RecordBatch:
    numbers = range(start, end)
    destinations = [DESTINATIONS[n % len(DESTINATIONS)] for n in numbers]
    return pa.RecordBatch.from_pydict(
        {"dest": destinations, "delay": [n % 90 - 30 for n in numbers], "n": list(numbers)}, schema=FLIGHTS
    )


@pytest.fixture(scope="module")
def admin(cluster: BrokerCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as client:
        yield client


@pytest.fixture(scope="module")
def producer(cluster: BrokerCluster) -> Iterator[Producer]:
    with Producer(cluster.bootstrap_servers) as client:
        yield client


@pytest.fixture(scope="module")
def offsets(admin: Admin, producer: Producer) -> dict[int, int]:
    """`flights`, with 5,000 rows in 3 partitions; the number of records of each."""
    config = {"key.columns": "dest", "min.insync.replicas": 2}
    admin.create_topic(NewTopic("flights", partitions=3, replication_factor=3, schema=FLIGHTS, config=config))
    futures = [producer.append("flights", flights(start, start + 500)) for start in range(0, 5000, 500)]
    ends: dict[int, int] = {}
    for future in futures:
        for acknowledged in future.result(60):
            assert acknowledged.base_offset is not None
            end = acknowledged.base_offset + acknowledged.count
            ends[acknowledged.partition] = max(ends.get(acknowledged.partition, 0), end)
    return ends


@pytest.fixture(scope="module")
def load(spark: SparkSession, cluster: BrokerCluster) -> type[Load]:
    Load.spark, Load.bootstrap = spark, cluster.bootstrap_servers
    return Load


class Load:
    """`load.topic(subscribe="flights", ...)`."""

    spark: SparkSession
    bootstrap: str

    @classmethod
    def topic(cls, **options: str) -> DataFrame:
        reader = cls.spark.read.format("spark_broker").option("kafka.bootstrap.servers", cls.bootstrap)
        return reader.options(**options).load()


def test_every_row_is_there_once_and_each_key_keeps_its_order(load: type[Load], offsets: dict[int, int]) -> None:
    rows = load.topic(subscribe="flights").collect()

    assert sorted(row.n for row in rows) == list(range(5000))
    assert {(row.dest, row.delay, row.n) for row in rows} == {
        (row["dest"], row["delay"], row["n"]) for row in flights(0, 5000).to_pylist()
    }
    for partition, end in offsets.items():
        mine = [row for row in rows if row._partition == partition]
        assert [row._offset for row in mine] == list(range(end))
        for dest in {row.dest for row in mine}:
            numbers = [row.n for row in mine if row.dest == dest]
            assert numbers == sorted(numbers)
    for dest in DESTINATIONS:
        assert len({row._partition for row in rows if row.dest == dest}) == 1


def test_named_offsets_are_read_exactly(load: type[Load], offsets: dict[int, int]) -> None:
    starts = {partition: end // 3 for partition, end in offsets.items()}
    ends = {partition: end - 7 for partition, end in offsets.items()}

    frame = load.topic(
        subscribe="flights",
        startingOffsets=json.dumps({"flights": {str(p): starts.get(p, -2) for p in range(3)}}),
        endingOffsets=json.dumps({"flights": {str(p): ends.get(p, -1) for p in range(3)}}),
    )

    positions = {(row._partition, row._offset) for row in frame.select("_partition", "_offset").collect()}
    assert positions == {(p, offset) for p in offsets for offset in range(starts[p], ends[p])}


def test_assign_reads_one_partition(load: type[Load], offsets: dict[int, int]) -> None:
    partition = next(iter(offsets))
    frame = load.topic(assign=json.dumps({"flights": [partition]}))
    assert frame.groupBy("_partition").count().collect() == [Row(_partition=partition, count=offsets[partition])]


def test_projection_and_splitting_change_no_result(load: type[Load], offsets: dict[int, int]) -> None:
    frame = load.topic(subscribe="flights", columns="n,_offset", minPartitions="7")
    assert frame.columns == ["n", "_offset"]
    assert frame.rdd.getNumPartitions() >= 7
    assert frame.selectExpr("count(*) AS rows", "sum(n) AS total").collect() == [Row(rows=5000, total=12_497_500)]


def test_a_users_schema_projects(load: type[Load], spark: SparkSession, offsets: dict[int, int]) -> None:
    reader = spark.read.format("spark_broker").option("bootstrap.servers", load.bootstrap).schema("delay LONG")
    assert sorted(row.delay for row in reader.load("flights").collect()) == sorted(n % 90 - 30 for n in range(5000))


def test_an_empty_topic_is_an_empty_frame(load: type[Load], admin: Admin) -> None:
    admin.create_topic(NewTopic("nothing", partitions=2, replication_factor=3))
    frame = load.topic(subscribe="nothing")
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert frame.count() == 0


def test_kafkas_record_reads_like_sparks_kafka_source(load: type[Load], admin: Admin, producer: Producer) -> None:
    admin.create_topic(NewTopic("words", partitions=1, replication_factor=3))
    futures = [
        producer.send("words", value=word, key=b"k", headers=[("at", b"1")], timestamp=from_ms(1_700_000_000_000))
        for word in (b"a", b"b")
    ]
    assert [future.result(60).offset for future in futures] == [0, 1]

    frame = load.topic(subscribe="words", includeHeaders="true")

    rows = frame.selectExpr(
        "CAST(key AS STRING) AS key",
        "CAST(value AS STRING) AS value",
        *("topic", "partition", "offset", "unix_millis(timestamp) AS ms", "timestampType", "headers"),
    ).collect()
    assert [row.value for row in rows] == ["a", "b"]
    assert rows[1] == Row(
        key="k",
        value="b",
        topic="words",
        partition=0,
        offset=1,
        ms=1_700_000_000_000,
        timestampType=0,
        headers=[Row(key="at", value=b"1")],
    )


def test_what_winning_tasks_appended_is_read_once_the_driver_has_committed_it(
    load: type[Load], spark: SparkSession, cluster: BrokerCluster, admin: Admin
) -> None:
    admin.create_topic(NewTopic("loaded", partitions=2, replication_factor=3, schema=FLIGHTS))
    group = TransactionGroup(cluster.bootstrap_servers, "load", version=0, execution="run")
    batches = [flights(part * 100, part * 100 + 100) for part in range(4)]  # tasks do not import this module

    def attempt(parts: Iterable[int]) -> Iterable[tuple[int, int]]:
        for part in parts:
            with group.join() as writer:
                writer.append("loaded", batches[part], partition=part % 2)
                writer.flush()
                yield part, writer.producer_id

    attempts = spark.sparkContext.parallelize(range(4), 4).mapPartitions(attempt).collect()
    assert load.topic(subscribe="loaded").count() == 0
    assert load.topic(subscribe="loaded", **{"isolation.level": "read_uncommitted"}).count() == 400
    assert group.commit(producer_id for part, producer_id in attempts if part != 2)
    rows = load.topic(subscribe="loaded").collect()
    assert sorted(row.n for row in rows) == [*range(200), *range(300, 400)]
    assert load.topic(subscribe="loaded", minPartitions="50").count() == 300


def test_a_temporary_view_reads_a_topic(load: type[Load], spark: SparkSession, offsets: dict[int, int]) -> None:
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW flights USING spark_broker"
        f" OPTIONS ('bootstrap.servers' '{load.bootstrap}', subscribe 'flights')"
    )
    assert spark.sql("SELECT count(*) AS rows FROM flights").collect() == [Row(rows=5000)]


def test_a_mistake_is_a_typed_error_when_the_query_is_planned(load: type[Load], offsets: dict[int, int]) -> None:
    with pytest.raises(AnalysisException, match=r"INVALID_CONFIG.*did you mean 'subscribe'") as option:
        load.topic(subscrib="flights")
    with pytest.raises(AnalysisException, match=r"UNKNOWN_TOPIC_OR_PARTITION.*'fligths' does not exist") as topic:
        load.topic(subscribe="fligths")
    too_far = json.dumps({"flights": {str(p): offsets.get(p, 0) + 1 for p in range(3)}})
    with pytest.raises(AnalysisException, match="OFFSET_OUT_OF_RANGE") as offset:
        load.topic(subscribe="flights", startingOffsets=too_far).collect()
    assert [str(error.value) for error in (option, topic, offset) if "Traceback" in str(error.value)] == []


def test_a_read_goes_on_when_its_leader_is_killed_in_the_middle(
    load: type[Load], admin: Admin, producer: Producer
) -> None:
    """This is the last test of the module, because the module's cluster loses a broker."""
    admin.create_topic(NewTopic("long", partitions=1, replication_factor=3, schema=FLIGHTS))
    for start in range(0, 200_000, 10_000):
        producer.append("long", flights(start, start + 10_000)).result(60)
    query = load.topic(subscribe="long")
    # The same reader as a task's, one answer at a time, so that the leader goes while most is still to be read.
    options = {"bootstrap.servers": load.bootstrap, "subscribe": "long", "max.partition.fetch.bytes": "4096"}
    source = DefaultSource(CaseInsensitiveDict(options))
    reader = source.reader(source.schema())
    (partition,) = reader.partitions()
    batches = reader.read(partition)
    first = next(batches)

    before = admin.describe_topic("long").partitions[0]
    pid = next(broker.pid for broker in admin.describe_cluster().brokers if broker.id == before.leader)
    os.kill(pid, signal.SIGKILL)

    assert pa.Table.from_batches([first, *batches])["n"].to_pylist() == list(range(200_000))
    assert query.selectExpr("count(*) AS rows", "count(DISTINCT n) AS numbers", "max(n) AS last").collect() == [
        Row(rows=200_000, numbers=200_000, last=199_999)
    ]
    # The killed broker may be back, and lead again: only the epoch shows that there was an election.
    eventually(lambda: admin.describe_topic("long").partitions[0].leader_epoch > before.leader_epoch, 30)
