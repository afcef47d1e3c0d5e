"""A producer's transaction is there as a whole or not at all, whatever fails, and no older producer adds to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from spark_broker import Consumer, OffsetAndMetadata, Producer, RecordMetadata, TopicPartition
from spark_broker.client.coordinator import CoordinatorClient
from spark_broker.client.outgoing import OutgoingBatch
from spark_broker.client.record_builder import RecordBuilder
from spark_broker.client.sender import Sender
from spark_broker.errors import (
    BufferExhaustedError,
    ClientEndedError,
    ClosedError,
    CorruptMessageError,
    InvalidConfigError,
    InvalidDataError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    LeaderNotAvailableError,
    MessageTooLargeError,
    NetworkError,
    NotLeaderOrFollowerError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceNumberError,
    ProducerFencedError,
    RequestTimedOutError,
    SparkBrokerError,
    TransactionAbortableError,
    UnknownProducerIdError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import (
    AppendRequest,
    CallRequest,
    EmptyResponse,
    EndTransactionRequest,
    EnsureOffsetsTopicRequest,
    ErrorResponse,
    InitProducerIdRequest,
    InitTransactionsRequest,
    Message,
    MetadataRequest,
    TransactionalOffsetCommitRequest,
)
from spark_broker.protocol.murmur2 import group_partition
from tests.client.fake_broker import BreakAfterStoring, FakeCluster, StoreSilently
from tests.conftest import WaitUntil
from tests.support.committed import committed_offset

Values = Callable[..., pa.RecordBatch]
WAIT_S = 30.0
T0 = TopicPartition("t", 0)


def committed(cluster: FakeCluster, topic: str = "t", *, isolation: str = "read_committed") -> list[list[str]]:
    """What a consumer sees, by partition."""
    partitions = [TopicPartition(topic, number) for number in range(len(cluster.topics[topic].partitions))]
    consumed: list[list[str]] = [[] for _ in partitions]
    with Consumer(cluster.bootstrap, isolation_level=isolation, auto_offset_reset="earliest") as consumer:
        consumer.assign(partitions)
        ends = consumer.end_offsets(partitions)
        deadline = time.monotonic() + WAIT_S
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            assert time.monotonic() < deadline, f"positions never came to {ends}"
            for batch in consumer.poll(1.0):
                consumed[batch.partition] += [value.decode() for value in batch.data["value"].to_pylist()]
    return consumed


def transactional(cluster: FakeCluster, **settings: int) -> Producer:
    config = {name.replace("_", "."): value for name, value in settings.items()}
    return Producer(cluster.bootstrap, transactional_id="x", config={"retry.backoff.ms": 5, **config})


class Once:
    """A call hook that answers the first request of a kind, at any broker."""

    def __init__(self, kind: type[CallRequest], answer: Callable[[int, CallRequest], Message | None]) -> None:
        self._kind = kind
        self._answer = answer
        self.requests: list[CallRequest] = []

    def __call__(self, broker: int, request: CallRequest) -> Message | None:
        if not isinstance(request, self._kind):
            return None
        self.requests.append(request)
        return self._answer(broker, request) if len(self.requests) == 1 else None


def test_a_transaction_is_read_as_a_whole_once_it_is_committed(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 3)
    cluster.create("u")
    with transactional(cluster) as producer:
        with producer.transaction():
            for partition in range(3):
                producer.append("t", values(f"a{partition}"), partition=partition)
            producer.append("u", values("b")).result(WAIT_S)
            producer.flush()
            assert committed(cluster) == [[], [], []]
            assert committed(cluster, isolation="read_uncommitted") == [["a0"], ["a1"], ["a2"]]
        assert committed(cluster) == [["a0"], ["a1"], ["a2"]]
        assert committed(cluster, "u") == [["b"]]
        metrics = producer.metrics()
        assert (metrics["transactions_committed"], metrics["transactions_aborted"]) == (1, 0)
    assert {arrival.transactional_id for arrival in cluster.arrivals} == {"x"}


def test_an_exception_aborts_and_is_raised_on(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    with transactional(cluster) as producer:
        with pytest.raises(KeyError, match="mine"), producer.transaction():  # noqa: PT012 - the block is tested
            producer.append("t", values("lost")).result(WAIT_S)
            raise KeyError("mine")
        with producer.transaction():
            producer.append("t", values("kept"))
        assert producer.metrics()["transactions_aborted"] == 1
    assert committed(cluster) == [["kept"]]
    assert committed(cluster, isolation="read_uncommitted") == [["lost", "kept"]]


def test_numbers_begin_anew_in_each_transaction_under_a_new_epoch(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 2)
    with transactional(cluster) as producer:
        for names in ("ab", "c", "de"):
            with producer.transaction():
                for name in names:
                    producer.append("t", values(name), partition=1)
    numbered = [(a.producer_epoch, a.sequence) for a in cluster.arrivals]
    assert numbered == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert len({a.producer_id for a in cluster.arrivals}) == 1
    assert committed(cluster) == [[], ["a", "b", "c", "d", "e"]]


def test_records_of_send_that_still_linger_are_part_of_the_commit(cluster: FakeCluster) -> None:
    cluster.create("t")
    with transactional(cluster, linger_ms=3_600_000, batch_size=1_000_000) as producer:
        with producer.transaction():
            sent = producer.send("t", b"a")
        assert sent.result(0).offset == 0
    assert committed(cluster) == [["a"]]


def test_records_of_send_that_still_linger_are_discarded_by_an_abort(cluster: FakeCluster) -> None:
    cluster.create("t")
    with transactional(cluster, linger_ms=3_600_000, batch_size=1_000_000) as producer:
        producer.begin_transaction()
        sent = producer.send("t", b"a")
        producer.abort_transaction()
        with pytest.raises(TransactionAbortableError):
            sent.result(0)
        with producer.transaction():
            producer.send("t", b"b")
    assert committed(cluster, isolation="read_uncommitted") == [["b"]]


def test_an_abort_discards_what_waits_and_does_not_wait_for_it(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    with transactional(cluster, delivery_timeout_ms=600_000) as producer:
        producer.begin_transaction()
        producer.append("t", values("stored")).result(WAIT_S)
        cluster.elect("t", 0, -1)
        waiting = producer.append("t", values("waits"))
        began_s = time.monotonic()
        cluster.elect("t", 0, 1)
        cluster.append_hook = lambda broker, request, header: StoreSilently()
        silent = producer.append("t", values("silent"))
        producer.abort_transaction()
        assert time.monotonic() - began_s < 10
        for future in (waiting, silent):
            with pytest.raises(TransactionAbortableError):
                future.result(0)
        cluster.append_hook = lambda broker, request, header: None
        with producer.transaction():
            producer.append("t", values("next"))
    assert committed(cluster) == [["next"]]


def test_a_transaction_without_appends_ends_without_a_call(cluster: FakeCluster) -> None:
    with transactional(cluster) as producer:
        with producer.transaction():
            pass
        producer.begin_transaction()
        producer.abort_transaction()
    assert not [request for _, request in cluster.calls if isinstance(request, EndTransactionRequest)]


def test_close_aborts_what_is_open(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    producer = transactional(cluster)
    producer.begin_transaction()
    producer.append("t", values("a")).result(WAIT_S)
    producer.close()
    assert committed(cluster) == [[]]
    assert cluster.topics["t"].partitions[0].latest(True) == 2, "readers of committed records need not wait"
    with pytest.raises(ClosedError):
        producer.begin_transaction()


def test_nothing_is_appended_outside_of_a_transaction(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    with transactional(cluster) as producer:
        for call in (
            lambda: producer.append("t", values("a")),
            lambda: producer.send("t", b"a"),
            lambda: producer.send_offsets_to_transaction({T0: 1}, "g"),
            producer.commit_transaction,
            producer.abort_transaction,
        ):
            with pytest.raises(InvalidTxnStateError):
                call()
        with producer.transaction(), pytest.raises(InvalidTxnStateError):
            producer.begin_transaction()
    assert cluster.arrivals == []


def test_a_plain_producer_has_no_transactions(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap) as producer, pytest.raises(InvalidTxnStateError, match="no transactional id"):
        producer.begin_transaction()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"acks": 1}, "acks"),
        ({"acks": 0}, "acks"),
        ({"enable_idempotence": False}, "idempotence"),
        ({"transactional_id": "x" * 250}, "transactional.id"),
        ({"transaction_timeout_ms": 0}, "transaction.timeout.ms"),
    ],
)
def test_settings_that_do_not_go_with_transactions_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidConfigError, match=named):
        Producer("127.0.0.1:1", **{"transactional_id": "x", **settings})  # type: ignore[arg-type]


def test_a_time_out_that_the_brokers_do_not_allow_is_refused(cluster: FakeCluster) -> None:
    with transactional(cluster, transaction_timeout_ms=1_000_000) as producer:
        for _ in range(2):
            with pytest.raises(InvalidTransactionTimeoutError):
                producer.init_transactions()


@pytest.mark.parametrize(
    "failing",
    [
        pytest.param(lambda producer: producer.append("t", "nonsense"), id="data"),
        pytest.param(lambda producer: producer.append("nowhere", [{"value": b"a"}]), id="topic"),
        pytest.param(lambda producer: producer.send("t", b"x", partition=77), id="partition"),
    ],
)
def test_a_failed_append_lets_the_transaction_only_be_aborted(
    cluster: FakeCluster, values: Values, failing: Callable[[Producer], Future[RecordMetadata]]
) -> None:
    cluster.create("t")
    with transactional(cluster, max_block_ms=2000) as producer:
        with pytest.raises(TransactionAbortableError) as caught, producer.transaction():  # noqa: PT012 - the block is tested
            producer.append("t", values("a"))
            assert isinstance(failing(producer).exception(WAIT_S), (InvalidDataError, UnknownTopicOrPartitionError))
        assert isinstance(caught.value.__cause__, (InvalidDataError, UnknownTopicOrPartitionError))
        with producer.transaction():
            producer.append("t", values("b"))
    assert committed(cluster) == [["b"]]


def test_a_record_of_send_that_is_too_large_lets_the_transaction_only_be_aborted(cluster: FakeCluster) -> None:
    cluster.create("t", config={"max.message.bytes": "2000"})
    with transactional(cluster) as producer:
        producer.begin_transaction()
        small, large = producer.send("t", b"small"), producer.send("t", b"x" * 5000)
        assert isinstance(large.exception(WAIT_S), MessageTooLargeError)
        with pytest.raises(TransactionAbortableError, match="MESSAGE_TOO_LARGE"):
            producer.commit_transaction()
        producer.abort_transaction()
        assert small.done()
    assert committed(cluster) == [[]]


def test_an_append_that_found_no_room_lets_the_transaction_only_be_aborted(
    cluster: FakeCluster, values: Values
) -> None:
    cluster.create("t", 2)
    answers = threading.Event()

    def hold(broker: int, request: AppendRequest, header: BatchHeader) -> None:
        answers.wait(WAIT_S)

    cluster.append_hook = hold
    with transactional(cluster, buffer_memory=1024, max_block_ms=2000) as producer:
        producer.begin_transaction()
        producer.append("t", values("x" * 2000), partition=0)
        refused = producer.append("t", values("y" * 2000), partition=1)
        assert isinstance(refused.exception(WAIT_S), BufferExhaustedError)
        answers.set()
        with pytest.raises(TransactionAbortableError, match="BUFFER_EXHAUSTED"):
            producer.commit_transaction()
        producer.abort_transaction()
    assert committed(cluster) == [[], []]


@pytest.mark.parametrize(
    "refusal", [CorruptMessageError("no"), OutOfOrderSequenceNumberError("no"), UnknownProducerIdError("no")]
)
def test_a_batch_that_a_broker_refuses_for_good_aborts_and_takes_no_new_producer_id(
    cluster: FakeCluster, values: Values, refusal: SparkBrokerError
) -> None:
    cluster.create("t")
    cluster.append_hook = lambda broker, request, header: refusal
    with transactional(cluster) as producer:
        producer.begin_transaction()
        first = producer.append("t", values("a"))
        assert first.exception(WAIT_S) is not None
        with pytest.raises(TransactionAbortableError, match=refusal.name):
            producer.append("t", values("b"))
        with pytest.raises(TransactionAbortableError, match=refusal.name):
            producer.commit_transaction()
        with pytest.raises(TransactionAbortableError):
            producer.commit_transaction()
        cluster.append_hook = lambda broker, request, header: None
        producer.abort_transaction()
        with producer.transaction():
            producer.append("t", values("c"))
    assert committed(cluster) == [["c"]]
    assert len({arrival.producer_id for arrival in cluster.arrivals}) == 1
    assert not [request for _, request in cluster.calls if isinstance(request, InitProducerIdRequest)]


@pytest.mark.slow
def test_an_append_that_nobody_acknowledges_aborts_the_transaction(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 2)
    with transactional(cluster, delivery_timeout_ms=4000) as producer:
        with pytest.raises(TransactionAbortableError, match="REQUEST_TIMED_OUT"), producer.transaction():  # noqa: PT012 - the block is tested
            producer.append("t", values("a"), partition=1).result(WAIT_S)
            cluster.elect("t", 0, -1)
            producer.append("t", values("b"), partition=0)
        cluster.elect("t", 0, 1)
        with producer.transaction():
            producer.append("t", values("c"), partition=0)
    assert committed(cluster) == [["c"], []]


def test_a_batch_whose_answer_was_lost_is_committed_once(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    reactions = [None, BreakAfterStoring(), NotLeaderOrFollowerError("moved")]

    def react(broker: int, request: AppendRequest, header: BatchHeader) -> object:
        return reactions.pop(0) if reactions else None

    cluster.append_hook = react  # type: ignore[assignment]
    with transactional(cluster) as producer, producer.transaction():
        for name in "abcd":
            producer.append("t", values(name))
    assert committed(cluster) == [["a", "b", "c", "d"]]


def test_a_leader_that_is_killed_inside_a_transaction_loses_nothing(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 3)
    with transactional(cluster) as producer:
        producer.init_transactions()
        with producer.transaction():
            for n in range(60):
                if n == 30:
                    cluster.kill(2)
                producer.append("t", values(str(n)), partition=n % 3)
    assert committed(cluster) == [[str(n) for n in range(p, 60, 3)] for p in range(3)]


def test_a_newer_producer_fences_an_older_one_and_aborts_what_it_left_open(
    cluster: FakeCluster, values: Values
) -> None:
    cluster.create("t")
    with transactional(cluster) as older, transactional(cluster) as newer:
        older.begin_transaction()
        older.append("t", values("older")).result(WAIT_S)
        with newer.transaction():
            newer.append("t", values("newer"))
            with pytest.raises(ProducerFencedError):
                older.commit_transaction()
            for call in (
                older.begin_transaction,
                older.commit_transaction,
                older.abort_transaction,
                older.init_transactions,
                lambda: older.append("t", values("again")),
                lambda: older.send("t", b"again"),
                lambda: older.send_offsets_to_transaction({T0: 1}, "g"),
            ):
                with pytest.raises(ProducerFencedError):
                    call()
    assert committed(cluster) == [["newer"]]


def test_a_zombies_append_is_refused_and_its_block_says_that_it_was_fenced(
    cluster: FakeCluster, values: Values
) -> None:
    cluster.create("t")
    with transactional(cluster) as older, transactional(cluster) as newer:
        with pytest.raises(ProducerFencedError), older.transaction():  # noqa: PT012 - the block is tested
            older.append("t", values("older")).result(WAIT_S)
            newer.init_transactions()
            assert older.append("t", values("zombie")).exception(WAIT_S) is not None
        with newer.transaction():
            newer.append("t", values("newer"))
    assert committed(cluster, isolation="read_uncommitted") == [["older", "newer"]]
    assert committed(cluster) == [["newer"]]


@pytest.mark.parametrize("answer", [InvalidProducerEpochError, InvalidProducerIdMappingError, ProducerFencedError])
def test_a_coordinator_that_knows_another_identity_ends_the_producer(
    cluster: FakeCluster, values: Values, answer: type[SparkBrokerError]
) -> None:
    cluster.create("t")
    cluster.call_hook = Once(EndTransactionRequest, lambda broker, request: ErrorResponse(answer.code, "another"))
    with transactional(cluster) as producer:
        producer.begin_transaction()
        producer.append("t", values("a"))
        fatal = InvalidProducerIdMappingError if answer is InvalidProducerIdMappingError else ProducerFencedError
        for call in (producer.commit_transaction, producer.abort_transaction, producer.begin_transaction):
            with pytest.raises(fatal, match="another"):
                call()


def test_a_transaction_that_has_timed_out_is_reported_and_the_producer_goes_on(
    cluster: FakeCluster, values: Values
) -> None:
    cluster.create("t")
    with transactional(cluster) as producer:
        with pytest.raises(TransactionAbortableError), producer.transaction():  # noqa: PT012 - the block is tested
            producer.append("t", values("late")).result(WAIT_S)
            cluster.transactions.time_out("x")
        with producer.transaction():
            producer.append("t", values("next"))
    assert committed(cluster) == [["next"]]


def test_a_commit_whose_answer_is_lost_is_asked_for_again(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")

    def commit_and_break(broker: int, request: CallRequest) -> Message:
        cluster.transactions.answer(request)
        return ErrorResponse(NetworkError.code, "lost")

    hook = Once(EndTransactionRequest, commit_and_break)
    cluster.call_hook = hook
    with transactional(cluster) as producer, producer.transaction():
        producer.append("t", values("a"))
    assert len(hook.requests) == 2
    assert hook.requests[0] == hook.requests[1]
    assert committed(cluster) == [["a"]]


@pytest.mark.slow
def test_an_unknown_outcome_is_said_and_resolved_before_anything_else(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    silent = True
    cluster.call_hook = lambda broker, request: (
        ErrorResponse(NetworkError.code, "gone") if silent and isinstance(request, EndTransactionRequest) else None
    )
    with transactional(cluster, delivery_timeout_ms=1500) as producer:
        with pytest.raises(RequestTimedOutError, match="is not known"), producer.transaction():
            producer.append("t", values("a"))
        with pytest.raises(InvalidTxnStateError):
            producer.append("t", values("b"))
        with pytest.raises(RequestTimedOutError, match="is not known"):
            producer.commit_transaction()
        with pytest.raises(RequestTimedOutError, match="is not known"):
            producer.begin_transaction()
        silent = False
        producer.commit_transaction()
        assert committed(cluster) == [["a"]]
        with producer.transaction():
            producer.append("t", values("c"))
    ends = [request for _, request in cluster.calls if isinstance(request, EndTransactionRequest)]
    assert {request.committed for request in ends} == {True}
    assert committed(cluster) == [["a", "c"]]


def test_the_next_transaction_resolves_an_abort_that_nobody_answered(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.call_hook = lambda broker, request: (
        ErrorResponse(NetworkError.code, "gone") if isinstance(request, EndTransactionRequest) else None
    )
    with transactional(cluster, delivery_timeout_ms=1500) as producer:
        with pytest.raises(KeyError) as caught, producer.transaction():  # noqa: PT012 - the block is tested
            producer.append("t", values("a")).result(WAIT_S)
            raise KeyError("mine")
        assert "could not be aborted" in caught.value.__notes__[0]
        cluster.call_hook = lambda broker, request: None
        with producer.transaction():
            producer.append("t", values("b"))
    assert committed(cluster) == [["b"]]


def test_a_coordinator_that_moves_is_found_again(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    with transactional(cluster) as producer:
        for n in range(6):
            with producer.transaction():
                producer.append("t", values(str(n)))
                partition = group_partition("x", len(cluster.topics[TRANSACTION_STATE_TOPIC].partitions))
                cluster.elect(TRANSACTION_STATE_TOPIC, partition, n % 3)
    assert committed(cluster) == [[str(n) for n in range(6)]]


def test_a_frozen_coordinator_is_left_long_before_request_timeout_ms(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    thawed = threading.Event()

    def freeze(broker: int, request: CallRequest) -> None:
        thawed.wait(WAIT_S)

    cluster.call_hook = Once(EndTransactionRequest, freeze)
    with transactional(cluster, request_timeout_ms=600_000) as producer:
        began_s = time.monotonic()
        with producer.transaction():
            producer.append("t", values("a"))
        assert time.monotonic() - began_s < 10
    thawed.set()
    assert committed(cluster) == [["a"]]


def test_a_broker_that_has_just_started_and_knows_nothing_is_passed_over(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")

    def know_nothing(broker: int, request: CallRequest) -> Message | None:
        if broker == 0 and isinstance(request, MetadataRequest):
            return ErrorResponse(LeaderNotAvailableError.code, "this broker has not heard from the controller yet")
        return None

    cluster.call_hook = know_nothing
    for n in range(8):
        with transactional(cluster) as producer, producer.transaction():
            producer.append("t", values(str(n)))
    assert committed(cluster) == [[str(n) for n in range(8)]]


def test_init_takes_the_id_over_once(cluster: FakeCluster) -> None:
    with transactional(cluster, transaction_timeout_ms=7000) as producer:
        producer.init_transactions()
        producer.init_transactions()
        with producer.transaction():
            pass
    inits = [request for _, request in cluster.calls if isinstance(request, InitTransactionsRequest)]
    assert set(inits) == {InitTransactionsRequest("x", 7000)}


def test_offsets_are_committed_with_the_transaction(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 2)
    t1 = TopicPartition("t", 1)
    with transactional(cluster) as producer:
        with pytest.raises(KeyError), producer.transaction():  # noqa: PT012 - the block is tested
            producer.send_offsets_to_transaction({T0: 5}, "g")
            raise KeyError
        assert cluster.committed == {}
        with producer.transaction():
            producer.append("t", values("a"))
            producer.send_offsets_to_transaction({T0: 7}, "g")
            producer.send_offsets_to_transaction({t1: OffsetAndMetadata(3, 2, "note")}, "g")
            assert cluster.committed == {}
    with Consumer(cluster.bootstrap, group_id="g") as consumer:
        assert committed_offset(consumer, T0) == 7
        assert consumer.committed(t1) == OffsetAndMetadata(3, 2, "note")
    sent = [request for _, request in cluster.calls if isinstance(request, TransactionalOffsetCommitRequest)]
    assert [(request.producer_epoch, request.sequence) for request in sent] == [(0, 0), (1, 0), (1, 1)]


def test_the_first_offsets_wait_until_their_internal_topic_is_there(cluster: FakeCluster) -> None:
    """Story: the transaction failed with COORDINATOR_NOT_AVAILABLE while `__consumer_offsets` was being made."""
    hook = Once(EnsureOffsetsTopicRequest, lambda broker, request: EmptyResponse())
    cluster.call_hook = hook
    with transactional(cluster) as producer, producer.transaction():
        producer.send_offsets_to_transaction({T0: 5}, "g")
    assert cluster.committed["g", "t", 0].offset == 5


def test_offsets_whose_answer_is_lost_are_sent_again_under_the_same_number(cluster: FakeCluster) -> None:
    def store_and_break(broker: int, request: CallRequest) -> Message:
        cluster.transactions.answer(request)
        return ErrorResponse(NetworkError.code, "lost")

    hook = Once(TransactionalOffsetCommitRequest, store_and_break)
    cluster.call_hook = hook
    with transactional(cluster) as producer, producer.transaction():
        producer.send_offsets_to_transaction({T0: 7}, "g")
        producer.send_offsets_to_transaction({T0: 8}, "g")
    assert [request.sequence for request in hook.requests] == [0, 0, 1]  # type: ignore[union-attr]
    with Consumer(cluster.bootstrap, group_id="g") as consumer:
        assert committed_offset(consumer, T0) == 8


def test_offsets_of_a_topic_that_is_missing_are_refused_after_a_second(cluster: FakeCluster) -> None:
    missing = ErrorResponse(UnknownTopicOrPartitionError.code, "offsets in a transaction: topic 'gone' does not exist")
    asked: list[float] = []

    def refuse(broker: int, request: CallRequest) -> Message | None:
        if not isinstance(request, TransactionalOffsetCommitRequest):
            return None
        asked.append(time.monotonic())
        return missing

    cluster.call_hook = refuse
    with transactional(cluster) as producer:
        producer.begin_transaction()
        with pytest.raises(UnknownTopicOrPartitionError, match="'gone' does not exist"):
            producer.send_offsets_to_transaction({TopicPartition("gone", 0): 1}, "g")
        assert len(asked) > 1, "the coordinator may learn of a new topic later than the client"
        assert asked[-1] - asked[0] < 10, "max.block.ms is not waited for"
        producer.abort_transaction()


def test_offsets_that_are_refused_let_the_transaction_only_be_aborted(cluster: FakeCluster) -> None:
    cluster.call_hook = Once(
        TransactionalOffsetCommitRequest, lambda broker, request: ErrorResponse(CorruptMessageError.code, "no")
    )
    with transactional(cluster) as producer:
        producer.begin_transaction()
        with pytest.raises(OffsetOutOfRangeError):
            producer.send_offsets_to_transaction({T0: -1}, "g")
        with pytest.raises(InvalidConfigError, match=r"group\.id"):
            producer.send_offsets_to_transaction({T0: 1}, "")
        producer.send_offsets_to_transaction({}, "g")
        with pytest.raises(CorruptMessageError):
            producer.send_offsets_to_transaction({T0: 1}, "g")
        with pytest.raises(TransactionAbortableError, match="CORRUPT_MESSAGE"):
            producer.commit_transaction()
        producer.abort_transaction()


@pytest.mark.parametrize("commit", [True, False])
def test_the_end_waits_for_an_append_that_another_thread_has_begun(
    cluster: FakeCluster, values: Values, commit: bool
) -> None:
    cluster.create("t")
    cluster.create("u")
    begun, go_on = threading.Event(), threading.Event()

    def hold_metadata(broker: int, request: CallRequest) -> None:
        if isinstance(request, MetadataRequest) and "u" in (request.topics or []):
            begun.set()
            go_on.wait(WAIT_S)

    cluster.call_hook = hold_metadata
    with transactional(cluster) as producer, ThreadPoolExecutor(2) as pool:
        producer.begin_transaction()
        producer.append("t", values("a")).result(WAIT_S)
        begins = pool.submit(producer.append, "u", values("b"))
        assert begun.wait(WAIT_S)
        ending = pool.submit(producer.commit_transaction if commit else producer.abort_transaction)
        with pytest.raises(TimeoutError):
            ending.result(0.3)
        go_on.set()
        ending.result(WAIT_S)
        assert begins.result(WAIT_S).done()
        expected = [["b"]] if commit else [[]]
        assert committed(cluster, "u") == expected
        assert cluster.transactions.by_id["x"].writers.popitem()[1].partitions == [], "nothing is left open"


def test_an_append_belongs_to_the_transaction_in_which_it_was_admitted(cluster: FakeCluster, values: Values) -> None:
    """Threads append all the while. Each append is in its transaction as a whole, or was refused."""
    cluster.create("t", 2)
    admitted: list[Future[list[RecordMetadata]]] = []
    stop = threading.Event()

    def append_all_the_while(producer: Producer, name: str) -> None:
        n = 0
        while not stop.is_set():
            try:
                future = producer.append("t", values(f"{name}{n}"), partition=n % 2)
            except InvalidTxnStateError:
                continue
            admitted.append(future)
            n += 1

    with transactional(cluster) as producer:
        producer.init_transactions()
        threads = [threading.Thread(target=append_all_the_while, args=(producer, name)) for name in "ab"]
        for thread in threads:
            thread.start()
        for _ in range(15):
            producer.begin_transaction()
            before = len(admitted)
            deadline = time.monotonic() + WAIT_S
            while len(admitted) < before + 3:
                assert time.monotonic() < deadline, "no append is admitted"
            producer.commit_transaction()
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert all(future.done() and future.exception() is None for future in admitted)
    assert sum(len(rows) for rows in committed(cluster)) == len(admitted)


def test_offsets_whose_call_was_interrupted_are_not_taken_for_a_repetition(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the next offsets had the same number, were taken for a repetition, and the older ones were committed."""
    cluster.create("t")
    ask, interrupts = CoordinatorClient.ask, [KeyboardInterrupt]

    def interrupted(self: CoordinatorClient, request: CallRequest, *rest: Any, **named: Any) -> Any:
        answer = ask(self, request, *rest, **named)
        if isinstance(request, TransactionalOffsetCommitRequest) and interrupts:
            raise interrupts.pop()
        return answer

    monkeypatch.setattr(CoordinatorClient, "ask", interrupted)
    with Producer(cluster.bootstrap, transactional_id="x") as producer:
        producer.begin_transaction()
        with pytest.raises(KeyboardInterrupt):
            producer.send_offsets_to_transaction({T0: 5}, "g")
        with pytest.raises(TransactionAbortableError, match="KeyboardInterrupt"):
            producer.send_offsets_to_transaction({T0: 10}, "g")
        producer.abort_transaction()
        with producer.transaction():
            producer.send_offsets_to_transaction({T0: 10}, "g")
    assert cluster.committed["g", "t", 0].offset == 10


