"""One task of a read, in a process of its own: ranges of one partition or more, as record batches."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from spark_broker.errors import invariant
from spark_broker.quiet_end import end_in_silence
from spark_broker.spark.columns import Column, by_name, columns_of, columns_to_fetch, leader_epoch_column
from spark_broker.spark.options import ReadOptions
from spark_broker.spark.planned_topic import TOPIC_GONE, is_gone, planned_topic
from spark_broker.spark.ranges import OffsetRange, TaskRanges
from spark_broker.spark.spark_schema import output_of
from spark_broker.spark.user_errors import message_alone

if TYPE_CHECKING:
    from spark_broker.client.cluster_view import ClusterView, TopicView
    from spark_broker.client.metadata import ClusterMetadata

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """What a task gets: ranges, one after the other, each with the columns to ask the broker for (None: all, as
    stored). `cluster_id`, `metadata_offset`: of the view that it was planned with; the task's must not be older.
    """

    parts: tuple[tuple[OffsetRange, list[str] | None], ...]
    cluster_id: str
    metadata_offset: int


def offered(topic: TopicView, options: ReadOptions) -> tuple[Column, ...]:
    """The columns of a read before the user's `.schema(...)`: the topic's, or `columns`."""
    columns = columns_of(topic, include_headers=options.include_headers)
    if options.include_leader_epoch:
        columns += (leader_epoch_column(topic),)
    return columns if options.columns is None else by_name(columns, options.columns, "columns")


def planned(
    tasks: Sequence[TaskRanges],
    topics: Sequence[TopicView],
    options: ReadOptions,
    schema: StructType,
    view: ClusterView,
) -> list[InputPartition]:
    """The tasks, as Spark hands them on. `view`: they were planned with it, or an older one.

    Raises typed errors where a topic does not fit the schema of the read.
    """
    columns = {
        topic.name: columns_to_fetch(
            topic, output_of(schema, offered(topic, options)).columns, include_headers=options.include_headers
        )
        for topic in topics
    }
    parts = (tuple((part, columns[part.topic]) for part in task) for task in tasks)
    return [InputPartition(Planned(of_task, view.cluster_id, view.metadata_offset)) for of_task in parts]


def read_task(options: ReadOptions, schema: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one task, of each range in order of their offsets. Raises typed errors."""
    # Spark asks for InputPartition(None) when there is nothing to read.
    end_in_silence()
    if partition.value is not None:
        invariant(isinstance(partition.value, Planned), "a task gets what partitions() planned")
        with message_alone():
            yield from _read(options, schema, partition.value)


def _read(options: ReadOptions, schema: StructType, task: Planned) -> Iterator[pa.RecordBatch]:
    from spark_broker.client.retry import Deadline
    from spark_broker.spark import kept

    with kept.KEPT.metadata(options.settings, task.cluster_id) as metadata:
        metadata.use({part.topic for part, _ in task.parts})
        view = metadata.view
        if not 0 <= task.metadata_offset <= view.metadata_offset:
            metadata.refresh(Deadline.after_ms(options.settings.default_api_timeout_ms))
        gone: dict[str, str] = {}
        for part, columns in task.parts:
            why = gone.get(part.topic_id, "") or (yield from _read_range(metadata, options, schema, part, columns))
            if why:
                gone[part.topic_id] = why
                _log.warning("failOnDataLoss=false, passing over what was planned of %s: %s", part.tp, why)
    kept.spare_collections()


def _read_range(
    metadata: ClusterMetadata, options: ReadOptions, schema: StructType, part: OffsetRange, columns: list[str] | None
) -> Generator[pa.RecordBatch, None, str]:
    """Returns why the rest is passed over, as the topic is gone (failOnDataLoss=false); empty: the range is read."""
    from spark_broker.client.retry import Deadline
    from spark_broker.spark.assemble import assembled
    from spark_broker.spark.range_reader import RangeReader

    timeout_ms = options.settings.default_api_timeout_ms
    try:
        topic = planned_topic(metadata, part.topic, part.topic_id, Deadline.after_ms(timeout_ms))
        output = output_of(schema, offered(topic, options))
        reader = RangeReader(
            metadata,
            part,
            options.settings,
            columns,
            fail_on_data_loss=options.fail_on_data_loss,
            local_reads=options.local_reads,
        )
        for batches in reader.batches():
            yield from assembled(batches, output)
    except TOPIC_GONE as error:
        deadline = Deadline.after_ms(timeout_ms)
        if options.fail_on_data_loss or not is_gone(metadata, part.topic, part.topic_id, deadline):
            raise
        return error.message
    return ""
