"""A typed topic and its table, as its users see them: what tests of the table's schema and of its values share."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from spark_broker import Admin, Consumer, NewTopic, Producer
from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import TiererProcess
from tests.support.waiting import eventually

Row = dict[str, object]


def create(admin: Admin, name: str, table: Path, schema: pa.Schema, **more: object) -> None:
    """Of one partition. Its brokers drop what is in the table. `more`: its configuration, with `_` for `.`."""
    config = {"delta.path": str(table), "storage.format": "delta"}
    config |= {name.replace("_", "."): str(value) for name, value in more.items()}
    admin.create_topic(NewTopic(name, partitions=1, replication_factor=1, schema=schema, config=config))


def append(brokers: ProcessCluster, topic: str, *rows: Row) -> None:
    with Producer(brokers.bootstrap_servers) as producer:
        producer.append(topic, list(rows), partition=0).result(30)


def tier(brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str) -> None:
    """Tier everything."""
    answer = spark.tier(brokers.bootstrap_servers, topic)
    assert "error" not in answer, answer

    def shown() -> bool:
        (partition,) = admin.describe_topic(topic).partitions
        return partition.history_end_offset == partition.high_watermark

    eventually(shown, 10, "the broker that is asked has heard of the history")


def stopped(admin: Admin, topic: str) -> str | None:
    """Why tiering has stopped, as the topic's description shows it."""
    history = admin.describe_topic(topic).history
    return None if history is None else history.stopped


def consumed(brokers: ProcessCluster, topic: str, count: int) -> list[Row]:
    rows: list[Row] = []
    with Consumer(brokers.bootstrap_servers, topics=topic, auto_offset_reset="earliest") as consumer:
        while len(rows) < count:
            batches = consumer.poll(30)
            assert batches
            rows += [row for batch in batches for row in batch.data.to_pylist()]
    return rows


def by_spark(brokers: ProcessCluster, spark: TiererProcess, topic: str, columns: list[str]) -> list[Row]:
    rows = spark.select(brokers.bootstrap_servers, topic, ["_offset", *columns])
    return [dict(zip(columns, row, strict=True)) for _, *row in sorted(rows)]


def in_table(spark: TiererProcess, table: Path, columns: list[str]) -> list[Row]:
    rows = spark.sql(f"SELECT {', '.join(columns)} FROM delta.`{table}` ORDER BY _offset")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def dead_letters(spark: TiererProcess, table: Path) -> list[tuple[int, str, Row]]:
    """Offset, reason and record, in order."""
    rows = spark.sql(f"SELECT _offset, _reason, _record FROM delta.`{table}_dead_letters` ORDER BY _offset")
    return [(offset, reason, json.loads(record)) for offset, reason, record in rows]
