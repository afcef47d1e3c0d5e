"""A topic's Delta table: its snapshot, its commits by our tierers, and an append that happens once."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spark_broker.client.cluster_view import TIERER
from spark_broker.errors import HistoryNotFoundError, TieringStoppedError
from spark_broker.history.dead_letters import accepted, count_refused, judged, letters
from spark_broker.history.design import TableDesign, holds_local_times, quoted, wider_columns
from spark_broker.history.lasting import make_lasting
from spark_broker.history.plan import TableCommit, TableSnapshot, TieringRange, Written
from spark_broker.history.retention import HistoryMark
from spark_broker.history.steps import ConflictError
from spark_broker.model import dead_letters_path
from spark_broker.protocol.schema import LOG_COLUMNS
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.spark.delta_session import delta_snapshot, transactions_of, why_incomplete
from spark_broker.spark.spark_failures import root_cause, said

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
    from pyspark.sql.types import DataType, StructType

logger = logging.getLogger(__name__)

STATISTICS = LOG_COLUMNS
"""The columns that queries skip files by, whatever the topic's columns are."""

TYPE_WIDENING = "delta.enableTypeWidening"

TIMESTAMP_NTZ = "delta.feature.timestampNtz"
"""A table that is made with such a column has this feature. One that gets the column later must be told."""

_MAX_STATISTICS = 32
"""Delta's own default: so many columns have statistics."""

_RACES = (
    "DELTA_CONCURRENT_",
    "DELTA_METADATA_CHANGED",
    "DELTA_PROTOCOL_CHANGED",
    "DELTA_TABLE_NOT_FOUND",
)
"""How Delta's errors begin when somebody else creates, writes or deletes the table. The next try finds out what."""

_CANCELLED = "[SPARK_JOB_CANCELLED]"
"""In what Spark says when somebody has cancelled all jobs of the session, as Ctrl-C in a notebook does. Try again."""

_HISTORY_PAGES = (20, 1000, None)
"""How many of the newest commits are looked through for one of ours. None: all."""


