"""A topic's Delta table in the hands of others: users with plain Delta, the topic's retention, and accidents."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import InvalidConfigError
from spark_broker.spark.delta_session import downloaded_jars
from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import TiererProcess
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(900)

PARTITIONS = 2
BATCHES = 4
ROWS = 50

Row = tuple[int, int, int]
"""Partition, offset, CRC-32 of the value."""


@pytest.fixture
def topic(request: pytest.FixtureRequest, admin: Admin, tmp_path: Path) -> str:
    """A topic with a table at `tmp_path / "table"`, named after the test."""
    name = str(request.node.name)[:200]
    config = {"delta.path": str(tmp_path / "table"), "segment.bytes": "16384"}
    admin.create_topic(NewTopic(name, partitions=PARTITIONS, replication_factor=2, config=config))
    return name


def fill(brokers: ProcessCluster, topic: str, first: int = 0) -> list[Row]:
    """Append batches to every partition. Returns what they hold; `first`: the offset where each partition begins."""
    rows: list[Row] = []
    with Producer(brokers.bootstrap_servers) as producer:
        for index in range(BATCHES * PARTITIONS):
            values = [f"{first} {index} {number}".encode().ljust(200) for number in range(ROWS)]
            batch = pa.record_batch({"value": pa.array(values, pa.binary())})
            (stored,) = producer.append(topic, batch, partition=index % PARTITIONS).result(60)
            assert stored.base_offset is not None
            rows += [(index % PARTITIONS, n, zlib.crc32(value)) for n, value in enumerate(values, stored.base_offset)]
    assert min(offset for _, offset, _ in rows) == first
    return sorted(rows)


def tier(brokers: ProcessCluster, spark: TiererProcess, topic: str) -> None:
    answer = spark.tier(brokers.bootstrap_servers, topic)
    assert "error" not in answer, answer


def consumed(brokers: ProcessCluster, topic: str) -> list[Row]:
    """What a consumer reads from the first offset to the last."""
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    rows: list[Row] = []
    with Consumer(brokers.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            for batch in consumer.poll(1.0):
                values = batch.data.column("value").to_pylist()
                rows += [(batch.partition, n, zlib.crc32(value)) for n, value in enumerate(values, batch.base_offset)]
    return sorted(rows)


def in_table(table: Path) -> list[Row]:
    columns = DeltaTable(str(table)).to_pyarrow_table(columns=["_partition", "_offset", "value"]).to_pylist()
    return sorted((row["_partition"], row["_offset"], zlib.crc32(row["value"])) for row in columns)


def by_plain_delta(spark: TiererProcess, table: Path, version: str = "") -> list[Row]:
    rows = spark.sql(f"SELECT _partition, _offset, crc32(value) FROM delta.`{table}` {version} ORDER BY 1, 2")
    return [(partition, offset, crc) for partition, offset, crc in rows]


@pytest.mark.full
def test_users_rewrite_the_table_and_delete_records_and_the_topic_goes_on(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    """OPTIMIZE, VACUUM and time travel by plain Delta; DeleteRecords across the boundary of table and log."""
    table, servers = tmp_path / "table", brokers.bootstrap_servers
    admin.alter_topic_config(topic, {"storage.format": "delta"})
    first = fill(brokers, topic)
    tier(brokers, spark, topic)
    second = fill(brokers, topic, first=len(first) // PARTITIONS)
    tier(brokers, spark, topic)
    assert by_plain_delta(spark, table) == in_table(table) == sorted(first + second)
    assert by_plain_delta(spark, table, "VERSION AS OF 0") == first
    starts = [p.local_log_start_offset or 0 for p in admin.describe_topic(topic).partitions]
    assert min(starts) > len(first) // PARTITIONS, "storage.format=delta: what is in the table is not kept"

    spark.sql("SET spark.databricks.delta.retentionDurationCheck.enabled=false")
    assert spark.sql(f"OPTIMIZE delta.`{table}` ZORDER BY (_timestamp)")
    spark.sql(f"VACUUM delta.`{table}` RETAIN 0 HOURS")
    spark.sql("RESET spark.databricks.delta.retentionDurationCheck.enabled")
    third = fill(brokers, topic, first=2 * len(first) // PARTITIONS)
    tier(brokers, spark, topic)
    everything = sorted(first + second + third)
    assert by_plain_delta(spark, table) == in_table(table) == everything
    assert consumed(brokers, topic) == spark.read(servers, topic) == everything

    cut = TopicPartition(topic, 1)
    assert admin.delete_records({cut: 77}) == {cut: 77}
    left = [row for row in everything if row[0] == 0 or row[1] >= 77]
    assert consumed(brokers, topic) == spark.read(servers, topic) == left
    assert admin.describe_topic(topic).partitions[1].log_start_offset == 77
    assert in_table(table) == everything, "rows go with the next run"
    tier(brokers, spark, topic)
    assert in_table(table) == by_plain_delta(spark, table) == left
    assert consumed(brokers, topic) == left


def overwritten(brokers: ProcessCluster, topic: str, first: int) -> list[Row]:
    """Append batches that overwrite the same keys. Returns what was appended. `first`: where partition 0 ends."""
    rows: list[Row] = []
    with Producer(brokers.bootstrap_servers) as producer:
        for index in range(BATCHES):
            values = [f"{first} {index} {number}".encode().ljust(200) for number in range(ROWS)]
            records = [{"key": b"%d" % number, "value": value} for number, value in enumerate(values)]
            (stored,) = producer.append(topic, records, partition=0).result(60)
            assert stored.base_offset is not None
            rows += [(0, n, zlib.crc32(value)) for n, value in enumerate(values, stored.base_offset)]
    assert rows[0][1] == first
    return rows


@pytest.mark.full
def test_the_table_of_a_compacted_topic_has_every_record_and_the_log_the_last_of_each_key(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table, servers = tmp_path / "table", brokers.bootstrap_servers
    admin.alter_topic_config(topic, {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.0})
    rows = overwritten(brokers, topic, 0)
    partition = TopicPartition(topic, 0)
    assert consumed(brokers, topic) == rows, "nothing is compacted that is not in the table"
    tier(brokers, spark, topic)
    eventually(lambda: len(consumed(brokers, topic)) <= 2 * ROWS, 60, "what is in the table is compacted")
    assert consumed(brokers, topic)[-ROWS:] == rows[-ROWS:]
    rows += overwritten(brokers, topic, len(rows))
    assert in_table(table) == by_plain_delta(spark, table) == rows[: len(rows) // 2]
    assert consumed(brokers, topic)[-len(rows) // 2 :] == rows[-len(rows) // 2 :]
    tier(brokers, spark, topic)
    eventually(lambda: len(consumed(brokers, topic)) <= 2 * ROWS, 60, "what is in the table now is compacted")
    assert in_table(table) == by_plain_delta(spark, table) == spark.read(servers, topic) == rows
    (described, _) = admin.describe_topic(topic).partitions
    assert (described.log_start_offset, described.high_watermark) == (0, len(rows))
    with pytest.raises(InvalidConfigError, match=r"cleanup\.policy must be delete"):
        admin.alter_topic_config(topic, {"storage.format": "delta"})
    with Consumer(servers, auto_offset_reset="none") as consumer:
        consumer.assign([partition])
        consumer.seek(partition, 3)
        assert consumer.poll(10.0)[0].base_offset >= len(rows) - 2 * ROWS, "those before are in the table alone"


@pytest.mark.full
def test_retention_by_size_deletes_the_rows_of_the_oldest_commits(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table, servers = tmp_path / "table", brokers.bootstrap_servers
    rows: list[Row] = []
    for _ in range(3):
        rows += fill(brokers, topic, first=len(rows) // PARTITIONS)
        tier(brokers, spark, topic)
    commit = len(rows) // 3 // PARTITIONS
    assert in_table(table) == sorted(rows), "a default deletes nothing"
    assert admin.describe_topic(topic).config.get("retention.ms") is None
    admin.alter_topic_config(topic, {"retention.bytes": 30_000})
    tier(brokers, spark, topic)
    starts = [partition.log_start_offset for partition in admin.describe_topic(topic).partitions]
    assert starts == [2 * commit] * PARTITIONS
    left = [row for row in sorted(rows) if row[1] >= 2 * commit]
    assert in_table(table) == consumed(brokers, topic) == spark.read(servers, topic) == left
    assert admin.list_offsets({TopicPartition(topic, 0): "earliest"}) == {TopicPartition(topic, 0): 2 * commit}


@pytest.mark.full
def test_retention_by_time_deletes_everything_that_is_old_and_offsets_go_on(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    older = [{"value": b"a user's own", "_offset": None, "_partition": None}]
    schema = pa.schema([("value", pa.binary()), ("_offset", pa.int64()), ("_partition", pa.int32())])
    write_deltalake(str(table), pa.Table.from_pylist(older, schema))
    first = fill(brokers, topic)
    tier(brokers, spark, topic)
    admin.alter_topic_config(topic, {"retention.ms": 1})
    end = len(first) // PARTITIONS
    # A run deletes what was tiered before: its own commit is not old yet.
    eventually(lambda: _tiered_away(brokers, admin, spark, topic, end), 120, "retention deletes the first commit")
    assert consumed(brokers, topic) == []
    rows = DeltaTable(str(table)).to_pyarrow_table(columns=["value", "_offset"]).to_pylist()
    assert rows == [{"value": b"a user's own", "_offset": None}]
    second = fill(brokers, topic, first=end)
    assert consumed(brokers, topic) == second
    admin.alter_topic_config(topic, {"retention.ms": -1})
    tier(brokers, spark, topic)
    assert consumed(brokers, topic) == spark.read(brokers.bootstrap_servers, topic) == second


def _tiered_away(brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, end: int) -> bool:
    tier(brokers, spark, topic)
    return [partition.log_start_offset for partition in admin.describe_topic(topic).partitions] == [end] * PARTITIONS


@pytest.mark.full
def test_a_table_that_exists_already_keeps_its_rows_and_they_are_not_part_of_the_topic(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    spark.sql(f"CREATE TABLE delta.`{table}` (value BINARY, note STRING) USING DELTA PARTITIONED BY (note)")
    spark.sql(f"INSERT INTO delta.`{table}` VALUES (CAST('older' AS BINARY), 'mine')")
    rows = fill(brokers, topic)
    tier(brokers, spark, topic)
    assert spark.sql(f"SELECT CAST(value AS STRING), note FROM delta.`{table}` WHERE _offset IS NULL") == [
        ["older", "mine"]
    ]
    assert spark.sql(f"SELECT count(*), count(note) FROM delta.`{table}` WHERE _offset IS NOT NULL") == [[len(rows), 0]]
    assert consumed(brokers, topic) == spark.read(brokers.bootstrap_servers, topic) == rows
    spark.sql(f"INSERT INTO delta.`{table}` (value, note) VALUES (CAST('later' AS BINARY), 'mine')")
    rows += fill(brokers, topic, first=len(rows) // PARTITIONS)
    tier(brokers, spark, topic)
    assert consumed(brokers, topic) == spark.read(brokers.bootstrap_servers, topic) == sorted(rows)


@pytest.mark.full
def test_a_new_cluster_over_the_metadata_of_one_without_disks_serves_the_history_and_goes_on(
    spark: TiererProcess, tmp_path: Path
) -> None:
    config = {"cluster.loss.delay.ms": 1000}
    base, table = tmp_path / "cluster", tmp_path / "table"
    with ProcessCluster(base, 2, config) as lost, Admin(lost.bootstrap_servers) as admin:
        settings = {"delta.path": str(table), "segment.bytes": "16384"}
        admin.create_topic(NewTopic("t", partitions=PARTITIONS, replication_factor=2, config=settings))
        rows = fill(lost, "t")
        tier(lost, spark, "t")
        cluster_id = admin.describe_cluster().cluster_id
        not_tiered = fill(lost, "t", first=len(rows) // PARTITIONS)
        with Consumer(lost.bootstrap_servers, group_id="g", topics="t") as consumer:
            consumer.commit({TopicPartition("t", 0): 7})
    shutil.rmtree(base / "logs")
    with ProcessCluster(base, 2, config) as brokers, Admin(brokers.bootstrap_servers) as admin:
        assert admin.describe_cluster().cluster_id == cluster_id
        eventually(lambda: all(p.leader is not None for p in admin.describe_topic("t").partitions), 60, "leaders")
        assert consumed(brokers, "t") == spark.read(brokers.bootstrap_servers, "t") == rows
        more = fill(brokers, "t", first=len(rows) // PARTITIONS)
        assert consumed(brokers, "t") == spark.read(brokers.bootstrap_servers, "t") == sorted(rows + more)
        assert not {row[2] for row in not_tiered} - {row[2] for row in more}, "the same values again"
        tier(brokers, spark, "t")
        assert in_table(table) == sorted(rows + more)
        eventually(lambda: all(len(p.isr) == 2 for p in admin.describe_topic("t").partitions), 60, "followers")
        with Consumer(brokers.bootstrap_servers, group_id="g", topics="t") as consumer:
            assert consumer.committed(TopicPartition("t", 0)) is None, "positions were on the disks"
            consumer.commit({TopicPartition("t", 0): 7})
            committed = consumer.committed(TopicPartition("t", 0))
            assert committed is not None
            assert committed.offset == 7


def stopped(admin: Admin, topic: str) -> str:
    history = admin.describe_topic(topic).history
    assert history is not None
    return history.stopped or ""


def await_retention(brokers: ProcessCluster, admin: Admin, witness: str) -> None:
    """Wait until each broker that leads has applied retention: to a topic of this name, too, which needs no table."""
    config = {"segment.bytes": "16384", "retention.ms": "1"}
    admin.create_topic(NewTopic(witness, partitions=PARTITIONS, replication_factor=2, config=config))
    fill(brokers, witness)
    eventually(lambda: min(local_starts(admin, witness)) > 0, what="a run of retention")


def local_starts(admin: Admin, topic: str) -> list[int]:
    return [partition.local_log_start_offset or 0 for partition in admin.describe_topic(topic).partitions]


@pytest.mark.full
def test_brokers_keep_what_the_table_has_lost(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    """They deleted it because it was in the table, although the topic's description said that the table was gone."""
    table = tmp_path / "table"
    rows = fill(brokers, topic)
    tier(brokers, spark, topic)
    shutil.move(table, tmp_path / "elsewhere")
    answer = spark.tier(brokers.bootstrap_servers, topic)
    assert (answer["error"], "gone" in answer["message"]) == ("HISTORY_NOT_FOUND", True)
    admin.alter_topic_config(topic, {"local.retention.ms": "1"})
    await_retention(brokers, admin, f"{topic[:150]}-witness")
    assert local_starts(admin, topic) == [0] * PARTITIONS
    assert consumed(brokers, topic) == sorted(rows)
    shutil.move(tmp_path / "elsewhere", table)
    tier(brokers, spark, topic)
    eventually(lambda: min(local_starts(admin, topic)) > 0, what="the table is found again, and retention goes on")
    assert consumed(brokers, topic) == sorted(rows)


