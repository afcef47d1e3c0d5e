"""The reads of the data source: their schema, and the plan of a batch, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from spark_broker.quiet_end import end_in_silence
from spark_broker.spark.option_table import Query
from spark_broker.spark.options import ReadOptions, parse_options
from spark_broker.spark.planned_topic import planned_topic
from spark_broker.spark.range_rows import ranges_schema
from spark_broker.spark.refusals import invalid_option
from spark_broker.spark.spark_schema import spark_schema
from spark_broker.spark.stream import StreamReader
from spark_broker.spark.task import offered, planned, read_task
from spark_broker.spark.user_errors import message_alone


@message_alone()
def read_schema(options: Mapping[str, str]) -> StructType:
    """The DataFrame's schema, from the cluster's metadata. Raises typed errors of options and cluster."""
    from spark_broker.client.retry import Deadline
    from spark_broker.spark.cluster import connected, selected_topics

    end_in_silence()
    read = parse_options(options, Query.EITHER)
    if read.ranges:
        return ranges_schema()
    deadline = Deadline.after_ms(read.settings.default_api_timeout_ms)
    with connected(read.settings) as metadata:
        topics = selected_topics(metadata, read.selection, deadline)
    return spark_schema(offered(topics[0], read))


@message_alone()
def batch_reader(options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """The reader of a query with this schema. A user's own schema may leave out or reorder columns."""
    end_in_silence()
    read = parse_options(options)
    if read.ranges:
        raise invalid_option("ranges = true is for streams: a batch query reads records")
    return BatchReader(read, schema)


def stream_reader(options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """The reader of a streaming query with this schema, in the same way."""
    # The traceback stays here. Spark 4.2 fails on an error here (UnboundLocalError), and only the traceback names the
    # error.
    end_in_silence()
    return StreamReader(parse_options(options, Query.STREAM), schema)


class BatchReader(DataSourceReader):
    """Plans once, then reads each range in a task. It is pickled for the tasks, with the result of `partitions`."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @message_alone()
    def partitions(self) -> Sequence[InputPartition]:
        """What each task reads. Raises typed errors: an unknown column, offsets that do not exist, no cluster."""
        from spark_broker.client.retry import Deadline
        from spark_broker.spark.cluster import connected, selected_topics
        from spark_broker.spark.planning import plan_tasks, with_others

        options = self._options
        deadline = Deadline.after_ms(options.settings.default_api_timeout_ms)
        with connected(options.settings) as metadata:
            topics = selected_topics(metadata, options.selection, deadline)
            if options.topic_id:
                topics = [planned_topic(metadata, topics[0].name, options.topic_id, deadline)]
                options = with_others(options, topics[0])
            tasks = plan_tasks(metadata, options, topics, deadline)
            return planned(tasks, topics, options, self._schema, metadata.view)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, of each range in order of their offsets. Raises typed errors."""
        return read_task(self._options, self._schema, partition)
