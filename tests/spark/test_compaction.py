"""Compacted topics on real executors: whoever reads gets the last record of each key at its own offset."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import spark_broker
from spark_broker import Admin, BrokerCluster, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from spark_broker.testing.compacted_replicas import compacted_batches, compare_compacted_replicas
from spark_broker.testing.replicas import find_replicas
from tests.spark.failover import wait_for

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

KEYS = 20
BATCHES = 60
ROWS = 25
EVERY_OFFSET = 1 << 62
CONFIG = {"cleanup.policy": "compact", "segment.bytes": 4096, "min.cleanable.dirty.ratio": 0.01, "retention.ms": -1}

Records = dict[int, tuple[bytes, bytes | None]]
"""Key and value by offset."""


@pytest.fixture(scope="module")
def cluster(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    settings = {"log.dirs": str(tmp_path_factory.mktemp("log-dirs")), "log.cleaner.backoff.ms": 200}
    with BrokerCluster.start(spark, 3, settings) as started:
        yield started


@pytest.fixture(scope="module")
def admin(cluster: BrokerCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as opened:
        yield opened


def rows_left(log_dirs: str, partition: TopicPartition) -> list[int]:
    """How many records each replica's files hold."""
    replicas = find_replicas(log_dirs, partition)
    return [sum(frame.header.row_count for frame in compacted_batches(replica, EVERY_OFFSET)) for replica in replicas]


def overwrite(producer: Producer, topic: str, rng: random.Random) -> Records:
    """Write a few keys again and again, and delete some. Returns what was stored."""
    stored: Records = {}
    for _ in range(BATCHES):
        rows = [(b"key-%d" % rng.randrange(KEYS), rng.choice([None, rng.randbytes(20)])) for _ in range(ROWS)]
        records = [{"key": key, "value": value} for key, value in rows]
        batch = pa.RecordBatch.from_pylist(records, schema=DEFAULT_SCHEMA)
        (done,) = producer.append(topic, batch, partition=0).result(120)
        assert done.base_offset is not None
        stored.update(enumerate(rows, done.base_offset))
    return stored


def last_of_each_key(records: Records) -> dict[bytes, tuple[int, bytes | None]]:
    return {key: (offset, value) for offset, (key, value) in sorted(records.items())}


def check_read(read: Records, stored: Records) -> None:
    """What was read is of what was stored, at its own offset, and is the last of each key."""
    assert read.items() <= stored.items()
    assert last_of_each_key(read) == last_of_each_key(stored)


def consumed(servers: str, partition: TopicPartition) -> Records:
    records: Records = {}
    with Consumer(servers, auto_offset_reset="earliest") as consumer:
        end = consumer.end_offsets([partition])[partition]
        consumer.assign([partition])
        while consumer.position(partition) < end:
            for batch in consumer.poll(1.0):
                rows = zip(batch.data["key"].to_pylist(), batch.data["value"].to_pylist(), strict=True)
                records.update(enumerate(rows, batch.base_offset))
    return records


def collected(frame: DataFrame) -> Records:
    rows = frame.select("offset", "key", "value").collect()
    return {row.offset: (bytes(row.key), None if row.value is None else bytes(row.value)) for row in rows}


