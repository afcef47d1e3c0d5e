"""The checker and groups whose members share: for each rule a history that breaks it, and one that nearly does."""

from __future__ import annotations

import pytest

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition
from spark_broker.testing.checker import ViolationKind, check_history
from spark_broker.testing.history import (
    Acknowledged,
    Assigned,
    CommitInvoked,
    Event,
    Gone,
    History,
    Invoked,
    Isolation,
    OffsetsCommitted,
    OffsetsFetched,
    Polled,
    Positioned,
    ReaderOpened,
    Revoked,
    Run,
    Snapshot,
    TransactionAborted,
    TransactionBegan,
    TransactionCommitted,
    UncleanElection,
)
from spark_broker.testing.recorder import HistoryRecorder

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
VALUES = (b"a", b"b", b"c", b"d")
APPENDED: tuple[Event, ...] = (Invoked(0, "w", P0, VALUES), Acknowledged(0, 0))
MEMBERS: tuple[Event, ...] = (ReaderOpened("r", group="g"), ReaderOpened("s", group="g"))
OPENED = (*APPENDED, *MEMBERS)

CLEAN = (Revoked("r", (P0,)), Assigned("s", (P0,), 2))
OVERLAP = (Assigned("s", (P0,), 2), Revoked("r", (P0,)))
LEARNS_LATE = (Assigned("s", (P0,), 2), Revoked("r", (P0,), lost=True))
S_ENDS = Revoked("s", (P0,))


def assigned(reader: str = "r", epoch: int = 1) -> Assigned:
    return Assigned(reader, (P0,), epoch)


def polled(first: int, end: int, reader: str = "r") -> Polled:
    return Polled(reader, P0, first, VALUES[first:end])


def committed(offset: int, reader: str = "r", began: int = -1, transaction: int | None = None) -> OffsetsCommitted:
    return OffsetsCommitted("g", P0, offset, transaction, reader, began)


def kinds(*events: Event) -> set[ViolationKind]:
    """The violations of the append, two members, these events, and a whole read."""
    result = check_history(History((*OPENED, *events, Snapshot("consumer", (Run(P0, 0, VALUES),)))))
    return {violation.kind for violation in result.violations}


# One owner at a time.


@pytest.mark.parametrize(
    "move",
    [
        CLEAN,
        LEARNS_LATE,
        (Gone("r"), assigned("s", 2)),
        (assigned("s", 2), Gone("r")),
        (*CLEAN, S_ENDS, assigned("r", 3), Revoked("r", (P0,))),
        (*LEARNS_LATE, S_ENDS, assigned("r", 3)),
    ],
)
def test_a_partition_may_go_from_one_member_to_the_next(move: tuple[Event, ...]) -> None:
    assert kinds(assigned(), *move) == set()


@pytest.mark.parametrize(
    "move",
    [
        OVERLAP,
        (assigned("s", 2),),  # "r" owns it to the end.
        (assigned("s", 1), Revoked("r", (P0,))),
        (*OVERLAP, S_ENDS),
        (assigned("s", 2), Revoked("s", (P0,), lost=True)),
        (*LEARNS_LATE, assigned("r", 3), S_ENDS),
    ],
)
def test_a_partition_that_two_members_own_is_found(move: tuple[Event, ...]) -> None:
    assert kinds(assigned(), *move) == {ViolationKind.TWO_OWNERS}


def test_members_of_different_groups_and_partitions_do_not_concern_each_other() -> None:
    other = ReaderOpened("q", group="h")

    assert kinds(other, assigned(), assigned("q"), Assigned("s", (P1,), 1)) == set()


def test_a_member_that_stood_still_may_learn_of_its_partition_after_its_successor() -> None:
    late = (assigned("s", 2), assigned("r", 1))

    assert kinds(*late, Revoked("r", (P0,), lost=True)) == set()
    assert kinds(*late, Revoked("r", (P0,))) == {ViolationKind.TWO_OWNERS}


def test_what_came_twice_and_what_went_without_having_come_is_found() -> None:
    assert kinds(assigned(), assigned("r", 2)) == {ViolationKind.TOLD_WRONGLY}
    assert kinds(assigned(), Revoked("r", (P0, P1))) == {ViolationKind.TOLD_WRONGLY}
    assert kinds(assigned(), Revoked("r", (P0,)), Revoked("r", (P0,), lost=True)) == {ViolationKind.TOLD_WRONGLY}
    assert kinds(assigned(), Revoked("r", (P0,)), assigned("r", 2), Revoked("r", (P0,))) == set()


def test_a_member_of_no_group_cannot_be_judged() -> None:
    with pytest.raises(InvalidDataError, match="nobody was assigned"):
        kinds(assigned("nobody"))


