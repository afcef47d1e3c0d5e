"""Moves what is sealed of a topic into its Delta table: every offset once, whoever else tiers, whenever a try ends.

A try reads the table's newest transaction v and its end offsets from one snapshot, and commits transaction v + 1. Delta
takes one commit of a transaction. So of two tries that began at v, one commits. The commit is read back, and the
controller records it. A try that ends before that leaves either nothing, or a commit that the next try finds.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import Reach, at_time, lookup_offsets
from spark_broker.client.retry import Deadline, call_with_retries
from spark_broker.config import AdminConfig
from spark_broker.errors import (
    ClosedError,
    HistoryConflictError,
    InvalidConfigError,
    MissingDependencyError,
    SparkBrokerError,
    StaleControllerEpochError,
    TieringStoppedError,
    UnknownTopicOrPartitionError,
    UnsupportedSparkError,
)
from spark_broker.history.plan import (
    HistoryState,
    PartitionLog,
    TableCommit,
    TieringRange,
    after,
    cut_back,
    next_ranges,
    recover,
    unrecorded,
)
from spark_broker.history.retention import HistoryMark, HistoryRetention, expired_before, with_mark
from spark_broker.history.table import APP_PREFIX, ConflictError, HistoryTable, Written
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import (
    LATEST_TIMESTAMP_MS,
    ConfirmHistoryRequest,
    ListedOffset,
    Message,
    RaiseLogStartsRequest,
    ReportTieringRequest,
)
from spark_broker.spark.delta_session import check_delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

TRIES = 5
"""How often a run starts over because somebody else changed the table or the cluster."""

FILE_BYTES = 256 * 1024 * 1024
"""At most so many stored bytes go into one file. Parquet makes of them between 64 and 512 MB, for most data."""

PARALLEL_FILE_BYTES = 96 * 1024 * 1024
"""Files may be as small as this, so that every core writes as many of them."""


@dataclass(frozen=True)
class TieredTopic:
    """What a run has done. `table_version` is None when there was nothing to write. `ends`: of the history now.

    `log_starts`: the topic's records before these offsets are deleted, by partition. `quarantined`: how many records of
    this run the table refused; they are in its dead-letter table.
    """

    topic: str
    path: str
    table_version: int | None
    records: int
    files: int
    size_bytes: int
    ends: tuple[int, ...]
    log_starts: tuple[int, ...] = ()
    quarantined: int = 0


@dataclass(frozen=True)
class _Target:
    """The topic as one try sees it, and under which controller."""

    topic: TopicView
    cluster_id: str
    controller_epoch: int

    @property
    def app_id(self) -> str:
        return f"{APP_PREFIX}{self.cluster_id}/{self.topic.topic_id}"


def tier_topic(
    spark: SparkSession, topic: str, bootstrap_servers: str, *, include_active_segments: bool = False
) -> TieredTopic:
    """Append to the topic's Delta table (`delta.path`) what is sealed and committed, in one commit.

    `include_active_segments`: all that is committed. Raises InvalidConfigError for a topic without `delta.path`,
    UnknownTopicOrPartitionError, UnsupportedSparkError for Spark Connect, MissingDependencyError where the session has
    no Delta, and TieringStoppedError where the table cannot be used. The topic's description shows that reason until a
    run succeeds.
    """
    if not isinstance(spark, SparkSession):
        raise UnsupportedSparkError(f"{type(spark).__module__}: tiering needs a session with a JVM, not Spark Connect")
    config = AdminConfig.parse({"bootstrap.servers": bootstrap_servers})
    metadata = ClusterMetadata.connect(config)
    try:
        tierer = Tierer(spark, metadata, config, include_active_segments=include_active_segments)
        return tierer.run(topic)
    finally:
        metadata.close()


class Tierer:
    """One run, over connections of its own."""

    def __init__(
        self, spark: SparkSession, metadata: ClusterMetadata, config: AdminConfig, *, include_active_segments: bool
    ) -> None:
        self._spark = own_session(spark)
        self._metadata = metadata
        self._config = config
        self._include_active_segments = include_active_segments

    def run(self, name: str) -> TieredTopic:
        """Try until a try succeeds; see `tier_topic`."""
        self._metadata.use([name])
        try:
            check_delta(self._spark)
        except MissingDependencyError as error:
            self._report(self._target(name), error.message)
            raise
        conflict: Exception | None = None
        for number in range(TRIES):
            if conflict is not None and self._metadata.closing.wait(self._metadata.backoff.wait_s(number)):
                raise ClosedError("the client was closed during the call")
            target = self._target(name)
            try:
                tiered = self._try(target)
            except (ConflictError, HistoryConflictError, StaleControllerEpochError) as error:
                logger.info("tiering of %s starts over: %s", name, error)
                conflict = error
            except TieringStoppedError as error:
                self._report(target, error.message)
                raise
            else:
                self._report(target, "")
                return tiered
        raise TieringStoppedError(f"gave up after {TRIES} tries, the last one: {conflict}")

    def _report(self, target: _Target, stopped: str) -> None:
        if not self._metadata.closing.is_set():
            report_tiering(self._metadata, self._config, target.topic.name, target.topic.topic_id, stopped)

    def _target(self, name: str) -> _Target:
        deadline = self._deadline()
        view = self._metadata.refresh(deadline)
        topic = self._metadata.topic(name, deadline)
        if topic.internal:
            raise InvalidConfigError(f"{name} is an internal topic: it has no history")
        if not topic.settings.delta_path:
            raise InvalidConfigError(f"topic {name!r} has no delta.path: set it to the URL of a Delta table")
        return _Target(topic, view.cluster_id, view.controller_epoch)

    def _try(self, target: _Target) -> TieredTopic:
        topic = target.topic
        recorded = _recorded(topic)
        table = HistoryTable(self._spark, topic.settings.delta_path, target.app_id)
        snapshot = table.snapshot(recorded.version)
        history = recover(recorded, snapshot)
        marks = () if snapshot is None else snapshot.marks
        if snapshot is not None and history.version > recorded.version:
            history, marks = self._recovered(target, table, recorded, snapshot.commits[history.version], history)
        deleted = self._delete(table, history, topic.log_starts)
        listed = self._listed(topic, history)
        ranges = next_ranges(history, [self._log(info) for info in listed])
        if not ranges:
            log_starts = self._expire(target, table, history, marks)
            return TieredTopic(topic.name, topic.settings.delta_path, None, 0, 0, 0, history.ends, log_starts)
        sizes = {r.partition: _size(listed[r.partition], r) for r in ranges}
        frame = self._frame(topic, ranges, sum(sizes.values()))
        refused = 0
        if snapshot is not None:
            design = table.design()
            frame, refused = table.judged(table.fitted(frame, design, topic.settings.delta_type_widening), design)
        partitions = len(topic.partitions)
        starts, ends = after(history, ranges, partitions, deleted)
        mark = HistoryMark(time.time_ns() // 1_000_000, tuple(ends), tuple(sizes.get(p, 0) for p in range(partitions)))
        marks = with_mark(marks, mark)
        commit = TableCommit(
            table_version=-1,
            version=history.version + 1,
            attempt=uuid.uuid4().hex,
            starts=tuple(starts),
            ends=tuple(ends),
            marks=marks,
            quarantined=history.quarantined + refused,
            refused=tuple(ranges) if refused else (),
        )
        written = table.append(frame, commit)
        self._settle(target, table, written.commit, _state(written))
        log_starts = self._expire(target, table, _state(written), marks)
        return TieredTopic(
            topic=topic.name,
            path=topic.settings.delta_path,
            table_version=written.commit.table_version,
            records=written.rows,
            files=written.files,
            size_bytes=written.size_bytes,
            ends=commit.ends,
            log_starts=log_starts,
            quarantined=refused,
        )

    def _recovered(
        self, target: _Target, table: HistoryTable, recorded: HistoryState, commit: TableCommit, history: HistoryState
    ) -> tuple[HistoryState, tuple[HistoryMark, ...]]:
        """Let the controller record a commit that it does not know, as far as the log has what is in it.

        An unclean election since may have cut the log. What the table has beyond is deleted: others have these offsets.
        """
        offsets = self._departures(target, table, recorded, commit)
        if not offsets:
            self._settle(target, table, commit, history)
            return history, commit.marks
        logger.warning(
            "%s: an unclean election has cut records that are in the table: its rows from offsets %s on are deleted",
            *(target.topic.name, offsets),
        )
        kept = [replace(each, end=min(each.end, offsets.get(each.partition, each.end))) for each in commit.refused]
        self._save_refused(
            target, table, replace(commit, refused=tuple(each for each in kept if each.start < each.end))
        )
        written = table.cut(offsets, cut_back(commit, offsets, uuid.uuid4().hex))
        self._confirm(target, _state(written))
        return _state(written), written.commit.marks

    def _departures(
        self, target: _Target, table: HistoryTable, recorded: HistoryState, commit: TableCommit
    ) -> dict[int, int]:
        """From which offset on the commit has other records than the log, by partition."""
        listed = self._listed(target.topic, recorded)
        ranges = unrecorded(recorded, commit, [self._log(info) for info in listed])
        in_log = [replace(each, end=min(each.end, listed[each.partition].offset)) for each in ranges]
        in_log = [each for each in in_log if each.start < each.end]
        frame = self._frame(target.topic, in_log, sum(commit.marks[-1].sizes)) if in_log else None
        return table.departures(ranges, frame) if ranges else {}

    def _settle(self, target: _Target, table: HistoryTable, commit: TableCommit, history: HistoryState) -> None:
        """Once a commit is in the table: save the records that the table refused, and let the controller record it.

        The controller comes last: brokers keep the records until then.
        """
        self._save_refused(target, table, commit)
        self._confirm(target, history)

    def _save_refused(self, target: _Target, table: HistoryTable, commit: TableCommit) -> None:
        if commit.refused:
            listed = self._listed(target.topic, HistoryState())
            starts = [(each, max(each.start, listed[each.partition].log_start_offset)) for each in commit.refused]
            ranges = [TieringRange(each.partition, start, each.end) for each, start in starts if start < each.end]
            if ranges:
                frame = self._frame(target.topic, ranges, sum(commit.marks[-1].sizes))
                table.quarantine(frame, table.design(), commit, target.topic.schema.names)
            logger.warning("the table of %s has refused %d records so far", target.topic.name, commit.quarantined)

    def _delete(self, table: HistoryTable, history: HistoryState, log_starts: Sequence[int]) -> tuple[int, ...]:
        """Delete rows of records that are deleted already. Returns before which offsets the table has none now."""
        deleted = tuple(min(start, end) for start, end in zip(log_starts, history.ends, strict=False))
        due = {p: start for p, start in enumerate(deleted) if start > history.starts[p]}
        if due:
            table.delete_before(due)
        return deleted

    def _expire(
        self, target: _Target, table: HistoryTable, history: HistoryState, marks: Sequence[HistoryMark]
    ) -> tuple[int, ...]:
        """Apply the topic's retention. First the controller, so that readers get no row that is about to go."""
        topic = target.topic
        retention = HistoryRetention.of_topic(topic.config)
        now_ms = time.time_ns() // 1_000_000
        log_starts = expired_before(marks, retention, now_ms, topic.log_starts, len(topic.partitions))
        raised = [(p, start) for p, start in enumerate(log_starts) if start > topic.deleted_before(p)]
        if raised:
            self._tell(RaiseLogStartsRequest(topic.topic_id, raised))
            self._delete(table, history, log_starts)
        return log_starts

    def _listed(self, topic: TopicView, history: HistoryState) -> list[ListedOffset]:
        """The log of every partition: start, sealed end, last stable offset, and its size from the history's end on."""
        partitions = [TopicPartition(topic.name, state.partition) for state in topic.partitions]
        ends = [*history.ends, *[0] * (len(partitions) - len(history.ends))]
        reaches = {tp: Reach(end, max_bytes=1) for tp, end in zip(partitions, ends, strict=False)}
        wanted = at_time(partitions, LATEST_TIMESTAMP_MS)
        listed = lookup_offsets(self._metadata, wanted, self._deadline(), read_committed=True, reaches=reaches)
        for tp, info in listed.items():
            if info.topic_id != topic.topic_id:
                raise UnknownTopicOrPartitionError(f"{tp} was deleted and created again meanwhile")
        return [listed[tp] for tp in partitions]

    def _log(self, info: ListedOffset) -> PartitionLog:
        return PartitionLog(info.log_start_offset, info.offset if self._include_active_segments else info.sealed_offset)

    def _frame(self, topic: TopicView, ranges: Sequence[TieringRange], size_bytes: int) -> DataFrame:
        """The records of the ranges with the table's columns, in as many parts as there are to be files."""
        files = file_count(size_bytes, self._spark.sparkContext.defaultParallelism)
        bounds = [{str(r.partition): r.start for r in ranges}, {str(r.partition): r.end for r in ranges}]
        starts, ends = (json.dumps({topic.name: offsets}) for offsets in bounds)
        options = {
            "bootstrap.servers": ",".join(self._config.bootstrap_servers),
            "assign": json.dumps({topic.name: [r.partition for r in ranges]}),
            "startingOffsets": starts,
            "endingOffsets": ends,
            "isolation.level": "read_committed",
            "includeHeaders": "true",
            "includeLeaderEpoch": "true",
            "minPartitions": str(files),
        }
        frame = self._spark.read.format("spark_broker").options(**options).load()
        return with_table_columns(frame, topic).coalesce(files)

    def _confirm(self, target: _Target, history: HistoryState) -> None:
        self._tell(
            ConfirmHistoryRequest(
                topic_id=target.topic.topic_id,
                controller_epoch=target.controller_epoch,
                table_id=history.table_id,
                version=history.version,
                table_version=history.table_version,
                starts=list(history.starts),
                ends=list(history.ends),
                quarantined=history.quarantined,
                leader_epochs=[state.leader_epoch for state in target.topic.partitions],
            )
        )

    def _tell(self, request: Message) -> None:
        _tell(self._metadata, self._config, request)

    def _deadline(self) -> Deadline:
        return Deadline.after_ms(self._config.default_api_timeout_ms)


