"""What a read yields: every record of the ranges once, at its offset, in columns of exactly the declared types."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_broker.errors import InvalidConfigError, InvalidSchemaError, SchemaMismatchError
from spark_broker.protocol.schema import DEFAULT_SCHEMA, conform, normalize_schema
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster
from tests.datasource.conftest import MakeRead

FLIGHTS = pa.schema([("dest", pa.string()), ("delay", pa.int32()), ("speed", pa.float32())])


def records(*values: str) -> pa.RecordBatch:
    rows = [
        {
            "key": value.upper().encode(),
            "value": value.encode(),
            "headers": [{"key": "h", "value": value.encode()}],
            "timestamp": dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        }
        for value in values
    ]
    return pa.RecordBatch.from_pylist(rows, schema=DEFAULT_SCHEMA)


def flights(*delays: int) -> pa.RecordBatch:
    rows = [{"dest": f"D{delay}", "delay": delay, "speed": delay / 2} for delay in delays]
    return pa.RecordBatch.from_pylist(rows, schema=FLIGHTS)


def test_kafkas_record_has_the_columns_of_sparks_kafka_source(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("t")
    cluster.store("t", 0, records("a", "b"))
    query = read(subscribe="t")
    assert query.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int>"
    )
    when = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    assert query.table().to_pylist() == [
        {
            "key": value.upper(),
            "value": value,
            "topic": "t",
            "partition": 0,
            "offset": offset,
            "timestamp": when,
            "timestampType": 0,
        }
        for offset, value in enumerate([b"a", b"b"])
    ]


def test_headers_come_when_they_are_asked_for(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("t")
    cluster.store("t", 0, records("a"))
    query = read(subscribe="t", includeHeaders="true")
    header = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    assert query.schema["headers"].dataType == ArrayType(header)
    assert query.table()["headers"].to_pylist() == [[{"key": "h", "value": b"a"}]]


def test_leader_epochs_come_when_they_are_asked_for(cluster: FakeCluster, read: MakeRead) -> None:
    for name, stored, column in (("t", records("a"), "leaderEpoch"), ("f", flights(1), "_leader_epoch")):
        cluster.create(name, schema=stored.schema)
        cluster.store(name, 0, stored)
        cluster.elect(name, 0, 1)
        cluster.store(name, 0, stored)
        query = read(subscribe=name, includeLeaderEpoch="true")
        assert query.schema.names[-1] == column
        assert query.table()[column].to_pylist() == [0, 1]
        assert column not in read(subscribe=name).schema.names


def test_a_typed_topic_has_its_columns_and_those_of_the_log(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("f", 2, schema=FLIGHTS)
    cluster.store("f", 0, flights(1, 2))
    cluster.store("f", 1, flights(3))
    query = read(subscribe="f")
    assert query.schema.simpleString() == (
        "struct<dest:string,delay:int,speed:float,_topic:string,_partition:int,_offset:bigint,_timestamp:timestamp>"
    )
    rows = query.table().to_pylist()
    assert [(row["dest"], row["_partition"], row["_offset"]) for row in rows] == [
        ("D1", 0, 0),
        ("D2", 0, 1),
        ("D3", 1, 0),
    ]
    appended = dt.datetime.fromtimestamp(APPEND_TIME_MS / 1000, dt.UTC)
    assert {row["_timestamp"] for row in rows} == {appended}


def test_a_timestamp_column_gives_the_timestamp_even_when_it_is_not_among_the_columns(
    cluster: FakeCluster, read: MakeRead
) -> None:
    schema = pa.schema([("day", pa.date32()), ("n", pa.int64()), ("m", pa.int64())])
    cluster.create("t", schema=schema, config={"timestamp.column": "day"})
    cluster.store("t", 0, pa.RecordBatch.from_pylist([{"day": dt.date(2013, 1, 2), "n": 1, "m": 2}], schema=schema))
    table = read(subscribe="t", columns="n,_timestamp").table()
    assert table.to_pylist() == [{"n": 1, "_timestamp": dt.datetime(2013, 1, 2, tzinfo=dt.UTC)}]


def test_an_empty_topic_has_a_schema_and_no_rows(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("f", 3, schema=FLIGHTS)
    query = read(subscribe="f")
    assert query.partitions == []
    assert query.table().num_rows == 0
    assert "dest" in query.schema.names


def test_a_users_schema_chooses_columns_and_only_those_cross_the_wire(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("f", schema=FLIGHTS)
    cluster.store("f", 0, flights(1, 2))
    schema = StructType([StructField("_offset", LongType()), StructField("Delay", LongType())])
    assert read(schema=schema, subscribe="f").table().to_pylist() == [
        {"_offset": 0, "Delay": 1},
        {"_offset": 1, "Delay": 2},
    ]
    assert {tuple(fetch.columns or ()) for fetch in cluster.fetches} == {("delay",)}


def test_columns_chooses_columns_in_their_order(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("f", schema=FLIGHTS)
    cluster.store("f", 0, flights(1))
    assert read(subscribe="f", columns="_OFFSET,dest").table().to_pylist() == [{"_offset": 0, "dest": "D1"}]
    assert {tuple(fetch.columns or ()) for fetch in cluster.fetches} == {("dest",)}


def test_without_any_column_of_the_topic_the_rows_are_counted_all_the_same(
    cluster: FakeCluster, read: MakeRead
) -> None:
    cluster.create("f", schema=FLIGHTS)
    cluster.store("f", 0, flights(1, 2, 3))
    assert read(subscribe="f", columns="_offset").table().to_pylist() == [{"_offset": n} for n in range(3)]
    assert {tuple(fetch.columns or ()) for fetch in cluster.fetches} == {("delay",)}


def test_all_columns_are_fetched_as_they_are_stored(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("t")
    cluster.store("t", 0, records("a"))
    read(subscribe="t").table()
    assert {fetch.columns for fetch in cluster.fetches} == {None}


@pytest.mark.parametrize(
    ("field", "error"),
    [
        (StructField("desst", StringType()), InvalidConfigError),
        (StructField("dest", IntegerType()), SchemaMismatchError),
        (StructField("delay", StringType()), SchemaMismatchError),
        (StructField("dest", TimestampType()), SchemaMismatchError),
        (StructField("delay", DoubleType()), SchemaMismatchError),
    ],
)
def test_a_users_schema_that_the_topic_cannot_fill_is_refused_when_the_query_is_planned(
    cluster: FakeCluster, read: MakeRead, field: StructField, error: type[Exception]
) -> None:
    cluster.create("f", schema=FLIGHTS)
    with pytest.raises(error, match=field.name):
        read(schema=StructType([field]), subscribe="f")


def test_a_null_in_a_column_that_the_user_declared_without_is_an_error(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("f", schema=FLIGHTS)
    cluster.store("f", 0, pa.RecordBatch.from_pylist([{"dest": None}], schema=FLIGHTS))
    query = read(schema=StructType([StructField("dest", StringType(), nullable=False)]), subscribe="f")
    with pytest.raises(SchemaMismatchError, match="dest"):
        query.table()


def test_every_type_that_a_topic_stores_arrives(cluster: FakeCluster, read: MakeRead) -> None:
    values = pa.RecordBatch.from_pydict(
        {
            "bool": pa.array([True, None]),
            "i8": pa.array([1, None], pa.int8()),
            "u16": pa.array([65535, None], pa.uint16()),
            "u32": pa.array([2**32 - 1, None], pa.uint32()),
            "f64": pa.array([0.5, None]),
            "big": pa.array(["x", None], pa.large_string()),
            "fixed": pa.array([b"ab", None], pa.binary(2)),
            "dec": pa.array([Decimal("1.25"), None], pa.decimal128(12, 2)),
            "date": pa.array([dt.date(2020, 2, 3), None]),
            "naive": pa.array([1_580_702_400_123_456_000, None], pa.timestamp("ns")),
            "zoned": pa.array([dt.datetime(2020, 2, 3, 4, tzinfo=dt.UTC), None], pa.timestamp("ms", tz="UTC")),
            "span": pa.array([dt.timedelta(seconds=1), None], pa.duration("s")),
            "time": pa.array([dt.time(1, 2, 3), None], pa.time32("s")),
            "list": pa.array([[1, None], None], pa.list_(pa.int32())),
            "map": pa.array([[("k", [1])], None], pa.map_(pa.string(), pa.list_(pa.int32()))),
            "struct": pa.array([{"a": 1, "b": [{"c": "x"}]}, None]),
            "dict": pa.array(["x", None]).dictionary_encode(),
        }
    )
    plain = [f if f.name != "dict" else pa.field("dict", pa.string()) for f in values.schema]
    schema = normalize_schema(pa.schema(plain))
    stored = conform(values, schema)
    cluster.create("types", schema=schema)
    cluster.store("types", 0, stored)
    cluster.store("types", 0, stored.slice(1))
    table = read(subscribe="types").table().select(schema.names)
    assert table.to_pylist() == [*stored.to_pylist(), *stored.slice(1).to_pylist()]


def test_a_type_that_spark_does_not_have_names_its_column(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("t", schema=pa.schema([("fine", pa.int32()), ("odd", pa.list_(pa.decimal128(5, -2)))]))
    with pytest.raises(InvalidSchemaError, match="odd"):
        read(subscribe="t")
    cluster.create("p", schema=pa.schema([("odd", pa.decimal128(5, 7))]))
    with pytest.raises(InvalidSchemaError, match="column 'odd': Spark has no decimal"):
        read(subscribe="p")
    cluster.create("u", schema=pa.schema([("huge", pa.uint64())]))
    with pytest.raises(InvalidSchemaError, match="huge"):
        read(subscribe="u")


def test_batches_under_an_older_schema_have_nulls_in_the_newer_columns(cluster: FakeCluster, read: MakeRead) -> None:
    topic = cluster.create("f", schema=FLIGHTS)
    cluster.store("f", 0, flights(1))
    newer = FLIGHTS.append(pa.field("gate", pa.string()))
    topic.schemas.append(newer.serialize().to_pybytes())
    cluster.store("f", 0, pa.RecordBatch.from_pylist([{"dest": "X", "gate": "7"}], schema=newer), schema_id=1)
    assert read(subscribe="f").table().select(["dest", "gate"]).to_pylist() == [
        {"dest": "D1", "gate": None},
        {"dest": "X", "gate": "7"},
    ]


def test_small_batches_are_joined_and_keep_their_order(cluster: FakeCluster, read: MakeRead) -> None:
    cluster.create("f", schema=FLIGHTS)
    for n in range(300):
        cluster.store("f", 0, flights(n))
    batches = list(read(subscribe="f").batches())
    assert len(batches) == 1
    assert batches[0].column(0).to_pylist() == [f"D{n}" for n in range(300)]
    assert batches[0].schema.field("_offset").type == pa.int64()
    assert batches[0].column(5).to_pylist() == list(range(300))
