"""Compacted topics as clients meet them, on real processes: settings, refusals, consumers with old offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import InvalidConfigError, InvalidRecordError, PolicyViolationError
from spark_broker.model import OffsetAndMetadata
from spark_broker.testing.compacted_replicas import compacted_batches
from spark_broker.testing.replicas import find_replicas
from tests.conftest import WaitUntil
from tests.support.process_cluster import ProcessCluster

TYPED = pa.schema([("id", pa.int64()), ("name", pa.string())])
COMPACT = {"cleanup.policy": "compact", "segment.bytes": 4096, "min.cleanable.dirty.ratio": 0.0, "retention.ms": -1}
EVERY_OFFSET = 1 << 62

Record = tuple[int, bytes | None, bytes | None]
"""Offset, key, value."""

Rows = list[tuple[bytes | None, bytes | None]]


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("brokers"), 2, {"log.cleaner.backoff.ms": 50}) as started:
        yield started


@pytest.fixture(scope="module")
def admin(brokers: ProcessCluster) -> Iterator[Admin]:
    with Admin(brokers.bootstrap_servers) as opened:
        yield opened


@pytest.fixture
def topic(request: pytest.FixtureRequest, admin: Admin) -> TopicPartition:
    """A compacted topic of one partition, named after the test."""
    name = str(request.node.name)[:200]
    admin.create_topic(NewTopic(name, partitions=1, replication_factor=2, config=COMPACT))
    return TopicPartition(name, 0)


def write(brokers: ProcessCluster, partition: TopicPartition, *batches: Rows) -> list[int]:
    """Append each as a batch of its own; returns their base offsets."""
    with Producer(brokers.bootstrap_servers) as producer:
        offsets = []
        for rows in batches:
            records = [{"key": key, "value": value} for key, value in rows]
            (stored,) = producer.append(partition.topic, records, partition=0).result(60)
            offsets.append(stored.base_offset or 0)
        return offsets


def seal(brokers: ProcessCluster, partition: TopicPartition) -> None:
    """Two batches that share no segment with another one, of the same key."""
    rows: Rows = [(b"seal", bytes(3000))]
    write(brokers, partition, rows, rows)


def read(consumer: Consumer, partition: TopicPartition) -> list[Record]:
    """Everything from the consumer's position to the end, without what `seal` writes."""
    end, records = consumer.end_offsets([partition])[partition], []
    while consumer.position(partition) < end:
        for batch in consumer.poll(1.0):
            columns = (batch.data[name].to_pylist() for name in ("key", "value"))
            offsets = range(batch.base_offset, batch.base_offset + batch.data.num_rows)
            records += list(zip(offsets, *columns, strict=True))
    return [record for record in records if record[1] != b"seal"]


