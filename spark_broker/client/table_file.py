"""A Parquet file of a topic's Delta table: whether its pages are as they were written, and which offsets it has.

Parquet keeps a checksum of each page. deltalake's queries do not look at it, and hand out what a flipped bit has made
of a record. The end of a file has no checksum at all: if its statistics change, a query passes over records. So pyarrow
reads a part of a file before the first query does, checks its pages, counts its records, and measures them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSystem

CHECKED_ROWS = 16_384
CHECKED_BYTES = 16 * 1024 * 1024
"""At most so many rows, or about so many bytes of them, are decoded at a time to check their pages."""

HELD_BYTES = 2 * CHECKED_BYTES
"""Of one column. What many rows share is read as one value, so that it takes no memory for each. But then all different
values of a row group are held in memory. A column with more than this is read without that."""

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


_Reader = Callable[[frozenset[str]], "pq.ParquetFile"]
"""Reads the file, so that values which rows share stay one; but not those of the columns that are named."""


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
        self._row_bytes: dict[tuple[int, str], int] = {}  # by row group and the column's name in the file

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
            with self._opened() as reader:
                if self._groups is None:
                    parquet = reader(frozenset())
                    self._groups = [self._runs(parquet, n) for n in range(parquet.num_row_groups)]
                    having = self._having(rows)
                for n in having:
                    self._check_group(reader, n, columns)
        counts = [None if (runs := self._groups[n]) is None else runs.count(rows) for n in having]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def row_bytes(self, rows: Rows, columns: set[str]) -> int:
        """How many bytes a row takes in memory, where these columns take most: of many rows, the mean.

        Only of what was checked. A file may have a thousandth of it.
        """
        sizes = dict.fromkeys(self._having(rows), 0)
        for (n, name), size in self._row_bytes.items():
            if n in sizes and (self._maps_columns or name in columns):
                sizes[n] += size
        return max(sizes.values(), default=0)

    def _having(self, rows: Rows) -> list[int]:
        """The row groups that may have any of the rows."""
        groups = self._groups or ()
        return [n for n, runs in enumerate(groups) if runs is None or runs.count(rows)]

    def _check_group(self, reader: _Reader, n: int, columns: set[str]) -> None:
        apart: frozenset[str] = frozenset()
        there = reader(apart).schema_arrow.names
        # With column mapping, columns have other names here.
        wanted = [name for name in there if name.lower() in columns] or there
        missing = [name for name in wanted if (n, name.lower()) not in self._checked]
        while missing:
            row_bytes, large = _measured(reader(apart), n, missing, apart)
            if not large:
                self._row_bytes.update(((n, name.lower()), size) for name, size in row_bytes.items())
                break
            apart |= large
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
    def _opened(self) -> Iterator[_Reader]:
        import pyarrow.parquet as pq

        with self._storage.open_input_file(self.path) as opened:
            metadata = pq.ParquetFile(opened).metadata
            if self.records is not None and metadata.num_rows != self.records:
                raise ValueError(f"it has {metadata.num_rows} records, {self.records} were written")

            columns = [metadata.schema.column(n) for n in range(metadata.num_columns)]
            # What metadata says of a column of a row group is not asked for: if it is damaged, that ends the process.
            texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]

            def reader(apart: frozenset[str]) -> pq.ParquetFile:
                shared = [path for path in texts if not any(f"{path}.".startswith(f"{name}.") for name in apart)]
                return pq.ParquetFile(
                    opened, metadata=metadata, read_dictionary=shared, page_checksum_verification=True
                )

            yield reader


def _measured(
    parquet: pq.ParquetFile, n: int, columns: Sequence[str], apart: frozenset[str]
) -> tuple[dict[str, int], set[str]]:
    """Check the pages of these columns. Returns the bytes of a row by column, and an empty set; or, if that takes too
    much memory, the columns that are to be read `apart` as well: not everything was checked then.
    """
    group = parquet.metadata.row_group(n)
    mean = max(1, group.total_byte_size // max(1, group.num_rows))
    rows = max(1, min(CHECKED_ROWS, CHECKED_BYTES // mean))
    sizes = dict.fromkeys(columns, 0)
    for batch in parquet.iter_batches(rows, [n], columns=list(columns), use_threads=False):
        held = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name, column in held.items():
            sizes[name] = max(sizes[name], bytes_alone(column) // max(1, len(column)))
        large = {name for name, column in held.items() if name not in apart and column.nbytes > HELD_BYTES}
        if large:
            return sizes, large
    return sizes, set()


def bytes_alone(values: pa.Array) -> int:
    """How many bytes the values take where each stands for itself, also if many share one now."""
    kind = values.type
    if pa.types.is_dictionary(kind) and _has_lengths(kind.value_type):
        lengths = pc.binary_length(values.dictionary).cast(pa.int64())
        return int(pc.sum(lengths.take(values.indices)).as_py() or 0)
    if pa.types.is_struct(kind):
        return sum(map(bytes_alone, values.flatten()))
    if pa.types.is_map(kind):
        return sum(map(bytes_alone, (values.keys, values.items)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return bytes_alone(values.flatten())
    return int(values.nbytes)


def _has_lengths(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