class HistoryTable:
    """The table at `path`, for the topic whose tierers are the application `app_id`."""

    def __init__(self, spark: SparkSession, path: str, app_id: str) -> None:
        self._spark = spark
        self._path = path
        self._app_id = app_id

    def snapshot(self, recorded: int, why_not: Callable[[str, list[str]], str] = lambda *_: "") -> TableSnapshot | None:
        """The newest version, with our commits from this transaction on; None: there is no table.

        `why_not`: why the table of this id, with these columns, is not the topic's. Raises TieringStoppedError where
        the table cannot be read, or is the history of another topic; HistoryNotFoundError, if something is recorded to
        be in it.
        """
        kind = TieringStoppedError if recorded < 0 else HistoryNotFoundError
        with failures(f"the table {self._path} cannot be read", kind):
            # DeltaTable.isDeltaTable may answer from a cache, and not see a table that another process has made since.
            snapshot = self._delta_snapshot()
            if snapshot.version() < 0:
                return None
            why = why_incomplete(snapshot)
            if why:
                raise kind(f"the table {self._path} lacks a commit: {why}. Put it back, from a backup")
            version = self._our_version(snapshot, kind)
            table_id, fields = str(snapshot.metadata().id()), json.loads(snapshot.metadata().schemaString())["fields"]
            why = why_not(table_id, [field["name"] for field in fields])
            if why:
                raise kind(f"the table {self._path} is not the whole history: {why}. Give the column its name again")
            table_version = int(snapshot.version())
            commits = self._commits(recorded - 1, version, table_version) if version >= max(recorded, 0) else {}
            return TableSnapshot(table_id, table_version, version, commits)

    def fitted(self, frame: DataFrame, design: TableDesign, widening: str) -> DataFrame:
        """The rows with what the table demands of each: columns that it is partitioned by, null where the topic lacks
        them and Delta makes no value for them. A column that the table lacks is added to it later.

        `widening`: what to do where a column is wider in the topic (`delta.type.widening`). Raises TieringStoppedError
        where a column of the table has another type, and ConflictError where somebody else writes meanwhile.
        """
        from pyspark.sql.functions import lit

        wider = wider_columns(design, frame.schema)
        if wider:
            self._widen(design, wider, widening)
        if TIMESTAMP_NTZ not in design.properties and holds_local_times(frame.schema) and not design.holds_local_times:
            with failures(f"the table {self._path} cannot get {TIMESTAMP_NTZ}, which a new column needs"):
                self._set_property(TIMESTAMP_NTZ, "supported")
        there = {field.name.lower() for field in frame.schema}
        for name in design.partitioned_by:
            if name.lower() not in there and not design.makes(name):
                frame = frame.withColumn(name, lit(None).cast(design.column(name).dataType))
        return frame

    def design(self) -> TableDesign:
        """The table's columns and rules, as they are now. Raises TieringStoppedError."""
        with failures(f"the table {self._path} cannot be read"):
            metadata = self._delta_snapshot().metadata()
            configuration = metadata.configuration()
            names = self._scala_list(configuration.keys())
            return TableDesign.of(
                self._path,
                json.loads(metadata.schemaString()),
                {name: str(configuration.apply(name)) for name in names},
                self._scala_list(metadata.partitionColumns()),
            )

    def _scala_list(self, collection: Any) -> list[str]:
        values = collection.toIndexedSeq()
        return [str(values.apply(index)) for index in range(values.size())]

    def _widen(self, design: TableDesign, wider: Mapping[str, DataType], widening: str) -> None:
        """Give columns of the table the types that they have in the topic now, in the way that the user has chosen."""
        changes = ", ".join(f"{name} to {kind.simpleString()}" for name, kind in wider.items())
        if not widening:
            raise TieringStoppedError(
                f"columns became wider in the topic than in the table {self._path}: {changes}. Set delta.type.widening "
                "to native (deltalake cannot read the table then) or to rewrite (it is written anew)"
            )
        logger.warning("the table %s widens %s (%s)", self._path, changes, widening)
        with failures(f"the table {self._path} cannot widen {changes}"):
            if widening == "native":
                # Delta then widens a column when wider values are appended.
                if design.properties.get(TYPE_WIDENING) != "true":
                    self._set_property(TYPE_WIDENING, "true")
                return
            design.check_rewrite()
            rows = self._spark.read.format("delta").load(self._path)
            rows = rows.withColumns({name: rows[quoted(name)].cast(kind) for name, kind in wider.items()})
            writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
            writer.partitionBy(*design.partitioned_by).save(self._path)

    def _set_property(self, name: str, value: str) -> None:
        self._spark.sql(f"ALTER TABLE delta.{quoted(self._path)} SET TBLPROPERTIES ('{name}' = '{value}')")

    def append(self, frame: DataFrame, commit: TableCommit) -> Written:
        """Append these rows as transaction `commit.version`, and read the commit back. Creates the table if need be.

        Raises ConflictError where another tierer was first, and TieringStoppedError where the table cannot be written.
        """
        with failures(f"the table {self._path} cannot be written"):
            writer = frame.write.mode("append").option("mergeSchema", "true")
            # Counts when this append creates the table.
            writer = writer.option("delta.dataSkippingStatsColumns", ",".join(_with_statistics(frame.schema)))
            return self._written(writer, commit)

    def departures(self, ranges: Sequence[TieringRange], log: DataFrame | None) -> dict[int, int]:
        """From which offset on (inclusive) the table has other records in these ranges than the log, by partition.

        `log`: what the leaders have of them; None: nothing. Each record has the epoch of the leader that appended it,
        and two records of one offset have two epochs. Raises TieringStoppedError where the table cannot be read.
        """
        from pyspark.sql.functions import col
        from pyspark.sql.functions import min as least

        with failures(f"the table {self._path} cannot be compared with the log"):
            rows = self._spark.read.format("delta").load(self._path).where(_within(ranges))
            rows = rows.select("_partition", "_offset", "_leader_epoch")
            if log is not None:
                there = log.select("_partition", "_offset", col("_leader_epoch").alias("_log_epoch"))
                rows = rows.join(there, ["_partition", "_offset"], "left")
                rows = rows.where("_log_epoch IS NULL OR _log_epoch <> _leader_epoch")
            first = rows.groupBy("_partition").agg(least("_offset")).collect()
            return {int(partition): int(offset) for partition, offset in first}

    def cut(self, offsets: Mapping[int, int], commit: TableCommit) -> Written:
        """Delete the rows from each partition's offset on, as transaction `commit.version`, and read it back.

        Raises ConflictError where another tierer was first, and TieringStoppedError where the table cannot be written.
        """
        beyond = (f"(_partition = {partition} AND _offset >= {offset})" for partition, offset in offsets.items())
        with failures(f"rows of the table {self._path} cannot be deleted"):
            nothing = self._spark.read.format("delta").load(self._path).limit(0)
            nothing = nothing.select(*map(quoted, self.design().settable(nothing.columns)))
            return self._written(nothing.write.mode("overwrite").option("replaceWhere", " OR ".join(beyond)), commit)

    def _written(self, writer: DataFrameWriter, commit: TableCommit) -> Written:
        metadata = {"version": commit.version, "attempt": commit.attempt}
        marks = [[mark.time_ms, list(mark.ends), list(mark.sizes)] for mark in commit.marks]
        offsets = {"starts": list(commit.starts), "ends": list(commit.ends), "marks": marks}
        if commit.quarantined:
            metadata["quarantined"] = commit.quarantined
            offsets["refused"] = [[each.partition, each.start, each.end] for each in commit.refused]
        writer = writer.format("delta").option("txnAppId", self._app_id).option("txnVersion", str(commit.version))
        writer.option("userMetadata", json.dumps({self._app_id: {**metadata, **offsets}})).save(self._path)
        return self._read_back(commit)

    def judged(self, frame: DataFrame, design: TableDesign) -> tuple[DataFrame, int]:
        """The rows that the table accepts, and how many it does not. Raises TieringStoppedError."""
        design.check_columns(frame.columns)
        if not design.rules(frame.columns) and not design.kept(frame.columns):
            return frame, 0
        with failures(f"the rules of the table {self._path} cannot be applied"):
            rows = judged(frame, design)
            count = count_refused(rows, design, frame.columns)
            return (accepted(rows), count) if count else (frame, 0)

    def quarantine(self, frame: DataFrame, design: TableDesign, commit: TableCommit, columns: Sequence[str]) -> None:
        """Append to the dead-letter table the rows of this frame that the commit lacks, unless that was done before.

        `columns`: the topic's. Raises TieringStoppedError where it cannot be written.
        """
        path = dead_letters_path(self._path)
        with failures(f"the table {path} cannot be written, for records that the table {self._path} refused"):
            # The newest version, and not the commit's: after a week Delta refuses to read older ones.
            table = self._spark.read.format("delta").load(self._path)
            there = table.where(_within(commit.refused)).select("_partition", "_offset")
            rows = judged(frame, design).join(there, ["_partition", "_offset"], "left_anti")
            writer = letters(rows, columns).write.format("delta").mode("append")
            writer = writer.option("txnAppId", self._app_id).option("txnVersion", str(commit.version))
            writer.save(path)

    def make_lasting(self) -> None:
        """No crash of the machine undoes what was committed until now. Raises TieringStoppedError."""
        for path in (self._path, dead_letters_path(self._path)):
            make_lasting(path)

    def delete_before(self, starts: Mapping[int, int]) -> None:
        """Delete the rows of each partition before its offset. Rows of a user, which have no offset, stay.

        Raises ConflictError where somebody else writes meanwhile, and TieringStoppedError where rows cannot be deleted.
        """
        conditions = (f"(_partition = {partition} AND _offset < {start})" for partition, start in starts.items())
        with failures(f"rows of the table {self._path} cannot be deleted"):
            from delta.tables import DeltaTable

            DeltaTable.forPath(self._spark, self._path).delete(" OR ".join(conditions))

    def _read_back(self, commit: TableCommit) -> Written:
        """Delta skips a transaction that it has seen, and says nothing. So look whose commit it is."""
        for row, ours in self._our_commits():
            if ours.version < commit.version:
                break
            if ours.attempt == commit.attempt:
                metrics = row["operationMetrics"] or {}
                rows, files, size = (
                    int(metrics.get(name, 0)) for name in ("numOutputRows", "numFiles", "numOutputBytes")
                )
                snapshot = self._delta_snapshot()
                self._our_version(snapshot, TieringStoppedError)  # Another topic's tierer may have been as fast.
                return Written(str(snapshot.metadata().id()), ours, rows, files, size)
        raise ConflictError(f"transaction {commit.version} was committed by another tierer")

    def _delta_snapshot(self) -> Any:
        return delta_snapshot(self._spark, self._path)

    def _our_version(self, snapshot: Any, kind: type[TieringStoppedError]) -> int:
        """Our newest transaction; -1: there is none. Raises `kind` where another topic's tierer has written."""
        transactions = transactions_of(snapshot)
        version = transactions.pop(self._app_id, -1)
        others = [app_id for app_id in transactions if app_id.startswith(TIERER)]
        if others:
            _, cluster_id, topic_id = others[0].split("/", 2)
            raise kind(f"the table {self._path} is the history of another topic: {topic_id} of cluster {cluster_id}")
        return version

    def _commits(self, newer_than: int, newest: int, table_version: int) -> dict[int, TableCommit]:
        """Our commits of transactions after `newer_than`, up to the newest of the snapshot."""
        commits = {}
        for _, ours in self._our_commits():
            if ours.version <= newer_than:
                break
            if ours.table_version <= table_version:
                commits[ours.version] = ours
            if ours.version == newest:
                break
        return commits

    def _our_commits(self) -> Iterator[tuple[Any, TableCommit]]:
        """Commits with our metadata, newest first. Those of other users, OPTIMIZE for one, lie between them."""
        from delta.tables import DeltaTable

        seen = 0
        for page in _HISTORY_PAGES:
            table = DeltaTable.forPath(self._spark, self._path)
            frame = table.history() if page is None else table.history(page)
            rows = frame.select("version", "userMetadata", "operationMetrics").collect()
            for row in rows[seen:]:
                ours = _our_commit(row, self._app_id)
                if ours is not None:
                    yield row, ours
            if page is None or len(rows) < page:
                return
            seen = len(rows)


