"""One try of a tiering run, step by step: what comes before what, and what ends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from spark_broker.client.cluster_view import TopicView
from spark_broker.errors import HistoryConflictError, HistoryNotFoundError
from spark_broker.history.attempt import Attempt, TieredTopic
from spark_broker.history.plan import TableCommit, TableSnapshot, TieringRange, Written
from spark_broker.history.retention import HistoryMark
from spark_broker.history.steps import (
    START_OVER,
    AppendRecords,
    CompareWithLogs,
    Confirm,
    CutTable,
    DeleteRows,
    HistoryFound,
    ListLogs,
    RaiseLogStarts,
    ReadClock,
    ReadRecords,
    ReadTable,
    SaveRefused,
    Step,
)
from spark_broker.protocol.messages import HistoryMetadata, ListedOffset, PartitionMetadata

EPOCH = 6
"""Of the record before the offset that a leader is asked about."""

UNRECORDED = TableCommit(5, 1, "another", (0,), (30,), (HistoryMark(7, (30,), (300,)),))
"""A commit in the table that the controller has not recorded."""


def topic(
    recorded: int,
    *,
    config: Mapping[str, str] | None = None,
    log_starts: Sequence[int] = (),
    version: int = 0,
    uncut: bool = False,
    missing: bool = False,
) -> TopicView:
    """A topic of one partition. The controller has recorded its history up to this offset; 0: none."""
    history = None
    if recorded:
        history = HistoryMetadata("table", version, 0, [0], [recorded], uncut=uncut, missing=missing)
    partition = PartitionMetadata(0, 1, 4, [1], [1], 1)
    settings = {"delta.path": "/lake", **(config or {})}
    return TopicView("t", "id", (partition,), (), settings, history, tuple(log_starts))


def log(sealed: int, *, start: int = 0) -> list[ListedOffset]:
    info = ListedOffset("id", 0, 0, offset=sealed, log_start_offset=start, sealed_offset=sealed, size_bytes=100)
    return [msgspec.structs.replace(info, start_epoch=EPOCH)]


def written(step: AppendRecords | CutTable) -> Written:
    return Written("table", step.commit, 10, 1, 100)


def run(
    view: TopicView, table: TableSnapshot | None, logs: list[ListedOffset], **answers: Callable[[Any], object]
) -> tuple[list[Step[Any]], TieredTopic]:
    """Run a try. `answers`: by the name of a step, what it answers, or raises."""
    given: dict[str, Callable[[Any], object]] = {
        "ReadTable": lambda _: table,
        "ListLogs": lambda _: logs,
        "ReadClock": lambda _: 1000,
        "ReadRecords": lambda _: 0,
        "AppendRecords": written,
        "CutTable": written,
        "CompareWithLogs": lambda _: {},
        **answers,
    }
    steps = Attempt(view, include_active_segments=False, new_id=lambda: "mine").steps()
    done: list[Step[Any]] = []
    while True:
        try:
            step = next(steps)
        except StopIteration as ended:
            tiered: TieredTopic = ended.value
            return done, tiered
        done.append(step)
        step.answer = given.get(type(step).__name__, lambda _: None)(step)


def kinds(steps: Sequence[Step[Any]]) -> list[type[Step[Any]]]:
    return [type(step) for step in steps]


def test_the_first_try_creates_the_table_and_confirms_last() -> None:
    steps, tiered = run(topic(0), None, log(20))
    done = [ReadTable, ListLogs, ReadRecords, ReadClock, AppendRecords, ListLogs, Confirm, ReadClock]
    assert kinds(steps) == done
    read, append, ends, confirm = steps[2], *steps[4:7]
    assert isinstance(read, ReadRecords)
    assert (read.ranges, read.table_exists) == ([TieringRange(0, 0, 20)], False)
    assert isinstance(append, AppendRecords)
    assert (append.commit.version, append.commit.starts, append.commit.ends) == (0, (0,), (20,))
    assert append.commit.marks == (HistoryMark(1000, (20,), (100,)),)
    assert isinstance(confirm, Confirm)
    assert isinstance(ends, ListLogs)
    assert ends.ends == (20,)
    assert (confirm.history.version, confirm.history.ends, confirm.end_epochs) == (0, (20,), (EPOCH,))
    assert (tiered.records, tiered.ends) == (10, (20,))


def test_where_nothing_is_sealed_nothing_is_written() -> None:
    steps, tiered = run(topic(20), TableSnapshot("table", 0, 0, {}), log(20))
    assert kinds(steps) == [ReadTable, ListLogs, ReadClock]
    assert (tiered.table_version, tiered.ends) == (None, (20,))


def test_a_history_that_an_earlier_run_did_not_find_is_said_to_be_there_at_once() -> None:
    """Before the logs are asked: partitions without a leader may wait for the table."""
    view = topic(20, missing=True)
    steps, _ = run(view, TableSnapshot("table", 0, 0, {}), log(20))
    assert kinds(steps) == [ReadTable, HistoryFound, ListLogs, ReadClock]
    with pytest.raises(HistoryNotFoundError, match="gone"):
        run(view, None, log(20))


def test_a_commit_that_nobody_recorded_is_compared_with_the_log_and_recorded_first() -> None:
    table = TableSnapshot("table", 5, 1, {1: UNRECORDED})
    steps, tiered = run(topic(20), table, log(45))
    assert kinds(steps)[:5] == [ReadTable, ListLogs, CompareWithLogs, ListLogs, Confirm]
    compare, confirm = steps[2], steps[4]
    assert isinstance(compare, CompareWithLogs)
    assert compare.ranges == [TieringRange(0, 20, 30)]
    assert isinstance(confirm, Confirm)
    assert (confirm.history.version, confirm.history.ends) == (1, (30,))
    assert tiered.ends == (45,)


def test_a_try_whose_metadata_lacks_a_partition_of_the_table_starts_over() -> None:
    """Found by the simulator (seed 160005630): it failed on a bug."""
    grown = TableCommit(5, 1, "another", (0, 0), (30, 10), (HistoryMark(7, (30, 10), (300, 100)),))
    with pytest.raises(START_OVER, match="t has 1 partitions here, and 2 in its table"):
        run(topic(20), TableSnapshot("table", 5, 1, {1: grown}), log(45))


def test_the_table_is_cut_only_once_the_controller_has_decided_it() -> None:
    """What the table has and the log lacks may have been compacted, once the controller has recorded the commit. A try
    whose metadata is older would take it for cut by an unclean election.
    """
    table = TableSnapshot("table", 5, 1, {1: UNRECORDED})
    asked: list[Confirm] = []

    def recorded_meanwhile(step: Confirm) -> None:
        asked.append(step)
        raise HistoryConflictError("version 1 of t: 1 was confirmed before")

    with pytest.raises(HistoryConflictError):
        run(topic(20), table, log(45), CompareWithLogs=lambda _: {0: 25}, Confirm=recorded_meanwhile)
    assert [(step.history.version, step.history.ends, step.history.uncut) for step in asked] == [(1, (25,), True)]


def test_rows_that_an_unclean_election_cut_from_the_log_are_cut_from_the_table() -> None:
    table = TableSnapshot("table", 5, 1, {1: UNRECORDED})
    steps, tiered = run(topic(20), table, log(45), CompareWithLogs=lambda _: {0: 25})
    assert kinds(steps)[2:8] == [CompareWithLogs, ListLogs, Confirm, CutTable, ListLogs, Confirm]
    check_cut(steps[4:8])
    assert tiered.ends == (45,)


def test_a_cut_that_was_decided_and_not_made_comes_before_anything_is_appended() -> None:
    table = TableSnapshot("table", 5, 1, {1: UNRECORDED})
    steps, tiered = run(topic(25, version=1, uncut=True), table, log(45))
    assert kinds(steps)[:5] == [ReadTable, CutTable, ListLogs, Confirm, ListLogs]
    check_cut(steps[:4])
    assert tiered.ends == (45,)


def check_cut(steps: Sequence[Step[Any]]) -> None:
    cut, confirm = steps[1], steps[3]
    assert isinstance(cut, CutTable)
    assert (cut.offsets, cut.commit.version, cut.commit.ends) == ({0: 25}, 2, (25,))
    assert [mark.ends for mark in cut.commit.marks] == [(25,)]
    assert isinstance(confirm, Confirm)
    assert (confirm.history.version, confirm.history.ends, confirm.history.uncut) == (2, (25,), False)


def test_records_that_the_table_refuses_are_saved_before_the_controller_knows() -> None:
    table = TableSnapshot("table", 0, 0, {})
    steps, tiered = run(topic(20), table, log(45), ReadRecords=lambda _: 3)
    saved = [AppendRecords, ListLogs, SaveRefused, ListLogs, Confirm, ReadClock]
    assert kinds(steps)[2:] == [ReadRecords, ReadClock, *saved]
    append = steps[4]
    assert isinstance(append, AppendRecords)
    assert (append.commit.refused, append.commit.quarantined) == ((TieringRange(0, 20, 45),), 3)
    assert tiered.quarantined == 3


def test_retention_tells_the_controller_before_rows_go() -> None:
    marks = (HistoryMark(10, (20,), (100,)),)
    commit = TableCommit(0, 0, "x", (0,), (20,), marks)
    table = TableSnapshot("table", 0, 0, {0: commit})
    view = topic(20, config={"retention.ms": "500"})
    steps, tiered = run(view, table, log(20))
    assert kinds(steps) == [ReadTable, ListLogs, ReadClock, RaiseLogStarts, DeleteRows]
    assert tiered.log_starts == (20,)


def at(now_ms: int, logs: list[ListedOffset]) -> list[ListedOffset]:
    """By the leaders' clocks."""
    return [msgspec.structs.replace(info, now_ms=now_ms) for info in logs]


