"""The checker and transactions: each anomaly, written by hand, beside a history without it."""

from __future__ import annotations

import pytest

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition
from spark_broker.testing.checker import CheckResult, ViolationKind, check_history
from spark_broker.testing.history import (
    Acknowledged,
    CommitInvoked,
    CommitRefused,
    CommitUnknown,
    Event,
    History,
    Invoked,
    Isolation,
    Polled,
    ReaderOpened,
    Run,
    Snapshot,
    SnapshotBegan,
    TransactionAborted,
    TransactionBegan,
    TransactionCommitted,
)

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)

BEGUN: tuple[Event, ...] = (
    TransactionBegan(0, "w", "x"),
    Invoked(0, "w", P0, (b"a", b"b"), 0),
    Acknowledged(0, 0),
    Invoked(1, "w", P1, (b"c",), 0),
    Acknowledged(1, 0),
)
"""A transaction of three values in two partitions; its markers will be at offset 2 and 1."""

ALL = (Run(P0, 0, (b"a", b"b")), Run(P1, 0, (b"c",)))
COMMITTED: tuple[Event, ...] = (CommitInvoked(0, (0,)), TransactionCommitted(0))
UNKNOWN: tuple[Event, ...] = (CommitInvoked(0, (0,)), CommitUnknown(0, "timed out"))


def judged(*events: Event, runs: tuple[Run, ...] = ALL) -> CheckResult:
    """Check the events, then a whole read that finds `runs`."""
    return check_history(History((*events, Snapshot("consumer", runs))))


def kinds(*events: Event, runs: tuple[Run, ...] = ALL) -> set[ViolationKind]:
    return {violation.kind for violation in judged(*events, runs=runs).violations}


def test_a_committed_transaction_is_there_and_counts() -> None:
    result = judged(*BEGUN, *COMMITTED)

    assert result.ok
    assert (result.acknowledged_values, result.committed_transactions) == (3, 1)


@pytest.mark.parametrize("runs", [ALL, ()])
def test_a_transaction_of_unknown_outcome_is_there_whole_or_not_at_all(runs: tuple[Run, ...]) -> None:
    result = judged(*BEGUN, *UNKNOWN, runs=runs)

    assert result.ok
    assert (result.acknowledged_values, result.unknown_transactions) == (0, 1)


def test_a_part_of_a_transaction_of_unknown_outcome_is_torn() -> None:
    assert kinds(*BEGUN, *UNKNOWN, runs=ALL[:1]) == {ViolationKind.TORN_TRANSACTION}


def test_a_part_of_a_committed_transaction_that_is_missing_is_lost_and_the_transaction_torn() -> None:
    result = judged(*BEGUN, *COMMITTED, runs=ALL[:1])

    assert result.counts() == {ViolationKind.LOST: 1, ViolationKind.TORN_TRANSACTION: 1}
    assert "1 of 3 values" in next(v.detail for v in result.violations if v.kind is ViolationKind.TORN_TRANSACTION)


def test_a_committed_transaction_of_which_nothing_is_left_is_lost() -> None:
    assert judged(*BEGUN, *COMMITTED, runs=()).counts() == {ViolationKind.LOST: 3}


def test_an_aborted_transaction_is_not_missed() -> None:
    result = judged(*BEGUN, TransactionAborted(0), runs=())

    assert result.ok
    assert (result.acknowledged_values, result.aborted_transactions) == (0, 1)


def test_an_aborted_value_at_the_end_is_an_aborted_read() -> None:
    assert kinds(*BEGUN, TransactionAborted(0), runs=ALL[1:]) == {ViolationKind.ABORTED_READ}


def test_an_aborted_value_that_a_poll_was_given_is_an_aborted_read_though_it_is_gone_later() -> None:
    assert kinds(*BEGUN, Polled("r", P0, 0, (b"a", b"b")), TransactionAborted(0), runs=()) == {
        ViolationKind.ABORTED_READ
    }


def test_what_nobody_asked_to_commit_may_not_be_read() -> None:
    assert kinds(*BEGUN, runs=()) == set()
    assert kinds(*BEGUN) == {ViolationKind.ABORTED_READ}


def test_a_refused_commit_commits_nothing() -> None:
    refused = (CommitInvoked(0, (0,)), CommitRefused(0, "fenced"))

    assert kinds(*BEGUN, *refused, runs=()) == set()
    assert kinds(*BEGUN, *refused) == {ViolationKind.ABORTED_READ}


def test_a_reader_of_uncommitted_records_may_be_given_anything_that_was_appended() -> None:
    reader = ReaderOpened("r", Isolation.READ_UNCOMMITTED)
    polled = Polled("r", P0, 0, (b"a", b"b"))

    assert kinds(reader, *BEGUN, polled, TransactionAborted(0), runs=()) == set()
    assert kinds(reader, *BEGUN, polled, *COMMITTED) == set()


