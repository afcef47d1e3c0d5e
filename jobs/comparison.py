"""Compares the rows that were read with those that were sent: nothing lost, nothing twice, order kept per key.

Works on Arrow tables: the source, and the rows that were read, with their `_partition` and `_offset` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

PARTITION, OFFSET = "_partition", "_offset"
EXAMPLES_MAX = 3
_SIDE = "_side"


@dataclass(frozen=True)
class Comparison:
    """What one reader got, against the source. All numbers but `rows_sent` and `rows_read` count what is wrong."""

    reader: str
    rows_sent: int
    rows_read: int
    rows_lost: int
    rows_extra: int
    """Read more often than they were sent: stored twice, or changed."""
    keys_out_of_order: int
    """Keys whose rows are not read in the order in which they were sent."""
    keys_split: int
    """Keys with rows in more than one partition."""
    offsets_broken: int
    """Partitions whose offsets do not run from 0 without a gap or a repetition."""
    examples: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the reader got exactly what was sent."""
        wrong = (self.rows_lost, self.rows_extra, self.keys_out_of_order, self.keys_split, self.offsets_broken)
        return self.rows_read == self.rows_sent and not any(wrong)


def compare(reader: str, source: pa.Table, read: pa.Table, key: str) -> Comparison:
    """Compare `read` (the source's columns, `_partition` and `_offset`, rows in any order) with `source`."""
    names = source.schema.names
    lost, extra = multiset_difference(source, read.select(names))
    disordered = keys_out_of_order(source, read, key)
    examples = [
        *(f"{reader}: lost {row}" for row in lost.slice(0, EXAMPLES_MAX).to_pylist()),
        *(f"{reader}: extra {row}" for row in extra.slice(0, EXAMPLES_MAX).to_pylist()),
        *(f"{reader}: out of order {key} = {name!r}" for name in disordered[:EXAMPLES_MAX]),
    ]
    return Comparison(
        reader=reader,
        rows_sent=source.num_rows,
        rows_read=read.num_rows,
        rows_lost=_copies(lost),
        rows_extra=_copies(extra),
        keys_out_of_order=len(disordered),
        keys_split=_keys_split(read, key),
        offsets_broken=_offsets_broken(read),
        examples=tuple(examples),
    )


def multiset_difference(left: pa.Table, right: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The rows that only `left` has and those that only `right` has, with the number of copies in `_copies`."""
    names = left.schema.names
    sides = [
        table.append_column(_SIDE, pa.repeat(pa.scalar(sign, pa.int64()), table.num_rows))
        for table, sign in ((left, 1), (right.cast(left.schema), -1))
    ]
    groups = pa.concat_tables(sides).group_by(names).aggregate([(_SIDE, "sum")])
    surplus = groups[f"{_SIDE}_sum"]
    rows = groups.select(names).append_column("_copies", pc.abs(surplus))
    return rows.filter(pc.greater(surplus, 0)), rows.filter(pc.less(surplus, 0))


def keys_out_of_order(source: pa.Table, read: pa.Table, key: str) -> list[object]:
    """The keys whose rows, ordered by partition and offset, are not the source's; also for lost or extra rows."""
    names = source.schema.names
    sent = _grouped(source.append_column("_row", pa.array(range(source.num_rows))), key, ["_row"]).select(names)
    got = _grouped(read, key, [PARTITION, OFFSET]).select(names).cast(source.schema)
    if got.equals(sent):
        return []
    keys = pc.unique(pa.concat_tables([sent.select([key]), got.select([key])])[key])
    return [value.as_py() for value in keys if not _of_key(got, key, value).equals(_of_key(sent, key, value))]


def same_offsets(one: pa.Table, other: pa.Table) -> bool:
    """Whether two readers saw the same row at every offset of every partition."""
    by_place = [(PARTITION, "ascending"), (OFFSET, "ascending")]
    return bool(one.sort_by(by_place).equals(other.select(one.schema.names).cast(one.schema).sort_by(by_place)))


def _grouped(table: pa.Table, key: str, then: Sequence[str]) -> pa.Table:
    return table.sort_by([(name, "ascending") for name in (key, *then)])


def _of_key(table: pa.Table, key: str, value: pa.Scalar) -> pa.Table:
    wanted = pc.is_null(table[key]) if not value.is_valid else pc.equal(table[key], value)
    return table.filter(wanted).combine_chunks()


def _copies(rows: pa.Table) -> int:
    return int(pc.sum(rows["_copies"]).as_py() or 0)


def _keys_split(read: pa.Table, key: str) -> int:
    places = read.group_by([key, PARTITION]).aggregate([]).group_by([key]).aggregate([(PARTITION, "count")])
    return int(pc.sum(pc.greater(places[f"{PARTITION}_count"], 1)).as_py() or 0)


def _offsets_broken(read: pa.Table) -> int:
    by_partition = read.group_by([PARTITION]).aggregate(
        [(OFFSET, how) for how in ("count", "count_distinct", "min", "max")]
    )
    whole = [
        row[f"{OFFSET}_min"] == 0
        and row[f"{OFFSET}_max"] == row[f"{OFFSET}_count"] - 1
        and row[f"{OFFSET}_count_distinct"] == row[f"{OFFSET}_count"]
        for row in by_partition.to_pylist()
    ]
    return whole.count(False)
