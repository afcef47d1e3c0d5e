"""Splitting of offset ranges: every offset is in exactly one piece, whatever is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_broker.spark.ranges import OffsetRange, split_ranges

RANGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5000)), max_size=8).map(
    lambda found: [OffsetRange("t", "0" * 32, p, start, start + size) for p, (start, size) in enumerate(found)]
)


@given(RANGES, st.integers(0, 40), st.integers(0, 700))
def test_pieces_are_the_ranges_cut_in_order_and_none_is_empty(
    ranges: list[OffsetRange], min_partitions: int, max_records: int
) -> None:
    pieces = split_ranges(ranges, min_partitions=min_partitions, max_records=max_records)
    assert all(piece.size > 0 for piece in pieces)
    for offset_range in ranges:
        mine = [piece for piece in pieces if piece.partition == offset_range.partition]
        offsets = [offset for piece in mine for offset in range(piece.start, piece.end)]
        assert offsets == list(range(offset_range.start, offset_range.end))
    if max_records:
        assert all(piece.size <= max_records for piece in pieces)


def test_large_ranges_are_cut_more_often_than_small_ones() -> None:
    ranges = [OffsetRange("t", "0" * 32, 0, 0, 900), OffsetRange("t", "0" * 32, 1, 0, 100)]
    pieces = split_ranges(ranges, min_partitions=10)
    assert [piece.size for piece in pieces if piece.partition == 0] == [100] * 9
    assert [piece.size for piece in pieces if piece.partition == 1] == [100]


def test_without_a_wish_each_range_that_has_records_is_one_piece() -> None:
    ranges = [OffsetRange("t", "0" * 32, 0, 5, 9), OffsetRange("t", "0" * 32, 1, 7, 7)]
    assert split_ranges(ranges) == ranges[:1]