# Records are handed out to the owner.


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((assigned(), polled(0, 1)), set()),
        ((polled(0, 1), assigned()), {ViolationKind.NOT_OWNED}),
        ((assigned(), polled(0, 1), Revoked("r", (P0,)), polled(1, 2)), {ViolationKind.NOT_OWNED}),
        ((assigned(), polled(0, 1), Revoked("r", (P0,), lost=True), polled(1, 2)), {ViolationKind.NOT_OWNED}),
        ((assigned(), polled(0, 1), Gone("r"), polled(1, 2)), {ViolationKind.NOT_OWNED}),
        ((assigned(), polled(0, 1, "s")), {ViolationKind.NOT_OWNED}),
        ((assigned(), polled(0, 1), assigned("s", 2), polled(1, 2), Gone("r")), set()),  # It does not know yet.
        ((ReaderOpened("alone"), assigned(), polled(0, 1, "alone")), set()),
        ((ReaderOpened("q", group="h"), assigned(), polled(0, 1, "q")), set()),  # Nobody shares in "h".
    ],
)
def test_only_the_owner_is_handed_records(events: tuple[Event, ...], expected: set[ViolationKind]) -> None:
    assert kinds(*events) == expected


# Commits of fenced members.


def moved(*after: Event, how: tuple[Event, ...] = LEARNS_LATE) -> tuple[Event, ...]:
    """r reads everything, and the partition goes to s: event 6 of the whole history, where `how` begins with it."""
    return (assigned(), polled(0, 4), *how, *after)


@pytest.mark.parametrize(("began", "expected"), [(6, set()), (7, {ViolationKind.FENCED_COMMIT}), (-1, set())])
def test_a_commit_counts_if_it_began_before_the_partition_went_to_another_member(
    began: int, expected: set[ViolationKind]
) -> None:
    assert (*OPENED, *moved())[6] == assigned("s", 2)

    assert kinds(*moved(committed(4, began=began))) == expected


def test_a_commit_of_who_owns_the_partition_again_counts() -> None:
    back = (S_ENDS, assigned("r", 3))

    assert kinds(*moved(S_ENDS, committed(4, began=9))) == {ViolationKind.FENCED_COMMIT}
    assert kinds(*moved(*back, committed(4, began=10))) == set()
    assert kinds(*moved(*back, committed(4, began=9))) == {ViolationKind.FENCED_COMMIT}


def test_a_commit_of_the_present_owner_and_one_without_a_member_count() -> None:
    assert kinds(*moved(polled(0, 4, "s"), committed(4, "s", began=9))) == set()
    assert kinds(*moved(committed(4, "", began=9))) == set()


def test_an_owner_that_learned_of_it_late_fences_nobody_later() -> None:
    late = (assigned("s", 2), assigned("r", 1), polled(0, 4, "s"))

    assert kinds(*late, committed(4, "s", began=7), Revoked("r", (P0,), lost=True)) == set()


def test_offsets_of_a_fenced_member_in_a_transaction_count_when_it_is_committed() -> None:
    sent = moved(TransactionBegan(0, "w"), committed(4, began=8, transaction=0))

    assert kinds(*sent, TransactionAborted(0)) == set()
    assert kinds(*sent, CommitInvoked(0, (0,)), TransactionCommitted(0)) == {ViolationKind.FENCED_COMMIT}


# Nothing is handed out twice, and nothing to nobody.


def read_and_committed(reached: int = 3, offset: int = 3) -> tuple[Event, ...]:
    fetched = OffsetsFetched("g", P0, None)
    return (assigned(), fetched, Positioned("r", P0, 0), polled(0, reached), committed(offset, began=7))


@pytest.mark.parametrize("move", [CLEAN, LEARNS_LATE])
def test_what_was_committed_before_a_move_is_not_handed_out_again(move: tuple[Event, ...]) -> None:
    before = (*read_and_committed(), *move)

    assert kinds(*before, Positioned("s", P0, 3), polled(3, 4, "s")) == set()
    assert kinds(*before, Positioned("s", P0), polled(2, 4, "s")) == {ViolationKind.HANDED_OUT_TWICE}


def test_what_was_not_committed_before_a_move_is_handed_out_again() -> None:
    assert kinds(*read_and_committed(3, 2), *LEARNS_LATE, Positioned("s", P0, 2), polled(2, 4, "s")) == set()


def test_a_commit_that_is_told_after_the_move_promises_nothing() -> None:
    lost, late = Revoked("r", (P0,), lost=True), committed(3, began=7)
    before = (assigned(), Positioned("r", P0, 0), polled(0, 3), assigned("s", 2), late, lost)

    assert kinds(*before, polled(0, 4, "s")) == set()


def test_offsets_in_a_transaction_are_a_beginning_for_readers_of_committed_records() -> None:
    sent = (assigned(), polled(0, 3), TransactionBegan(0, "w"), committed(3, transaction=0), CommitInvoked(0, (0,)))
    move = (TransactionCommitted(0), *CLEAN)
    uncommitted = ReaderOpened("s", Isolation.READ_UNCOMMITTED, "g")

    assert kinds(*sent, *move, polled(3, 4, "s")) == set()
    assert kinds(*sent, *move, polled(0, 4, "s")) == {ViolationKind.HANDED_OUT_TWICE}
    assert kinds(uncommitted, *sent, *move, polled(0, 4, "s")) == set()


