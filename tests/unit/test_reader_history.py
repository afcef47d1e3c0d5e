"""The checker and readers: committed offsets, latest offsets, whole reads during a run, unclean elections."""

from __future__ import annotations

import pytest

from spark_broker.model import TopicPartition
from spark_broker.testing.checker import ViolationKind, check_history
from spark_broker.testing.history import (
    Acknowledged,
    CommitInvoked,
    Event,
    Failed,
    History,
    Invoked,
    LatestShown,
    OffsetsCommitted,
    OffsetsFetched,
    Polled,
    Positioned,
    ReaderOpened,
    Run,
    Snapshot,
    SnapshotBegan,
    TransactionAborted,
    TransactionBegan,
    TransactionCommitted,
    Truncated,
    UncleanElection,
)

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
VALUES = (b"a", b"b", b"c", b"d")
APPENDED: tuple[Event, ...] = (Invoked(0, "w", P0, VALUES), Acknowledged(0, 0))
MEMBER = ReaderOpened("r", group="g")


def polled(first: int, end: int, reader: str = "r") -> Polled:
    return Polled(reader, P0, first, VALUES[first:end])


def kinds(*events: Event, runs: tuple[Run, ...] = (Run(P0, 0, VALUES),)) -> set[ViolationKind]:
    """The violations of the append, these events, and a whole read that finds `runs`."""
    result = check_history(History((*APPENDED, *events, Snapshot("consumer", runs))))
    return {violation.kind for violation in result.violations}


def test_a_committed_offset_up_to_what_was_handed_out_is_right() -> None:
    assert kinds(MEMBER, Positioned("r", P0, 0), polled(0, 3), OffsetsCommitted("g", P0, 3)) == set()


def test_a_committed_offset_may_not_pass_a_record_that_was_not_handed_out() -> None:
    assert kinds(MEMBER, Positioned("r", P0, 0), polled(0, 3), OffsetsCommitted("g", P0, 4)) == {
        ViolationKind.OFFSET_PASSED_RECORDS
    }


def test_what_is_handed_out_after_the_commit_does_not_excuse_it() -> None:
    events = (MEMBER, Positioned("r", P0, 0), polled(0, 2), OffsetsCommitted("g", P0, 3), polled(2, 4))

    assert kinds(*events) == {ViolationKind.OFFSET_PASSED_RECORDS}


def test_a_group_may_begin_anywhere() -> None:
    assert kinds(MEMBER, Positioned("r", P0), polled(2, 4), OffsetsCommitted("g", P0, 4)) == set()


def test_what_one_member_was_given_counts_for_the_group() -> None:
    other = ReaderOpened("s", group="g")
    events = (MEMBER, other, Positioned("r", P0, 0), polled(0, 2), Positioned("s", P0, 2), polled(2, 4, "s"))

    assert kinds(*events, OffsetsCommitted("g", P0, 4)) == set()
    assert kinds(*events, OffsetsCommitted("h", P0, 4)) == {ViolationKind.OFFSET_PASSED_RECORDS}


def test_a_member_that_begins_past_the_committed_offset_skips_records() -> None:
    events = (MEMBER, Positioned("r", P0, 0), polled(0, 1), OffsetsCommitted("g", P0, 1), Positioned("r", P0, 1))

    assert kinds(*events, polled(1, 4), OffsetsCommitted("g", P0, 4)) == set()
    assert kinds(*events, polled(2, 4)) == {ViolationKind.SKIPPED}
    assert kinds(*events, polled(0, 4)) == {ViolationKind.WENT_BACK}


@pytest.mark.parametrize(
    ("found", "expected"),
    [(3, set()), (4, set()), (2, {ViolationKind.OFFSET_LOST}), (None, {ViolationKind.OFFSET_LOST})],
)
def test_a_committed_offset_is_not_forgotten(found: int | None, expected: set[ViolationKind]) -> None:
    events = (
        MEMBER,
        Positioned("r", P0, 0),
        polled(0, 4),
        OffsetsCommitted("g", P0, 3),
        OffsetsFetched("g", P0, found),
    )

    assert kinds(*events) == expected