def streamed(spark: SparkSession, servers: str, topic: str, base: Path, maximum: int) -> Records:
    """What a stream with Trigger.AvailableNow reads, in micro-batches of at most so many offsets."""
    reader = spark.readStream.format("spark_broker").option("kafka.bootstrap.servers", servers)
    reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", maximum)
    frame = reader.option("subscribe", topic).load()
    writer = frame.select("offset", "key", "value").writeStream.format("parquet").option("path", str(base / "out"))
    query = writer.option("checkpointLocation", str(base / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(240)
    return collected(spark.read.parquet(str(base / "out")))


def test_every_reader_gets_the_last_records_before_and_after_executors_are_lost(
    spark: SparkSession, cluster: BrokerCluster, admin: Admin, tmp_path: Path
) -> None:
    """The killed executor's replica is compacted by whoever has it next."""
    topic, rng = "state", random.Random(5)
    partition = TopicPartition(topic, 0)
    admin.create_topic(NewTopic(topic, 1, 3, config={**CONFIG, "min.insync.replicas": 2}))
    with Producer(cluster.bootstrap_servers, config={"delivery.timeout.ms": 240_000}) as producer:
        stored = overwrite(producer, topic, rng)
        wait_for(lambda: max(rows_left(cluster.log_dirs, partition)) < BATCHES * ROWS / 2, "the first passes")
        check_read(consumed(cluster.bootstrap_servers, partition), stored)
        leader = admin.describe_topic(topic).partitions[0].leader
        (victim,) = (broker for broker in admin.describe_cluster().brokers if broker.id == leader)
        os.kill(victim.pid, signal.SIGKILL)
        stored |= overwrite(producer, topic, rng)

    def healed() -> bool:
        (described,) = admin.describe_topic(topic).partitions
        return len(described.isr) == 3 and len(admin.describe_cluster().brokers) == 3

    wait_for(healed, "a whole cluster")
    wait_for(lambda: max(rows_left(cluster.log_dirs, partition)) < BATCHES * ROWS / 2, "every replica's passes")
    check_read(consumed(cluster.bootstrap_servers, partition), stored)
    reader = spark.read.format("spark_broker").option("kafka.bootstrap.servers", cluster.bootstrap_servers)
    check_read(collected(reader.option("subscribe", topic).load()), stored)
    check_read(streamed(spark, cluster.bootstrap_servers, topic, tmp_path, 400), stored)
    (described,) = admin.describe_topic(topic).partitions
    assert described.high_watermark == len(stored)
    differences = compare_compacted_replicas(
        cluster.log_dirs, partition, described.replicas, up_to_offset=described.high_watermark
    )
    assert differences == ()


def test_a_typed_topic_that_data_frames_write_is_compacted_by_its_key_columns(
    spark: SparkSession, cluster: BrokerCluster, admin: Admin, tmp_path: Path
) -> None:
    servers, topic = cluster.bootstrap_servers, "prices"
    schema = pa.schema([("market", pa.string()), ("item", pa.int64()), ("price", pa.float64()), ("note", pa.string())])
    config = {**CONFIG, "key.columns": "market,item"}
    admin.create_topic(NewTopic(topic, 2, 3, schema=schema, config=config))
    for price in range(12):
        frame = spark.range(200).selectExpr(
            "if(id % 2 = 0, 'east', 'west') market", "id % 50 item", f"double({price}) price", "repeat('x', 40) note"
        )
        frame.write.format("spark_broker").option("bootstrap.servers", servers).mode("append").save(topic)
    spark.sql("select 'east' market, 0L item, double(null) price, string(null) note").write.format(
        "spark_broker"
    ).option("bootstrap.servers", servers).mode("append").save(topic)
    partitions = [TopicPartition(topic, number) for number in range(2)]
    wait_for(
        lambda: all(max(rows_left(cluster.log_dirs, partition)) < 600 for partition in partitions),
        "passes of every replica",
    )
    by_stream = streamed_offsets(spark, servers, topic, tmp_path)
    rows = spark_broker.read_topic(spark, topic, bootstrap_servers=servers).collect()
    rows.sort(key=lambda row: (row._partition, row._offset))
    assert {(row.market, row.item): (row.price, row.note) for row in rows} == {
        **{("west" if item % 2 else "east", item): (11.0, "x" * 40) for item in range(50)},
        ("east", 0): (None, None),
    }
    assert {(row._partition, row._offset) for row in rows} <= by_stream, "later passes only remove"
    ends = [partition.high_watermark or 0 for partition in admin.describe_topic(topic).partitions]
    assert sum(ends) >= 12 * 200 + 1, "offsets are kept"


def streamed_offsets(spark: SparkSession, servers: str, topic: str, base: Path) -> set[tuple[int, int]]:
    """Partition and offset of each row that a stream with Trigger.AvailableNow reads."""
    reader = spark.readStream.format("spark_broker").option("bootstrap.servers", servers)
    frame = reader.option("startingOffsets", "earliest").load(topic)
    writer = frame.select("_partition", "_offset").writeStream.format("json").option("path", str(base / "out"))
    query = writer.option("checkpointLocation", str(base / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(240)
    return {(row._partition, row._offset) for row in spark.read.json(str(base / "out")).collect()}
