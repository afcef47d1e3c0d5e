"""A topic whose older records are only in its Delta table still reads as one log, from any offset to any other."""

from __future__ import annotations

import json
import random
import time
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import MissingDependencyError
from spark_broker.spark.delta_session import check_delta
from spark_broker.spark.frames import read_topic
from tests.spark.history import History
from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import TiererProcess
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

PARTITIONS = 2
BATCHES = 8
ROWS = 100

Row = tuple[int, int, int]
"""Partition, offset, CRC-32 of the value."""


@pytest.fixture(scope="module")
def tierer(history: History) -> TiererProcess:
    return history.tierer


@pytest.fixture(scope="module")
def brokers(history: History) -> ProcessCluster:
    return history.brokers


def create(brokers: ProcessCluster, table: Path, topic: str) -> None:
    config = {"delta.path": str(table), "segment.bytes": "65536", "local.retention.ms": "1"}
    with Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic(NewTopic(topic, partitions=PARTITIONS, replication_factor=2, config=config))


def fill(brokers: ProcessCluster, topic: str, rows: list[Row]) -> None:
    """Append batches to every partition, and note what they hold."""
    values = random.Random(f"{topic}{len(rows)}")
    with Producer(brokers.bootstrap_servers) as producer:
        for index in range(BATCHES * PARTITIONS):
            data = [values.randbytes(200) for _ in range(ROWS)]
            batch = pa.record_batch({"value": pa.array(data, pa.binary())})
            (stored,) = producer.append(topic, batch, partition=index % PARTITIONS).result(60)
            assert stored.base_offset is not None
            rows += [
                (index % PARTITIONS, offset, zlib.crc32(value)) for offset, value in enumerate(data, stored.base_offset)
            ]
    rows.sort()


def consumed(servers: str, topic: str, count: int) -> list[Row]:
    """What a consumer reads from the first offset on, without a JVM."""
    rows: list[Row] = []
    with Consumer(servers, topics=topic, auto_offset_reset="earliest") as consumer:
        while len(rows) < count:
            for batch in consumer.poll(30.0):
                values = batch.data.column("value").to_pylist()
                rows += [(batch.partition, n, zlib.crc32(value)) for n, value in enumerate(values, batch.base_offset)]
    return sorted(rows)


def await_drop(brokers: ProcessCluster, topic: str) -> list[int]:
    """Wait until retention has deleted the beginning of every log. Returns the log starts."""

    def starts() -> list[int]:
        with Admin(brokers.bootstrap_servers) as admin:
            return [partition.local_log_start_offset or 0 for partition in admin.describe_topic(topic).partitions]

    eventually(lambda: min(starts()) > 0, what="retention deletes what is in the table")
    return starts()


def without_delta(spark: SparkSession, servers: str, topic: str, **options: str) -> list[Row]:
    """What `TiererProcess.read` returns, from the session that all tests share. It lacks Delta."""
    with pytest.raises(MissingDependencyError):
        check_delta(spark)
    frame = read_topic(spark, topic, None, bootstrap_servers=servers, stream=False, **options)
    rows = frame.selectExpr("partition", "offset", "crc32(value)").collect()
    return sorted((partition, offset, crc) for partition, offset, crc in rows)


def test_every_read_is_that_of_one_log(
    tierer: TiererProcess, brokers: ProcessCluster, spark: SparkSession, tmp_path: Path
) -> None:
    servers, rows = brokers.bootstrap_servers, list[Row]()
    create(brokers, tmp_path / "table", "t")
    fill(brokers, "t", rows)
    assert tierer.read(servers, "t") == rows, "nothing is tiered yet"
    assert "error" not in tierer.tier(servers, "t", include_active_segments=False)
    starts = await_drop(brokers, "t")
    assert tierer.read(servers, "t") == rows

    middle_ms = int(time.time() * 1000) + 1
    eventually(lambda: time.time() * 1000 > middle_ms)
    older = len(rows) // PARTITIONS
    fill(brokers, "t", rows)
    assert tierer.read(servers, "t") == rows, "the log goes on after the table"
    assert "error" not in tierer.tier(servers, "t", include_active_segments=False)
    eventually(lambda: min(await_drop(brokers, "t")) > older, what="the beginning of the second half is deleted, too")
    assert tierer.read(servers, "t") == rows
    assert consumed(servers, "t", len(rows)) == rows

    since = tierer.read(servers, "t", startingTimestamp=str(middle_ms))
    assert since == [row for row in rows if row[1] >= older]
    until = tierer.read(servers, "t", endingTimestamp=str(middle_ms))
    assert until == [row for row in rows if row[1] < older]

    bounds = {
        "startingOffsets": json.dumps({"t": {"0": starts[0] - 1, "1": -2}}),
        "endingOffsets": json.dumps({"t": {"0": older + 5, "1": 3}}),
    }
    ends = {0: (starts[0] - 1, older + 5), 1: (0, 3)}
    expected = [row for row in rows if ends[row[0]][0] <= row[1] < ends[row[0]][1]]
    assert tierer.read(servers, "t", **bounds) == expected
    last = tierer.read(servers, "t", startingOffsets=json.dumps({"t": {"0": 2 * older - 1, "1": 2 * older - 1}}))
    assert [row[:2] for row in last] == [(0, 2 * older - 1), (1, 2 * older - 1)], "this is in the log alone"

    end = json.dumps({"t": {"0": 2 * older - 1, "1": 2 * older}})
    assert without_delta(spark, servers, "t", startingOffsets=end) == last[:1]
    assert without_delta(spark, servers, "t") == rows, "without Delta, deltalake reads the table"


