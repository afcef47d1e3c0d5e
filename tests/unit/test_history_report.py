"""The page about an anomaly says what it is, which clients wrote around it, and what each reader saw there."""

from __future__ import annotations

from spark_broker.model import TopicPartition
from spark_broker.testing.checker import ViolationKind, check_history
from spark_broker.testing.history import (
    Acknowledged,
    Assigned,
    CommitInvoked,
    CommitUnknown,
    Event,
    Gone,
    History,
    Invoked,
    OffsetsCommitted,
    Polled,
    ReaderOpened,
    Revoked,
    Run,
    Snapshot,
    TransactionBegan,
    TransactionCommitted,
)
from spark_broker.testing.report import AROUND, READS_MAX, explain, explain_violation

P0 = TopicPartition("t", 0)


def explained(*events: Event) -> str:
    history = History(events)
    return explain(history, check_history(history))


def test_a_lost_value_is_told_with_its_writer_and_its_readers() -> None:
    page = explained(
        Invoked(0, "alice", P0, (b"a", b"b")),
        Acknowledged(0, 0),
        Invoked(1, "bob", P0, (b"c",)),
        Acknowledged(1, 2),
        Polled("carol", P0, 2, (b"c",)),
        Snapshot("consumer", (Run(P0, 0, (b"a", b"b")),)),
    )

    assert "LOST at t-0, offset 2: b'c'" in page
    assert "bob began operation 1: b'c' to t-0" in page
    assert "operation 1 acknowledged at offset 2" in page
    assert "carol polled 2 to 2: 2=b'c'" in page
    assert "consumer (read_committed, whole read at the end) 0 to 1: 0=b'a'  1=b'b'" in page


def test_a_torn_transaction_is_told_with_its_commits() -> None:
    page = explained(
        TransactionBegan(4, "alice"),
        Invoked(0, "alice", P0, (b"a",), 4),
        Acknowledged(0, 0),
        Invoked(1, "alice", TopicPartition("t", 1), (b"b",), 4),
        Acknowledged(1, 0),
        CommitInvoked(7, (4,)),
        CommitUnknown(7, "timed out"),
        CommitInvoked(8, (4,)),
        TransactionCommitted(8),
        Snapshot("consumer", (Run(P0, 0, (b"a",)),)),
    )

    assert ViolationKind.TORN_TRANSACTION.name in page
    for told in ("transaction 4 began: alice", "commit 7: timed out", "commit 8 returned", "alice began operation 1"):
        assert told in page


def test_two_owners_are_told_with_all_owners_and_the_commits_there() -> None:
    page = explained(
        Invoked(0, "alice", P0, (b"a",)),
        Acknowledged(0, 0),
        ReaderOpened("r", group="g"),
        ReaderOpened("s", group="g"),
        Assigned("r", (P0,), 1),
        Polled("r", P0, 0, (b"a",)),
        OffsetsCommitted("g", P0, 1, None, "r", 5),
        Assigned("s", (P0,), 2),
        Revoked("r", (P0,)),
        Gone("s"),
        Snapshot("consumer", (Run(P0, 0, (b"a",)),)),
    )

    assert "TWO_OWNERS at t-0, offset 1: r owned it in epoch 1 when s was assigned it" in page
    for told in (
        "4  r was assigned it",
        "6  r committed 1 for 'g', which began at 5",
        "8  r gave it up",
        "9  s was gone",
    ):
        assert told in page


def test_the_page_stays_a_page() -> None:
    events: list[Event] = [Invoked(0, "w", P0, (b"a",)), Acknowledged(0, 0)]
    events += [Polled(f"reader-{n}", P0, 0, (b"a",)) for n in range(500)]
    history = History((*events, Snapshot("consumer", ())))
    result = check_history(history)

    page = explain_violation(history, result.violations[0])

    assert len(page.splitlines()) < READS_MAX + 2 * AROUND + 20
    assert "more ..." in page
