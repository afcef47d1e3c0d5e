"""Rows of a topic's Delta table without a JVM, through deltalake. What it raises becomes one typed error, here.

Each query's rows are compared with the table's files first (`table_file.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.table_file import ACTION_COLUMNS, Rows, TableFile
from spark_broker.errors import (
    InvalidDataError,
    InvariantError,
    MissingDependencyError,
    ProcessLimitError,
    SparkBrokerError,
)
from spark_broker.process_limits import SYSTEM_LIMITS
from spark_broker.protocol.schema import LOG_COLUMNS

if TYPE_CHECKING:
    from deltalake import DeltaTable

RESTORE = (
    "Put the file back as it was, from a backup or from an older version in the object store. To go on without these "
    "records, seek behind them."
)
RESTORE_TABLE = "Put the table back as it was, from a backup, or see what the message says of its store."

_LOG_ENTRY = re.compile(r"\d{20}\.json")
_SAID_MAX = 1000

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How Rust ends the text of an error of the system."""

_PANICS = "pyo3_runtime"
"""Where Rust's panics are defined. They are no `Exception`."""


BATCH_ROWS_MAX = 8192
"""Of deltalake's queries. They decode so many rows at a time."""


class Fitting(NamedTuple):
    """Rows that fit into some memory. `at_once`: how many rows of their files would fit."""

    rows: Rows
    at_once: int