def test_a_stream_of_a_history_has_delta_scan_the_table(
    tierer: TiererProcess, brokers: ProcessCluster, tmp_path: Path
) -> None:
    servers, rows = brokers.bootstrap_servers, list[Row]()
    create(brokers, tmp_path / "table", "caught")
    fill(brokers, "caught", rows)
    assert "error" not in tierer.tier(servers, "caught", include_active_segments=False)
    await_drop(brokers, "caught")
    fill(brokers, "caught", rows)

    limit = 300
    with pytest.raises(RuntimeError, match="the batch 2 was to fail"):
        tierer.stream(servers, "caught", tmp_path / "checkpoint", fails_at=2, maxOffsetsPerTrigger=str(limit))
    first = tierer.stream(servers, "caught", tmp_path / "other", maxOffsetsPerTrigger=str(limit))
    repeated = tierer.stream(servers, "caught", tmp_path / "checkpoint", maxOffsetsPerTrigger=str(limit))

    assert sorted(tuple(row[:3]) for row in first) == rows
    assert all(sum(row[3] == number for row in first) <= limit for number in {row[3] for row in first})
    assert {row[4] for row in first} == {True, False}, "the table's files, and the log"
    assert [row[4] for row in first if row[3] == 0] == [True] * limit
    assert sorted(tuple(row[:4]) for row in repeated) == sorted(tuple(row[:4]) for row in first if row[3] >= 2)

    more = list[Row]()
    fill(brokers, "caught", more)
    later = tierer.stream(servers, "caught", tmp_path / "other", maxOffsetsPerTrigger=str(limit))
    assert len(later) == len(more), "it goes on where it had stopped"
    assert {row[4] for row in later} == {False}


def test_a_frame_keeps_its_records_when_they_are_deleted_from_the_table(
    tierer: TiererProcess, brokers: ProcessCluster, tmp_path: Path
) -> None:
    """Delta would scan the newest version in each query, and rows would be missing without an error."""
    servers, rows = brokers.bootstrap_servers, list[Row]()
    create(brokers, tmp_path / "table", "deleted")
    fill(brokers, "deleted", rows)
    assert "error" not in tierer.tier(servers, "deleted")
    assert tierer.read_after_deletion(servers, "deleted", before=ROWS) == rows
    assert tierer.read(servers, "deleted") == [row for row in rows if row[0] or row[1] >= ROWS]


def test_what_is_not_in_the_table_is_not_deleted(
    tierer: TiererProcess, brokers: ProcessCluster, tmp_path: Path
) -> None:
    servers, rows = brokers.bootstrap_servers, list[Row]()
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    create(brokers, blocked / "table", "kept")
    fill(brokers, "kept", rows)
    answer = tierer.tier(servers, "kept")
    assert answer["error"] == "TIERING_STOPPED"
    fill(brokers, "kept", rows)
    assert tierer.read(servers, "kept") == rows
    with Admin(servers) as admin:
        description = admin.describe_topic("kept")
        assert [partition.log_start_offset for partition in description.partitions] == [0] * PARTITIONS
        assert description.history is not None
        assert description.history.stopped == answer["message"]
        admin.alter_topic_config("kept", {"delta.path": str(tmp_path / "table")})
    assert "error" not in tierer.tier(servers, "kept", include_active_segments=False)
    await_drop(brokers, "kept")
    assert tierer.read(servers, "kept") == rows
    with Admin(servers) as admin:
        history = admin.describe_topic("kept").history
        assert history is not None
        assert history.stopped is None
        first = TopicPartition("kept", 0)
        assert admin.list_offsets({first: "earliest"}) == {first: 0}, "the table counts as part of the log"
