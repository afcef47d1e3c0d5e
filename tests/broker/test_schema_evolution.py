"""A topic's schema changes while producers, consumers and followers are at work, on real processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer
from spark_broker.errors import InvalidSchemaError, SchemaMismatchError, SparkBrokerError
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

OLD = pa.schema([pa.field("id", pa.int32(), nullable=False), ("name", pa.string())])
CHANGES = pa.schema([("id", pa.int64()), ("price", pa.float64())])
BIG = 2**40


def rows(consumer: Consumer, count: int) -> list[dict[str, object]]:
    """The next rows, as the caller gets them."""
    found: list[dict[str, object]] = []
    while len(found) < count:
        batches = consumer.poll(timeout=30)
        assert batches, f"{len(found)} of {count} rows"
        found += [row for batch in batches for row in batch.data.to_pylist()]
    return found


def check(servers: str, expected: list[dict[str, object]]) -> None:
    """Every way to read the topic from its beginning: all columns, and only some, which older rows may lack."""
    for columns in (None, ["price"], ["id"], ["price", "name"]):
        with Consumer(servers, topics="t", columns=columns, auto_offset_reset="earliest") as consumer:
            wanted = [{name: row[name] for name in row if columns is None or name in columns} for row in expected]
            assert rows(consumer, len(expected)) == wanted


@pytest.mark.full
def test_what_was_stored_before_is_read_under_the_newer_schema(tmp_path: Path) -> None:
    everything: list[dict[str, object]] = [
        {"id": 1, "name": "a", "price": None},
        {"id": 2, "name": None, "price": None},
        {"id": BIG, "name": None, "price": 1.5},
    ]
    with ProcessCluster(tmp_path, 2) as brokers:
        servers = brokers.bootstrap_servers
        with (
            Admin(servers) as admin,
            Producer(servers) as producer,
            Consumer(servers, topics="t", auto_offset_reset="earliest") as early,
        ):
            admin.create_topic(NewTopic("t", 1, replication_factor=2, schema=OLD))
            producer.append("t", [{"id": 1, "name": "a"}, {"id": 2}]).result(30)
            assert rows(early, 2) == [{"id": 1, "name": "a"}, {"id": 2, "name": None}]
            with pytest.raises(SchemaMismatchError):
                producer.append("t", [{"id": BIG, "price": 1.5}]).result(30)
            admin.alter_topic_schema("t", CHANGES)
            # Clients that were there before learn of it by themselves.
            producer.append("t", [{"id": BIG, "price": 1.5}]).result(30)
            assert rows(early, 1) == everything[2:]
            assert admin.describe_topic("t").schema_id == 1
            with pytest.raises(InvalidSchemaError, match="cannot become"):
                admin.alter_topic_schema("t", OLD)
        check(servers, everything)
    with ProcessCluster(tmp_path, 2) as brokers:
        check(brokers.bootstrap_servers, everything)


def test_a_producer_with_the_earlier_schema_learns_of_the_current_one_at_its_first_append(tmp_path: Path) -> None:
    """Story: a segment has one schema, so that each of their appends began another: three files for each."""
    with ProcessCluster(tmp_path, 1) as brokers, Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic(NewTopic("t", 1, schema=OLD))
        with Producer(brokers.bootstrap_servers) as earlier, Producer(brokers.bootstrap_servers) as later:
            earlier.append("t", [{"id": 1}]).result(30)
            admin.alter_topic_schema("t", CHANGES)
            later.append("t", [{"id": BIG}]).result(30)

            def segments() -> int:
                return len(list(tmp_path.glob("logs/broker-0/t-0/*.arrow")))

            def learned() -> bool:
                before = segments()
                for producer in (earlier, later):
                    producer.append("t", [{"id": 2}]).result(30)
                return segments() == before

            eventually(learned, 30, "both append under one schema")


@pytest.mark.full
def test_a_schema_that_changes_again_and_again_under_load_loses_nothing(tmp_path: Path) -> None:
    """Producers, leaders and followers learn of each schema at different times."""
    changes, ended = 12, threading.Event()
    stored: list[int] = []
    failures: list[SparkBrokerError] = []

    def fill(servers: str) -> None:
        with Producer(servers) as producer:
            while not ended.is_set():
                number = len(stored)
                try:
                    producer.append("t", [{"id": number, "name": "x" * 100}], partition=number % 2).result(60)
                except SparkBrokerError as error:
                    failures.append(error)
                    return
                stored.append(number)

    with ProcessCluster(tmp_path, 3) as brokers, Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic(NewTopic("t", 2, replication_factor=3, schema=OLD))
        filler = threading.Thread(target=fill, args=(brokers.bootstrap_servers,))
        filler.start()
        for number in range(changes):
            admin.alter_topic_schema("t", pa.schema([(f"c{number}", pa.float64())]))
            # A producer of its own knows the newest schema at once, and meets brokers that may not know it.
            with Producer(brokers.bootstrap_servers) as producer:
                producer.append("t", [{"id": -1 - number, f"c{number}": 0.5}], partition=number % 2).result(60)
        ended.set()
        filler.join(90)
        assert not filler.is_alive()
        assert failures == []
        with Consumer(brokers.bootstrap_servers, topics="t", auto_offset_reset="earliest") as consumer:
            found = rows(consumer, len(stored) + changes)
        assert sorted(row["id"] for row in found) == [*range(-changes, 0), *stored]  # type: ignore[type-var]
        assert {len(row) for row in found} == {2 + changes}
        marked = {row["id"]: [name for name, value in row.items() if value == 0.5] for row in found}
        assert all(marked[-1 - number] == [f"c{number}"] for number in range(changes))
        eventually(lambda: all(len(p.isr) == 3 for p in admin.describe_topic("t").partitions), 30, "all in sync")
