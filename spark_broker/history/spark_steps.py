"""Carries out the steps of a try with Spark, Delta and the cluster."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_broker.client.cluster_view import TIERER, TopicView
from spark_broker.errors import StaleMetadataError
from spark_broker.history.attempt import confirmation
from spark_broker.history.plan import TableCommit, TieringRange
from spark_broker.history.steps import (
    AppendRecords,
    CompareWithLogs,
    Confirm,
    CutTable,
    DeleteRows,
    HistoryFound,
    ListLogs,
    RaiseLogStarts,
    ReadClock,
    ReadRecords,
    ReadTable,
    SaveRefused,
    Step,
)
from spark_broker.history.table import HistoryTable, failures
from spark_broker.protocol.messages import ListedOffset, Message, RaiseLogStartsRequest, ReportTieringRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

FILE_BYTES = 256 * 1024 * 1024
"""At most so many stored bytes go into one file. Parquet makes of them between 64 and 512 MB, for most data."""

PARALLEL_FILE_BYTES = 96 * 1024 * 1024
"""Files may be as small as this, so that every core writes as many of them."""


@dataclass(frozen=True)
class Target:
    """The topic as one try sees it, and under which controller."""

    topic: TopicView
    cluster_id: str
    controller_epoch: int

    @property
    def app_id(self) -> str:
        return f"{TIERER}{self.cluster_id}/{self.topic.topic_id}"


class SparkSteps:
    """For one try. `list_logs` asks the leaders of all partitions, `tell` the controller."""

    def __init__(
        self,
        spark: SparkSession,
        target: Target,
        bootstrap_servers: Sequence[str],
        list_logs: Callable[[TopicView, Sequence[int]], list[ListedOffset]],
        tell: Callable[[Message], None],
    ) -> None:
        self._spark = spark
        self._target = target
        self._topic = target.topic
        self._table = HistoryTable(spark, target.topic.settings.delta_path, target.app_id)
        self._bootstrap_servers = bootstrap_servers
        self._list_logs = list_logs
        self._tell = tell
        self._records: DataFrame | None = None  # for the next append

    def carry_out(self, step: Step[Any]) -> None:
        """Do what the step says, and set its answer. Raises ConflictError, TieringStoppedError, and what the cluster
        answers.
        """
        match step:
            case ReadTable():
                step.answer = self._table.snapshot(step.recorded, self._topic.why_not_its_columns)
            case ListLogs():
                step.answer = self._list_logs(self._topic, step.ends)
            case CompareWithLogs():
                frame = self._frame(step.in_logs, step.size_bytes) if step.in_logs else None
                step.answer = self._table.departures(step.ranges, frame)
            case CutTable():
                cut = "%s: an unclean election has cut records that are in the table: its rows from offsets %s on go"
                logger.warning(cut, self._topic.name, step.offsets)
                step.answer = self._table.cut(step.offsets, step.commit)
            case ReadRecords():
                step.answer = self._read(step)
            case AppendRecords() if self._records is not None:
                step.answer = self._table.append(self._records, step.commit)
            case SaveRefused():
                self._save_refused(step.ranges, step.commit)
            case Confirm():
                self.confirm(step)
            case HistoryFound():
                stopped = "" if self._topic.history is None else self._topic.history.stopped
                self._tell(ReportTieringRequest(self._topic.topic_id, stopped, found=True))
            case DeleteRows():
                self._table.delete_before(step.before)
            case RaiseLogStarts():
                self._tell(RaiseLogStartsRequest(self._topic.topic_id, list(step.starts)))
            case ReadClock():
                step.answer = time.time_ns() // 1_000_000
            case _:
                raise TypeError(f"{step} cannot be carried out here")

    def _read(self, step: ReadRecords) -> int:
        frame, refused = self._frame(step.ranges, step.size_bytes), 0
        if step.table_exists:
            design = self._table.design()
            fitted = self._table.fitted(frame, design, self._topic.settings.delta_type_widening)
            frame, refused = self._table.judged(fitted, design)
        self._records = frame
        return refused

    def _save_refused(self, ranges: Sequence[TieringRange], commit: TableCommit) -> None:
        frame = self._frame(ranges, sum(commit.marks[-1].sizes))
        self._table.quarantine(frame, self._table.design(), commit, self._topic.schema.names)
        logger.warning("the table of %s has refused %d records so far", self._topic.name, commit.quarantined)

    def confirm(self, step: Confirm) -> None:
        """Let the controller record the history. Brokers may delete their copies then."""
        self._table.make_lasting()
        self._tell(confirmation(self._topic, self._target.controller_epoch, step))

    def _frame(self, ranges: Sequence[TieringRange], size_bytes: int) -> DataFrame:
        """The records of the ranges with the table's columns, in as many parts as there are to be files."""
        topic = self._topic
        files = file_count(size_bytes, self._spark.sparkContext.defaultParallelism)
        bounds = [{str(r.partition): r.start for r in ranges}, {str(r.partition): r.end for r in ranges}]
        starts, ends = (json.dumps({topic.name: offsets}) for offsets in bounds)
        options = {
            "bootstrap.servers": ",".join(self._bootstrap_servers),
            "assign": json.dumps({topic.name: [r.partition for r in ranges]}),
            "startingOffsets": starts,
            "endingOffsets": ends,
            "isolation.level": "read_committed",
            "includeHeaders": "true",
            "includeLeaderEpoch": "true",
            "minPartitions": str(files),
            "topicId": topic.topic_id,
        }
        with failures(f"the records of {topic.name} cannot be read"):
            frame = self._spark.read.format("spark_broker").options(**options).load()
            return with_table_columns(frame, topic).coalesce(files)


def file_count(size_bytes: int, cores: int) -> int:
    """How many files to make of so many stored bytes: as many for each core, unless they would be small."""
    fewest = max(1, -(-size_bytes // FILE_BYTES))
    even = -(-fewest // cores) * cores
    return max(fewest, min(even, size_bytes // PARALLEL_FILE_BYTES))


def with_table_columns(frame: DataFrame, topic: TopicView) -> DataFrame:
    """The topic's own columns, then `_partition`, `_offset`, `_timestamp` and `_leader_epoch`.

    Raises StaleMetadataError where the frame lacks columns: a broker that lags behind has described the topic to Spark.
    Without that, they would be null in the table for good.
    """
    from pyspark.sql.functions import col

    missing = [] if topic.has_default_schema else [name for name in topic.schema.names if name not in frame.columns]
    if missing:
        raise StaleMetadataError(f"a broker does not know yet that {topic.name} has {', '.join(missing)}")
    if not topic.has_default_schema:
        return frame.drop("_topic")
    log = {"partition": "_partition", "offset": "_offset", "timestamp": "_timestamp", "leaderEpoch": "_leader_epoch"}
    return frame.select(*topic.schema.names, *(col(name).alias(alias) for name, alias in log.items()))