def test_an_offset_in_a_transaction_counts_when_it_is_committed() -> None:
    sent = (MEMBER, Positioned("r", P0, 0), polled(0, 4), TransactionBegan(0, "w"), OffsetsCommitted("g", P0, 4, 0))
    forgotten = OffsetsFetched("g", P0, None)

    assert kinds(*sent, TransactionAborted(0), forgotten) == set()
    assert kinds(*sent, CommitInvoked(0, (0,)), TransactionCommitted(0), forgotten) == {ViolationKind.OFFSET_LOST}


def test_the_latest_offset_shown_never_falls() -> None:
    assert kinds(LatestShown("o", P0, 2), LatestShown("o", P0, 4), LatestShown("o", P1, 0)) == set()
    assert kinds(LatestShown("o", P0, 4), LatestShown("p", P0, 3)) == set()
    assert kinds(LatestShown("o", P0, 4), LatestShown("o", P0, 3)) == {ViolationKind.LATEST_FELL}


def test_a_whole_read_on_the_way_ends_past_what_was_acknowledged_before_it_began() -> None:
    later = (Invoked(1, "w", P0, (b"e",)), Acknowledged(1, 4))
    runs = (Run(P0, 0, (*VALUES, b"e")),)
    early = Snapshot("df", (Run(P0, 0, VALUES),), final=False)

    assert kinds(SnapshotBegan("df"), *later, early, runs=runs) == set()
    assert kinds(*later, SnapshotBegan("df"), early, runs=runs) == {ViolationKind.STALE}


def test_a_whole_read_on_the_way_has_everything_below_its_end() -> None:
    assert kinds(Snapshot("df", (Run(P0, 0, VALUES[:2]),), final=False)) == set()
    assert kinds(Snapshot("df", (Run(P0, 0, VALUES[:1]), Run(P0, 2, VALUES[2:3])), final=False)) == {
        ViolationKind.SKIPPED
    }


def test_a_whole_read_on_the_way_has_nothing_that_is_gone_later() -> None:
    failed = (Invoked(1, "w", P0, (b"e",)), Failed(1, "timed out"))

    assert kinds(*failed, Snapshot("df", (Run(P0, 0, (*VALUES, b"e")),), final=False)) == {ViolationKind.CHANGED}


def test_a_micro_batch_of_unknown_outcome_is_there_whole_and_in_one_piece() -> None:
    failed = (Invoked(1, "w", P0, (b"e", b"f")), Failed(1, "timed out"))

    assert kinds(*failed, runs=(Run(P0, 0, (*VALUES, b"e", b"f")),)) == set()
    assert kinds(*failed, runs=(Run(P0, 0, (*VALUES, b"e")),)) == {ViolationKind.TORN_BATCH}
    assert kinds(*failed, runs=(Run(P0, 0, (*VALUES, b"f", b"e")),)) == {ViolationKind.TORN_BATCH}
    assert kinds(*failed, runs=(Run(P0, 0, (*VALUES, b"e")), Run(P0, 6, (b"f",)))) == {ViolationKind.TORN_BATCH}
    assert kinds(*failed, runs=(Run(P0, 0, VALUES), Run(P1, 0, (b"e", b"f")))) == {ViolationKind.TORN_BATCH}


CUT = (Run(P0, 0, (b"a", b"b", b"x")),)
"""`c` and `d` were lost to an unclean election, and `x` was appended in their place."""

REWRITTEN: tuple[Event, ...] = (Invoked(1, "w", P0, (b"x",)), Acknowledged(1, 2))


def test_an_unclean_election_may_lose() -> None:
    assert kinds(UncleanElection(P0), *REWRITTEN, runs=CUT) == set()
    assert {ViolationKind.LOST, ViolationKind.INCONSISTENT_OFFSETS} <= kinds(*REWRITTEN, runs=CUT)
    assert ViolationKind.LOST in kinds(UncleanElection(P1), *REWRITTEN, runs=CUT)


def test_after_an_unclean_election_a_retry_may_be_stored_twice() -> None:
    retried = (Invoked(1, "w", P0, (b"e",)), Failed(1, "timed out"))
    runs = (Run(P0, 0, (*VALUES, b"e", b"e")),)
    assert kinds(UncleanElection(P0), *retried, runs=runs) == set()
    assert kinds(UncleanElection(P1), *retried, runs=runs) == {ViolationKind.DUPLICATE}


