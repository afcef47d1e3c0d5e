"""The history checker accepts what a correct log may do, and catches each thing that it may not."""

from __future__ import annotations

import threading

import pytest

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition
from spark_broker.testing.checker import CheckResult, Violation, ViolationKind, check_history
from spark_broker.testing.history import (
    Acknowledged,
    Event,
    Failed,
    History,
    Invoked,
    Polled,
    Positioned,
    Snapshot,
    Stored,
    runs_of,
)
from spark_broker.testing.recorder import HistoryRecorder

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)

APPENDS: tuple[Event, ...] = (
    Invoked(0, "w", P0, (b"a", b"b")),
    Invoked(1, "w", P0, (b"c",)),
    Invoked(2, "w", P1, (b"d",)),
    Acknowledged(0, 0),
    Acknowledged(2, 0),
    Acknowledged(1, 2),
)
ROWS = (Stored(P0, 0, b"a"), Stored(P0, 1, b"b"), Stored(P0, 2, b"c"), Stored(P1, 0, b"d"))


def judged(*events: Event, rows: tuple[Stored, ...] = ROWS, stored: tuple[Stored, ...] = ()) -> CheckResult:
    """Check the appends, then these events, then a whole read that finds `rows`."""
    return check_history(History((*APPENDS, *events, Snapshot("consumer", runs_of(rows)))), stored)


def kinds(result: CheckResult) -> set[ViolationKind]:
    return {violation.kind for violation in result.violations}


def test_a_correct_history_has_no_violation_and_says_how_much_it_proves() -> None:
    result = judged(Positioned("r", P0), Polled("r", P0, 0, (b"a", b"b")), Polled("r", P0, 2, (b"c",)))

    assert result.ok
    assert (result.acknowledged_values, result.failed_values, result.values_read) == (4, 0, 4)


@pytest.mark.parametrize("rows", [ROWS, (*ROWS, Stored(P0, 3, b"e"), Stored(P0, 4, b"f"))])
def test_a_failed_append_may_be_stored_or_not(rows: tuple[Stored, ...]) -> None:
    result = judged(Invoked(3, "w", P0, (b"e", b"f")), Failed(3, "timed out"), rows=rows)

    assert result.ok
    assert result.failed_values == 2


def test_a_failed_append_may_not_be_stored_twice() -> None:
    rows = (*ROWS, Stored(P0, 3, b"e"), Stored(P0, 4, b"e"))

    assert kinds(judged(Invoked(3, "w", P0, (b"e",)), Failed(3, "timed out"), rows=rows)) == {ViolationKind.DUPLICATE}


def test_an_acknowledged_value_that_nobody_finds_is_lost() -> None:
    (violation,) = judged(rows=(*ROWS[:2], ROWS[3])).violations

    assert violation == Violation(ViolationKind.LOST, P0, 2, "b'c'")


def test_a_missing_value_that_a_replica_holds_was_not_delivered() -> None:
    assert kinds(judged(rows=(*ROWS[:2], ROWS[3]), stored=ROWS)) == {ViolationKind.NOT_DELIVERED}


def test_a_value_at_two_offsets_is_a_duplicate() -> None:
    (violation,) = judged(rows=(*ROWS, Stored(P0, 3, b"c"))).violations

    assert (violation.kind, violation.offset) == (ViolationKind.DUPLICATE, 3)
    assert "t-0, offset 2" in violation.detail


def test_a_value_in_two_partitions_is_a_duplicate() -> None:
    assert kinds(judged(rows=(*ROWS, Stored(P1, 1, b"c")))) == {ViolationKind.DUPLICATE}


def test_a_row_that_one_read_gives_twice_is_a_duplicate() -> None:
    assert kinds(judged(rows=(*ROWS, ROWS[0]))) == {ViolationKind.DUPLICATE}


def test_an_offset_promised_to_two_values_is_inconsistent() -> None:
    result = judged(Invoked(3, "v", P0, (b"e",)), Acknowledged(3, 2))

    assert ViolationKind.INCONSISTENT_OFFSETS in kinds(result)


def test_two_values_at_one_offset_of_one_read_are_inconsistent() -> None:
    result = judged(Invoked(3, "w", P0, (b"e",)), rows=(*ROWS, Stored(P0, 2, b"e")))

    assert kinds(result) == {ViolationKind.INCONSISTENT_OFFSETS}


def test_another_value_where_one_was_acknowledged_is_inconsistent_and_the_first_one_lost() -> None:
    result = judged(Invoked(3, "w", P0, (b"e",)), rows=(*ROWS[:2], Stored(P0, 2, b"e"), ROWS[3]))

    assert kinds(result) == {ViolationKind.INCONSISTENT_OFFSETS, ViolationKind.LOST}


