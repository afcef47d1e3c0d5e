"""Topics as streams under real Spark: its triggers and checkpoints, and what happens to brokers and topics."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's guide has it
from pyspark.sql.streaming.query import StreamingQuery

import spark_broker
from spark_broker import Admin, NewTopic, Producer
from spark_broker.errors import InvalidDataError
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

NUMBERS = pa.schema([("n", pa.int64()), ("text", pa.string())])
WAIT_S = 120
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """Three brokers outside of Spark, so that the queries have all cores of the session."""
    config = {"log.retention.check.interval.ms": 500}
    with ProcessCluster(tmp_path_factory.mktemp("brokers"), 3, config) as started:
        yield started


@pytest.fixture(scope="module")
def servers(brokers: ProcessCluster) -> str:
    return brokers.bootstrap_servers


@pytest.fixture(scope="module")
def admin(servers: str) -> Iterator[Admin]:
    with Admin(servers) as opened:
        yield opened


@pytest.fixture(scope="module")
def producer(servers: str) -> Iterator[Producer]:
    with Producer(servers) as opened:
        yield opened


@pytest.fixture
def few_tasks(spark: SparkSession) -> Iterator[None]:
    """Two hundred tasks of a shuffle say nothing more than two."""
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield
    spark.conf.set("spark.sql.shuffle.partitions", before or "200")


class Topics:
    """Creates typed topics and fills them with numbers."""

    def __init__(self, admin: Admin, producer: Producer) -> None:
        self._admin = admin
        self._producer = producer

    def create(self, name: str, partitions: int = 2) -> str:
        config = {"min.insync.replicas": 2}
        self._admin.create_topic(
            NewTopic(name, partitions=partitions, replication_factor=3, schema=NUMBERS, config=config)
        )
        return name

    def add(self, name: str, *numbers: int, partition: int | None = None) -> None:
        rows = {"n": list(numbers), "text": [str(n) for n in numbers]}
        batch = pa.RecordBatch.from_pydict(rows, schema=NUMBERS)
        self._producer.append(name, batch, partition=partition).result(WAIT_S)


@pytest.fixture(scope="module")
def topics(admin: Admin, producer: Producer) -> Topics:
    return Topics(admin, producer)


class Job:
    """A query from a topic to files, on one checkpoint."""

    def __init__(self, spark: SparkSession, servers: str, base: Path) -> None:
        self.spark = spark
        self.servers = servers
        self.checkpoint = base / "checkpoint"
        self.output = base / "output"

    def read(self, topic: str, **options: str) -> DataFrame:
        reader = self.spark.readStream.format("spark_broker").option("bootstrap.servers", self.servers)
        return reader.options(**options).load(topic)

    def start(self, topic: str, *, trigger: str = "", **options: str) -> StreamingQuery:
        """With Trigger.AvailableNow, or with `trigger` as the time from batch to batch."""
        writer = self.read(topic, **options).writeStream.format("parquet").option("path", str(self.output))
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        writer = writer.trigger(processingTime=trigger) if trigger else writer.trigger(availableNow=True)
        return writer.start()

    def run(self, topic: str, **options: str) -> StreamingQuery:
        """Run a query that reads everything that there is, and ends."""
        query = self.start(topic, **options)
        assert query.awaitTermination(WAIT_S)
        return query

    def numbers(self) -> DataFrame:
        return self.spark.read.parquet(str(self.output)).select("n").orderBy("n")

    def expect(self, *numbers: int) -> None:
        expected = self.spark.createDataFrame([(n,) for n in sorted(numbers)], "n LONG")
        assert_df_equality(self.numbers(), expected, ignore_nullable=True)


@pytest.fixture
def job(spark: SparkSession, servers: str, tmp_path: Path) -> Job:
    return Job(spark, servers, tmp_path)


EARLIEST = {"startingOffsets": "earliest"}


def rows_of_batches(query: StreamingQuery) -> list[int]:
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


@pytest.mark.full
@pytest.mark.usefixtures("few_tasks")
def test_a_job_of_sparks_kafka_guide_changes_its_format_and_address_alone(
    spark: SparkSession, servers: str, admin: Admin, producer: Producer, tmp_path: Path
) -> None:
    """The guide's streaming query, and its batch queries with offsets and patterns."""
    for topic in ("topic1", "topic2"):
        admin.create_topic(NewTopic(topic, partitions=2, replication_factor=3))
        for n in range(20):
            producer.send(topic, value=f"{topic} {n}".encode(), key=str(n).encode(), partition=n % 2).result(WAIT_S)
    source, address = "spark_broker", servers

    df = (
        spark.readStream.format(source)
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", "topic1")
        .option("startingOffsets", "earliest")
        .load()
    )
    words = df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
    query = (
        words.groupBy("value")
        .count()
        .writeStream.outputMode("complete")
        .format("memory")
        .queryName("guide")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    expected = spark.createDataFrame([(f"topic1 {n}", 1) for n in range(20)], "value STRING, count LONG")
    assert_df_equality(spark.table("guide"), expected, ignore_row_order=True, ignore_nullable=True)

    batch = (
        spark.read.format(source)
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", "topic1,topic2")
        .option("startingOffsets", """{"topic1":{"0":3,"1":-2},"topic2":{"0":-2,"1":-2}}""")
        .option("endingOffsets", """{"topic1":{"0":5,"1":-1},"topic2":{"0":-1,"1":-1}}""")
        .load()
    )
    assert batch.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)").count() == 2 + 10 + 20
    pattern = spark.read.format(source).option("kafka.bootstrap.servers", address).option("subscribePattern", "topic.*")
    assert pattern.option("startingOffsets", "earliest").option("endingOffsets", "latest").load().count() == 40