def test_a_read_before_the_commit_was_asked_for_is_uncommitted() -> None:
    polled = Polled("r", P1, 0, (b"c",))

    assert kinds(*BEGUN, polled, *COMMITTED) == {ViolationKind.UNCOMMITTED_READ}
    assert kinds(*BEGUN, COMMITTED[0], polled, COMMITTED[1]) == set()


def test_a_late_write_never_joins_a_transaction_whose_commit_was_asked_for() -> None:
    late = (Invoked(2, "w", P1, (b"late",), 0), Acknowledged(2, 2))

    assert ViolationKind.UNCOMMITTED_READ in kinds(*BEGUN, *UNKNOWN, *late, runs=(*ALL, Run(P1, 2, (b"late",))))


def test_a_commit_that_is_asked_for_again_is_the_same_commit() -> None:
    again = (CommitInvoked(1, (0,)), TransactionCommitted(1))

    assert judged(*BEGUN, *UNKNOWN, *again).acknowledged_values == 3
    assert kinds(*BEGUN, *UNKNOWN, *again, runs=()) == {ViolationKind.LOST}


def test_polls_jump_over_markers_and_aborted_batches_and_over_nothing_else() -> None:
    aborted = (TransactionBegan(1, "w", "x"), Invoked(2, "w", P0, (b"no",), 1), Acknowledged(2, 3))
    plain = (Invoked(3, "v", P0, (b"d",)), Acknowledged(3, 5))
    events = (*BEGUN, *COMMITTED, *aborted, TransactionAborted(1), *plain, Polled("r", P0, 0, (b"a", b"b")))
    runs = (*ALL, Run(P0, 5, (b"d",)))

    assert kinds(*events, Polled("r", P0, 5, (b"d",)), runs=runs) == set()
    more = (Invoked(4, "v", P0, (b"e",)), Acknowledged(4, 6))
    skipping = kinds(*events, *more, Polled("r", P0, 6, (b"e",)), runs=(*runs[:2], Run(P0, 5, (b"d", b"e"))))
    assert skipping == {ViolationKind.SKIPPED}


def test_a_reader_of_uncommitted_records_may_not_skip_an_aborted_batch() -> None:
    reader = ReaderOpened("r", Isolation.READ_UNCOMMITTED)
    plain = (Invoked(3, "v", P0, (b"d",)), Acknowledged(3, 3), Invoked(4, "v", P0, (b"e",)), Acknowledged(4, 4))
    events = (*BEGUN, TransactionAborted(0), reader, *plain, Polled("r", P0, 0, (b"a",)))
    runs = (Run(P0, 3, (b"d", b"e")),)

    assert kinds(*events, Polled("r", P0, 1, (b"b",)), Polled("r", P0, 3, (b"d",)), runs=runs) == set()
    assert kinds(*events, Polled("r", P0, 3, (b"d",)), runs=runs) == {ViolationKind.SKIPPED}


def test_readers_of_uncommitted_and_committed_records_agree_on_what_is_committed() -> None:
    def with_uncommitted(*runs: Run) -> set[ViolationKind]:
        return kinds(*BEGUN, *COMMITTED, Snapshot("all", runs, Isolation.READ_UNCOMMITTED))

    assert with_uncommitted(*ALL) == set()
    assert with_uncommitted(ALL[0]) == {ViolationKind.SOURCES_DIFFER}


def test_a_whole_read_on_the_way_is_held_back_by_open_transactions_and_by_nothing_else() -> None:
    plain = (Invoked(3, "v", P0, (b"d",)), Acknowledged(3, 2))
    on_the_way = (SnapshotBegan("df"), Snapshot("df", (), final=False))
    runs = (Run(P0, 0, (b"a", b"b", b"d")), ALL[1])

    assert kinds(*BEGUN, *plain, *on_the_way, *COMMITTED, runs=runs) == set()
    assert kinds(*BEGUN, *COMMITTED, *plain, *on_the_way, runs=runs) == {ViolationKind.STALE}


def attempt(transaction: int, value: bytes, *, version: int = 1, execution: str = "e") -> tuple[Event, ...]:
    """A task attempt that joins the version and appends one value; its transaction number is the offset."""
    return (
        TransactionBegan(transaction, f"task-{transaction}", app="app", version=version, execution=execution),
        Invoked(transaction, f"task-{transaction}", P0, (value,), transaction),
        Acknowledged(transaction, transaction),
    )


TASKS = (*attempt(0, b"a"), *attempt(1, b"b"), *attempt(2, b"a again"))


