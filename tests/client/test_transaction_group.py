"""Many writers, one commit: what the winners appended is there once, and nothing of other writers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pyarrow as pa
import pytest

from spark_broker import TransactionGroup
from spark_broker.errors import (
    AlreadyCommittedError,
    ClosedError,
    CorruptMessageError,
    InvalidConfigError,
    InvalidTxnStateError,
    NetworkError,
    ProducerFencedError,
    RequestTimedOutError,
    TransactionAbortableError,
)
from spark_broker.protocol.messages import (
    CallRequest,
    CommitTransactionRequest,
    EndTransactionRequest,
    ErrorResponse,
    JoinTransactionRequest,
)
from tests.client.fake_broker import FakeCluster
from tests.client.test_transactions import committed

Values = Callable[..., pa.RecordBatch]
WAIT_S = 30.0


def make_group(
    cluster: FakeCluster, version: int = 0, execution: str = "run-1", timeout_ms: int = 120_000
) -> TransactionGroup:
    config = {"retry.backoff.ms": 5, "delivery.timeout.ms": timeout_ms}
    return TransactionGroup(cluster.bootstrap, "app", version, execution, config=config)


def write(group: TransactionGroup, batch: pa.RecordBatch, partition: int = 0) -> int:
    """A task attempt, from its join to what it reports."""
    with group.join() as writer:
        writer.append("t", batch, partition=partition)
        writer.flush()
        return writer.producer_id


def test_what_winners_appended_is_there_and_nothing_of_the_others(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 2)
    group = make_group(cluster)
    winners = [write(group, values("w0"), 0), write(group, values("w1"), 1)]
    loser = write(group, values("twice"), 1)
    assert loser not in winners
    assert committed(cluster) == [[], []]
    assert group.last_committed() is None
    assert group.commit(winners)
    assert committed(cluster) == [["w0"], ["w1"]]
    assert group.last_committed() == 0


def test_closing_a_writer_keeps_what_it_appended_and_leaves_the_transaction_to_its_driver(
    cluster: FakeCluster, values: Values, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create("t", 2)
    group = make_group(cluster)
    writer = group.join()
    writer.append("t", values("a", "b"), partition=0)
    sent = [writer.send("t", value=value, partition=1) for value in ("c", "d")]  # within linger.ms
    writer.close()
    assert [future.result(0).offset for future in sent] == [0, 1]
    assert group.commit([writer.producer_id])
    assert committed(cluster) == [["a", "b"], ["c", "d"]]
    assert caplog.messages == []


def test_a_writer_asks_no_coordinator_when_it_is_closed(
    cluster: FakeCluster, values: Values, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create("t", 1)
    for attempt in range(3):
        with make_group(cluster).join() as writer:
            writer.append("t", values(f"{attempt}"), partition=0)
    assert EndTransactionRequest not in {type(request) for _, request in cluster.calls}
    assert caplog.messages == []


def test_closing_a_writer_tells_of_an_append_that_failed_unseen(
    cluster: FakeCluster, values: Values, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create("t", 1)
    writer = make_group(cluster).join()
    writer.append("t", values("a"), partition=7)
    writer.close()
    (told,) = caplog.messages
    assert "nobody looked at their Futures" in told
    with pytest.raises(TransactionAbortableError, match="partitions 0 to 0"), make_group(cluster).join() as writer:
        writer.append("t", values("a"), partition=7)


def test_a_version_is_committed_once(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    group = make_group(cluster)
    assert group.commit([write(group, values("a"))])
    assert not group.commit([])
    again = make_group(cluster, execution="run-2")
    with pytest.raises(AlreadyCommittedError):
        again.join()
    assert not again.commit([])
    following = make_group(cluster, version=1, execution="run-2")
    assert following.commit([write(following, values("b"))])
    assert committed(cluster) == [["a", "b"]]
    assert following.last_committed() == 1


def test_an_empty_version_is_committed_too(cluster: FakeCluster) -> None:
    group = make_group(cluster, version=3)
    assert group.commit([])
    assert group.last_committed() == 3


def test_an_aborted_version_takes_no_more_writers_of_its_execution(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    group = make_group(cluster)
    write(group, values("a"))
    group.abort()
    with pytest.raises(InvalidTxnStateError):
        group.join()
    again = make_group(cluster, execution="run-2")
    assert again.commit([write(again, values("b"))])
    assert committed(cluster) == [["b"]]


def test_a_newer_execution_aborts_and_fences_an_older_one(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    older, newer = make_group(cluster), make_group(cluster, execution="run-2")
    with pytest.raises(TransactionAbortableError), older.join() as writer:  # noqa: PT012 - the block is tested
        writer.append("t", values("older")).result(WAIT_S)
        winner = write(newer, values("newer"))
        assert writer.append("t", values("zombie")).exception(WAIT_S) is not None
    with pytest.raises(ProducerFencedError):
        older.join()
    assert newer.commit([winner])
    assert committed(cluster) == [["newer"]]


def test_a_winner_must_have_joined(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    group = make_group(cluster)
    winner = write(group, values("a"))
    with pytest.raises(InvalidTxnStateError):
        group.commit([winner, winner + 1000])
    assert group.commit([winner])
    assert committed(cluster) == [["a"]]


def test_a_writer_whose_append_failed_cannot_be_taken_for_a_winner(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.append_hook = lambda broker, request, header: CorruptMessageError("no")
    group = make_group(cluster)
    writer = group.join()
    writer.append("t", values("a"))
    with pytest.raises(TransactionAbortableError, match="CORRUPT_MESSAGE"):
        writer.flush()
    with pytest.raises(TransactionAbortableError), writer:
        pass
    with pytest.raises(ClosedError):
        writer.append("t", values("b"))


def test_a_writer_does_not_end_the_transaction_itself(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    group = make_group(cluster)
    with group.join() as writer:
        writer.append("t", values("a")).result(WAIT_S)
        for call in (
            writer.init_transactions,
            writer.begin_transaction,
            writer.commit_transaction,
            writer.abort_transaction,
            lambda: writer.send_offsets_to_transaction({}, "g"),
        ):
            with pytest.raises(InvalidTxnStateError, match="driver"):
                call()
    assert group.commit([writer.producer_id])
    assert committed(cluster) == [["a"]]


def test_a_task_that_dies_is_a_loser_without_further_ado(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    group = make_group(cluster)
    with pytest.raises(KeyError), group.join() as writer:  # noqa: PT012 - the block is tested
        writer.append("t", values("dies")).result(WAIT_S)
        raise KeyError
    assert group.commit([write(group, values("again"))])
    assert committed(cluster) == [["again"]]


def test_a_commit_whose_answer_is_lost_is_repeated_and_finds_itself_done(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    group = make_group(cluster)
    winner = write(group, values("a"))
    lost: list[CallRequest] = []

    def commit_and_break(broker: int, request: CallRequest) -> ErrorResponse | None:
        if not isinstance(request, CommitTransactionRequest) or lost:
            return None
        lost.append(request)
        cluster.transactions.answer(request)
        return ErrorResponse(NetworkError.code, "lost")

    cluster.call_hook = commit_and_break
    assert not group.commit([winner])
    assert committed(cluster) == [["a"]]


def test_an_unknown_outcome_is_said(cluster: FakeCluster) -> None:
    cluster.call_hook = lambda broker, request: (
        ErrorResponse(NetworkError.code, "gone") if isinstance(request, CommitTransactionRequest) else None
    )
    group = make_group(cluster, timeout_ms=2000)
    with pytest.raises(RequestTimedOutError, match="CommitTransactionRequest is not known"):
        group.commit([])
    cluster.call_hook = lambda broker, request: None
    assert group.commit([])


def test_a_group_is_a_plain_value(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    group = make_group(cluster)
    copied = TransactionGroup(**json.loads(json.dumps(dataclasses.asdict(group))))
    assert copied == group
    assert group.commit([json.loads(json.dumps(write(copied, values("a"))))])
    joins = [request for _, request in cluster.calls if isinstance(request, JoinTransactionRequest)]
    assert joins == [JoinTransactionRequest("app", 0, "run-1", 900_000)]


@pytest.mark.parametrize(
    ("application", "version", "execution"), [("", 0, "e"), ("a", -1, "e"), ("a", 2**63, "e"), ("a", 0, "e" * 250)]
)
def test_a_group_that_no_coordinator_could_take_is_refused(application: str, version: int, execution: str) -> None:
    with pytest.raises(InvalidConfigError):
        TransactionGroup("127.0.0.1:1", application, version, execution)