def report_tiering(metadata: ClusterMetadata, config: AdminConfig, topic: str, topic_id: str, stopped: str) -> None:
    """Let the topic's description show why tiering has stopped; empty: it goes on. It counts without that, too."""
    try:
        _tell(metadata, config, ReportTieringRequest(topic_id, stopped[:1000]))
    except SparkBrokerError as error:
        logger.warning("the description of %s does not show how tiering ended: %s", topic, error)


def _tell(metadata: ClusterMetadata, config: AdminConfig, request: Message) -> None:
    """Tell the controller, through any broker. Raises what it answers."""
    deadline = Deadline.after_ms(config.default_api_timeout_ms)
    call_with_retries(
        lambda: metadata.call_any(request, deadline),
        deadline=deadline,
        backoff=metadata.backoff,
        closing=metadata.closing,
    )


def own_session(spark: SparkSession) -> SparkSession:
    """The user's session with its settings, and beside it: what is set here is not set there."""
    own = type(spark)(spark.sparkContext, spark._jsparkSession.cloneSession())
    # Other readers of the table, deltalake for one, take these; Spark's own default is a type of its own.
    own.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    return own


def file_count(size_bytes: int, cores: int) -> int:
    """How many files to make of so many stored bytes: as many for each core, unless they would be small."""
    fewest = max(1, -(-size_bytes // FILE_BYTES))
    even = -(-fewest // cores) * cores
    return max(fewest, min(even, size_bytes // PARALLEL_FILE_BYTES))


def with_table_columns(frame: DataFrame, topic: TopicView) -> DataFrame:
    """The topic's own columns, then `_partition`, `_offset`, `_timestamp` and `_leader_epoch`."""
    from pyspark.sql.functions import col

    if not topic.has_default_schema:
        return frame.drop("_topic")
    log = {"partition": "_partition", "offset": "_offset", "timestamp": "_timestamp", "leaderEpoch": "_leader_epoch"}
    return frame.select(*topic.schema.names, *(col(name).alias(alias) for name, alias in log.items()))


def _recorded(topic: TopicView) -> HistoryState:
    history = topic.history
    if history is None:
        return HistoryState()
    return HistoryState(
        table_id=history.table_id,
        version=history.version,
        table_version=history.table_version,
        starts=tuple(history.starts),
        ends=tuple(history.ends),
        quarantined=history.quarantined,
    )


def _state(written: Written) -> HistoryState:
    commit = written.commit
    return HistoryState(
        written.table_id, commit.version, commit.table_version, commit.starts, commit.ends, commit.quarantined
    )


def _size(info: ListedOffset, tiered: TieringRange) -> int:
    """About how many stored bytes the range has: the leader says how many there are up to the last stable offset."""
    offsets = info.offset - tiered.start
    return max(0, info.size_bytes) * (tiered.end - tiered.start) // max(1, offsets)
