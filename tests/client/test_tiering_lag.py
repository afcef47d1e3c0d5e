"""A tierer leaves no column out of the table, even if the brokers that it asks lag behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest

from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.config import AdminConfig
from spark_broker.errors import StaleMetadataError
from spark_broker.history.spark_steps import with_table_columns
from spark_broker.history.steps import START_OVER
from spark_broker.history.tierer import list_logs
from spark_broker.protocol.schema import schema_to_bytes
from tests.client.fake_broker import FakeCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OLD = pa.schema([pa.field("id", pa.int64())])
NEW = pa.schema([*OLD, pa.field("name", pa.string())])


def frame_with(*columns: str) -> DataFrame:
    return cast("DataFrame", SimpleNamespace(columns=[*columns, "_topic"], drop=lambda name: columns))


def test_a_try_starts_over_where_the_topic_has_got_columns_meanwhile(cluster: FakeCluster) -> None:
    """Story: the values of the new column were null in the table, and then the brokers dropped the log."""
    cluster.create("t", schema=OLD)
    config = AdminConfig.parse({"bootstrap.servers": cluster.bootstrap})
    metadata = ClusterMetadata.connect(config)
    try:
        topic = metadata.topic("t", Deadline.after_ms(10_000))
        assert len(list_logs(metadata, config, topic, [])) == 1
        cluster.topics["t"].schemas.append(schema_to_bytes(NEW))
        with pytest.raises(START_OVER):
            list_logs(metadata, config, topic, [])
        newer = metadata.refresh(Deadline.after_ms(10_000)).topic("t")
        assert newer is not None
        assert len(list_logs(metadata, config, newer, [])) == 1
        assert list(with_table_columns(frame_with("id", "name"), newer)) == ["id", "name"]  # type: ignore[call-overload]
        with pytest.raises(StaleMetadataError, match="name"):
            with_table_columns(frame_with("id"), newer)
    finally:
        metadata.close()
