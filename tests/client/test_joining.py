"""What a consumer does while its group takes it in: the coordinator knows more than the consumer then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from spark_broker import Consumer, TopicPartition
from spark_broker.errors import RequestTimedOutError, SparkBrokerError
from spark_broker.protocol.messages import CallRequest, ConsumerGroupHeartbeatRequest, Message
from tests.client.fake_broker import FakeCluster

T0 = TopicPartition("t", 0)


class Held:
    """The coordinator carries out what heartbeats ask for. Its answers come when `release` is set."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.decided = threading.Event()
        self.release = threading.Event()
        self._cluster = cluster
        cluster.call_hook = self

    def __call__(self, broker: int, request: CallRequest) -> Message | None:
        if not isinstance(request, ConsumerGroupHeartbeatRequest) or self.release.is_set():
            return None
        with self._cluster.changed:
            answer = self._cluster._answer(broker, request)
        self.decided.set()
        self.release.wait(20)
        return answer


@pytest.fixture
def held(cluster: FakeCluster) -> Iterator[Held]:
    cluster.create("t", 1)
    held = Held(cluster)
    yield held
    held.release.set()


def committing(consumer: Consumer) -> tuple[threading.Thread, list[SparkBrokerError]]:
    """A thread that commits 0 for t-0, and what it has raised."""
    raised: list[SparkBrokerError] = []

    def commit() -> None:
        try:
            consumer.commit({T0: 0})
        except SparkBrokerError as error:
            raised.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    return thread, raised


def committed(cluster: FakeCluster) -> bool:
    return ("g", "t", 0) in cluster.committed


def test_a_commit_waits_until_the_group_has_said_that_the_consumer_is_in(cluster: FakeCluster, held: Held) -> None:
    with Consumer(cluster.bootstrap, group_id="g", topics="t", auto_offset_reset="earliest") as consumer:
        assert held.decided.wait(20)
        thread, raised = committing(consumer)
        thread.join(0.3)
        assert thread.is_alive(), "nobody knows yet whose commit it is"
        held.release.set()
        thread.join(20)
        assert (raised, committed(cluster)) == ([], True)


def test_a_commit_waits_for_that_no_longer_than_its_deadline(cluster: FakeCluster, held: Held) -> None:
    with Consumer(cluster.bootstrap, group_id="g", topics="t", default_api_timeout_ms=500) as consumer:
        assert held.decided.wait(20)
        began_s = time.monotonic()
        with pytest.raises(RequestTimedOutError, match="has not said in time whether this consumer is a member"):
            consumer.commit({T0: 0})
        assert time.monotonic() - began_s < 10
        assert not committed(cluster)
        held.release.set()
        consumer.commit({T0: 0})
