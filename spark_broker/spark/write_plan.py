"""What a write does, decided once by the planner: its topic (created where the options say so), and its records'
columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import StructType

from spark_broker.client.topic_schema import rows_schema, unkept_type
from spark_broker.errors import TopicAlreadyExistsError
from spark_broker.spark.refusals import invalid_option
from spark_broker.spark.topic_rows import (
    ColumnMapping,
    Target,
    check_kept,
    mapping_of,
    positions_in_new_topic,
    topic_position,
)
from spark_broker.spark.write_options import TopicToCreate, WriteOptions


@dataclass(frozen=True)
class OneTopic:
    """Every row goes to this topic."""

    target: Target
    mapping: ColumnMapping


@dataclass(frozen=True)
class TopicOfRow:
    """The column at `position` names the topic of each row."""

    position: int


@dataclass(frozen=True)
class WritePlan:
    """A write. It is pickled for the tasks. `unkept`: Spark's types that no topic keeps, by the positions of their
    columns.
    """

    options: WriteOptions
    rows: pa.Schema
    unkept: Mapping[int, str]
    destination: OneTopic | TopicOfRow


def plan_write(options: WriteOptions, schema: StructType) -> WritePlan:
    """Raises InvalidConfigError, InvalidSchemaError, SchemaMismatchError, UnknownTopicOrPartitionError, and the
    cluster's errors, within max.block.ms.
    """
    from spark_broker.client.retry import Deadline
    from spark_broker.spark.cluster import connected

    rows = _arrow_schema(schema)
    kinds = {at: unkept_type(field.dataType) for at, field in enumerate(schema)}
    unkept = {at: kind for at, kind in kinds.items() if kind}
    if options.topic is None:
        return WritePlan(options, rows, unkept, TopicOfRow(topic_position(rows)))
    deadline = Deadline.after_ms(options.producer.max_block_ms)
    with connected(options.producer) as metadata:
        if options.create is not None and metadata.fetch([options.topic], deadline).topic(options.topic) is None:
            written = positions_in_new_topic(rows)
            check_kept(rows, unkept, written)
            _create(options, options.topic, options.create, pa.schema([rows.field(at) for at in written]))
        target = Target.of(metadata.topic(options.topic, deadline))
    return WritePlan(options, rows, unkept, OneTopic(target, mapping_of(rows, unkept, target, routed=False)))


def _arrow_schema(schema: StructType) -> pa.Schema:
    """As Spark hands the rows on; a session's time zone, and large variants of types, make no difference."""
    if not len(schema):
        raise invalid_option("the DataFrame has no columns: there is nothing to write")
    return rows_schema(schema)


def _create(options: WriteOptions, topic: str, create: TopicToCreate, columns: pa.Schema) -> None:
    """A typed topic with these columns."""
    from contextlib import suppress

    from spark_broker.client.admin import Admin
    from spark_broker.model import NewTopic

    wanted = NewTopic(topic, create.partitions, create.replication_factor, columns, create.config)
    with (
        Admin(options.producer.bootstrap_servers) as admin,
        suppress(TopicAlreadyExistsError),  # another write was first
    ):
        admin.create_topic(wanted)
