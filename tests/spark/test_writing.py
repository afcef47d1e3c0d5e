"""DataFrames and streams written to topics of a real cluster, and read back: the same rows, and errors that help."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_broker import Admin, NewTopic, Producer
from spark_broker.driver.cluster import BrokerCluster

FORMAT = "spark_broker"
WAIT_S = 240
pytestmark = pytest.mark.timeout(900)

EVERY_TYPE = (
    *(
        "id",
        "CAST(id % 7 AS STRING) AS dest",
        "id % 2 = 0 AS even",
        "CAST(id % 100 AS BYTE) AS b",
        "CAST(id AS SHORT) AS s",
    ),
    *("CAST(id AS INT) AS i", "id / 3 AS d", "CAST(id AS FLOAT) AS f", "CAST(id AS DECIMAL(20, 3)) AS m"),
    *("CAST(CAST(id AS STRING) AS BINARY) AS raw", "DATE'2020-01-01' + CAST(id AS INT) AS day"),
    *("timestamp_seconds(1590000000 + id) AS at", "TIMESTAMP_NTZ'2020-06-01 12:00:00' AS wall"),
    *("array(id, null) AS list", "map('k', id) AS pairs", "named_struct('x', id, 'y', array('z')) AS nested"),
    "IF(id % 3 = 0, null, id) AS sometimes",
)


@pytest.fixture(scope="module")
def servers(cluster: BrokerCluster) -> str:
    return cluster.bootstrap_servers


@pytest.fixture(scope="module")
def admin(servers: str) -> Iterator[Admin]:
    with Admin(servers) as client:
        yield client


def save(frame: DataFrame, servers: str, topic: str | None = None, **options: str) -> None:
    frame.write.format(FORMAT).mode("append").option("kafka.bootstrap.servers", servers).options(**options).save(topic)


def load(spark: SparkSession, servers: str, topic: str) -> DataFrame:
    return spark.read.format(FORMAT).option("bootstrap.servers", servers).load(topic)


def start(stream: DataStreamWriter, servers: str, directory: Path, **options: str) -> StreamingQuery:
    sink = stream.format(FORMAT).option("kafka.bootstrap.servers", servers).options(**options)
    return sink.option("checkpointLocation", str(directory / "checkpoint")).start()


def finish(query: StreamingQuery) -> None:
    """Wait for a query that ends by itself. Raises what ended it."""
    assert query.awaitTermination(WAIT_S)


def test_a_dataframe_of_every_type_comes_back_as_it_was(spark: SparkSession, servers: str, admin: Admin) -> None:
    frame = spark.range(0, 500, 1, 4).selectExpr(*EVERY_TYPE)
    options = {"createTopic": "true", "topic.partitions": "3", "topic.key.columns": "dest"}
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        save(frame, servers, "types", **options)
        stored = load(spark, servers, "types").drop("_topic", "_partition", "_offset", "_timestamp")
        # In a topic, values inside of a column may always be null. Rows cannot be sorted by a map.
        frame = frame.select(*(frame[field.name].cast(field.dataType) for field in stored.schema))
        assert_df_equality(stored, frame, transforms=[lambda df: df.sort("id")], ignore_nullable=True)
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    assert len(admin.describe_topic("types").partitions) == 3
    (most,) = load(spark, servers, "types").selectExpr("count(DISTINCT dest, _partition) AS pairs").collect()
    assert most.pairs == 7
    assert load(spark, servers, "types").filter("_partition IS NOT NULL").count() == 500


def test_a_job_of_sparks_kafka_guide_changes_the_format_and_the_address(
    spark: SparkSession, servers: str, admin: Admin
) -> None:
    for name in ("topic1", "topic2"):
        admin.create_topic(NewTopic(name, partitions=2, replication_factor=3))
    df = spark.range(10).selectExpr("id AS key", "CONCAT('topic', 1 + id % 2) AS topic", "id * 2 AS value")

    (
        df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
        .write.format(FORMAT)
        .mode("append")  # Spark requires it for a Python sink
        .option("kafka.bootstrap.servers", servers)
        .option("topic", "topic1")
        .save()
    )
    (
        df.selectExpr("topic", "CAST(key AS STRING)", "CAST(value AS STRING)")
        .write.format(FORMAT)
        .mode("append")
        .option("kafka.bootstrap.servers", servers)
        .save()
    )

    text = ("topic", "CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value")
    stored = load(spark, servers, "topic1").union(load(spark, servers, "topic2")).selectExpr(*text)
    twice = df.selectExpr("'topic1' AS topic", "CAST(key AS STRING)", "CAST(value AS STRING)")
    routed = df.selectExpr("topic", "CAST(key AS STRING)", "CAST(value AS STRING)")
    assert_df_equality(stored, twice.union(routed), ignore_row_order=True, ignore_nullable=True)


def test_keys_go_where_the_python_client_sends_them(spark: SparkSession, servers: str, admin: Admin) -> None:
    admin.create_topic(NewTopic("keys", partitions=5, replication_factor=3))
    with Producer(servers) as producer:
        for n in range(100):
            producer.send("keys", key=f"k{n}", value="python")
    save(spark.range(100).selectExpr("CONCAT('k', id) AS key", "'spark' AS value"), servers, "keys")
    apart = load(spark, servers, "keys").groupBy("key").agg({"partition": "min", "*": "count"}).count()
    spread = load(spark, servers, "keys").select("key", "partition").distinct().count()
    assert (apart, spread) == (100, 100)


def test_for_each_batch_writes_each_batch_once_to_each_topic(
    spark: SparkSession, servers: str, admin: Admin, tmp_path: Path
) -> None:
    source = spark.range(50).selectExpr("CAST(id AS STRING) AS value")
    source.write.json(str(tmp_path / "in"))
    for name in ("each1", "each2"):
        admin.create_topic(NewTopic(name, partitions=2, replication_factor=3))

    def store(batch: DataFrame, number: int) -> None:
        for _ in range(2):  # as after a crash
            for topic in ("each1", "each2"):
                save(batch, servers, topic, txnAppId="app", txnVersion=str(number))

    stream = spark.readStream.schema("value STRING").json(str(tmp_path / "in")).writeStream.foreachBatch(store)
    finish(stream.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start())

    for topic in ("each1", "each2"):
        stored = load(spark, servers, topic).selectExpr("CAST(value AS STRING) AS value")
        assert_df_equality(stored, source, ignore_row_order=True, ignore_nullable=True)


def test_a_stream_writes_to_the_topics_of_its_rows(
    spark: SparkSession, servers: str, admin: Admin, tmp_path: Path
) -> None:
    rows = spark.range(60).selectExpr("CONCAT('route', id % 3) AS topic", "CAST(id AS STRING) AS value")
    rows.write.json(str(tmp_path / "in"))
    for number in range(3):
        admin.create_topic(NewTopic(f"route{number}", partitions=1, replication_factor=3))
    stream = spark.readStream.schema("topic STRING, value STRING").json(str(tmp_path / "in"))

    finish(start(stream.writeStream.queryName("route").trigger(availableNow=True), servers, tmp_path))

    read = spark.read.format(FORMAT).option("bootstrap.servers", servers).option("subscribePattern", "route[0-9]")
    stored = read.load().selectExpr("topic", "CAST(value AS STRING) AS value")
    assert_df_equality(stored, rows, ignore_row_order=True, ignore_nullable=True)


@pytest.mark.full
def test_a_streams_output_mode_is_append_or_complete(
    spark: SparkSession, servers: str, admin: Admin, tmp_path: Path
) -> None:
    spark.range(20).selectExpr("id % 2 AS parity").write.json(str(tmp_path / "in"))
    admin.create_topic(NewTopic("counts", partitions=1, replication_factor=3, schema="parity LONG, count LONG"))
    counts = spark.readStream.schema("parity LONG").json(str(tmp_path / "in")).groupBy("parity").count()

    finish(
        start(counts.writeStream.outputMode("complete").trigger(availableNow=True), servers, tmp_path, topic="counts")
    )

    expected = spark.sql("SELECT * FROM VALUES (0L, 10L), (1L, 10L) AS t(parity, count)")
    stored = load(spark, servers, "counts").select("parity", "count")
    assert_df_equality(stored, expected, ignore_row_order=True, ignore_nullable=True)
    with pytest.raises(StreamingQueryException, match="does not support Update mode"):
        finish(start(counts.writeStream.outputMode("update"), servers, tmp_path / "update", topic="counts"))


def first_line(error: Exception, begins: str) -> str:
    """Our error in Spark's text: from `begins` to the end of that line."""
    text = str(error)
    assert begins in text, text
    return text[text.index(begins) :].splitlines()[0]


