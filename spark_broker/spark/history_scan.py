"""A topic with a history as one DataFrame: Delta's own scan of the table, and the rest from the log.

The scan of the table is Spark's and Delta's: they prune columns, and skip files by the statistics.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.delta_rows import unreadable
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import all_at, lookup_offsets
from spark_broker.client.retry import Deadline
from spark_broker.errors import MissingDependencyError, OffsetOutOfRangeError
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import ListedOffset
from spark_broker.spark.bounds import LATEST_OFFSET, Bound, Earliest, Latest
from spark_broker.spark.cluster import connected
from spark_broker.spark.columns import CREATE_TIME
from spark_broker.spark.delta_session import check_delta, delta_snapshot, transactions_of, why_incomplete
from spark_broker.spark.history_split import HistoryRange, Split, Wanted, split
from spark_broker.spark.option_table import REFUSED_FROM
from spark_broker.spark.options import ReadOptions, parse_options
from spark_broker.spark.planned_topic import TOPIC_GONE, is_gone, planned_topic
from spark_broker.spark.planning import check_named, newest, resolve_bound
from spark_broker.spark.spark_failures import root_cause, said
from spark_broker.times import LATEST

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_log = logging.getLogger(__name__)

_BOUNDS = (
    *("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "startingOffsets"),
    *("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets"),
    *("subscribe", "subscribePattern", "assign", "path"),
)
"""The options that say what is read. The read of the log gets others in their place."""

_LOG_COLUMNS = {
    "partition": "_partition",
    "offset": "_offset",
    "timestamp": "_timestamp",
    "leaderepoch": "_leader_epoch",
}
"""Columns of Kafka's record that are called otherwise in the table."""


def ranges_with_history(
    spark: SparkSession,
    topic: str,
    topic_id: str | None,
    reach: Mapping[int, tuple[int, int]],
    options: Mapping[str, str],
) -> DataFrame | None:
    """The records from one offset up to another (exclusive) of each partition: what the topic's table has by Delta's
    own scan, the rest from the log. `topic_id` None: there is no range.

    None: the topic does not exist any more, and failOnDataLoss is false. `options`: of a read, without those that say
    what is read. Raises InconsistentTopicIdError or UnknownTopicOrPartitionError if the topic is gone, and the typed
    errors of the source.
    """
    read = parse_options({**options, "path": topic})
    deadline = Deadline.after_ms(read.settings.default_api_timeout_ms)
    with connected(read.settings) as metadata:
        metadata.use([topic])
        try:
            view = planned_topic(metadata, topic, topic_id, deadline)
        except TOPIC_GONE as error:
            if read.fail_on_data_loss or not is_gone(metadata, topic, topic_id, deadline):
                raise
            _log.warning("failOnDataLoss=false, passing over a batch of %s: %s", topic, error.message)
            return None
        if not reach:
            return spark.read.format("spark_broker").options(**options).load(topic).limit(0)
        scan = _HistoryScan(spark, metadata, view, read, deadline)
        return scan.joined(scan.planned(reach), lambda: _of_log(spark, view, options, reach), options)


def _has_delta(spark: SparkSession) -> bool:
    try:
        check_delta(spark)
    except MissingDependencyError:
        return False
    return True


def with_history(spark: SparkSession, log: DataFrame, topic: str, options: Mapping[str, str]) -> DataFrame:
    """The read `log` of the topic, with Delta's own scan of what the topic's table has.

    Without a history, or in a session without Delta, it is `log` itself. `options`: those of the read. Raises the typed
    errors of the source.
    """
    read = parse_options({**options, "path": topic})
    deadline = Deadline.after_ms(read.settings.default_api_timeout_ms)
    with connected(read.settings) as metadata:
        metadata.use([topic])
        view = metadata.topic(topic, deadline)
        scan = _HistoryScan(spark, metadata, view, read, deadline)
        if not scan.history:
            return log
        return scan.joined(scan.wanted(), lambda: log, options, others=scan.others)


