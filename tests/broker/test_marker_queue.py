"""Markers on their way: grouped by leader, repeated until they are committed."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest

from spark_broker.broker import marker_queue
from spark_broker.broker.marker_queue import BACKOFF_MAX_MS, MarkerQueue, Round
from spark_broker.controller.image import EMPTY_IMAGE, BrokerState, MetadataImage, PartitionRegistration, TopicState
from spark_broker.core.transaction_coordinator import MarkerTarget
from spark_broker.errors import InvalidProducerEpochError, NetworkError, NotEnoughReplicasError
from spark_broker.protocol.messages import MarkerResult, TransactionMarker, WriteTransactionMarkersResponse
from tests.broker.rig import TOPIC_ID

NOW_MS = 1000


def image(*leaders: int) -> MetadataImage:
    """One topic on brokers 0 and 1, whose partitions have these leaders."""
    brokers = {
        n: BrokerState(n, n, str(n), "", n, "host", 9000 + n, None, "here", "", 0, 0, 0, "clean", fenced=False)
        for n in (0, 1)
    }
    partitions = tuple(
        PartitionRegistration(
            (0, 1), (leader,) if leader >= 0 else (), leader=leader, leader_epoch=0, partition_epoch=0
        )
        for leader in leaders
    )
    topic = TopicState("t", TOPIC_ID, MappingProxyType({}), partitions=partitions)
    topics = {TOPIC_ID: topic} if leaders else {}
    return dataclasses.replace(EMPTY_IMAGE, brokers=MappingProxyType(brokers), topics=MappingProxyType(topics))


def target(partition: int, producer_id: int = 7, epoch: int = 1) -> MarkerTarget:
    return MarkerTarget("id", producer_id, epoch, True, TOPIC_ID, partition)


def written(sent: Round, code: int = 0) -> WriteTransactionMarkersResponse:
    return WriteTransactionMarkersResponse(
        [MarkerResult(marker.producer_id, marker.topic_id, marker.partition, code, "") for marker in sent.targets]
    )


def test_each_leader_gets_one_request_at_a_time() -> None:
    queue = MarkerQueue()
    queue.add(3, [target(0), target(1), target(2), target(0, producer_id=8)])
    rounds = {sent.broker_id: sent for sent in queue.next_rounds(image(0, 1, 0), NOW_MS)}
    assert rounds[0].request.markers == [
        TransactionMarker(7, 1, True, [(TOPIC_ID, 0), (TOPIC_ID, 2)]),
        TransactionMarker(8, 1, True, [(TOPIC_ID, 0)]),
    ]
    assert rounds[1].targets == (target(1),)
    queue.add(3, [target(0, producer_id=9)])
    assert queue.next_rounds(image(0, 1, 0), NOW_MS) == [], "broker 0 is busy"
    assert [shard for shard, _ in queue.answered(rounds[0], written(rounds[0]), NOW_MS)] == [3, 3, 3]
    (following,) = queue.next_rounds(image(0, 1, 0), NOW_MS)
    assert following.targets == (target(0, producer_id=9),)


@pytest.mark.parametrize("failure", [NetworkError("lost"), None])
def test_what_has_failed_is_sent_again_after_a_while_for_ever(failure: Exception | None) -> None:
    queue = MarkerQueue()
    queue.add(0, [target(0)])
    now_ms = NOW_MS
    for _ in range(50):
        (sent,) = queue.next_rounds(image(1), now_ms)
        answer = failure or written(sent, NotEnoughReplicasError.code)
        assert queue.answered(sent, answer, now_ms) == []
        assert queue.next_rounds(image(1), now_ms) == []
        now_ms += BACKOFF_MAX_MS
    (sent,) = queue.next_rounds(image(1), now_ms)
    assert queue.answered(sent, written(sent), now_ms) == [(0, target(0))]
    assert len(queue) == 0


def test_a_partition_that_is_past_the_epoch_is_done() -> None:
    queue = MarkerQueue()
    queue.add(0, [target(0)])
    (sent,) = queue.next_rounds(image(0), NOW_MS)
    assert queue.answered(sent, written(sent, InvalidProducerEpochError.code), NOW_MS) == [(0, target(0))]


def test_a_marker_follows_a_leader_that_moves_while_it_is_under_way() -> None:
    """Its first leader is frozen, so that answer would come only with the time-out."""
    queue = MarkerQueue()
    queue.add(0, [target(0)])
    (frozen,) = queue.next_rounds(image(0), NOW_MS)
    assert queue.next_rounds(image(-1), NOW_MS) == [], "there is no leader"
    (sent,) = queue.next_rounds(image(1), NOW_MS)
    assert queue.answered(frozen, NetworkError("time-out"), NOW_MS) == []
    assert queue.answered(sent, written(sent), NOW_MS) == [(0, target(0))]


def test_a_deleted_topic_needs_no_marker_and_a_moved_shard_none_from_here() -> None:
    queue = MarkerQueue()
    queue.add(0, [target(0)])
    queue.add(1, [target(1)])
    assert queue.gone(image(0, 0)) == []
    queue.drop(1)
    assert queue.gone(image()) == [(0, target(0))]
    assert len(queue) == 0


def test_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_queue, "MARKERS_MAX", 2)
    queue = MarkerQueue()
    queue.add(0, [target(0, producer_id=n) for n in range(5)])
    sizes = []
    while rounds := queue.next_rounds(image(0), NOW_MS):
        sizes.append(len(rounds[0].targets))
        queue.answered(rounds[0], written(rounds[0]), NOW_MS)
    assert sizes == [2, 2, 1]
