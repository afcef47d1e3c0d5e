"""A Parquet file of a topic's Delta table: whether its pages are as they were written, and which offsets it has.

Parquet keeps a checksum of each page. deltalake's queries do not look at it, and hand out what a flipped bit has made
of a record. The end of a file has no checksum at all: if its statistics change, a query passes over records. So pyarrow
reads a part of a file before the first query does, checks its pages and counts its records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSystem

CHECKED_ROWS = 16_384
CHECKED_BYTES = 16 * 1024 * 1024
"""At most so many rows, or about so many bytes of them, are decoded at a time to check their pages."""

RUNS_MAX = 100_000
"""A part of a file with more runs of offsets is not counted: that would take much memory."""

_NOTHING = np.empty(0, np.int64)

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")

PARTITION, OFFSET = "_partition", "_offset"

_BOUNDS = tuple(f"{bound}.{name}" for name in (PARTITION, OFFSET) for bound in ("min", "max"))
ACTION_COLUMNS = ("path", "num_records", f"partition.{PARTITION}", *_BOUNDS)
"""Of the entry of a file in the table's log."""


@dataclass(frozen=True)
class Rows:
    """Rows of a partition: offsets `start` up to `end` (exclusive)."""

    partition: int
    start: int
    end: int


@dataclass(frozen=True)
class _Runs:
    """Runs of consecutive offsets, each of one partition: `starts` up to `ends` (exclusive)."""

    partitions: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, partitions: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> _Runs | None:
        """None: there are too many."""
        breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(partitions) != 0)) + 1
        if len(breaks) >= RUNS_MAX:
            return None
        first = np.concatenate([[0], breaks]).astype(np.int64)[: len(offsets)]
        last = np.concatenate([breaks, [len(offsets)]]).astype(np.int64)[: len(offsets)] - 1
        return cls(partitions[first], offsets[first], offsets[last] + 1)

    def count(self, rows: Rows) -> int:
        inside = np.minimum(self.ends, rows.end) - np.maximum(self.starts, rows.start)
        return int(np.where(self.partitions == rows.partition, inside.clip(min=0), 0).sum())


class TableFile:
    """A file as one version of the table has it. For one thread."""

    def __init__(self, storage: FileSystem, action: Mapping[str, object], *, maps_columns: bool = True) -> None:
        """`action`: ACTION_COLUMNS of its entry in the table's log, flat.

        `maps_columns`: the table may have column mapping. The statistics and the columns have other names then.
        """
        self._storage = storage
        self._maps_columns = maps_columns
        self.path = unquote(str(action["path"]))  # a URI, by Delta's protocol
        records, partition = action.get("num_records"), action.get(f"partition.{PARTITION}")
        self.records = records if isinstance(records, int) else None
        self._partition = partition if isinstance(partition, int) else None
        self._bounds = {name: (action.get(f"min.{name}"), action.get(f"max.{name}")) for name in (PARTITION, OFFSET)}
        self._groups: list[_Runs | None] | None = None  # of each row group, once the file was opened
        self._checked: set[tuple[int, str]] = set()  # row groups and columns

    def may_have(self, rows: Rows) -> bool:
        """Whether any of the rows may be in the file, by the table's log."""
        if self._partition not in (None, rows.partition):
            return False
        for name, first, last in ((PARTITION, rows.partition, rows.partition), (OFFSET, rows.start, rows.end - 1)):
            least, most = self._bounds[name]
            if isinstance(least, int) and isinstance(most, int) and (last < least or most < first):
                return False
        return True

    def check(self, rows: Rows, columns: set[str]) -> int | None:
        """Check the pages of these rows and columns (in lower case), and count the rows; None: that cannot be told.

        What was checked before is not read again. Raises ValueError, OSError and what else pyarrow raises.
        """
        if _URI.match(self.path):
            return None  # of a shallow clone: in the directory of another table
        having = self._having(rows)
        if self._groups is None or any((n, name) not in self._checked for n in having for name in columns):
            with self._opened() as parquet:
                if self._groups is None:
                    self._groups = [self._runs(parquet, n) for n in range(parquet.num_row_groups)]
                    having = self._having(rows)
                for n in having:
                    self._check_group(parquet, n, columns)
        counts = [None if (runs := self._groups[n]) is None else runs.count(rows) for n in having]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def _having(self, rows: Rows) -> list[int]:
        """The row groups that may have any of the rows."""
        groups = self._groups or ()
        return [n for n, runs in enumerate(groups) if runs is None or runs.count(rows)]

    def _check_group(self, parquet: pq.ParquetFile, n: int, columns: set[str]) -> None:
        there = parquet.schema_arrow.names
        # With column mapping, columns have other names here.
        wanted = [name for name in there if name.lower() in columns] or there
        missing = [name for name in wanted if (n, name.lower()) not in self._checked]
        if missing:
            group = parquet.metadata.row_group(n)
            row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
            rows = max(1, min(CHECKED_ROWS, CHECKED_BYTES // row_bytes))
            for _ in parquet.iter_batches(rows, [n], columns=missing, use_threads=False):
                pass
        self._checked.update((n, name) for name in columns)

    def _runs(self, parquet: pq.ParquetFile, n: int) -> _Runs | None:
        """The offsets of a row group, as its records have them. Rows of a user have none."""
        there = parquet.schema_arrow.names
        if OFFSET not in there or (PARTITION not in there and self._partition is None):
            # Without column mapping, they are rows of a user, from before the table was the topic's.
            return None if self._maps_columns else _Runs.of(_NOTHING, _NOTHING)
        names = [name for name in (PARTITION, OFFSET) if name in there]
        batches = parquet.iter_batches(4 * CHECKED_ROWS, [n], columns=names, use_threads=False)
        rows = pa.Table.from_batches(batches, pa.schema([parquet.schema_arrow.field(name) for name in names]))
        rows = rows.drop_null()
        offsets = rows.column(OFFSET).to_numpy().astype(np.int64)
        if PARTITION in there:
            return _Runs.of(rows.column(PARTITION).to_numpy().astype(np.int64), offsets)
        return _Runs.of(np.full(len(offsets), self._partition, np.int64), offsets)

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        import pyarrow.parquet as pq

        with self._storage.open_input_file(self.path) as opened:
            metadata = pq.ParquetFile(opened).metadata
            columns = map(metadata.schema.column, range(metadata.num_columns))
            # A value that many rows share stays one value: the rows may be a thousand times as large as their file.
            shared = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
            parquet = pq.ParquetFile(opened, metadata=metadata, read_dictionary=shared, page_checksum_verification=True)
            if self.records is not None and parquet.metadata.num_rows != self.records:
                raise ValueError(f"it has {parquet.metadata.num_rows} records, {self.records} were written")
            yield parquet