@pytest.mark.full
def test_a_table_deleted_under_the_topic_stops_tiering_and_nothing_else(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    rows = fill(brokers, topic)
    tier(brokers, spark, topic)
    shutil.move(table, tmp_path / "elsewhere")
    rows += fill(brokers, topic, first=len(rows) // PARTITIONS)
    answer = spark.tier(brokers.bootstrap_servers, topic)
    assert (answer["error"], "gone" in answer["message"]) == ("HISTORY_NOT_FOUND", True)
    eventually(lambda: "gone" in stopped(admin, topic), what="the description says why")
    assert not table.exists(), "no second history is begun"
    assert consumed(brokers, topic) == sorted(rows), "the brokers still have everything"
    spark.sql(f"CREATE TABLE delta.`{table}` (value BINARY) USING DELTA")
    assert "was replaced" in spark.tier(brokers.bootstrap_servers, topic)["message"]
    shutil.rmtree(table)
    shutil.move(tmp_path / "elsewhere", table)
    tier(brokers, spark, topic)
    eventually(lambda: stopped(admin, topic) == "", what="the description says that tiering goes on")
    assert in_table(table) == consumed(brokers, topic) == sorted(rows)


def of_version(jar: Path, version: bytes, made: Path) -> Path:
    """Delta's JAR, but it says that it is of this version (as long as the real one)."""
    with zipfile.ZipFile(jar) as real, zipfile.ZipFile(made, "w") as other:
        for entry in real.infolist():
            data = real.read(entry)
            says = entry.filename == "io/delta/package$.class"
            other.writestr(entry, data.replace(b"4.4.0", version) if says else data)
    return made


@pytest.mark.full
def test_a_delta_that_does_not_fit_spark_stops_tiering_and_nothing_else(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    delta, storage = downloaded_jars()
    other = of_version(delta, b"4.0.1", tmp_path / "delta-spark_2.13-4.0.1.jar")
    with TiererProcess(tmp_path, "unfit", jars=f"{other},{storage}") as unfit:
        rows = fill(brokers, topic)
        tier(brokers, spark, topic)
        rows += fill(brokers, topic, first=len(rows) // PARTITIONS)
        answer = unfit.tier(brokers.bootstrap_servers, topic)
        assert answer["error"] == "MISSING_DEPENDENCY"
        assert "Delta 4.0.1, which does not fit Spark 4.2" in answer["message"]
        eventually(lambda: "does not fit" in stopped(admin, topic), what="the description says why")
        assert consumed(brokers, topic) == unfit.read(brokers.bootstrap_servers, topic) == sorted(rows)
    tier(brokers, spark, topic)
    assert in_table(table) == sorted(rows)
    eventually(lambda: stopped(admin, topic) == "", what="the description says that tiering goes on")


@pytest.mark.full
def test_a_table_with_another_schema_stops_tiering_and_is_not_touched(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    spark.sql(f"CREATE TABLE delta.`{table}` (value INT) USING DELTA")
    rows = fill(brokers, topic)
    answer = spark.tier(brokers.bootstrap_servers, topic)
    assert answer["error"] == "TIERING_STOPPED"
    assert "column 'value' of the table" in answer["message"]
    eventually(lambda: "is int, in the topic it is binary" in stopped(admin, topic), what="the description says why")
    assert DeltaTable(str(table)).version() == 0
    assert consumed(brokers, topic) == rows
    admin.alter_topic_config(topic, {"delta.path": str(tmp_path / "another")})
    tier(brokers, spark, topic)
    assert in_table(tmp_path / "another") == rows
    eventually(lambda: stopped(admin, topic) == "", what="the description says that tiering goes on")
