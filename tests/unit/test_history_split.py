"""What of a read comes from the topic's table, and what from the log: every offset from one of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.spark.bounds import LATEST_OFFSET
from spark_broker.spark.history_split import HistoryRange, Wanted, split

HISTORY = {0: HistoryRange(2, 7)}
LATEST = LATEST_OFFSET


@pytest.mark.parametrize(
    ("wanted", "table", "log"),
    [
        (Wanted(2, LATEST, 5, True), HistoryRange(2, 7), (7, LATEST)),
        (Wanted(4, LATEST, 5, False), HistoryRange(4, 7), (7, LATEST)),
        (Wanted(7, LATEST, 5, False), None, (7, LATEST)),
        (Wanted(9, 11, 5, False), None, (9, 11)),
        (Wanted(3, 6, 5, False), HistoryRange(3, 6), None),
        (Wanted(3, 7, 5, False), HistoryRange(3, 7), None),
        (Wanted(3, 9, 5, False), HistoryRange(3, 7), (7, 9)),
        # Records between the table and the log were deleted: only an explicit offset asks for them.
        (Wanted(2, LATEST, 9, True), HistoryRange(2, 7), (9, LATEST)),
        (Wanted(2, LATEST, 9, False), HistoryRange(2, 7), (7, LATEST)),
        (Wanted(2, 8, 9, True), HistoryRange(2, 7), None),
    ],
)
def test_a_read_is_divided_at_the_boundary(
    wanted: Wanted, table: HistoryRange | None, log: tuple[int, int] | None
) -> None:
    parts = split({0: wanted}, HISTORY)
    assert parts.table.get(0) == table
    assert parts.log.get(0) == log
    assert parts.needs_table == (table is not None)


def test_a_partition_without_a_history_comes_from_the_log() -> None:
    parts = split({0: Wanted(2, LATEST, 5, True), 3: Wanted(0, LATEST, 0, True)}, HISTORY)
    assert (parts.table, parts.log) == ({0: HistoryRange(2, 7)}, {0: (7, LATEST), 3: (0, LATEST)})


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 20))
def test_every_offset_comes_from_one_side(first: int, tiered: int, ahead: int, length: int, log_start: int) -> None:
    history = HistoryRange(first, first + tiered)
    start = first + ahead
    wanted = Wanted(start, start + length, min(log_start, history.end), from_earliest=False)
    parts = split({0: wanted}, {0: history})
    table, log = parts.table.get(0, HistoryRange(0, 0)), parts.log.get(0, (0, 0))
    assert [*range(table.start, table.end), *range(*log)] == list(range(start, start + length))
    assert set(range(table.start, table.end)) <= set(range(history.start, history.end))
    assert set(range(*log)) <= set(range(wanted.log_start, wanted.end))
