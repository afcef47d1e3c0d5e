"""The schema of a new topic, checked here: the controller's pure decisions take it as given."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from spark_broker.config import TopicConfig, unknown_setting
from spark_broker.errors import InvalidConfigError
from spark_broker.protocol.keys import WHAT_KEYS_ARE, can_be_key
from spark_broker.protocol.schema import DEFAULT_SCHEMA, normalize_schema, schema_from_bytes, schema_to_bytes
from spark_broker.protocol.table_columns import why_not_in_table


def stored_schema(schema: bytes, config: Mapping[str, str]) -> bytes:
    """The stored form of a requested schema; empty: Kafka's record. `config` is checked against its columns.

    Raises InvalidSchemaError, InvalidConfigError.
    """
    stored = normalize_schema(schema_from_bytes(schema)) if schema else DEFAULT_SCHEMA
    check_columns(stored, config)
    if config.get("delta.path"):
        check_table_columns(stored)
    return schema_to_bytes(stored)


def check_columns(schema: pa.Schema, config: Mapping[str, str]) -> None:
    """Check that `key.columns` and `timestamp.column` name columns of a suitable type, and that there is a key where
    compaction needs one. Raises InvalidConfigError.
    """
    names = ("key.columns", "timestamp.column", "cleanup.policy")
    settings = TopicConfig.parse({k: v for k, v in config.items() if k in names})
    if "compact" in settings.cleanup_policy and not settings.key_columns and not schema.equals(DEFAULT_SCHEMA):
        raise InvalidConfigError("cleanup.policy=compact keeps the last record of each key: set key.columns, too")
    for name in settings.key_columns:
        _check_exists(schema, "key.columns", name)
        kind = schema.field(name).type
        if not can_be_key(kind):
            raise InvalidConfigError(f"key.columns: {name} is {kind}; {WHAT_KEYS_ARE}")
    if settings.timestamp_column:
        _check_exists(schema, "timestamp.column", settings.timestamp_column)
        kind = schema.field(settings.timestamp_column).type
        if not pa.types.is_timestamp(kind):
            raise InvalidConfigError(f"timestamp.column: {settings.timestamp_column} is {kind}, not a timestamp")


def check_table_columns(schema: pa.Schema) -> None:
    """Check that the table of `delta.path` can have the topic's columns. Raises InvalidConfigError."""
    why = why_not_in_table(schema)
    if why:
        raise InvalidConfigError(f"delta.path: {why}")


def _check_exists(schema: pa.Schema, setting: str, name: str) -> None:
    if name not in schema.names:
        raise InvalidConfigError(f"{setting}: {unknown_setting(name, list(schema.names), 'column')}")
