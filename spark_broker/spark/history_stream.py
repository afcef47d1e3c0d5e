"""Catching up with a topic that has a history: a micro-batch is ranges of offsets, which Delta and the log then read.

Rows of the stream are ranges and no records, so Python sees none of the records that Delta scans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from spark_broker.client import given
from spark_broker.errors import InvalidDataError, UnsupportedSparkError
from spark_broker.setting_values import listed, to_text
from spark_broker.spark.frames import FORMAT, is_remote, servers_of
from spark_broker.spark.refusals import invalid_option

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

EachBatch = Callable[["DataFrame", int], object]

_OF_THE_STREAM = ("startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp", "group")
_OF_LIMITS = ("maxoffsetspertrigger", "minoffsetspertrigger", "maxbytespertrigger", "maxtriggerdelay")


def stream_history(
    spark: SparkSession,
    topic: str,
    each_batch: EachBatch,
    columns: Sequence[str] | None = None,
    *,
    bootstrap_servers: str | None = None,
    **options: str,
) -> DataStreamWriter:
    """A stream of the topic that has `each_batch(frame, number)` called for each micro-batch, as `foreachBatch` has.

    What is in the topic's Delta table, Delta itself scans; the rest comes from the log. It begins at the earliest
    record, unless `startingOffsets` or its like says otherwise. Give `maxOffsetsPerTrigger`, a `checkpointLocation`
    and a trigger, and start it. A micro-batch that is repeated has the same records. The other arguments are those of
    `read_topic`. With failOnDataLoss=false, a micro-batch of a topic that does not exist any more is passed over.
    Raises InvalidConfigError without an address, and UnsupportedSparkError in a session of Spark Connect.
    """
    topic = given.topic_name(topic)
    if not callable(each_batch):
        raise InvalidDataError(
            f"each_batch is {type(each_batch).__name__}; give a function of a DataFrame and a number"
        )
    servers = servers_of(spark, bootstrap_servers)
    if is_remote(spark):
        raise UnsupportedSparkError(
            "stream_history calls a function of this process for each micro-batch, and Spark Connect calls none",
            hint="Use read_topic(..., stream=True), or a classic session.",
        )
    texts = {name: given.text(to_text(value), name) for name, value in options.items()}
    refused = next((name for name in texts if name.lower() in ("ranges", "columns")), None)
    if refused is not None:
        raise invalid_option(f"{refused} is set by stream_history")
    if not any(name.lower() in _OF_THE_STREAM[:3] for name in texts):
        texts["startingOffsets"] = "earliest"
    stream = spark.readStream.format(FORMAT).options(**texts, **{"bootstrap.servers": servers, "ranges": "true"})
    of_read = {name: text for name, text in texts.items() if name.lower() not in (*_OF_THE_STREAM, *_OF_LIMITS)}
    chosen = {} if columns is None else {"columns": listed(given.texts(columns, "columns"))}
    read = {**of_read, **chosen, "bootstrap.servers": servers}

    def run(ranges: DataFrame, number: int) -> None:
        frame = _read(ranges.sparkSession, topic, ranges.collect(), read)
        if frame is not None:
            each_batch(frame, number)

    return stream.load(topic).writeStream.foreachBatch(run)


def _read(spark: SparkSession, topic: str, ranges: Iterable[Any], options: dict[str, str]) -> DataFrame | None:
    """The records of these ranges (rows of `range_rows.COLUMNS`). None: the topic is gone (failOnDataLoss=false)."""
    from spark_broker.spark.history_scan import ranges_with_history

    reach = {row.partition: (row.startOffset, row.endOffset) for row in ranges}
    topic_ids = {row.topicId for row in ranges}
    return ranges_with_history(spark, topic, topic_ids.pop() if topic_ids else None, reach, options)