def read_all(brokers: ProcessCluster, partition: TopicPartition) -> list[Record]:
    with Consumer(brokers.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([partition])
        return read(consumer, partition)


@pytest.fixture
def compacted(brokers: ProcessCluster, wait_until: WaitUntil) -> Callable[[TopicPartition, int], None]:
    """Waits until no replica has more than so many records below the active segment."""

    def wait(partition: TopicPartition, rows: int) -> None:
        def done() -> bool:
            replicas = find_replicas(brokers.log_dirs, partition)
            counts = [sum(f.header.row_count for f in compacted_batches(r, EVERY_OFFSET)) for r in replicas]
            return len(counts) == 2 and max(counts) <= rows

        wait_until(done, f"{rows} records in each replica")

    return wait


def test_a_consumer_goes_on_from_an_offset_that_is_gone(
    brokers: ProcessCluster, topic: TopicPartition, compacted: Callable[[TopicPartition, int], None]
) -> None:
    batches: list[Rows] = [[(b"k%d" % key, b"%d" % n) for key in range(3)] for n in range(10)]
    write(brokers, topic, *batches)
    seal(brokers, topic)
    compacted(topic, 3 + 2)
    servers = brokers.bootstrap_servers
    with Consumer(servers, group_id="late", auto_offset_reset="none", enable_auto_commit=False) as consumer:
        consumer.assign([topic])
        consumer.commit({topic: OffsetAndMetadata(7)})
    with Consumer(servers, group_id="late", auto_offset_reset="none", enable_auto_commit=False) as consumer:
        consumer.assign([topic])
        assert read(consumer, topic) == [(27, b"k0", b"9"), (28, b"k1", b"9"), (29, b"k2", b"9")]
        consumer.seek(topic, 28)
        assert [offset for offset, _, _ in read(consumer, topic)] == [28, 29]


def test_records_that_are_gone_are_not_counted_and_the_log_starts_where_it_did(
    brokers: ProcessCluster, admin: Admin, topic: TopicPartition, compacted: Callable[[TopicPartition, int], None]
) -> None:
    batches: list[Rows] = [[(b"k", b"%d" % n)] for n in range(20)]
    write(brokers, topic, *batches)
    seal(brokers, topic)
    compacted(topic, 1 + 2)
    (described,) = admin.describe_topic(topic.topic).partitions
    assert (described.log_start_offset, described.high_watermark) == (0, 22)
    assert read_all(brokers, topic) == [(19, b"k", b"19")]


def test_a_record_without_a_key_is_refused_and_the_others_are_kept(
    brokers: ProcessCluster, topic: TopicPartition
) -> None:
    write(brokers, topic, [(b"k", b"before")])
    with pytest.raises(InvalidRecordError, match="1 of 2 records"):
        write(brokers, topic, [(b"k", b"with a refused one"), (None, b"no key")])
    write(brokers, topic, [(b"k", b"after")])
    assert read_all(brokers, topic) == [(0, b"k", b"before"), (1, b"k", b"after")]


def test_a_topic_that_becomes_compacted_keeps_its_records_without_a_key(
    brokers: ProcessCluster, admin: Admin, compacted: Callable[[TopicPartition, int], None]
) -> None:
    partition = TopicPartition("was-deleting", 0)
    admin.create_topic(NewTopic(partition.topic, 1, 2, config={**COMPACT, "cleanup.policy": "delete"}))
    write(brokers, partition, [(None, b"no key"), (b"k", b"1")], [(b"k", b"2")])
    seal(brokers, partition)
    admin.alter_topic_config(partition.topic, {"cleanup.policy": "compact"})
    compacted(partition, 2 + 2)
    assert read_all(brokers, partition) == [(0, None, b"no key"), (2, b"k", b"2")]
    admin.alter_topic_config(partition.topic, {"cleanup.policy": None})
    write(brokers, partition, [(None, b"no key again")])
    assert [value for _, _, value in read_all(brokers, partition)] == [b"no key", b"2", b"no key again"]


def test_only_a_topic_that_also_deletes_has_records_deleted(brokers: ProcessCluster, admin: Admin) -> None:
    for name, policy in (("only", "compact"), ("both", "compact,delete")):
        admin.create_topic(NewTopic(name, 1, 2, config={**COMPACT, "cleanup.policy": policy}))
        write(brokers, TopicPartition(name, 0), [(b"a", b"1"), (b"b", b"2")])
    with pytest.raises(PolicyViolationError, match=r"cleanup\.policy"):
        admin.delete_records({TopicPartition("only", 0): 1})
    assert admin.delete_records({TopicPartition("both", 0): 1}) == {TopicPartition("both", 0): 1}


def test_a_typed_topic_is_compacted_only_by_key_columns(admin: Admin, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"set key\.columns"):
        admin.create_topic(NewTopic("typed", 1, 1, schema=TYPED, config=COMPACT))
    admin.create_topic(NewTopic("typed", 1, 1, schema=TYPED))
    with pytest.raises(InvalidConfigError, match=r"set key\.columns"):
        admin.alter_topic_config("typed", {"cleanup.policy": "compact"})
    with pytest.raises(InvalidConfigError, match="nope"):
        admin.alter_topic_config("typed", {"cleanup.policy": "compact", "key.columns": "nope"})
    admin.alter_topic_config("typed", {"cleanup.policy": "compact", "key.columns": "id"})
    with pytest.raises(InvalidConfigError, match=r"set key\.columns"):
        admin.alter_topic_config("typed", {"key.columns": None})
    with pytest.raises(InvalidConfigError, match=r"cleanup\.policy must be delete"):
        admin.alter_topic_config("typed", {"storage.format": "delta", "delta.path": str(tmp_path)})
    with pytest.raises(InvalidConfigError, match="delete, compact, or both"):
        admin.alter_topic_config("typed", {"cleanup.policy": "compress"})
    assert admin.describe_topic("typed").config == {"cleanup.policy": "compact", "key.columns": "id"}
