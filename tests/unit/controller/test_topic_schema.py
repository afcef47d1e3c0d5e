"""The controller's decisions about changes of a topic's schema."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spark_broker.controller import topic_schema
from spark_broker.controller.image import TopicState
from spark_broker.errors import InvalidSchemaError, InvalidTopicError, UnknownTopicOrPartitionError
from spark_broker.protocol.messages import AlterTopicSchemaRequest, EmptyResponse, EnsureOffsetsTopicRequest
from spark_broker.protocol.schema import DEFAULT_SCHEMA, normalize_schema, schema_from_bytes, schema_to_bytes
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
