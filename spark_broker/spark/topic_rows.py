"""Turns the rows of a DataFrame into record batches of a topic's schema, by partition. Python looks at no row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.partitioner import UNKEYED, row_partitions, split_by_partition
from spark_broker.client.topic_schema import unkept_error
from spark_broker.errors import InvalidDataError, SchemaMismatchError, UnknownTopicOrPartitionError
from spark_broker.protocol.arrays import to_numpy
from spark_broker.protocol.schema import conform
from spark_broker.spark.refusals import HINT

TOPIC_COLUMN = "topic"
PARTITION_COLUMN = "partition"

_OF_A_READ = frozenset(("_topic", "_partition", "_offset", "_timestamp", "_leader_epoch"))
"""Columns that the read of a typed topic adds, in lower case. A copy from topic to topic leaves them out."""


@dataclass(frozen=True)
class Target:
    """A topic as a write sees it when it is planned.

    `partitions` does not change during the write, so rows of one key stay together. `usable`: the partitions for rows
    without a key.
    """

    name: str
    topic_id: str
    schema: pa.Schema
    is_record: bool  # Kafka's record: key, value, headers, timestamp
    key_columns: tuple[str, ...]
    partitions: int
    usable: tuple[int, ...]

    @classmethod
    def of(cls, topic: TopicView) -> Target:
        led_partitions = tuple(state.partition for state in topic.partitions if state.leader >= 0)
        return cls(
            name=topic.name,
            topic_id=topic.topic_id,
            schema=topic.schema,
            is_record=topic.has_default_schema,
            key_columns=topic.key_columns,
            partitions=len(topic.partitions),
            usable=led_partitions or tuple(range(len(topic.partitions))),
        )


@dataclass(frozen=True)
class ColumnMapping:
    """Which columns of a DataFrame, by position, become which of the topic's. `partition`: the column in which rows
    name theirs.
    """

    columns: tuple[tuple[int, str], ...]
    partition: int | None


def mapping_of(rows: pa.Schema, unkept: Mapping[int, str], target: Target, *, routed: bool) -> ColumnMapping:
    """How a DataFrame's rows become the topic's. `routed`: its column `topic` names the topic of each row.

    `unkept`: types that no topic keeps, by the positions of their columns. Raises InvalidSchemaError for such a column.
    Raises SchemaMismatchError with the name of a column that is missing, unknown or of a type that does not fit.
    """
    positions = positions_by_name(rows)
    stored = {name.lower(): name for name in target.schema.names}
    if target.is_record:
        # As in Kafka's sink, other columns of the DataFrame are not written.
        if "value" not in positions:
            raise SchemaMismatchError(f"column 'value' is missing; topic {target.name!r} stores Kafka's record")
        mapped = [name for name in positions if name in stored]
    else:
        left_out = _OF_A_READ | ({TOPIC_COLUMN} if routed else set())
        mapped = [name for name in positions if name in stored or name not in left_out]
    partition = positions.get(PARTITION_COLUMN) if target.is_record else None
    if partition is not None and not pa.types.is_integer(rows.field(partition).type):
        raise SchemaMismatchError(f"column 'partition' is {rows.field(partition).type}; a partition is an integer")
    check_kept(rows, unkept, [positions[name] for name in mapped])
    columns = tuple((positions[name], stored.get(name, rows.names[positions[name]])) for name in mapped)
    mapping = ColumnMapping(columns, partition)
    topic_rows(pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in rows], schema=rows), mapping, target)
    return mapping


def check_kept(rows: pa.Schema, unkept: Mapping[int, str], written: Iterable[int]) -> None:
    """Raise InvalidSchemaError if a column at one of these positions has a type that no topic keeps."""
    for at in written:
        if at in unkept:
            raise unkept_error(rows.names[at], unkept[at])


def positions_in_new_topic(rows: pa.Schema) -> list[int]:
    """Positions of the columns that a new topic of these rows has. The read of a copied topic adds the others."""
    return [at for at, name in enumerate(rows.names) if name.lower() not in _OF_A_READ]


def positions_by_name(rows: pa.Schema) -> dict[str, int]:
    """Positions of columns by their name in lower case: case does not count in Spark."""
    positions: dict[str, int] = {}
    for at, name in enumerate(rows.names):
        if positions.setdefault(name.lower(), at) != at:
            raise SchemaMismatchError(f"the DataFrame has two columns named {name!r} (case does not count)")
    return positions


def topic_position(rows: pa.Schema) -> int:
    """The position of the column `topic`. Raises SchemaMismatchError unless it is there and holds text."""
    at = positions_by_name(rows).get(TOPIC_COLUMN)
    if at is None:
        raise SchemaMismatchError("no topic is named: give the option topic, or a column 'topic'", hint=HINT)
    kind = rows.field(at).type
    if not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
        raise SchemaMismatchError(f"column 'topic' is {kind}; it must be a string", hint=HINT)
    return at


def by_topic(rows: pa.RecordBatch, position: int) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each topic that the column at `position` names, in their order. Raises InvalidDataError for null."""
    names = rows.column(position)
    if names.null_count:
        raise InvalidDataError(f"column 'topic' has {names.null_count} nulls: each row names its topic", hint=HINT)
    encoded = names.dictionary_encode()
    topics = encoded.dictionary.to_pylist()
    if len(topics) == 1:
        yield topics[0], rows
        return
    for code, part in split_by_partition(rows, to_numpy(encoded.indices).astype(np.int64), len(topics)):
        yield topics[code], part


def topic_rows(rows: pa.RecordBatch, mapping: ColumnMapping, target: Target) -> pa.RecordBatch:
    """The rows under the topic's schema. Raises SchemaMismatchError for nulls and values that do not fit."""
    arrays = [rows.column(at) for at, _ in mapping.columns]
    named = pa.RecordBatch.from_arrays(arrays, names=[name for _, name in mapping.columns])
    try:
        return conform(named, target.schema, local_is_utc=False)
    except SchemaMismatchError as error:
        raise SchemaMismatchError(f"topic {target.name!r}: {error.message}") from None


def by_partition(
    rows: pa.RecordBatch, mapping: ColumnMapping, target: Target, *, sticky: int
) -> list[tuple[int, pa.RecordBatch]]:
    """The rows under the topic's schema, by partition: the partition that a row names, or its key's, or `sticky`.

    Raises SchemaMismatchError, and UnknownTopicOrPartitionError for a partition that does not exist.
    """
    conformed = topic_rows(rows, mapping, target)
    if not rows.num_rows:
        return []
    wanted = row_partitions(conformed, target.key_columns, target.partitions)
    if wanted is None:
        wanted = np.full(rows.num_rows, UNKEYED, dtype=np.int64)
    if mapping.partition is not None:
        named = rows.column(mapping.partition)
        given = to_numpy(named.is_valid())
        wanted[given] = to_numpy(named.cast(pa.int64()))[given]
        outside = wanted[given & ((wanted < 0) | (wanted >= target.partitions))]
        if len(outside):
            raise UnknownTopicOrPartitionError(
                f"column 'partition' has {outside[0]}; {target.name!r} has partitions 0 to {target.partitions - 1}"
            )
    wanted[wanted == UNKEYED] = sticky
    return split_by_partition(conformed, wanted, target.partitions)