def test_a_value_found_elsewhere_than_acknowledged_is_misplaced() -> None:
    (violation,) = judged(rows=(*ROWS[:2], Stored(P0, 3, b"c"), ROWS[3])).violations

    assert (violation.kind, violation.offset) == (ViolationKind.MISPLACED, 2)
    assert "t-0 offset 3" in violation.detail


def test_appends_that_overtook_each_other_are_reordered() -> None:
    swapped = (Acknowledged(0, 1), Acknowledged(1, 0))
    rows = (Stored(P0, 0, b"c"), Stored(P0, 1, b"a"), Stored(P0, 2, b"b"))
    history = History((*APPENDS[:2], *swapped, Snapshot("consumer", runs_of(rows))))

    assert kinds(check_history(history)) == {ViolationKind.REORDERED}


@pytest.mark.parametrize(
    ("base_offset", "values", "kind"), [(2, (b"c",), ViolationKind.SKIPPED), (0, (b"a",), ViolationKind.WENT_BACK)]
)
def test_a_poll_that_does_not_go_on_where_the_last_one_ended_is_caught(
    base_offset: int, values: tuple[bytes, ...], kind: ViolationKind
) -> None:
    result = judged(Polled("r", P0, 0, (b"a",)), Polled("r", P0, base_offset, values))

    assert kinds(result) == {kind}


def test_a_new_assignment_may_begin_anywhere() -> None:
    assert judged(Polled("r", P0, 0, (b"a", b"b")), Positioned("r", P0), Polled("r", P0, 0, (b"a",))).ok


def test_readers_and_partitions_have_positions_of_their_own() -> None:
    assert judged(Polled("r", P0, 0, (b"a",)), Polled("s", P0, 2, (b"c",)), Polled("r", P1, 0, (b"d",))).ok


def test_a_read_that_is_different_later_has_changed() -> None:
    result = judged(Invoked(3, "w", P0, (b"e",)), Failed(3, "fenced"), Polled("r", P0, 2, (b"e",)))

    assert ViolationKind.CHANGED in kinds(result)


def test_a_read_of_which_nothing_is_left_has_changed() -> None:
    result = judged(Invoked(3, "w", P0, (b"e",)), Failed(3, "fenced"), Polled("r", P0, 3, (b"e",)))

    assert kinds(result) == {ViolationKind.CHANGED}


@pytest.mark.parametrize("rows", [ROWS[1:], (*ROWS, Stored(P1, 1, b"e"))])
def test_a_data_frame_that_has_other_rows_than_the_consumer_is_caught(rows: tuple[Stored, ...]) -> None:
    result = judged(Invoked(3, "w", P1, (b"e",)), Failed(3, "timed out"), Snapshot("DataFrame", runs_of(rows)))

    (violation,) = result.violations
    assert violation.kind is ViolationKind.SOURCES_DIFFER
    assert "DataFrame" in violation.detail


def test_a_value_that_nobody_appended_is_caught() -> None:
    assert kinds(judged(rows=(*ROWS, Stored(P1, 1, b"x")))) == {ViolationKind.UNKNOWN_VALUE}


def test_a_history_without_a_final_read_cannot_be_judged() -> None:
    with pytest.raises(InvalidDataError, match="no final snapshot"):
        check_history(History(APPENDS))


def test_values_that_repeat_cannot_be_judged() -> None:
    with pytest.raises(InvalidDataError, match="a second time"):
        judged(Invoked(3, "w", P0, (b"a",)))
    with pytest.raises(InvalidDataError, match="a second time"):
        judged(Invoked(3, "w", P0, (b"e", b"e")))


def test_a_report_says_what_and_where_and_stays_short() -> None:
    text = str(judged(rows=()))
    many = str(CheckResult(tuple(Violation(ViolationKind.LOST, P0, at, "gone") for at in range(500)), 500, 0, 0))

    assert "LOST at t-0, offset 2: b'c' (acknowledged, and nowhere)" in text
    assert text.startswith("4 violations; 4 values acknowledged")
    assert len(many.splitlines()) < 30
    assert many.endswith("and 480 more")


def test_the_recorder_keeps_what_many_threads_did() -> None:
    recorder = HistoryRecorder()

    def write(name: str, partition: TopicPartition) -> None:
        for at in range(200):
            recorder.acknowledged(recorder.invoked(name, partition, [f"{name}{at}".encode()]), at)

    threads = [threading.Thread(target=write, args=("ab"[p.partition], p)) for p in (P0, P1)]
    for thread in threads:
        thread.start()
    assert recorder.wait_acknowledged(400, timeout_s=20)
    for thread in threads:
        thread.join(20)
    recorder.snapshot(
        "all", [Stored(p, at, f"{'ab'[p.partition]}{at}".encode()) for p in (P0, P1) for at in range(200)]
    )

    result = check_history(recorder.history())
    assert result.ok
    assert (result.acknowledged_values, recorder.acknowledged_count) == (400, 400)


def test_an_append_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidDataError):
        HistoryRecorder().invoked("w", P0, [])
