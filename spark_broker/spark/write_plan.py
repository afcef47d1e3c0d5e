"""What a write does, decided once by the planner: its topic (created where the options say so), and its records'
columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import StructType

from spark_broker.client.topic_schema import arrow_schema
from spark_broker.errors import TopicAlreadyExistsError
from spark_broker.spark.refusals import invalid_option
from spark_broker.spark.topic_rows import ColumnMapping, Target, mapping_of, topic_position
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
    """A write. It is pickled for the tasks."""

    options: WriteOptions
    rows: pa.Schema
    destination: OneTopic | TopicOfRow


def plan_write(options: WriteOptions, schema: StructType) -> WritePlan:
    """Raises InvalidConfigError, InvalidSchemaError, SchemaMismatchError, UnknownTopicOrPartitionError, and the
    cluster's errors, within max.block.ms.
    """
    from spark_broker.client.retry import Deadline
    from spark_broker.spark.cluster import connected

    rows = _arrow_schema(schema)
    if options.topic is None:
        return WritePlan(options, rows, TopicOfRow(topic_position(rows)))
    deadline = Deadline.after_ms(options.producer.max_block_ms)
    with connected(options.producer) as metadata:
        if options.create is not None and metadata.fetch([options.topic], deadline).topic(options.topic) is None:
            _create(options, options.topic, options.create, rows)
        target = Target.of(metadata.topic(options.topic, deadline))
    return WritePlan(options, rows, OneTopic(target, mapping_of(rows, target, routed=False)))


def _arrow_schema(schema: StructType) -> pa.Schema:
    """As Spark hands the rows on; a session's time zone, and large variants of types, make no difference."""
    if not len(schema):
        raise invalid_option("the DataFrame has no columns: there is nothing to write")
    return arrow_schema(schema)


def _create(options: WriteOptions, topic: str, create: TopicToCreate, rows: pa.Schema) -> None:
    """A typed topic with the DataFrame's columns."""
    from contextlib import suppress

    from spark_broker.client.admin import Admin
    from spark_broker.model import NewTopic

    wanted = NewTopic(topic, create.partitions, create.replication_factor, rows, create.config)
    with (
        Admin(options.producer.bootstrap_servers) as admin,
        suppress(TopicAlreadyExistsError),  # another write was first
    ):
        admin.create_topic(wanted)
