"""Answers to brokers while a decision is being written: brokers that are live, and stay live, go on."""

from __future__ import annotations

import pytest

from spark_broker.controller.effects import Send
from spark_broker.controller.events import Event, HeartbeatReceived, SessionEnded, SparkLost
from spark_broker.controller.meanwhile import ANSWER_AFTER_MS, Meanwhile
from spark_broker.protocol.messages import HeartbeatRequest, HeartbeatResponse
from tests.unit.controller.cluster import Cluster, registration


@pytest.fixture
def cluster() -> Cluster:
    new_cluster = Cluster()
    new_cluster.start_brokers(3)
    new_cluster.create_topic(partitions=3)
    return new_cluster


def beat(cluster: Cluster, broker: int, now_ms: int, **changes: int) -> HeartbeatReceived:
    values = {"broker_epoch": cluster.image.brokers[broker].epoch, "sent_ms": now_ms - 1, **changes}
    heartbeat = HeartbeatRequest(metadata_offset=cluster.image.next_offset, ready=True, **values)  # type: ignore[arg-type]
    return HeartbeatReceived(cluster.session_of[broker], heartbeat, now_ms)


def waiting(cluster: Cluster, *decided: Event) -> Meanwhile:
    """The decisions of these events are being written from 0 ms on."""
    meanwhile = Meanwhile(cluster.controller)
    committed = cluster.image
    for event in decided:
        cluster.handle(event)
    meanwhile.begin(committed, 0)
    return meanwhile


def test_a_live_broker_is_told_to_go_on_and_its_heartbeat_still_waits(cluster: Cluster) -> None:
    meanwhile = waiting(cluster)
    first, second = beat(cluster, 0, 1000), beat(cluster, 0, 2000)

    told = [meanwhile.take(event, event.received_ms) for event in (first, second)]

    expected = [HeartbeatResponse(sent_ms, fenced=False) for sent_ms in (999, 1999)]
    assert told == [Send(cluster.session_of[0], answer) for answer in expected]
    assert meanwhile.release(10) == [second]
    assert meanwhile.release(10) == []


def test_an_ordinary_write_answers_nobody_and_drops_no_heartbeat(cluster: Cluster) -> None:
    meanwhile = waiting(cluster)
    events = [beat(cluster, 0, now_ms) for now_ms in range(0, ANSWER_AFTER_MS, 100)]

    assert [meanwhile.take(event, event.received_ms) for event in events] == [None] * len(events)
    assert meanwhile.release(10) == events


def test_events_wait_in_the_order_in_which_they_came(cluster: Cluster) -> None:
    meanwhile = waiting(cluster)
    early, ended, late = beat(cluster, 0, 1000), SessionEnded(cluster.session_of[1]), beat(cluster, 0, 2000)

    for event in (early, ended, late, SparkLost(99)):
        meanwhile.take(event, 2000)

    assert meanwhile.release(10) == [ended, late, SparkLost(99)]


def test_a_broker_that_the_decision_fences_hears_nothing(cluster: Cluster) -> None:
    meanwhile = waiting(cluster, SparkLost(cluster.image.brokers[0].launch))

    assert meanwhile.take(beat(cluster, 0, 1000), 1000) is None
    assert meanwhile.take(beat(cluster, 1, 1000), 1000) is not None
    assert len(meanwhile) == 2


def test_a_broker_hears_that_it_is_live_only_once_that_is_written(cluster: Cluster) -> None:
    cluster.end_session(0)
    cluster.tick(20_000)
    assert not cluster.image.is_live(0)
    cluster.register(registration(cluster.new_launch(), "directory-0", broker_id=0))

    meanwhile = waiting(cluster, beat(cluster, 0, 0))

    assert cluster.controller.image.is_live(0)
    assert meanwhile.take(beat(cluster, 0, 1000), 1000) is None


def test_a_broker_that_leaves_has_to_wait(cluster: Cluster) -> None:
    cluster.beat(0, wants_shutdown=True)

    assert waiting(cluster).take(beat(cluster, 0, 1000), 1000) is None


def test_an_earlier_incarnation_hears_nothing(cluster: Cluster) -> None:
    assert waiting(cluster).take(beat(cluster, 0, 1000, broker_epoch=0), 1000) is None