def test_a_mistake_is_told_first_when_a_write_is_planned(spark: SparkSession, servers: str) -> None:
    save(spark.range(3), servers, "typed", createTopic="true")
    frame = spark.range(1)
    cases = [
        ({"topik": "t"}, frame, "InvalidConfigError: [INVALID_CONFIG] unknown option 'topik'"),
        ({"topic": "nowhere"}, frame, "UnknownTopicOrPartitionError: [UNKNOWN_TOPIC_OR_PARTITION] topic 'nowhere'"),
        (
            {"topic": "typed"},
            frame.selectExpr("'a' AS id"),
            "SchemaMismatchError: [SCHEMA_MISMATCH] topic 'typed': col",
        ),
        (
            {"topic": "typed"},
            frame.selectExpr("id AS ida"),
            "SchemaMismatchError: [SCHEMA_MISMATCH] topic 'typed': unk",
        ),
    ]
    for options, rows, message in cases:
        with pytest.raises(AnalysisException) as raised:
            save(rows, servers, **options)
        told = first_line(raised.value, "[PYTHON_DATA_SOURCE_ERROR]")
        assert re.sub(r".*spark_broker\.errors\.", "", told).startswith(message), told
        assert "writer: spark_broker.errors." in told


@pytest.mark.full
def test_a_null_in_a_column_that_has_none_fails_the_task_and_stores_nothing(spark: SparkSession, servers: str) -> None:
    save(spark.range(3), servers, "whole", createTopic="true")
    with pytest.raises(PythonException) as raised:
        save(spark.range(100).selectExpr("IF(id = 77, null, id) AS id"), servers, "whole")
    assert "spark_broker.errors.SchemaMismatchError: [SCHEMA_MISMATCH] topic 'whole': column 'id' is not null" in str(
        raised.value
    )
    # What was written beside it is aborted, and blocks no reader.
    save(spark.range(3, 5), servers, "whole")
    assert sorted(row.id for row in load(spark, servers, "whole").collect()) == list(range(5))