def test_available_now_reads_in_limited_batches_and_goes_on_from_its_checkpoint(job: Job, topics: Topics) -> None:
    topics.create("resumed")
    topics.add("resumed", *range(100), partition=0)
    first = job.run("resumed", maxOffsetsPerTrigger="40", **EARLIEST)
    assert rows_of_batches(first) == [40, 40, 20]
    job.expect(*range(100))

    topics.add("resumed", *range(100, 130), partition=1)
    assert rows_of_batches(job.run("resumed", **EARLIEST)) == [30]
    assert rows_of_batches(job.run("resumed", **EARLIEST)) == []
    job.expect(*range(130))


@pytest.mark.full
def test_bytes_limit_a_batch(job: Job, topics: Topics) -> None:
    topics.create("heavy", partitions=1)
    for start in range(0, 400, 100):
        topics.add("heavy", *range(start, start + 100))
    query = job.run("heavy", maxBytesPerTrigger="1", **EARLIEST)
    assert rows_of_batches(query) == [100, 100, 100, 100]
    job.expect(*range(400))


def test_records_that_came_before_a_crash_of_the_first_batch_are_not_lost(job: Job, topics: Topics) -> None:
    """Spark asks for the initial offset again after such a crash, and the latest offset has moved by then."""
    topics.create("crashed", partitions=1)
    topics.add("crashed", 1, 2, 3)
    first = job.run("crashed")
    assert rows_of_batches(first) == []
    (job.checkpoint / "commits" / "0").unlink()
    (job.checkpoint / "commits" / ".0.crc").unlink()
    topics.add("crashed", 4, 5)
    job.run("crashed")
    job.expect(4, 5)


def test_a_processing_time_query_survives_kills_of_leaders_and_picks_up_new_partitions(
    job: Job, topics: Topics, admin: Admin, brokers: ProcessCluster
) -> None:
    topics.create("tormented", partitions=3)
    query = job.start("tormented", trigger="200 milliseconds", group="tormented-job", **EARLIEST)
    try:
        for start in range(0, 600, 100):
            topics.add("tormented", *range(start, start + 100))
            if start in (200, 400):
                slot = brokers.slot_of(leader_pid(admin, "tormented", 0))
                assert slot is not None
                os.kill(brokers.pid(slot), signal.SIGKILL)
                eventually(lambda: brokers.live_count() == 2, WAIT_S, "the broker's end is noticed")
                brokers.launch(slot)
                brokers.await_live(3)
        admin.create_partitions("tormented", 4)
        topics.add("tormented", *range(600, 650), partition=3)
        eventually(lambda: end_offset(query, "tormented", 3) == 50, WAIT_S, "the new partition is read")
        eventually(lambda: sum(lag.lag for lag in spark_broker.lag(query)) == 0, WAIT_S, "everything is read")
        assert {(lag.topic, lag.partition) for lag in spark_broker.lag(query)} == {("tormented", p) for p in range(4)}
        eventually(lambda: group_lags(brokers) == [0, 0, 0, 0], WAIT_S, "the progress is published")
        assert query.exception() is None
    finally:
        query.stop()
    job.expect(*range(650))

    view = spark_broker.create_lag_view(job.spark, spark_broker.group_lag(brokers.bootstrap_servers, "tormented-job"))
    assert view.count() == 4
    assert job.spark.sql("SELECT sum(lag) AS total FROM lag").collect()[0].total == 0


