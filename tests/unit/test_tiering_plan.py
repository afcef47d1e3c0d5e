"""Which offsets are tiered next, and where the end of a history is not known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.errors import HistoryNotFoundError, TieringStoppedError
from spark_broker.history.plan import (
    HistoryState,
    PartitionLog,
    TableCommit,
    TableSnapshot,
    TieringRange,
    after,
    cut_back,
    next_ranges,
    recover,
    shortened,
    unrecorded,
)
from spark_broker.history.retention import HistoryMark

TABLE = "a-table"
RECORDED = HistoryState(TABLE, 3, 30, (0, 0), (5, 7))


def commit(version: int, ends: tuple[int, ...]) -> TableCommit:
    return TableCommit(version + 40, version, "attempt", (0,) * len(ends), ends)


def snapshot(version: int, *commits: TableCommit, table_id: str = TABLE) -> TableSnapshot:
    return TableSnapshot(table_id, 50, version, {each.version: each for each in commits})


@pytest.mark.parametrize(
    ("recorded", "table", "history"),
    [
        (HistoryState(), None, HistoryState()),
        (HistoryState(), snapshot(-1), HistoryState()),
        (RECORDED, snapshot(3), RECORDED),
        (HistoryState(), snapshot(0, commit(0, (4,))), HistoryState(TABLE, 0, 40, (0,), (4,))),
        (RECORDED, snapshot(5, commit(4, (6, 8)), commit(5, (9, 9))), HistoryState(TABLE, 5, 45, (0, 0), (9, 9))),
        # The end offsets of transaction 4 were cleaned up. Those of 5 contain them.
        (RECORDED, snapshot(5, commit(5, (9, 9))), HistoryState(TABLE, 5, 45, (0, 0), (9, 9))),
    ],
)
def test_the_history_ends_where_the_table_says(
    recorded: HistoryState, table: TableSnapshot | None, history: HistoryState
) -> None:
    assert recover(recorded, table) == history


@pytest.mark.parametrize(
    ("recorded", "table", "reason", "found"),
    [
        (RECORDED, None, r"is gone, or delta\.path was changed", False),
        (
            RECORDED,
            snapshot(3, table_id="another"),
            r"was replaced, or delta\.path was changed: its id is another",
            False,
        ),
        (RECORDED, snapshot(2), "was taken back", False),
        (RECORDED, snapshot(-1), "was taken back", False),
        (RECORDED, snapshot(4), "was cleaned up", True),
        (RECORDED, snapshot(5, commit(4, (6, 8))), "was cleaned up", True),
        (HistoryState(), snapshot(4), "was cleaned up", True),
    ],
)
def test_tiering_stops_where_the_end_is_not_known(
    recorded: HistoryState, table: TableSnapshot | None, reason: str, found: bool
) -> None:
    """`found`: the table has what is recorded, and brokers may go on to delete it."""
    with pytest.raises(TieringStoppedError, match=reason) as stopped:
        recover(recorded, table)
    assert isinstance(stopped.value, HistoryNotFoundError) != found


def test_what_is_sealed_and_not_in_the_history_comes_next() -> None:
    logs = [PartitionLog(0, 5), PartitionLog(2, 9), PartitionLog(0, 0), PartitionLog(4, 6)]
    assert next_ranges(RECORDED, logs) == [TieringRange(1, 7, 9), TieringRange(3, 4, 6)]
    assert after(RECORDED, next_ranges(RECORDED, logs), 4) == ([0, 0, 0, 4], [5, 9, 0, 6])


def test_a_history_begins_anew_after_a_gap() -> None:
    ranges = next_ranges(RECORDED, [PartitionLog(8, 9), PartitionLog(7, 9)])
    assert ranges == [TieringRange(0, 8, 9), TieringRange(1, 7, 9)]
    assert after(RECORDED, ranges, 2) == ([8, 0], [9, 9])


LOGS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: PartitionLog(*pair)), max_size=4)


@given(st.lists(LOGS, max_size=6))
def test_no_offset_is_tiered_twice_and_none_that_is_there_is_left_out(runs: list[list[PartitionLog]]) -> None:
    history = HistoryState()
    tiered: list[set[int]] = []
    for logs in runs:
        partitions = max(len(logs), len(history.ends))
        tiered += [set() for _ in range(partitions - len(tiered))]
        ranges = next_ranges(history, logs)
        for part in ranges:
            offsets = set(range(part.start, part.end))
            assert not offsets & tiered[part.partition]
            tiered[part.partition] |= offsets
        starts, ends = after(history, ranges, partitions)
        history = HistoryState(TABLE, history.version + 1, 0, tuple(starts), tuple(ends))
        for partition, log in enumerate(logs):
            assert set(range(max(log.log_start, starts[partition]), log.sealed)) <= tiered[partition]
            assert set(range(starts[partition], ends[partition])) <= tiered[partition]


def test_what_a_commit_has_beyond_the_record_is_compared_as_far_as_the_logs_reach_back() -> None:
    logs = [PartitionLog(0, 99), PartitionLog(8, 99), PartitionLog(0, 99), PartitionLog(50, 99)]
    found = unrecorded(RECORDED, commit(4, (9, 10, 3, 20)), logs)
    assert found == [TieringRange(0, 5, 9), TieringRange(1, 8, 10), TieringRange(2, 0, 3)]


def test_a_commit_that_is_cut_back_ends_where_the_log_still_agrees() -> None:
    marks = (HistoryMark(1, (5, 7), (50, 70)), HistoryMark(2, (20, 10), (150, 30)))
    found = HistoryState(TABLE, 4, 44, (0, 9), (20, 10), 3)
    kept = shortened(found, {0: 12, 1: 8})
    assert kept == HistoryState(TABLE, 4, 44, (0, 8), (12, 8), 3, uncut=True)
    after_it = cut_back(kept, marks, "another")
    assert (after_it.version, after_it.attempt, after_it.quarantined, after_it.refused) == (5, "another", 3, ())
    assert (after_it.starts, after_it.ends) == ((0, 8), (12, 8))
    assert [mark.ends for mark in after_it.marks] == [(5, 7), (12, 8)]
