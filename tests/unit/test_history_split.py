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


@pytest.mark.parametrize(
    ("wanted", "table", "log"),
    [
        (Wanted(2, LATEST, 5, True), HistoryRange(2, 5), (5, LATEST)),
        (Wanted(2, LATEST, 9, True), HistoryRange(2, 7), (9, LATEST)),
        (Wanted(3, 6, 5, False), HistoryRange(3, 5), (5, 6)),
        (Wanted(3, 5, 5, False), HistoryRange(3, 5), None),
        (Wanted(5, 9, 5, False), None, (5, 9)),
        (Wanted(2, 9, 0, False), None, (2, 9)),
    ],
)
def test_of_a_table_that_has_refused_records_only_what_the_log_lacks_is_read(
    wanted: Wanted, table: HistoryRange | None, log: tuple[int, int] | None
) -> None:
    parts = split({0: wanted}, HISTORY, has_refused=True)
    assert parts.table.get(0) == table
    assert parts.log.get(0) == log
    lost = HistoryRange(0, 2)
    assert split({0: Wanted(0, 9, 1, False)}, HISTORY, has_refused=True).lost == {0: lost}


def test_a_partition_without_a_history_comes_from_the_log() -> None:
    parts = split({0: Wanted(2, LATEST, 5, True), 3: Wanted(0, LATEST, 0, True)}, HISTORY)
    assert (parts.table, parts.log) == ({0: HistoryRange(2, 7)}, {0: (7, LATEST), 3: (0, LATEST)})


@pytest.mark.parametrize(
    ("wanted", "lost"),
    [
        (Wanted(0, LATEST, 0, False), HistoryRange(0, 2)),
        (Wanted(0, 9, 0, False), HistoryRange(0, 2)),
        (Wanted(0, 1, 0, False), HistoryRange(0, 1)),
        (Wanted(2, 9, 0, False), None),
        (Wanted(0, 9, 0, True), None),  # It asks for what there is.
    ],
)
def test_what_was_deleted_from_the_table_is_lost_and_not_left_out(wanted: Wanted, lost: HistoryRange | None) -> None:
    assert split({0: wanted}, HISTORY).lost.get(0) == lost
    assert split({0: wanted}, {}).lost == {}, "what the log has, the source finds out"


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 20), st.integers(0, 9), st.integers(0, 20), st.booleans())
def test_every_offset_comes_from_one_side(
    first: int, tiered: int, start: int, length: int, log_start: int, has_refused: bool
) -> None:
    history = HistoryRange(first, first + tiered)
    wanted = Wanted(start, start + length, min(log_start, history.end), from_earliest=False)
    parts = split({0: wanted}, {0: history}, has_refused=has_refused)
    nothing = HistoryRange(0, 0)
    lost, table, log = parts.lost.get(0, nothing), parts.table.get(0, nothing), parts.log.get(0, (0, 0))
    found = [*range(lost.start, lost.end), *range(table.start, table.end), *range(*log)]
    assert found == list(range(start, start + length))
    assert not set(range(lost.start, lost.end)) & set(range(history.start, history.end))
    assert set(range(table.start, table.end)) <= set(range(history.start, history.end))
    assert set(range(*log)) <= set(range(wanted.log_start, wanted.end))
