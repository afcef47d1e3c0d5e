"""The history checker of a compacted topic: what may be gone, and what may not."""

from __future__ import annotations

import pytest

from spark_broker.model import TopicPartition
from spark_broker.testing.checker import CheckResult, ViolationKind, check_history
from spark_broker.testing.checks.compaction import removable_values
from spark_broker.testing.history import (
    Acknowledged,
    Event,
    Failed,
    History,
    Invoked,
    Isolation,
    Polled,
    Positioned,
    ReaderOpened,
    Run,
    Snapshot,
    Stored,
    runs_of,
)

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)

FIRST = Invoked(0, "w", P0, (b"a1", b"b1"), keys=(b"a", b"b"))
SECOND = Invoked(1, "w", P0, (b"a2", b"c1"), keys=(b"a", b"c"))
DELETION = Invoked(2, "w", P0, (b"c2",), keys=(b"c",), tombstones=(0,))
APPENDS: tuple[Event, ...] = (FIRST, SECOND, DELETION, Acknowledged(0, 0), Acknowledged(1, 2), Acknowledged(2, 4))
LEFT = (Stored(P0, 1, b"b1"), Stored(P0, 2, b"a2"))
"""What is left when everything has gone that may."""


def judged(*events: Event, rows: tuple[Stored, ...] = LEFT) -> CheckResult:
    return check_history(History((*APPENDS, *events, Snapshot("consumer", runs_of(rows)))))


def kinds(result: CheckResult) -> set[ViolationKind]:
    return {violation.kind for violation in result.violations}


@pytest.mark.parametrize(
    "also", [(), (Stored(P0, 0, b"a1"),), (Stored(P0, 3, b"c1"),), (Stored(P0, 3, b"c1"), Stored(P0, 4, b"c2"))]
)
def test_what_is_superseded_or_deletes_may_be_there_or_not(also: tuple[Stored, ...]) -> None:
    assert judged(rows=tuple(sorted((*LEFT, *also), key=lambda row: row.offset))).ok


@pytest.mark.parametrize("gone", LEFT)
def test_the_last_record_of_a_key_is_not_to_be_gone(gone: Stored) -> None:
    assert kinds(judged(rows=tuple(row for row in LEFT if row != gone))) == {ViolationKind.LOST}


def test_a_reader_may_skip_what_is_gone_and_nothing_else() -> None:
    assert judged(Positioned("r", P0, 0), Polled("r", P0, 1, (b"b1", b"a2"))).ok
    assert kinds(judged(Positioned("r", P0, 0), Polled("r", P0, 2, (b"a2",)))) == {ViolationKind.SKIPPED}


def test_a_record_that_comes_back_elsewhere_is_found() -> None:
    assert ViolationKind.MISPLACED in kinds(judged(rows=(*LEFT, Stored(P0, 5, b"a1"))))


def removable(
    *invoked: Invoked, at: dict[int, int], aborted: tuple[int, ...] = (), read: tuple[Run, ...] = ()
) -> set[bytes]:
    return removable_values(
        invoked, at, aborted, {v: at for run in read for at, v in enumerate(run.values, run.base_offset)}
    )


def test_a_key_of_another_partition_supersedes_nothing() -> None:
    elsewhere = Invoked(1, "w", P1, (b"a2",), keys=(b"a",))
    assert removable(FIRST, elsewhere, at={0: 0, 1: 9}) == set()


def test_what_was_not_committed_supersedes_nothing_and_may_go() -> None:
    assert removable(FIRST, SECOND, at={0: 0, 1: 2}, aborted=(1,)) == {b"a2", b"c1"}


def test_an_append_of_unknown_outcome_supersedes_only_if_it_was_read() -> None:
    assert b"a1" not in removable(FIRST, SECOND, at={0: 0})
    assert b"a1" in removable(FIRST, SECOND, at={0: 0}, read=(Run(P0, 2, (b"a2", b"c1")),))


def test_values_without_keys_stay() -> None:
    assert removable(Invoked(0, "w", P0, (b"x",)), at={0: 0}) == set()


def test_an_append_that_failed_supersedes_nothing_where_nobody_read_it() -> None:
    events = (Invoked(9, "w", P0, (b"b2",), keys=(b"b",)), Failed(9, "timed out"))
    assert judged(*events).ok
    assert kinds(judged(*events, rows=LEFT[1:])) == {ViolationKind.LOST}


@pytest.mark.parametrize("isolation", list(Isolation))
def test_an_append_without_an_answer_that_was_read_may_go_when_it_is_superseded(isolation: Isolation) -> None:
    """Story: only a reader of uncommitted records had read it, and the nemesis said that what was read had changed."""
    result = judged(
        Invoked(9, "w", P0, (b"b2",), keys=(b"b",)),
        Failed(9, "timed out"),
        ReaderOpened("r", isolation),
        Positioned("r", P0, 5),
        Polled("r", P0, 5, (b"b2",)),
        Invoked(10, "w", P0, (b"b3",), keys=(b"b",)),
        Acknowledged(10, 6),
        rows=(Stored(P0, 2, b"a2"), Stored(P0, 6, b"b3")),
    )
    assert result.ok