class DeltaRows:
    """One version of a topic's table. For one thread.

    Raises MissingDependencyError without deltalake, and InvalidDataError where the table, or a file of it, cannot be
    read, was replaced, or was taken back to an older version than the topic's history needs.
    """

    def __init__(self, topic: TopicView) -> None:
        self._topic = topic
        self._path = topic.settings.delta_path
        self._deltalake = _deltalake()
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        with self.failures():
            self._table: DeltaTable = self._deltalake.DeltaTable(_url(self._path))
            self._storage = PyFileSystem(DeltaStorageHandler(self._table.table_uri, None, None))
            self._check_log()
            transaction = self._table.transaction_version(topic.tierer)
            table_id = str(self._table.metadata().id)
            why = topic.why_not_its_table(table_id, self._table.version(), transaction)
            self.columns: Mapping[str, str] = {each.name.lower(): each.name for each in self._table.schema().fields}
            actions = pa.table(self._table.get_add_actions(flatten=True))
            maps = self._table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
            files = _of_files(actions).to_pylist()
            self._files = [TableFile(self._storage, action, maps_columns=maps) for action in files]
            self._has_deleted_rows = "deletionVectors" in (self._table.protocol().reader_features or ())
            self.row_bytes = _row_bytes(actions)
        why = why or topic.why_not_its_columns(table_id, self.columns)
        if why:
            raise self._unreadable(why)

    def fitting(self, rows: Rows, names: Iterable[str], size_bytes: int) -> Fitting:
        """The first of these rows, so many that they take about so many bytes in memory with these columns."""
        self._checked(rows, names)
        columns = _all_of(names)
        files = [file for file in self._files if file.may_have(rows)]
        while True:
            row_bytes = max((file.row_bytes(rows, columns) for file in files), default=1)
            count, fits = rows.end - rows.start, max(1, size_bytes // max(1, row_bytes))
            if count <= fits:
                return Fitting(rows, fits)
            # Large rows may be only among the last ones.
            rows = replace(rows, end=rows.start + max(fits, count // 2))

    def sorted(self, rows: Rows, names: Sequence[str], at_once: int = BATCH_ROWS_MAX) -> Iterator[pa.RecordBatch]:
        """The rows by offset, with these columns of the table, under these names. `at_once`: rows that are decoded."""
        expected = self._checked(rows, names)
        columns = ", ".join(f"{_quoted(self.columns[name.lower()])} AS {_quoted(name)}" for name in names)
        found = 0
        query = f'SELECT {columns} FROM history WHERE {_within(rows)} ORDER BY "_offset"'
        for batch in self._query(query, min(at_once, BATCH_ROWS_MAX)):
            found += batch.num_rows
            yield batch
        if expected is not None and found != expected:
            what = f"offsets {rows.start} to {rows.end} of partition {rows.partition}"
            raise self._unreadable(f"a query found {found} records with {what}, and its files have {expected}")

    def first_since(self, rows: Rows, timestamp_us: int) -> int | None:
        """The first offset among these rows with this timestamp (us since 1970) or a later one."""
        since = f'"_timestamp" >= to_timestamp_micros({timestamp_us})'
        for batch in self._query(f'SELECT min("_offset") AS first FROM history WHERE {_within(rows)} AND {since}'):
            for first in batch.column("first").to_pylist():
                return None if first is None else int(first)
        return None

    def _query(self, query: str, at_once: int = BATCH_ROWS_MAX) -> Iterator[pa.RecordBatch]:
        with self.failures():
            session = self._deltalake.QueryBuilder({"datafusion.execution.batch_size": str(at_once)})
            batches = iter(session.register("history", self._table).execute(query))
        while True:
            with self.failures():
                batch = next(batches, None)
                found = None if batch is None else pa.record_batch(batch)
            if found is None:
                return
            yield found

    def _checked(self, rows: Rows, names: Iterable[str]) -> int | None:
        """Check what a query of these rows and columns reads. Returns how many rows there are; None: unknown."""
        columns = _all_of(names)
        counts = []
        for file in self._files:
            if file.may_have(rows):
                with self.failures(file):
                    counts.append(file.check(rows, columns))
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) and not self._has_deleted_rows else None

    def _check_log(self) -> None:
        """Raise ValueError for an empty entry of the table's log. deltalake takes it for a commit of nothing."""
        from pyarrow.fs import FileSelector

        for entry in self._storage.get_file_info(FileSelector("_delta_log")):
            if entry.size == 0 and _LOG_ENTRY.fullmatch(entry.base_name):
                raise ValueError(f"the entry {entry.base_name} of its log is empty")

    @contextmanager
    def failures(self, file: TableFile | None = None) -> Iterator[None]:
        """Turn what deltalake and pyarrow raise into InvalidDataError. deltalake raises bare `Exception`, too."""
        try:
            yield
        except (SparkBrokerError, InvariantError, MemoryError):
            raise
        except Exception as error:
            self._check_limits(error)
            raise self._unreadable(str(error), file) from error
        except BaseException as error:
            if type(error).__module__ != _PANICS:
                raise
            self._check_limits(error)
            raise self._unreadable(f"deltalake panicked: {error}", file) from error

    def _check_limits(self, error: BaseException) -> None:
        """Raises ProcessLimitError if this process is at a limit: nothing is wrong with the table then."""
        named = [int(number) for number in _OS_ERROR.findall(str(error))]
        if SYSTEM_LIMITS.intersection([*named, error.errno if isinstance(error, OSError) else None]):
            what = f"the table {self._path}, the history of {self._topic.name}, cannot be read now"
            raise ProcessLimitError(f"{what}: {_one_line(str(error))}") from error

    def _unreadable(self, why: str, file: TableFile | None = None) -> InvalidDataError:
        if file is None:
            return unreadable(self._topic, why)
        what = f"file {file.path} of the table {self._path}, the history of {self._topic.name}, is gone or damaged"
        return InvalidDataError(f"{what}: {_one_line(why)}", hint=RESTORE)


def unreadable(topic: TopicView, why: str) -> InvalidDataError:
    """The error for a table that cannot be read as a whole."""
    # A table may have what only Delta itself can read, such as type widening.
    hint = "Read it with read_topic in a session that has Delta." if "features" in why else RESTORE_TABLE
    what = f"the table {topic.settings.delta_path}, the history of {topic.name}, cannot be read"
    return InvalidDataError(f"{what}: {_one_line(why)}", hint=hint)


def _all_of(names: Iterable[str]) -> set[str]:
    """The columns that a query of these reads, in lower case."""
    return {name.lower() for name in (*names, *LOG_COLUMNS)}


def _of_files(actions: pa.Table) -> pa.Table:
    """What `TableFile` needs. Least and greatest values of other columns may have no form in Python."""
    return actions.select([name for name in actions.column_names if name in ACTION_COLUMNS])


def _row_bytes(actions: pa.Table) -> int:
    """About how many bytes of its file a row has. Of files without statistics, nobody knows how many rows they have."""
    if "num_records" not in actions.column_names:
        return 1
    counted = actions.filter(pc.is_valid(actions.column("num_records")))
    records, size = (pc.sum(counted.column(name)).as_py() or 0 for name in ("num_records", "size_bytes"))
    return max(1, int(size) // max(1, int(records)))


def _one_line(said: str) -> str:
    return " ".join(said.split())[:_SAID_MAX]


def _deltalake() -> ModuleType:
    """Raises MissingDependencyError."""
    try:
        import deltalake
    except ModuleNotFoundError as error:
        hint = "pip install 'spark-broker[delta]', or read with read_topic in a session that has Delta."
        raise MissingDependencyError("records that are only in the topic's table need deltalake", hint=hint) from error
    return deltalake


def _url(path: str) -> str:
    """Hadoop writes `file:/lake`, other libraries `file:///lake`."""
    return path.replace("file:/", "file:///", 1) if path.startswith("file:/") and path[6:7] != "/" else path


def _within(rows: Rows) -> str:
    return f'"_partition" = {rows.partition} AND "_offset" >= {rows.start} AND "_offset" < {rows.end}'


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
