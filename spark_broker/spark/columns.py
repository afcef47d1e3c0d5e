"""The columns of a topic's DataFrame: those of its records, and those that the log adds to each record."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from spark_broker.client.cluster_view import TopicView
from spark_broker.protocol.schema import TIMESTAMP_TYPE, normalize_schema
from spark_broker.spark.refusals import invalid_option

CREATE_TIME = 0
"""`timestampType` of Kafka: the producer's timestamp."""


class Source(Enum):
    """Where a column's values come from."""

    DATA = "data"
    TOPIC = "topic"
    PARTITION = "partition"
    OFFSET = "offset"
    TIMESTAMP = "timestamp"
    TIMESTAMP_TYPE = "timestampType"
    LEADER_EPOCH = "leaderEpoch"


@dataclass(frozen=True)
class Column:
    """A column of the DataFrame. `type` is Arrow's. A DATA column has the name of the topic's column."""

    name: str
    source: Source
    type: pa.DataType
    nullable: bool = True


_LOG = {
    Source.TOPIC: pa.string(),
    Source.PARTITION: pa.int32(),
    Source.OFFSET: pa.int64(),
    Source.TIMESTAMP: TIMESTAMP_TYPE,
    Source.TIMESTAMP_TYPE: pa.int32(),
}


def columns_of(topic: TopicView, *, include_headers: bool) -> tuple[Column, ...]:
    """The columns, in order: those of Spark's Kafka source for Kafka's record, else the topic's own and `_topic`, ...

    Raises InvalidSchemaError for a type that a DataFrame cannot hold.
    """
    if not topic.has_default_schema:
        data = tuple(Column(f.name, Source.DATA, f.type, f.nullable) for f in normalize_schema(topic.schema))
        return data + tuple(
            Column(f"_{source.value}", source, kind)
            for source, kind in _LOG.items()
            if source is not Source.TIMESTAMP_TYPE
        )
    columns = {name: Column(name, Source.DATA, topic.schema.field(name).type) for name in ("key", "value", "headers")}
    record = (columns["key"], columns["value"])
    log = tuple(Column(source.value, source, kind) for source, kind in _LOG.items())
    return record + log + ((columns["headers"],) if include_headers else ())


def leader_epoch_column(topic: TopicView) -> Column:
    """The epoch of the leader that appended a record."""
    name = "leaderEpoch" if topic.has_default_schema else "_leader_epoch"
    return Column(name, Source.LEADER_EPOCH, pa.int32())


def by_name(columns: Sequence[Column], names: Sequence[str], where: str) -> tuple[Column, ...]:
    """The columns with these names (case does not count). Raises InvalidConfigError with the nearest name."""
    columns_by_name = {column.name.lower(): column for column in columns}
    for name in names:
        if name.lower() not in columns_by_name:
            near = difflib.get_close_matches(name.lower(), list(columns_by_name), n=1, cutoff=0.4)
            hint = (
                f"did you mean {columns_by_name[near[0]].name!r}?"
                if near
                else f"there are {', '.join(c.name for c in columns)}"
            )
            raise invalid_option(f"{where}: unknown column {name!r}; {hint}")
    return tuple(columns_by_name[name.lower()] for name in names)


def columns_to_fetch(topic: TopicView, columns: Sequence[Column], *, include_headers: bool) -> list[str] | None:
    """The columns to ask the broker for. None means every column, as stored; this costs the broker nothing.

    There is at least one: a batch without columns would have no rows either.
    """
    wanted = {column.name for column in columns if column.source is Source.DATA}
    every = {
        column.name
        for column in columns_of(topic, include_headers=include_headers)
        if column.source is Source.DATA and column.name != topic.timestamp_column
    }
    if wanted >= every:
        return None
    return [name for name in topic.schema.names if name in wanted] or [_narrowest(topic.schema)]


def _narrowest(schema: pa.Schema) -> str:
    def width(field: pa.Field) -> int:
        return int(field.type.bit_width) if pa.types.is_primitive(field.type) else 1 << 16

    return str(min(schema, key=width).name)