def test_a_reader_of_what_an_unclean_election_lost_must_be_told() -> None:
    more = (Invoked(2, "w", P0, (b"y", b"z")), Acknowledged(2, 3))
    runs = (Run(P0, 0, (b"a", b"b", b"x", b"y", b"z")),)
    before = (polled(0, 4), UncleanElection(P0), *REWRITTEN, *more)
    told = (Truncated("r", P0, 2), Polled("r", P0, 2, (b"x", b"y", b"z")))

    assert kinds(*before, *told, runs=runs) == set()
    assert kinds(*before, runs=runs) == set()
    assert kinds(*before, Polled("r", P0, 4, (b"z",)), runs=runs) == {ViolationKind.CHANGED}
    of_a_table = UncleanElection(P0, has_table=True)
    assert kinds(*before, Polled("r", P0, 4, (b"z",)), of_a_table, runs=runs) == set()


def test_a_reader_that_is_told_of_a_cut_goes_on_where_it_is() -> None:
    more = (Invoked(2, "w", P0, (b"y", b"z")), Acknowledged(2, 3))
    runs = (Run(P0, 0, (b"a", b"b", b"x", b"y", b"z")),)
    before = (polled(0, 4), UncleanElection(P0), *REWRITTEN, *more, Truncated("r", P0, 2))

    assert kinds(*before, Polled("r", P0, 4, (b"z",)), runs=runs) == {ViolationKind.SKIPPED}
    assert kinds(*before, Positioned("r", P0, 4), Polled("r", P0, 4, (b"z",)), runs=runs) == set()


def test_a_group_that_comes_back_must_be_told_what_its_last_member_had_read() -> None:
    more = (Invoked(2, "w", P0, (b"y", b"z")), Acknowledged(2, 3))
    runs = (Run(P0, 0, (b"a", b"b", b"x", b"y", b"z")),)
    first = (ReaderOpened("r", group="g"), Positioned("r", P0, 0), polled(0, 4), OffsetsCommitted("g", P0, 4))
    before = (*first, UncleanElection(P0), *REWRITTEN, *more, ReaderOpened("r2", group="g"), Positioned("r2", P0, 4))

    told = (Truncated("r2", P0, 2), Polled("r2", P0, 2, (b"x", b"y", b"z")))
    assert kinds(*before, *told, OffsetsFetched("g", P0, 2), runs=runs) == set()
    assert kinds(*before, Polled("r2", P0, 4, (b"z",)), runs=runs) == {ViolationKind.CHANGED}


def test_a_group_that_comes_back_may_not_learn_how_far_down_the_log_was_cut() -> None:
    """It knows only the last record's epoch. The log diverges from `b` on, but it is notified only from `d` on."""
    more = (Invoked(2, "w", P0, (b"y", b"z")), Acknowledged(2, 3))
    runs = (Run(P0, 0, (b"a", b"x", b"y", b"z")),)
    first = (ReaderOpened("r", group="g"), Positioned("r", P0, 0), polled(0, 4), OffsetsCommitted("g", P0, 4))
    rewritten = (UncleanElection(P0), Invoked(1, "w", P0, (b"x",)), Acknowledged(1, 1), *more[:1], Acknowledged(2, 2))
    second = (ReaderOpened("r2", group="g"), Positioned("r2", P0, 4), Truncated("r2", P0, 3))
    before = (*first, *rewritten, *second, Polled("r2", P0, 3, (b"z",)))
    assert kinds(*before, runs=runs) == set()
    # It knows the records that it has read itself.
    later = (Invoked(3, "w", P0, (b"v",)), Acknowledged(3, 3), Truncated("r2", P0, 4), Polled("r2", P0, 4, (b"u",)))
    more_runs = (Run(P0, 0, (b"a", b"x", b"y", b"v", b"u")),)
    assert ViolationKind.CHANGED in kinds(
        *before, *later, Invoked(4, "w", P0, (b"u",)), Acknowledged(4, 4), runs=more_runs
    )


def test_a_group_need_not_be_told_of_what_it_had_not_committed() -> None:
    runs = (Run(P0, 0, (b"a", b"b", b"x")),)
    first = (ReaderOpened("r", group="g"), Positioned("r", P0, 0), polled(0, 4), OffsetsCommitted("g", P0, 2))
    second = (ReaderOpened("r2", group="g"), Positioned("r2", P0, 2), Polled("r2", P0, 2, (b"x",)))
    assert kinds(*first, UncleanElection(P0), *REWRITTEN, *second, runs=runs) == set()
