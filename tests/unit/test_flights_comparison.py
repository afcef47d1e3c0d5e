"""The demo's comparison finds every way in which a log can go wrong."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from jobs.comparison import OFFSET, PARTITION, Comparison, compare, multiset_difference, same_offsets

SOURCE = pa.table({"dest": ["A", "B", "A", "C", "B", "A", None], "n": pa.array([1, 2, 3, 4, 5, 1, 6], pa.int32())})
PLACES = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3), (1, 2)]
READ = SOURCE.append_column(PARTITION, pa.array([p for p, _ in PLACES], pa.int32())).append_column(
    OFFSET, pa.array([o for _, o in PLACES], pa.int64())
)


def compared(read: pa.Table) -> Comparison:
    return compare("test", SOURCE, read, "dest")


def with_values(changes: dict[int, int]) -> pa.Table:
    values = [changes.get(row, value) for row, value in enumerate(READ["n"].to_pylist())]
    return READ.set_column(1, "n", pa.array(values, pa.int32()))


def renumbered(read: pa.Table) -> pa.Table:
    """The same rows with offsets that have no gaps, as if the log had never held the missing rows."""
    seen: dict[int, int] = {}
    offsets = []
    for partition in read[PARTITION].to_pylist():
        offsets.append(seen.get(partition, 0))
        seen[partition] = offsets[-1] + 1
    return read.set_column(read.schema.get_field_index(OFFSET), OFFSET, pa.array(offsets, pa.int64()))


def test_equal_data_holds_in_whatever_order_it_was_fetched() -> None:
    result = compared(READ.take(pa.array([6, 1, 5, 0, 4, 3, 2])))
    assert result.holds
    assert (result.rows_sent, result.rows_read, result.examples) == (7, 7, ())


def test_a_lost_row_is_counted_and_shown() -> None:
    result = compared(renumbered(READ.take(pa.array([0, 1, 3, 4, 5, 6]))))
    assert not result.holds
    assert (result.rows_lost, result.rows_extra, result.offsets_broken) == (1, 0, 0)
    assert "'n': 3" in result.examples[0]


def test_a_row_stored_twice_is_counted_and_shown() -> None:
    result = compared(renumbered(READ.take(pa.array([0, 1, 2, 3, 3, 4, 5, 6]))))
    assert not result.holds
    assert (result.rows_lost, result.rows_extra) == (0, 1)
    assert "'dest': 'C'" in result.examples[0]


def test_a_lost_copy_of_equal_rows_is_not_hidden_by_the_other() -> None:
    """Rows 0 and 5 are equal: as sets, source and read do not differ."""
    result = compared(renumbered(READ.take(pa.array([0, 1, 2, 3, 4, 6]))))
    assert result.rows_lost == 1


def test_a_changed_value_is_one_row_lost_and_one_extra() -> None:
    result = compared(with_values({3: 44}))
    assert (result.rows_lost, result.rows_extra) == (1, 1)


def test_a_value_that_became_null_is_seen() -> None:
    changed = READ.set_column(1, "n", pc.if_else(pc.equal(READ["n"], 4), pa.scalar(None, pa.int32()), READ["n"]))
    assert not compared(changed).holds


def test_rows_of_a_key_in_another_order_are_seen_though_the_multiset_is_equal() -> None:
    result = compared(with_values({0: 3, 2: 1}))
    assert not result.holds
    assert (result.rows_lost, result.rows_extra, result.keys_out_of_order) == (0, 0, 1)
    assert "'A'" in result.examples[0]


def test_a_key_in_two_partitions_is_seen() -> None:
    partitions = [0, 1, 0, 0, 1, 2, 1]
    moved = renumbered(READ.set_column(2, PARTITION, pa.array(partitions, pa.int32())))
    result = compared(moved)
    assert not result.holds
    assert (result.keys_split, result.keys_out_of_order) == (1, 0)


@pytest.mark.parametrize("offsets", [[0, 0, 1, 2, 1, 4, 2], [0, 0, 1, 2, 1, 2, 2], [1, 0, 2, 3, 1, 4, 2]])
def test_offsets_that_skip_repeat_or_start_late_are_seen(offsets: list[int]) -> None:
    result = compared(READ.set_column(3, OFFSET, pa.array(offsets, pa.int64())))
    assert not result.holds
    assert result.offsets_broken == 1


def test_nothing_read_is_everything_lost() -> None:
    result = compared(READ.slice(0, 0))
    assert not result.holds
    assert result.rows_lost == 7


def test_two_readers_agree_when_every_offset_holds_the_same_row() -> None:
    assert same_offsets(READ, READ.take(pa.array([6, 5, 4, 3, 2, 1, 0])))
    assert not same_offsets(READ, with_values({0: 3, 2: 1}))


def test_a_multiset_difference_counts_copies() -> None:
    left, right = pa.table({"a": [1, 1, 1, 2]}), pa.table({"a": [1, 3, 3]})
    only_left, only_right = multiset_difference(left, right)
    assert {(row["a"], row["_copies"]) for row in only_left.to_pylist()} == {(1, 2), (2, 1)}
    assert {(row["a"], row["_copies"]) for row in only_right.to_pylist()} == {(3, 2)}