def test_a_clock_of_the_tierer_that_is_ahead_deletes_nothing() -> None:
    commit = TableCommit(0, 0, "x", (0,), (20,), (HistoryMark(10, (20,), (100,)),))
    view, table = topic(20, config={"retention.ms": "500"}), TableSnapshot("table", 0, 0, {0: commit})
    steps, tiered = run(view, table, at(400, log(20)))
    assert kinds(steps) == [ReadTable, ListLogs, ReadClock]
    assert tiered.log_starts == (0,)
    _, tiered = run(view, table, at(1100, log(20)))
    assert tiered.log_starts == (20,), "it is old by both clocks"


def test_a_clock_of_the_tierer_that_is_behind_makes_no_record_old() -> None:
    steps, _ = run(topic(0), None, at(2_000_000, log(20)))
    append = steps[4]
    assert isinstance(append, AppendRecords)
    assert append.commit.marks == (HistoryMark(2_000_000, (20,), (100,)),)


def test_rows_of_deleted_records_go_before_anything_is_appended() -> None:
    steps, _ = run(topic(20, log_starts=[7]), TableSnapshot("table", 0, 0, {}), log(45))
    assert kinds(steps)[:3] == [ReadTable, DeleteRows, ListLogs]
    delete = steps[1]
    assert isinstance(delete, DeleteRows)
    assert delete.before == {0: 7}