def group_lags(brokers: ProcessCluster) -> list[int]:
    return [lag.lag for lag in spark_broker.group_lag(brokers.bootstrap_servers, "tormented-job")]


def leader_pid(admin: Admin, topic: str, partition: int) -> int:
    leader = admin.describe_topic(topic).partitions[partition].leader
    return next(broker.pid for broker in admin.describe_cluster().brokers if broker.id == leader)


def end_offset(query: StreamingQuery, topic: str, partition: int) -> int:
    if query.lastProgress is None:
        return -1
    state = json.loads(query.lastProgress.sources[0].endOffset)["topics"].get(topic, {"offsets": {}})
    return int(state["offsets"].get(str(partition), -1))


@pytest.mark.full
def test_the_progress_says_where_the_logs_end_beside_what_is_read(job: Job, topics: Topics) -> None:
    topics.create("behind", partitions=1)
    topics.add("behind", *range(100))
    query = job.run("behind", maxOffsetsPerTrigger="60", **EARLIEST)
    first = next(progress for progress in query.recentProgress if progress.numInputRows == 60)
    end, latest = (json.loads(text) for text in (first.sources[0].endOffset, first.sources[0].latestOffset))
    assert end["topics"]["behind"]["offsets"] == {"0": 60}
    assert latest["topics"]["behind"]["offsets"] == {"0": 100}


@pytest.mark.full
def test_a_recreated_topic_fails_the_query_and_is_read_anew_when_loss_is_accepted(
    job: Job, topics: Topics, admin: Admin
) -> None:
    topics.create("again", partitions=1)
    topics.add("again", *range(10))
    job.run("again", **EARLIEST)
    admin.delete_topic("again")
    with Producer(job.servers) as fresh:  # the other producer knows the old topic, and refuses
        anew = Topics(admin, fresh)
        anew.create("again", partitions=1)
        anew.add("again", *range(100, 120))
    query = job.start("again", **EARLIEST)
    with pytest.raises(StreamingQueryException, match=r"INCONSISTENT_TOPIC_ID.*deleted and created again"):
        query.awaitTermination(WAIT_S)
    job.run("again", failOnDataLoss="false", **EARLIEST)
    job.expect(*range(10), *range(100, 120))


@pytest.mark.full
def test_records_that_retention_deleted_unread_are_named(job: Job, topics: Topics, admin: Admin) -> None:
    topics.create("short", partitions=1)
    topics.add("short", *range(10))
    job.run("short", **EARLIEST)
    admin.alter_topic_config("short", {"segment.bytes": 4096, "retention.bytes": 4096})
    for start in range(100, 2000, 100):
        topics.add("short", *range(start, start + 100))
    eventually(lambda: (admin.describe_topic("short").partitions[0].log_start_offset or 0) > 10, WAIT_S, "a deletion")
    query = job.start("short", **EARLIEST)
    with pytest.raises(StreamingQueryException, match=r"short-0: records 10 to \d+ \(exclusive\) were deleted"):
        query.awaitTermination(WAIT_S)
    job.run("short", failOnDataLoss="false", **EARLIEST)
    assert job.numbers().agg(F.max("n")).collect()[0][0] == 1999


