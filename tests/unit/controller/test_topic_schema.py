"""The controller's decisions about changes of a topic's schema."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spark_broker.controller import topic_schema
from spark_broker.controller.image import TopicState
from spark_broker.driver.topic_schema import stored_schema
from spark_broker.errors import (
    InvalidConfigError,
    InvalidSchemaError,
    InvalidTopicError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    EmptyResponse,
    EnsureOffsetsTopicRequest,
)
from spark_broker.protocol.schema import DEFAULT_SCHEMA, normalize_schema, schema_from_bytes, schema_to_bytes
from spark_broker.protocol.table_columns import why_not_in_table
from tests.unit.controller.cluster import Cluster

WIDER = pa.schema([("n", pa.int64())])


def request(name: str, schema: pa.Schema) -> AlterTopicSchemaRequest:
    return AlterTopicSchemaRequest(name, schema_to_bytes(schema))


def topic(cluster: Cluster, schema: pa.Schema | None = None) -> TopicState:
    cluster.start_brokers(1)
    stored = normalize_schema(schema or pa.schema([("n", pa.int32())]))
    cluster.create_topic("t", partitions=1, factor=1, schema=schema_to_bytes(stored))
    return cluster.topic("t")


def test_each_change_is_a_schema_of_its_own_and_a_repetition_is_none() -> None:
    cluster = Cluster()
    topic(cluster)
    for changes, schemas in ((WIDER, 2), (WIDER, 2), (pa.schema([("s", pa.string())]), 3)):
        assert isinstance(cluster.call(request("t", changes)), EmptyResponse)
        assert len(cluster.topic("t").schemas) == schemas
    newest = schema_from_bytes(cluster.topic("t").schemas[-1])
    assert newest == pa.schema([("n", pa.int64()), ("s", pa.string())])
    assert "has schema 2" in " ".join(cluster.notes)


def test_a_change_that_cannot_be_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    before = topic(cluster)
    cluster.call(EnsureOffsetsTopicRequest())
    cluster.create_topic("kafka", partitions=1, factor=1, schema=schema_to_bytes(DEFAULT_SCHEMA))
    monkeypatch.setattr(topic_schema, "SCHEMAS_MAX", 1)
    for name, schema, error in (
        ("t", pa.schema([("n", pa.string())]), InvalidSchemaError),
        ("t", WIDER, InvalidSchemaError),
        ("kafka", WIDER, InvalidSchemaError),
        ("__consumer_offsets", WIDER, InvalidTopicError),
        ("none", WIDER, UnknownTopicOrPartitionError),
    ):
        with pytest.raises(error):
            cluster.call(request(name, schema))
    with pytest.raises(InvalidSchemaError):
        cluster.call(AlterTopicSchemaRequest("t", b"no schema"))
    assert cluster.topic("t") == before


BAD_FIELDS = [
    *(pa.field(name, pa.int32()) for name in ("unit price", "a,b", "a=b", "a;b", "a(b", "a{b", "a\tb", "a\nb", "a\0b")),
    *(pa.field("x", kind) for kind in (pa.time64("us"), pa.duration("us"), pa.decimal128(5, -2), pa.decimal128(3, 5))),
    pa.field("x", pa.list_(pa.struct([("unit price", pa.int32())]))),
    pa.field("x", pa.map_(pa.string(), pa.time64("us"))),
]


@pytest.mark.parametrize("bad", BAD_FIELDS, ids=str)
def test_a_column_that_no_table_can_have_is_refused_before_there_are_records(bad: pa.Field) -> None:
    """At creation, when a table is given, and when the schema changes; and a topic without a table may have it."""
    columns = normalize_schema(pa.schema([("n", pa.int32()), bad]))
    assert why_not_in_table(columns)
    message = schema_to_bytes(columns)
    with pytest.raises(InvalidConfigError, match=r"delta\.path: a Delta table"):
        stored_schema(message, {"delta.path": "/lake/t"})
    assert stored_schema(message, {}) == message
    cluster = Cluster()
    topic(cluster)
    cluster.call(AlterTopicConfigRequest("t", {"delta.path": "/lake/t"}))
    with pytest.raises(InvalidSchemaError, match=r"topic t has a delta\.path: a Delta table"):
        cluster.call(request("t", pa.schema([bad])))
    cluster.call(AlterTopicConfigRequest("t", {"delta.path": ""}))
    cluster.call(request("t", pa.schema([bad])))


@pytest.mark.parametrize("name", ["a.b", "a-b", "é", "a`b", "a/b", "a%b", "a'b", 'a"b', "\u00a0", "value.x"])
def test_other_names_are_columns_of_a_table(name: str) -> None:
    assert why_not_in_table(pa.schema([(name, pa.int32())])) == ""


def test_a_topic_from_before_this_check_can_still_be_altered() -> None:
    cluster = Cluster()
    topic(cluster, pa.schema([("unit price", pa.int32())]))
    cluster.call(AlterTopicConfigRequest("t", {"delta.path": "/lake/t"}))
    cluster.call(request("t", pa.schema([("more", pa.int32())])))
    assert len(cluster.topic("t").schemas) == 2


def wide(prefix: str, columns: int = 2500) -> pa.Schema:
    return pa.schema([(f"{prefix}_{number:05d}_" + "x" * 220, pa.int64()) for number in range(columns)])


def test_a_union_that_no_broker_would_read_is_refused() -> None:
    """Story: two schemas below the limit made one above it. Every broker ended on it, at each start, for good."""
    cluster = Cluster()
    made = topic(cluster, wide("a"))
    with pytest.raises(InvalidSchemaError, match="the limit is"):
        cluster.call(request("t", wide("b")))
    assert cluster.topic("t").schemas == made.schemas


def test_the_schemas_of_all_topics_fit_into_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    made = topic(cluster)
    monkeypatch.setattr(topic_schema, "SCHEMAS_BYTES_MAX", 4 * len(made.schemas[0]))
    monkeypatch.setattr(topic_schema, "SMALL_BYTES", len(made.schemas[0]))
    monkeypatch.setattr(topic_schema, "SMALL_BYTES_MAX", 5 * len(made.schemas[0]))
    with pytest.raises(InvalidSchemaError, match="of all topics"):
        cluster.call(request("t", wide("b", 10)))
    with pytest.raises(InvalidSchemaError, match="of all topics"):
        cluster.create_topic("u", partitions=1, factor=1, schema=schema_to_bytes(wide("b", 10)))
    for name in ("u", "v", "w", "x"):
        cluster.create_topic(name, partitions=1, factor=1, schema=made.schemas[0])
    with pytest.raises(InvalidSchemaError, match="of all topics"):
        cluster.create_topic("y", partitions=1, factor=1, schema=made.schemas[0])
    cluster.call(EnsureOffsetsTopicRequest())  # Groups work nevertheless.