def _within(ranges: Sequence[TieringRange]) -> str:
    return " OR ".join(
        f"(_partition = {each.partition} AND _offset >= {each.start} AND _offset < {each.end})" for each in ranges
    )


def _our_commit(row: Any, app_id: str) -> TableCommit | None:
    """The commit, if it is one of ours. The metadata of other writers is any text."""
    try:
        metadata = json.loads(row["userMetadata"] or "{}")
    except UNDECODABLE:
        return None
    ours = metadata.get(app_id) if isinstance(metadata, dict) else None
    if not isinstance(ours, dict):
        return None
    return TableCommit(
        table_version=int(row["version"]),
        version=int(ours["version"]),
        attempt=str(ours["attempt"]),
        starts=tuple(ours["starts"]),
        ends=tuple(ours["ends"]),
        marks=tuple(HistoryMark(time_ms, tuple(e), tuple(s)) for time_ms, e, s in ours.get("marks", ())),
        quarantined=int(ours.get("quarantined", 0)),
        refused=tuple(TieringRange(*each) for each in ours.get("refused", ())),
    )


def _with_statistics(schema: StructType) -> Sequence[str]:
    """Columns that Delta can keep minimum and maximum of. Ours come first."""
    from pyspark.sql.types import DateType, NumericType, StringType, TimestampNTZType, TimestampType

    kinds = (NumericType, StringType, DateType, TimestampType, TimestampNTZType)
    plain = [f.name for f in schema if isinstance(f.dataType, kinds) and f.name not in STATISTICS]
    names = [*STATISTICS, *plain][:_MAX_STATISTICS]
    return [quoted(name) for name in names]


@contextmanager
def failures(what: str, kind: type[TieringStoppedError] = TieringStoppedError) -> Iterator[None]:
    """Turn the errors of Spark in this block into ours."""
    from delta.exceptions import DeltaConcurrentModificationException
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except DeltaConcurrentModificationException as error:
        raise ConflictError(str(error)) from error
    except (Py4JJavaError, PySparkException) as error:
        # Java's own exceptions, of a file system for one, stay what they are. Not every error of Spark's has a
        # condition: its conversion loses that of an exception that it does not know.
        text = said(error)
        if _CANCELLED in text or re.search(rf"\b({'|'.join(_RACES)})", text) is not None:
            raise ConflictError(text) from error
        raise kind(f"{what}: {text}{root_cause(error)}") from error