@dataclass
class _HistoryScan:
    """What a read needs to know of the topic's history and of its log."""

    spark: SparkSession
    metadata: ClusterMetadata
    topic: TopicView
    read: ReadOptions
    deadline: Deadline

    @property
    def history(self) -> dict[int, HistoryRange]:
        """The table's offsets of each partition that has some."""
        return self._recorded(self.topic)

    def _recorded(self, recorded: TopicView) -> dict[int, HistoryRange]:
        """The same, without what was deleted meanwhile. `recorded`: the topic as the controller has it."""
        # The table may be open already, so it ends where it was known to end.
        ranges = {}
        for state in self.topic.partitions:
            begins, end = self.topic.history_of(state.partition)
            start = max(begins, recorded.history_of(state.partition)[0])
            if start < end:
                ranges[state.partition] = HistoryRange(start, end)
        return ranges

    @property
    def others(self) -> str:
        """What the read does with partitions that come before it is planned (`otherPartitions`)."""
        if isinstance(self.read.start, Earliest) and isinstance(self.read.end, Latest):
            return "all"
        return f"{REFUSED_FROM}{len(self.topic.partitions)}"

    def joined(
        self,
        wanted: Mapping[int, Wanted],
        by_source: Callable[[], DataFrame],
        options: Mapping[str, str],
        *,
        others: str = "none",
    ) -> DataFrame:
        """What is wanted, from table and log. `by_source`: the read of all of it by the source, which reads a table
        through deltalake. `options`: of a read. `others`: its `otherPartitions`.

        Raises OffsetOutOfRangeError for what was deleted although it is wanted (unless failOnDataLoss is false).
        """
        if not self._split(wanted, self.topic).needs_table or not _has_delta(self.spark):
            return by_source()
        table = self._table()
        # The controller records a deletion before rows leave the table. Delta may have taken long to open it.
        deadline = Deadline.after_ms(self.read.settings.default_api_timeout_ms)
        parts = self._split(wanted, self.metadata.as_recorded(self.topic, deadline))
        if not parts.needs_table:
            return by_source()
        self._report(parts.lost)
        if not parts.log:
            return self._rows(table, parts, by_source())
        rest = _of_log(self.spark, self.topic, options, parts.log, others=others)
        return self._rows(table, parts, rest).unionByName(rest)

    def _split(self, wanted: Mapping[int, Wanted], recorded: TopicView) -> Split:
        return split(wanted, self._recorded(recorded), has_refused=self.topic.has_refused)

    def _report(self, lost: Mapping[int, HistoryRange]) -> None:
        for number, part in lost.items():
            what = f"{self.topic.name}-{number}: records {part.start} to {part.end} (exclusive) were deleted"
            if self.read.fail_on_data_loss:
                raise OffsetOutOfRangeError(f"{what}; with failOnDataLoss=false the read has what is left")
            _log.warning("failOnDataLoss=false, going on with what there is: %s", what)

    def wanted(self) -> dict[int, Wanted]:
        """The offsets that the options ask for. The history counts as part of the log."""
        logs = self._logs(state.partition for state in self.topic.partitions)
        starts = self._resolved(self.read.start, logs)
        ends = None if isinstance(self.read.end, Latest) else self._resolved(self.read.end, logs)
        return {
            tp.partition: Wanted(
                start=starts[tp],
                end=LATEST_OFFSET if ends is None else ends[tp],
                log_start=logs[tp].log_start_offset,
                from_earliest=isinstance(self.read.start, Earliest),
            )
            for tp in logs
        }

    def planned(self, reach: Mapping[int, tuple[int, int]]) -> dict[int, Wanted]:
        """These offsets, from one up to another (exclusive). Where the logs begin is asked only if it counts."""
        logs = self._logs(reach) if self.topic.has_refused else {}
        log_starts = {tp.partition: info.log_start_offset for tp, info in logs.items()}
        return {
            number: Wanted(start, end, log_starts.get(number, 0), from_earliest=False)
            for number, (start, end) in reach.items()
        }

    def _logs(self, numbers: Iterable[int]) -> dict[TopicPartition, ListedOffset]:
        """The logs of these partitions. What is not in them any more is in the table, and `topic` shows it then."""
        moments = all_at([TopicPartition(self.topic.name, number) for number in numbers], LATEST)
        read_committed = self.read.settings.read_committed
        logs = lookup_offsets(self.metadata, moments, self.deadline, read_committed=read_committed)
        (self.topic,) = newest(self.metadata, [self.topic])
        return logs

    def _resolved(self, bound: Bound, logs: Mapping[TopicPartition, ListedOffset]) -> dict[TopicPartition, int]:
        check_named(bound, list(logs))
        return resolve_bound(self.metadata, self.read, bound, logs, [self.topic])

    def _table(self) -> DataFrame:
        """The table as it is now, also for later queries of the frame. Raises InvalidDataError where it cannot be read,
        or is not the topic's history.
        """
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        path = self.topic.settings.delta_path
        try:
            snapshot = delta_snapshot(self.spark, path)
            transaction = transactions_of(snapshot).get(self.topic.tierer)
            table_id, version = str(snapshot.metadata().id()), int(snapshot.version())
            why = why_incomplete(snapshot) or self.topic.why_not_its_table(table_id, version, transaction)
            # Delta would scan the newest version in each query. That may lack rows that were deleted since.
            frame = self.spark.read.format("delta").option("versionAsOf", snapshot.version()).load(path)
            why = why or self.topic.why_not_its_columns(table_id, frame.columns)
        except (Py4JJavaError, PySparkException) as error:
            raise unreadable(self.topic, f"{said(error)}{root_cause(error)}") from error
        if why:
            raise unreadable(self.topic, why)
        return frame

    def _rows(self, frame: DataFrame, parts: Split, log: DataFrame) -> DataFrame:
        """The rows of the table that the read takes, with the columns of the read of the log."""
        from pyspark.sql.functions import col, lit

        names = {name.lower(): name for name in frame.columns}
        columns: list[Column] = []
        for field in log.schema:
            name = field.name.lower()
            if self.topic.has_default_schema:
                name = _LOG_COLUMNS.get(name, name)
            value: Any = None
            if field.name == ("topic" if self.topic.has_default_schema else "_topic"):
                value = lit(self.topic.name)
            elif self.topic.has_default_schema and field.name == "timestampType":
                value = lit(CREATE_TIME)
            elif name in names:
                value = col("`" + names[name].replace("`", "``") + "`")
            columns.append((lit(None) if value is None else value).cast(field.dataType).alias(field.name))
        return frame.where(_within(parts.table)).select(*columns)