@pytest.mark.full
def test_a_dead_address_is_an_error_and_no_hang(spark: SparkSession) -> None:
    began = time.monotonic()
    with pytest.raises(AnalysisException, match=r"BOOTSTRAP_UNREACHABLE.*127\.0\.0\.1:1"):
        save(spark.range(1), "127.0.0.1:1", "t")
    assert time.monotonic() - began < WAIT_S


@pytest.mark.full
def test_a_topic_that_is_deleted_under_a_running_query_ends_it(
    spark: SparkSession, servers: str, admin: Admin, tmp_path: Path
) -> None:
    save(spark.range(1).selectExpr("id AS value"), servers, "doomed", createTopic="true")
    rate = spark.readStream.format("rate").option("rowsPerSecond", 10).load().select("value")
    query = start(rate.writeStream, servers, tmp_path, topic="doomed", **{"delivery.timeout.ms": "20000"})
    try:
        deadline = time.monotonic() + WAIT_S
        while not any(progress.numInputRows for progress in query.recentProgress):
            assert time.monotonic() < deadline
            assert not query.awaitTermination(1)
        admin.delete_topic("doomed")
        with pytest.raises(StreamingQueryException, match=r"spark_broker\.errors\.\w+: \[\w+\] .*doomed"):
            query.awaitTermination(WAIT_S)
    finally:
        query.stop()


def test_only_appending_is_offered(spark: SparkSession, servers: str) -> None:
    writer = spark.range(1).write.format(FORMAT).option("bootstrap.servers", servers)
    with pytest.raises(AnalysisException, match=r'a topic is only ever appended to: use mode\("append"\)'):
        writer.mode("overwrite").save("t")
    with pytest.raises(AnalysisException, match="Append"):
        spark.range(1).write.format(FORMAT).option("bootstrap.servers", servers).save("t")
