"""The partitions share a limit in proportion to what waits in each, and none starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_broker.spark.limits import shares

BACKLOGS = st.dictionaries(st.integers(0, 20), st.integers(-5, 10_000), max_size=20)


def test_shares_are_in_proportion() -> None:
    assert shares(100, {0: 500, 1: 500}) == {0: 50, 1: 50}
    assert shares(100, {0: 1000}) == {0: 100}
    assert shares(1000, {0: 3, 1: 4, 2: 0}) == {0: 3, 1: 4}
    assert shares(10, {0: 1, 1: 1_000_000}) == {0: 1, 1: 9}
    assert shares(1, {0: 1, 1: 1}) == {0: 1, 1: 1}


@given(st.integers(1, 5000), BACKLOGS)
def test_the_limit_holds_and_every_partition_moves(limit: int, backlogs: dict[int, int]) -> None:
    waiting = {partition: size for partition, size in backlogs.items() if size > 0}
    sizes = shares(limit, backlogs)
    assert sizes.keys() == waiting.keys()
    assert all(1 <= sizes[partition] <= size for partition, size in waiting.items())
    assert sum(sizes.values()) <= max(limit, len(waiting))


@given(st.integers(20, 5000), BACKLOGS)
def test_little_of_a_limit_is_left_unused(limit: int, backlogs: dict[int, int]) -> None:
    total = sum(size for size in backlogs.values() if size > 0)
    assert sum(shares(limit, backlogs).values()) >= min(limit, total) - len(backlogs)