def winners(*values: bytes) -> tuple[Run, ...]:
    return tuple(Run(P0, {b"a": 0, b"b": 1, b"a again": 2, b"c": 3}[value], (value,)) for value in values)


def test_winners_are_there_and_losers_are_not() -> None:
    commit = (CommitInvoked(0, (0, 1)), TransactionCommitted(0))

    result = judged(*TASKS, *commit, runs=winners(b"a", b"b"))
    assert result.ok
    assert (result.acknowledged_values, result.committed_transactions, result.aborted_transactions) == (2, 2, 1)
    assert kinds(*TASKS, *commit, runs=winners(b"a", b"b", b"a again")) == {ViolationKind.ABORTED_READ}


def test_a_winner_that_is_missing_tears_the_commit() -> None:
    unknown = (CommitInvoked(0, (0, 1)), CommitUnknown(0, "timed out"))

    assert kinds(*TASKS, *unknown, runs=winners(b"b")) == {ViolationKind.TORN_TRANSACTION}
    assert kinds(*TASKS, *unknown, runs=()) == set()


def test_one_version_is_committed_once() -> None:
    first = (CommitInvoked(0, (0, 1)), TransactionCommitted(0))
    other = (*attempt(3, b"c", execution="f"), CommitInvoked(1, (3,)))
    runs = winners(b"a", b"b")

    assert kinds(*TASKS, *first, *other, CommitRefused(1, "ALREADY_COMMITTED", True), runs=runs) == set()
    assert kinds(*TASKS, *first, *other, TransactionCommitted(1), runs=winners(b"a", b"b", b"c")) == {
        ViolationKind.COMMITTED_TWICE
    }
    # The second commit was never acknowledged, but its values show that it happened.
    assert kinds(*TASKS, *first, *other, runs=winners(b"a", b"b", b"c")) == {ViolationKind.COMMITTED_TWICE}


def test_an_older_version_is_not_committed_after_a_newer_one() -> None:
    newer = (*attempt(3, b"c", version=2), CommitInvoked(0, (3,)), TransactionCommitted(0))
    older = (CommitInvoked(1, (0, 1)), TransactionCommitted(1))
    runs = winners(b"a", b"b", b"c")

    assert kinds(*TASKS, *newer, *older, runs=runs) == {ViolationKind.COMMITTED_TWICE}
    assert kinds(*TASKS, *older, *newer, runs=runs) == set()


def test_already_committed_says_that_the_earlier_asking_succeeded() -> None:
    asked_twice = (*UNKNOWN[:0], CommitInvoked(0, (0, 1)), CommitUnknown(0, "timed out"), CommitInvoked(1, (0, 1)))
    events = (*TASKS, *asked_twice, CommitRefused(1, "ALREADY_COMMITTED", True))

    assert judged(*events, runs=winners(b"a", b"b")).acknowledged_values == 2
    assert kinds(*events, runs=()) == {ViolationKind.LOST}


def test_already_committed_may_be_said_of_this_very_asking() -> None:
    events = (*TASKS, CommitInvoked(0, (0, 1)), CommitRefused(0, "ALREADY_COMMITTED", True))

    assert judged(*events, runs=winners(b"a", b"b")).acknowledged_values == 2
    assert kinds(*events, runs=()) == {ViolationKind.LOST}
    assert kinds(*TASKS, CommitInvoked(0, (0, 1)), CommitRefused(0, "fenced"), runs=()) == set()


def test_already_committed_is_a_lie_where_nothing_was_committed() -> None:
    unknown = (CommitInvoked(0, (0, 1)), CommitUnknown(0, "timed out"))
    events = (*TASKS, *unknown, CommitInvoked(1, (2,)), CommitRefused(1, "ALREADY_COMMITTED", True))

    assert kinds(*events, runs=winners(b"a", b"b")) == set()
    assert kinds(*events, runs=winners(b"a again")) == set()
    assert kinds(*events, runs=()) == {ViolationKind.COMMIT_MISSING}


def test_a_commit_without_winners_counts_as_one_of_its_version() -> None:
    empty = (CommitInvoked(0, (), "app", 1), TransactionCommitted(0))
    second = (CommitInvoked(1, (0, 1)), TransactionCommitted(1))

    assert kinds(*TASKS, *empty, runs=()) == set()
    assert kinds(*TASKS, *empty, *second, runs=winners(b"a", b"b")) == {ViolationKind.COMMITTED_TWICE}


@pytest.mark.parametrize(
    "event", [TransactionAborted(7), TransactionCommitted(7), CommitInvoked(0, (7,)), Acknowledged(7, 0)]
)
def test_an_outcome_of_what_nobody_began_cannot_be_judged(event: Event) -> None:
    with pytest.raises(InvalidDataError, match="7"):
        judged(*BEGUN, event)
