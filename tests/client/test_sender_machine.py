"""The sender's machine by itself: events and times in, effects out."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from spark_broker.client.cluster_view import ClusterView, merge
from spark_broker.client.leader_channel import LeaderChannel
from spark_broker.client.outgoing import Outcome, OutgoingBatch
from spark_broker.client.retry import UNKNOWN_TOPIC_GRACE_MS, Backoff
from spark_broker.client.sender_effects import (
    CloseChannel,
    CompleteBatch,
    RefreshMetadata,
    RequestProducerIds,
    SendAppends,
    SenderEffect,
)
from spark_broker.client.sender_machine import STALLED_MS, SenderMachine
from spark_broker.config import ProducerConfig
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import (
    ClosedError,
    DuplicateSequenceNumberError,
    NetworkError,
    NotLeaderOrFollowerError,
    OutOfOrderSequenceNumberError,
    RequestTimedOutError,
    SchemaMismatchError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
    TransactionAbortableError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import RecordMetadata, TopicPartition
from spark_broker.protocol.arrow_message import encoded_batch
from spark_broker.protocol.messages import (
    AppendRequest,
    AppendResponse,
    BrokerMetadata,
    MetadataResponse,
    PartitionMetadata,
    TopicMetadata,
)

TOPIC_ID = "0" * 32
MESSAGE = encoded_batch(pa.record_batch({"value": [b"x"]}))
BACKOFF_MS = 100
REQUEST_TIMEOUT_MS = 5000
DELIVERY_TIMEOUT_MS = 20_000
OLD, NEW = ProducerIdentity(7, 0), ProducerIdentity(8, 0)
FIRST = TopicPartition("t", 0)


def cluster(*leaders: int, epoch: int = 1, fenced: tuple[int, ...] = (), exists: bool = True) -> ClusterView:
    """Brokers 0 and 1, and topic "t". `leaders`: the leader of each partition (-1: none)."""
    brokers = [BrokerMetadata(n, f"host{n}", 9000, None, 1, 0, "", 0, n in fenced) for n in (0, 1)]
    partitions = [PartitionMetadata(n, leader, epoch, [0, 1], [0, 1], epoch) for n, leader in enumerate(leaders)]
    topics = [TopicMetadata("t", TOPIC_ID, partitions, [], {})] if exists else []
    return merge(ClusterView(), MetadataResponse("c", 1, brokers, topics), None)


class Rig:
    """A machine, its view of the cluster, the time, and what has come of its effects."""

    def __init__(self, view: ClusterView, **settings: object) -> None:
        values: dict[str, object] = {
            "retry_backoff_ms": BACKOFF_MS,
            "retry_backoff_max_ms": 8 * BACKOFF_MS,
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            "delivery_timeout_ms": DELIVERY_TIMEOUT_MS,
            **settings,
        }
        self.config = ProducerConfig(**values)  # type: ignore[arg-type]
        rng = random.Random(1)
        self.machine = SenderMachine(
            self.config, Backoff(self.config.retry_backoff_ms, self.config.retry_backoff_max_ms, rng=rng)
        )
        self.machine.identity = OLD if self.machine.numbered else None
        self.view = view
        self.now_ms = 1000
        self.sent: list[tuple[LeaderChannel, AppendRequest, OutgoingBatch]] = []
        self.outcomes: list[Outcome] = []
        self.closed: list[CloseChannel] = []
        self.asked: list[SenderEffect] = []  # requests to brokers, not answered

    def append(self, count: int = 1, partition: int = 0) -> list[OutgoingBatch]:
        tp = TopicPartition("t", partition)
        batches = [OutgoingBatch(tp, TOPIC_ID, 0, 1, MESSAGE, self.outcomes.append) for _ in range(count)]
        for batch in batches:
            self.carry_out(self.machine.enqueue(batch, self.view, self.now_ms))
        return batches

    def carry_out(self, effects: list[SenderEffect]) -> None:
        for effect in effects:
            match effect:
                case CompleteBatch(batch, outcome):
                    batch.complete(outcome)
                case SendAppends(channel):
                    while (taken := self.machine.next_append(channel, self.now_ms)) is not None:
                        self.sent.append((channel, *taken))
                        self.carry_out(self.machine.written(channel, taken[1], self.now_ms))
                case CloseChannel():
                    self.closed.append(effect)
                case _:
                    self.asked.append(effect)

    def take_sent(self) -> list[tuple[LeaderChannel, AppendRequest, OutgoingBatch]]:
        sent, self.sent = self.sent, []
        return sent

    def answer(self, sent: tuple[LeaderChannel, AppendRequest, OutgoingBatch], error: SparkBrokerError | None) -> None:
        channel, request, _ = sent
        code, message, offset = (0, "", request.correlation_id) if error is None else (error.code, error.message, -1)
        response = AppendResponse(request.correlation_id, code, message, offset)
        self.carry_out(self.machine.answered(channel, response, self.now_ms))

    def breaks(self, channel: LeaderChannel, error: SparkBrokerError) -> None:
        self.carry_out(self.machine.broke(channel, error, self.now_ms))

    def refreshed(self, view: ClusterView) -> None:
        assert self.asked.pop() == RefreshMetadata()
        self.view = view
        self.carry_out(self.machine.metadata_refreshed(view, self.now_ms))

    def wait(self, ms: int, metadata_age_ms: float = 0) -> None:
        """Time passes, and whatever is due by then happens."""
        until_ms = self.now_ms + ms
        while self.machine.due_ms <= until_ms:
            self.now_ms = max(self.now_ms, int(self.machine.due_ms))
            self.carry_out(self.machine.tick(self.now_ms, metadata_age_ms))
        self.now_ms = until_ms


def sequences(sent: list[tuple[LeaderChannel, AppendRequest, OutgoingBatch]]) -> list[int]:
    return [batch.sequence for _, _, batch in sent]


def test_batches_are_numbered_and_five_of_a_partition_are_in_flight() -> None:
    rig = Rig(cluster(0, 1))
    rig.append(7)
    rig.append(1, partition=1)
    sent = rig.take_sent()
    assert sequences(sent) == [0, 1, 2, 3, 4, 0]
    assert [channel.broker_id for channel, _, _ in sent] == [0, 0, 0, 0, 0, 1]
    assert [request.leader_epoch for _, request, _ in sent] == [1] * 6
    rig.answer(sent[0], None)
    assert sequences(rig.take_sent()) == [5]
    assert rig.outcomes == [RecordMetadata("t", 0, sent[0][1].correlation_id, 1)]
    assert rig.machine.open_batches == 7


def test_a_leader_that_has_a_newer_schema_is_asked_for_metadata_at_once() -> None:
    """Story: producers of both schemas appended by turns. Each append began a segment, for up to five minutes."""
    rig = Rig(cluster(0))
    rig.append(2)
    (channel, first, batch), (_, second, _) = rig.take_sent()
    current = AppendResponse(first.correlation_id, 0, "", 0, newer_schema_id=-1)
    rig.carry_out(rig.machine.answered(channel, current, rig.now_ms))
    assert rig.asked == []
    newer = AppendResponse(second.correlation_id, 0, "", 1, newer_schema_id=batch.schema_id + 1)
    rig.carry_out(rig.machine.answered(channel, newer, rig.now_ms))
    assert len(rig.outcomes) == 2
    rig.refreshed(rig.view)
    assert rig.asked == []


def test_a_duplicate_is_acknowledged_without_an_offset() -> None:
    rig = Rig(cluster(0))
    rig.append()
    rig.answer(rig.sent[0], DuplicateSequenceNumberError("it is in the log"))
    assert rig.outcomes == [RecordMetadata("t", 0, None, 1)]


def test_without_a_leader_metadata_is_asked_for_until_there_is_one() -> None:
    rig = Rig(cluster(-1))
    rig.append()
    assert rig.asked == [RefreshMetadata()]
    rig.refreshed(cluster(-1))
    assert rig.asked == []
    rig.wait(2 * BACKOFF_MS)
    rig.refreshed(cluster(0))
    assert sequences(rig.sent) == [0]


def test_what_failed_is_sent_again_once_every_answer_is_in_under_the_same_numbers() -> None:
    rig = Rig(cluster(0))
    rig.append(3)
    first, second, third = rig.take_sent()
    rig.answer(first, NotLeaderOrFollowerError("moved"))
    rig.answer(second, NotLeaderOrFollowerError("moved"))
    assert rig.asked == [], "the third may be in the log"
    rig.answer(third, NotLeaderOrFollowerError("moved"))
    rig.refreshed(cluster(1, epoch=2))
    sent = rig.take_sent()
    assert [batch for _, _, batch in sent] == [first[2], second[2], third[2]]
    assert sequences(sent) == [0, 1, 2]
    assert {(channel.broker_id, request.leader_epoch) for channel, request, _ in sent} == {(1, 2)}
    assert rig.machine.retries == 3


def test_the_same_leader_is_asked_again_only_after_the_back_off_which_doubles() -> None:
    rig = Rig(cluster(0))
    rig.append()
    waited: list[int] = []
    for _ in range(3):
        (sent,) = rig.take_sent()
        rig.answer(sent, ThrottlingQuotaExceededError("overloaded"))
        failed_ms = rig.now_ms
        rig.wait(0)
        while not rig.sent:
            if rig.asked:
                rig.refreshed(cluster(0))
            rig.wait(5)
        waited.append(rig.now_ms - failed_ms)
    assert waited == sorted(waited)
    assert BACKOFF_MS * 0.8 <= waited[0] <= BACKOFF_MS * 1.2 + BACKOFF_MS + 5
    assert BACKOFF_MS * 4 * 0.8 <= waited[2] <= BACKOFF_MS * 4 * 1.2 + 2 * BACKOFF_MS + 5


def test_an_error_that_is_final_fails_its_batch_alone() -> None:
    rig = Rig(cluster(0))
    rig.append(2)
    first, second = rig.take_sent()
    rig.answer(first, SchemaMismatchError("no such column"))
    rig.answer(second, OutOfOrderSequenceNumberError("0 is next"))
    assert [type(outcome) for outcome in rig.outcomes] == [SchemaMismatchError]
    rig.refreshed(cluster(0))
    assert rig.asked == [RequestProducerIds(1)], "number 0 will never come"
    rig.asked.clear()
    rig.carry_out(rig.machine.producer_ids_came([NEW], rig.view, rig.now_ms))
    rig.wait(2 * BACKOFF_MS)
    rig.refreshed(cluster(0))
    (again,) = rig.take_sent()
    assert again[2] is second[2]
    assert (again[2].identity, again[2].sequence) == (NEW, 0)


def test_in_a_transaction_nothing_is_renumbered() -> None:
    rig = Rig(cluster(0), transactional_id="x")
    rig.append()
    rig.answer(rig.sent[0], OutOfOrderSequenceNumberError("5 is next"))
    assert [type(outcome) for outcome in rig.outcomes] == [OutOfOrderSequenceNumberError]


def test_a_stream_that_breaks_says_nothing_of_what_is_in_flight() -> None:
    rig = Rig(cluster(0))
    rig.append(2)
    first, second = rig.take_sent()
    rig.breaks(first[0], SchemaMismatchError("of the stream as a whole"))
    assert rig.closed == [CloseChannel(first[0], suspect=True)]
    assert rig.outcomes == []
    rig.breaks(first[0], NetworkError("heard by the other thread"))
    assert len(rig.closed) == 1
    rig.refreshed(cluster(1, epoch=2))
    assert [batch for _, _, batch in rig.sent] == [first[2], second[2]]


def test_a_leader_that_does_not_answer_is_given_up_at_the_request_timeout() -> None:
    rig = Rig(cluster(0))
    rig.append()
    (sent,) = rig.take_sent()
    rig.wait(REQUEST_TIMEOUT_MS - 1, metadata_age_ms=0)
    assert rig.closed == []
    rig.wait(2 + BACKOFF_MS)
    assert rig.closed == [CloseChannel(sent[0], suspect=True)]
    rig.answer(sent, None)
    assert rig.outcomes == [], "an answer on a closed channel belongs to nothing"


def test_metadata_is_looked_at_while_an_append_is_stalled() -> None:
    rig = Rig(cluster(0))
    rig.append()
    rig.wait(STALLED_MS, metadata_age_ms=STALLED_MS)
    assert rig.asked == []
    rig.wait(BACKOFF_MS + 1, metadata_age_ms=STALLED_MS)
    assert rig.asked == [RefreshMetadata()]


def test_a_channel_to_a_broker_that_is_fenced_is_closed() -> None:
    rig = Rig(cluster(0))
    rig.append()
    (sent,) = rig.take_sent()
    rig.wait(STALLED_MS + BACKOFF_MS + 1, metadata_age_ms=STALLED_MS)
    rig.refreshed(cluster(1, epoch=2, fenced=(0,)))
    assert rig.closed == [CloseChannel(sent[0], suspect=False)]
    rig.wait(2 * BACKOFF_MS)
    if not rig.sent:
        rig.refreshed(cluster(1, epoch=2, fenced=(0,)))
    assert [channel.broker_id for channel, _, _ in rig.sent] == [1]


def test_an_append_fails_at_its_delivery_timeout_and_says_why() -> None:
    rig = Rig(cluster(-1))
    rig.append()
    for _ in range(DELIVERY_TIMEOUT_MS // (8 * BACKOFF_MS) - 1):
        assert rig.asked.pop() == RefreshMetadata()
        rig.carry_out(rig.machine.refresh_failed(NetworkError("all brokers are away"), rig.now_ms))
        assert rig.outcomes == []
        rig.wait(8 * BACKOFF_MS)
    rig.wait(8 * BACKOFF_MS + 200)
    (outcome,) = rig.outcomes
    assert isinstance(outcome, RequestTimedOutError)
    assert "all brokers are away" in outcome.message


def test_the_batches_after_one_that_expired_in_flight_go_on_under_a_new_producer_id() -> None:
    rig = Rig(cluster(0), request_timeout_ms=60_000)
    rig.append()
    rig.now_ms += 1000
    (later,) = rig.append()
    rig.wait(DELIVERY_TIMEOUT_MS - 500)
    assert [type(outcome) for outcome in rig.outcomes] == [RequestTimedOutError]
    rig.answer(rig.sent[1], OutOfOrderSequenceNumberError("0 is next"))
    rig.sent.clear()
    rig.asked.clear()
    rig.carry_out(rig.machine.metadata_refreshed(rig.view, rig.now_ms))
    assert rig.asked == [RequestProducerIds(1)]
    rig.now_ms += 2 * BACKOFF_MS
    rig.carry_out(rig.machine.producer_ids_came([NEW], rig.view, rig.now_ms))
    assert [batch for _, _, batch in rig.sent] == [later]
    assert (later.identity, later.sequence) == (NEW, 0)


def test_a_topic_counts_as_deleted_once_its_absence_has_lasted() -> None:
    rig = Rig(cluster(-1))
    rig.append()
    rig.refreshed(cluster(exists=False))
    assert rig.outcomes == []
    rig.wait(UNKNOWN_TOPIC_GRACE_MS)
    rig.refreshed(cluster(exists=False))
    assert [type(outcome) for outcome in rig.outcomes] == [UnknownTopicOrPartitionError]
    assert rig.machine.open_batches == 0


def test_with_acks_0_written_is_acknowledged() -> None:
    rig = Rig(cluster(0), acks="0")
    rig.append(2)
    assert rig.outcomes == [RecordMetadata("t", 0, None, 1)] * 2
    assert sequences(rig.sent) == [-1, -1]


def test_refused_appends_fail_until_the_next_epoch_begins() -> None:
    rig = Rig(cluster(0), transactional_id="x")
    rig.append(2)
    (sent, _) = rig.take_sent()
    rig.carry_out(rig.machine.refuse(TransactionAbortableError("one failed")))
    assert [type(outcome) for outcome in rig.outcomes] == [TransactionAbortableError] * 2
    with pytest.raises(TransactionAbortableError):
        rig.append()
    rig.answer(sent, None)
    assert len(rig.outcomes) == 2
    rig.machine.begin_epoch(ProducerIdentity(7, 1))
    (batch,) = rig.append()
    assert (batch.identity, batch.sequence) == (ProducerIdentity(7, 1), 0)


def test_what_is_open_fails_at_the_close() -> None:
    rig = Rig(cluster(0))
    rig.append()
    rig.carry_out(rig.machine.close())
    assert [type(outcome) for outcome in rig.outcomes] == [ClosedError]
    assert [effect.channel.broker_id for effect in rig.closed] == [0]
    with pytest.raises(ClosedError):
        rig.append()
