"""What a consumer does while the coordinator of its group knows more than the consumer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pyarrow as pa
import pytest

from spark_broker import Consumer, TopicPartition
from spark_broker.errors import (
    FencedInstanceIdError,
    GroupMaxSizeReachedError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.protocol import wire
from spark_broker.protocol.messages import CallRequest, ConsumerGroupHeartbeatRequest, Message, MetadataRequest
from tests.client.fake_broker import FakeCluster, FakePartition
from tests.conftest import WaitUntil

Values = Callable[..., pa.RecordBatch]

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


def test_a_commit_says_at_once_what_keeps_the_consumer_out(cluster: FakeCluster) -> None:
    cluster.create("t", 1)
    full = wire.error_response(GroupMaxSizeReachedError("the group 'g' has 1 member, and takes no more"))
    cluster.call_hook = lambda _, request: full if isinstance(request, ConsumerGroupHeartbeatRequest) else None
    with Consumer(cluster.bootstrap, group_id="g", topics="t") as consumer:
        began_s = time.monotonic()
        with pytest.raises(GroupMaxSizeReachedError):
            consumer.commit({T0: 0})
        assert time.monotonic() - began_s < 20, "its deadline is a minute"


def test_a_new_partition_that_the_metadata_lacks_is_read_once_the_metadata_has_it(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    """Bug 47 of the simulator's table: the group gives a member what its metadata does not show yet."""
    cluster.create("t", 1)
    lags = threading.Event()

    def without_the_new_one(broker: int, request: CallRequest) -> Message | None:
        del broker
        if not isinstance(request, MetadataRequest) or not lags.is_set():
            return None
        answer = cluster.metadata(request.topics)
        topics = [msgspec.structs.replace(topic, partitions=topic.partitions[:1]) for topic in answer.topics]
        return msgspec.structs.replace(answer, topics=topics)

    cluster.call_hook = without_the_new_one
    with Consumer(cluster.bootstrap, group_id="g", topics="t", auto_offset_reset="earliest") as consumer:
        wait_until(lambda: consumer.poll(0.05) == [] and consumer.assignment() == [T0], "the assignment")
        lags.set()
        with cluster.changed:
            cluster.topics["t"].partitions.append(FakePartition(0))
        cluster.store("t", 1, values("new"))
        wait_until(lambda: consumer.poll(0.05) == [] and TopicPartition("t", 1) in consumer.assignment(), "the group")
        assert consumer.poll(0.3) == [], "it waits for metadata"
        lags.clear()
        wait_until(lambda: any(batch.partition == 1 for batch in consumer.poll(0.1)), "its record")


def resubscribed(consumer: Consumer) -> None:
    consumer.unsubscribe()
    consumer.subscribe(["t"])


def assigned(consumer: Consumer) -> None:
    consumer.unsubscribe()
    consumer.assign([T0])


@pytest.mark.parametrize("again", [resubscribed, assigned, lambda consumer: consumer.subscribe(["t"])])
def test_a_consumer_that_was_fenced_and_begins_again_reads_on(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil, again: Callable[[Consumer], None]
) -> None:
    """Story: it was a member again, and held partitions. Each poll raised the old error, and nobody read them."""
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    fenced = wire.error_response(FencedInstanceIdError("another process has it"))

    def taken_over(broker: int, request: CallRequest) -> Message | None:
        if not isinstance(request, ConsumerGroupHeartbeatRequest) or request.member_epoch <= 0:
            return None
        with cluster.changed:
            cluster.groups.remove("g", request.member_id)
        return fenced

    static = {"group.instance.id": "i", "session.timeout.ms": 2000}
    with Consumer(cluster.bootstrap, group_id="g", topics="t", auto_offset_reset="earliest", config=static) as consumer:
        wait_until(lambda: consumer.poll(0.1), "the assignment")
        cluster.call_hook = taken_over

        def is_fenced() -> bool:
            try:
                consumer.poll(0.1)
            except FencedInstanceIdError:
                return True
            return False

        wait_until(is_fenced, "the error")
        assert is_fenced(), "each poll raises it"
        cluster.call_hook = lambda broker, request: None
        again(consumer)
        cluster.store("t", 0, values("b"))
        wait_until(lambda: consumer.poll(0.1), "the record that came then")