@pytest.mark.full
def test_a_dead_address_is_an_error_and_never_a_hang(job: Job) -> None:
    job.servers = "127.0.0.1:1"
    with pytest.raises(AnalysisException, match=r"BOOTSTRAP_UNREACHABLE.*127\.0\.0\.1:1"):
        job.read("any")
    reader = job.spark.readStream.format("spark_broker").schema("n LONG")
    query = (
        reader.options(**{"bootstrap.servers": job.servers, "subscribe": "any", "default.api.timeout.ms": "2000"})
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(job.checkpoint))
        .start()
    )
    with pytest.raises(StreamingQueryException, match="BOOTSTRAP_UNREACHABLE"):
        query.awaitTermination(WAIT_S)


def test_mistakes_are_told_before_a_query_runs(job: Job, topics: Topics) -> None:
    topics.create("mistaken", partitions=1)
    with pytest.raises(AnalysisException, match="did you mean 'maxOffsetsPerTrigger'"):
        job.read("mistaken", maxOffsetPerTrigger="5")
    query = job.start("mistaken", endingOffsets="latest")
    with pytest.raises(StreamingQueryException, match="a streaming query has no end"):
        query.awaitTermination(WAIT_S)


@pytest.mark.parametrize("pushdown", ["false", "true"])
def test_a_frame_that_is_filtered_in_two_ways_lacks_no_rows(
    spark: SparkSession, servers: str, topics: Topics, pushdown: str
) -> None:
    """The trap: Spark 4.2 keeps the pushed filters of one query in the plan of every later query of the DataFrame."""
    topic = topics.create(f"filtered-{pushdown}")
    for partition in range(2):
        topics.add(topic, *range(partition * 10, partition * 10 + 10), partition=partition)
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, pushdown)
    try:
        frame = spark_broker.read_topic(spark, topic, bootstrap_servers=servers)
        first, second = frame.where("_partition = 0"), frame.where("_partition = 1 AND _offset >= 5")
        assert first.count() == 10
        assert frame.count() == 20
        assert sorted(row.n for row in first.union(second).collect()) == [*range(10), *range(15, 20)]
    finally:
        spark.conf.set(PUSHDOWN, before or "false")


def test_a_topic_is_read_by_its_name_and_columns(spark: SparkSession, servers: str, topics: Topics) -> None:
    topics.create("named", partitions=1)
    topics.add("named", 1, 2)
    frame = spark_broker.read_topic(spark, "named", columns=["text", "_offset"], bootstrap_servers=servers)
    assert_df_equality(frame, spark.createDataFrame([("1", 0), ("2", 1)], "text STRING, _offset LONG"))
    assert spark_broker.read_topic(spark, "named", bootstrap_servers=servers, stream=True).isStreaming
    spark.conf.set("spark.spark_broker.bootstrap.servers", servers)
    try:
        assert spark_broker.read_topic(spark, "named").count() == 2
    finally:
        spark.conf.unset("spark.spark_broker.bootstrap.servers")


def test_every_topic_is_a_view_and_a_new_call_shows_what_is_newer(
    spark: SparkSession, servers: str, topics: Topics
) -> None:
    topics.create("seen", partitions=1)
    topics.create("seen-too", partitions=1)
    topics.add("seen", 1, 2)
    assert {"seen", "seen-too"} <= set(spark_broker.create_views(spark, servers))
    assert spark.sql("SELECT sum(n) AS total FROM seen").collect()[0].total == 3
    assert spark.sql("SELECT count(*) AS rows FROM `seen-too`").collect()[0].rows == 0
    topics.add("seen", 4)
    spark_broker.create_views(spark, servers)
    assert spark.sql("SELECT sum(n) AS total FROM seen").collect()[0].total == 7


@pytest.mark.full
def test_topics_that_differ_in_case_only_are_no_views(
    spark: SparkSession, servers: str, topics: Topics, admin: Admin
) -> None:
    """Story: Spark takes both names for one, and a query of the one read the other."""
    topics.create("cased", partitions=1)
    topics.create("Cased", partitions=1)
    try:
        with pytest.raises(InvalidDataError, match="differ in case"):
            spark_broker.create_views(spark, servers)
        spark.conf.set("spark.sql.caseSensitive", "true")
        assert {"cased", "Cased"} <= set(spark_broker.create_views(spark, servers))
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
        admin.delete_topic("Cased")