def test_after_an_unclean_election_records_may_come_again() -> None:
    assert kinds(UncleanElection(P0), *read_and_committed(), *CLEAN, Positioned("s", P0, 2), polled(2, 4, "s")) == set()


def test_every_record_below_a_commit_was_handed_out_to_some_member() -> None:
    before = (*read_and_committed(), *CLEAN)
    end = committed(4, "s")

    assert kinds(*before, polled(3, 4, "s"), end) == set()
    assert kinds(*before, end) == {ViolationKind.OFFSET_PASSED_RECORDS}
    skipping = (*read_and_committed(3, 1), *LEARNS_LATE, Positioned("s", P0, 3), polled(3, 4, "s"))
    assert kinds(*skipping, end) == set(), "another member was handed them"
    assert kinds(*read_and_committed(1, 1), *CLEAN, Positioned("s", P0), polled(3, 4, "s"), end) == {
        ViolationKind.OFFSET_PASSED_RECORDS
    }


def test_a_member_that_takes_over_finds_what_was_committed() -> None:
    assert kinds(*read_and_committed(), *CLEAN, OffsetsFetched("g", P0, 3)) == set()
    assert kinds(*read_and_committed(), *CLEAN, OffsetsFetched("g", P0, 2)) == {ViolationKind.OFFSET_LOST}


def test_a_fetch_that_took_long_may_show_what_was_committed_when_it_began() -> None:
    """Story: a member asked for its beginning while coordinators changed. Meanwhile it lost the partition, and the next
    owner committed.
    """
    before = (*read_and_committed(), *CLEAN, polled(3, 4, "s"), committed(4, "s"))
    after = len(OPENED) + len(before)

    assert kinds(*before, OffsetsFetched("g", P0, 3, began=after - 1)) == set()
    assert kinds(*before, OffsetsFetched("g", P0, 2, began=after - 1)) == {ViolationKind.OFFSET_LOST}
    assert kinds(*before, OffsetsFetched("g", P0, 3, began=after)) == {ViolationKind.OFFSET_LOST}


# Epochs.


def test_the_epoch_of_a_member_falls_only_with_a_new_life() -> None:
    gives_up = Revoked("r", (P0,))

    assert kinds(assigned("r", 5), gives_up, assigned("r", 5)) == set()
    assert kinds(assigned("r", 5), gives_up, assigned("r", 4)) == {ViolationKind.EPOCH_FELL}
    assert kinds(assigned("r", 5), Revoked("r", (P0,), lost=True), assigned("r", 1)) == set()
    assert kinds(assigned("r", 5), Gone("r"), assigned("r", 1)) == set()
    assert kinds(assigned("r", 5), Assigned("r", (), 4)) == {ViolationKind.EPOCH_FELL}


# The recorder, and the size of histories.


def test_the_recorder_tells_where_a_commit_began() -> None:
    recorder = HistoryRecorder()
    recorder.opened("r", group="g")
    recorder.assigned("r", [P0], 3)
    began = recorder.event_count
    recorder.offsets_committed("g", P0, 0, reader="r", began=began)
    recorder.revoked("r", [P0], lost=True)
    recorder.gone("r")

    assert recorder.history().events == (
        ReaderOpened("r", group="g"),
        Assigned("r", (P0,), 3),
        OffsetsCommitted("g", P0, 0, None, "r", 2),
        Revoked("r", (P0,), lost=True),
        Gone("r"),
    )


def moves(count: int) -> History:
    """So many moves of one partition, from one member to the next; none of them gives it up."""
    recorder = HistoryRecorder()
    recorder.acknowledged(recorder.invoked("w", P0, VALUES), 0)
    for number in range(count):
        recorder.opened(f"r{number}", group="g")
        recorder.assigned(f"r{number}", [P0], number)
        recorder.polled(f"r{number}", P0, 0, VALUES)
    for number in range(count):
        recorder.offsets_committed("g", P0, 4, reader=f"r{number}", began=3 + 3 * number)
        recorder.revoked(f"r{number}", [P0], lost=number % 2 == 0)
    recorder.snapshot_of_runs("consumer", [Run(P0, 0, VALUES)])
    return recorder.history()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "count", [pytest.param(10_000, marks=pytest.mark.quick), pytest.param(100_000, marks=pytest.mark.full)]
)
def test_many_moves_are_judged(count: int) -> None:
    found = check_history(moves(count)).counts()

    # Each commit began before its member was assigned the partition, so that the one before was its owner.
    assert found == {ViolationKind.TWO_OWNERS: count // 2 - 1, ViolationKind.FENCED_COMMIT: count - 1}