def _of_log(
    spark: SparkSession,
    topic: TopicView,
    options: Mapping[str, str],
    reach: Mapping[int, tuple[int, int]],
    *,
    others: str = "none",
) -> DataFrame:
    """What the log has of these partitions, from one offset up to another (exclusive; -1: the latest)."""
    kept = {name: value for name, value in options.items() if name.lower() not in {each.lower() for each in _BOUNDS}}
    starts, ends = (json.dumps({topic.name: {str(p): each[side] for p, each in reach.items()}}) for side in (0, 1))
    assign = json.dumps({topic.name: list(reach)})
    reader = spark.read.format("spark_broker").options(**kept).options(topicId=topic.topic_id, otherPartitions=others)
    return reader.options(assign=assign, startingOffsets=starts, endingOffsets=ends).load()


def _within(ranges: Mapping[int, HistoryRange]) -> Column:
    """A condition for rows of these offsets. The bounds over all partitions come first: they skip files."""
    from pyspark.sql.functions import col

    starts = {partition: part.start for partition, part in ranges.items()}
    ends = {partition: part.end for partition, part in ranges.items()}
    partition, offset = col("_partition"), col("_offset")
    overall = partition.between(min(ranges), max(ranges)) & offset.between(min(starts.values()), max(ends.values()) - 1)
    return overall & (offset >= _by_partition(starts)) & (offset < _by_partition(ends))


def _by_partition(values: Mapping[int, int]) -> Column:
    """The value of a row's partition; null where the partition has none, so that no comparison holds."""
    from pyspark.sql.functions import array, col, get, lit

    each = [lit(values.get(partition)).cast("bigint") for partition in range(max(values) + 1)]
    return get(array(*each), col("_partition"))
