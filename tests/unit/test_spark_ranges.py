"""Offset ranges and tasks: every offset is in exactly one task, whatever is asked for."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from spark_broker.model import TopicPartition
from spark_broker.spark.ranges import OffsetRange, TaskRules, TaskSize, split_ranges, tasks_of

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


def of(*sizes: int) -> list[OffsetRange]:
    return [OffsetRange("t", "0" * 32, number, 0, size) for number, size in enumerate(sizes)]


def sizes_of(ranges: list[OffsetRange], enough: TaskSize, at_least: int = 0, max_records: int = 0) -> list[list[int]]:
    tasks = tasks_of(ranges, TaskRules(enough, at_least, max_records), {})
    return [[part.size for part in task] for task in tasks]


HUNDRED = TaskSize(records=100, bytes=1 << 40)


@given(
    RANGES, st.integers(1, 6000), st.integers(1, 600_000), st.integers(0, 40), st.integers(0, 700), st.integers(0, 900)
)
def test_tasks_have_every_range_once_and_in_order(
    ranges: list[OffsetRange], records: int, task_bytes: int, at_least: int, max_records: int, record_bytes: int
) -> None:
    rules = TaskRules(TaskSize(records, task_bytes), at_least, max_records)
    bytes_of = {piece.tp: float(record_bytes) for piece in ranges}
    tasks = tasks_of(ranges, rules, bytes_of)
    pieces = split_ranges(ranges, min_partitions=at_least, max_records=max_records)
    assert [part for task in tasks for part in task] == pieces
    assert all(tasks), "a task has something to read"
    assert len(tasks) >= min(len(pieces), at_least)
    if max_records:
        assert all(sum(part.size for part in task) <= max_records for task in tasks)
    total = sum(piece.size for piece in pieces)
    needed = max(math.ceil(total / records), math.ceil(total * record_bytes / task_bytes), at_least, 1)
    if not max_records:
        assert len(tasks) <= needed, "no more than what is enough asks for"


def test_small_ranges_share_tasks_of_about_the_same_size() -> None:
    assert sizes_of(of(*[33] * 6), HUNDRED) == [[33, 33, 33], [33, 33, 33]]
    assert sizes_of(of(*[10] * 6), HUNDRED) == [[10] * 6]
    assert sizes_of(of(*[50] * 6), HUNDRED) == [[50, 50]] * 3
    assert sizes_of([], HUNDRED) == []


def test_a_large_range_has_a_task_of_its_own_and_makes_no_more_of_small_ones() -> None:
    assert sizes_of(of(5000, 20, 20, 20, 5000), HUNDRED) == [[5000], [20, 20, 20], [5000]]
    assert sizes_of(of(20, 20, 5000), HUNDRED) == [[20, 20], [5000]]


def test_wishes_of_the_user_come_first() -> None:
    assert sizes_of(of(*[10] * 6), TaskSize(records=1, bytes=1 << 40)) == [[10]] * 6
    assert sizes_of(of(*[10] * 6), HUNDRED, at_least=3) == [[10, 10]] * 3
    assert len(sizes_of(of(1000, 1, 1, 1), HUNDRED, at_least=4)) >= 4
    assert sizes_of(of(*[10] * 6), HUNDRED, max_records=20) == [[10, 10]] * 3


def test_large_records_fill_a_task_sooner() -> None:
    rules = TaskRules(TaskSize(records=100, bytes=1000))
    tasks = tasks_of(of(10, 10, 10, 10), rules, {TopicPartition("t", 0): 100.0, TopicPartition("t", 1): 100.0})
    assert [len(task) for task in tasks] == [1, 1, 2]
