"""The batch read of the data source: its schema, its plan, its tasks, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from spark_broker.errors import invariant
from spark_broker.spark.columns import Column, by_name, columns_of, columns_to_fetch
from spark_broker.spark.option_table import Query
from spark_broker.spark.options import ReadOptions, parse_options
from spark_broker.spark.ranges import OffsetRange
from spark_broker.spark.spark_schema import output_of, spark_schema

if TYPE_CHECKING:
    from spark_broker.client.cluster_view import TopicView


@dataclass(frozen=True)
class _Planned:
    """What a task gets: the range, and the columns to ask the broker for (None: all, as stored)."""

    part: OffsetRange
    columns: list[str] | None


def read_schema(options: Mapping[str, str]) -> StructType:
    """The DataFrame's schema, from the cluster's metadata. Raises typed errors of options and cluster."""
    from spark_broker.client.retry import Deadline
    from spark_broker.spark.cluster import connected, selected_topics

    read = parse_options(options, Query.EITHER)
    deadline = Deadline.after_ms(read.settings.default_api_timeout_ms)
    with connected(read.settings) as metadata:
        topics = selected_topics(metadata, read.selection, deadline)
    return spark_schema(_offered(topics, read))


def batch_reader(options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """The reader of a query with this schema: the source's own, or the user's, who leaves out or reorders columns."""
    return BatchReader(parse_options(options), schema)


class BatchReader(DataSourceReader):
    """Plans once, then reads each range in a task. It is pickled, with what `partitions` returned, for the tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """One for each range. Raises typed errors: an unknown column, offsets that are not there, no cluster."""
        from spark_broker.client.retry import Deadline
        from spark_broker.spark.cluster import connected, selected_topics
        from spark_broker.spark.planning import plan_ranges

        options = self._options
        deadline = Deadline.after_ms(options.settings.default_api_timeout_ms)
        with connected(options.settings) as metadata:
            topics = selected_topics(metadata, options.selection, deadline)
            output = output_of(self._schema, _offered(topics, options))
            ranges = plan_ranges(metadata, options, topics, deadline)
        columns = columns_to_fetch(topics[0], output.columns, include_headers=options.include_headers)
        return [InputPartition(_Planned(part, columns)) for part in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range, in order of their offsets. Raises typed errors."""
        # Spark asks for InputPartition(None) when there is nothing to read.
        if partition.value is None:
            return
        invariant(isinstance(partition.value, _Planned), "a task gets what partitions() planned")
        yield from self._read(partition.value)

    def _read(self, planned: _Planned) -> Iterator[pa.RecordBatch]:
        from spark_broker.client.retry import Deadline
        from spark_broker.spark.assemble import assembled
        from spark_broker.spark.cluster import connected
        from spark_broker.spark.range_reader import RangeReader

        options = self._options
        with connected(options.settings) as metadata:
            deadline = Deadline.after_ms(options.settings.default_api_timeout_ms)
            topic = metadata.topic(planned.part.topic, deadline)
            output = output_of(self._schema, _offered([topic], options))
            reader = RangeReader(
                metadata,
                planned.part,
                options.settings,
                planned.columns,
                fail_on_data_loss=options.fail_on_data_loss,
            )
            for batches in reader.batches():
                yield from assembled(batches, output)


def _offered(topics: Sequence[TopicView], options: ReadOptions) -> tuple[Column, ...]:
    """The columns of the read before the user's `.schema(...)`: the topics' (their schemas are equal), or `columns`."""
    columns = columns_of(topics[0], include_headers=options.include_headers)
    return columns if options.columns is None else by_name(columns, options.columns, "columns")