def test_an_append_that_was_interrupted_is_not_committed_in_part(
    cluster: FakeCluster, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create("t", 2)
    enqueue, calls = Sender.enqueue, [0]

    def interrupted(self: Sender, batch: OutgoingBatch) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError
        enqueue(self, batch)

    monkeypatch.setattr(Sender, "enqueue", interrupted)
    with Producer(cluster.bootstrap, transactional_id="x") as producer:
        producer.begin_transaction()
        rows = pa.Table.from_batches([values(*(f"row {number}" for number in range(50)))])
        with pytest.raises(MemoryError):
            producer.append("t", rows.set_column(0, "key", rows["value"]))
        with pytest.raises(TransactionAbortableError):
            producer.commit_transaction()
        producer.abort_transaction()
    assert committed(cluster) == [[], []]


def test_records_that_the_linger_thread_has_lost_are_not_left_out_of_a_transaction(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create("t")

    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError

    producer = Producer(cluster.bootstrap, transactional_id="x", linger_ms=20)
    producer.begin_transaction()
    producer.append("t", [{"value": b"first"}]).result(WAIT_S)
    with monkeypatch.context() as patched:
        patched.setattr(RecordBuilder, "build", out_of_memory)
        assert isinstance(producer.send("t", b"lost").exception(WAIT_S), ClientEndedError)
    with pytest.raises(TransactionAbortableError):
        producer.commit_transaction()
    producer.close(1)
    assert not any(isinstance(call, EndTransactionRequest) and call.committed for _, call in cluster.calls)


def test_a_close_keeps_its_time_while_a_callback_does_not_return(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    called, release = threading.Event(), threading.Event()

    def block(_: object) -> None:
        called.set()
        release.wait(WAIT_S * 2)

    producer = Producer(cluster.bootstrap, transactional_id="x")
    producer.begin_transaction()
    producer.append("t", values("a")).add_done_callback(block)
    assert called.wait(WAIT_S)
    began_s = time.monotonic()
    producer.close(0.5)
    assert time.monotonic() - began_s < WAIT_S / 3
    release.set()
