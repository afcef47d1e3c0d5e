"""Rows of an older schema under the settings of a newer one: what names a column means nothing to rows that lack it."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pytest

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.topic import Topic
from spark_broker.controller.image import TopicState
from spark_broker.errors import InvalidRecordError
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.schema import schema_to_bytes
from tests.broker.lone_partition import LonePartition
from tests.broker.rig import TOPIC_ID, Outcome

OLD = pa.schema([("id", pa.int64())])
NEW = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("part", pa.string())])
LIKE_KAFKAS = pa.schema([(name, pa.string()) for name in ("key", "value", "headers", "timestamp")])
HOUR_US = 3_600_000_000


def topic(config: dict[str, str], *schemas: pa.Schema) -> Topic:
    messages = tuple(map(schema_to_bytes, schemas))
    return Topic.of(TopicState("t", TOPIC_ID, MappingProxyType(config), schemas=messages, partitions=()))


@pytest.fixture
def lone(tmp_path: Path) -> LonePartition:
    return LonePartition(tmp_path / "t-0")


def use(lone: LonePartition, used: Topic) -> None:
    lone.topic = lone.partition.topic = used
    lone.partition.log.configure(used)


def append(lone: LonePartition, rows: pa.RecordBatch, schema_id: int, compression: str | None = None) -> int:
    outcome = Outcome()
    message = encode_batch(rows, compression=compression, schema_id=schema_id)
    deadline_ms = SYSTEM_CLOCK.boottime_ms() + 30_000
    lone.partition.append(Append(message, lone.leader_epoch, -1, schema_id, deadline_ms), outcome)
    return outcome.future.result(20)


def offset_at(lone: LonePartition, time_us: int) -> int | None:
    found = lone.partition.reader.offset_at(lone.leader_epoch, time_us, read_committed=True)
    return None if found is None else found[0]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("count", [1, 200])
def test_a_time_column_that_came_later_leaves_older_rows_their_append_time(
    lone: LonePartition, count: int, compression: str | None
) -> None:
    """Story: a producer that had the earlier schema yet ended each broker by turns: it asked the next one."""
    use(lone, topic({"timestamp.column": "at"}, OLD, NEW))
    began_us = lone.clock.wall_ms() * 1000
    older = pa.record_batch({"id": pa.array(range(count), pa.int64())}, schema=OLD)
    later = [began_us + HOUR_US, None]
    newer = pa.record_batch({"id": [1, 2], "at": later, "part": ["x", "y"]}, schema=NEW)
    assert append(lone, older, 0, compression) == 0
    assert append(lone, newer, 1, compression) == count
    assert lone.partition.log.max_timestamp_us == began_us + HOUR_US
    assert offset_at(lone, began_us) == 0, "an older row counts with its append time"
    assert offset_at(lone, began_us + HOUR_US) == count
    assert offset_at(lone, began_us + HOUR_US + 1) is None


@pytest.mark.parametrize("count", [1, 200])
def test_columns_with_the_names_of_kafkas_record_are_not_kafkas_record(lone: LonePartition, count: int) -> None:
    """Story: a text in a column `timestamp` was taken for a time. 200 rows ended each broker by turns."""
    use(lone, topic({}, LIKE_KAFKAS))
    began_us = lone.clock.wall_ms() * 1000
    rows = pa.record_batch({name: ["2026-01-01"] * count for name in LIKE_KAFKAS.names}, schema=LIKE_KAFKAS)
    assert append(lone, rows, 0) == 0
    assert offset_at(lone, began_us) == 0
    assert began_us <= lone.partition.log.max_timestamp_us < began_us + HOUR_US


def test_a_key_of_columns_that_came_later_is_what_older_rows_have_of_it(lone: LonePartition) -> None:
    use(lone, topic({"cleanup.policy": "compact", "key.columns": "part,id"}, OLD, NEW))
    assert append(lone, pa.record_batch({"id": [1]}, schema=OLD), 0) == 0
    use(lone, topic({"cleanup.policy": "compact", "key.columns": "part"}, OLD, NEW))
    with pytest.raises(InvalidRecordError, match="have no key"):
        append(lone, pa.record_batch({"id": [1]}, schema=OLD), 0)


def test_a_bug_in_what_looks_at_rows_ends_the_call_and_not_the_broker(
    lone: LonePartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the partition's lock it would be an InvariantError: for this broker, and for each that is asked next."""

    def fails(self: Topic, parsed: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Topic, "newest_timestamp", fails)
        with pytest.raises(KeyError, match="a bug"):
            lone.write(b"1", transactional=False)
    assert lone.write(b"1", transactional=False) == 0
