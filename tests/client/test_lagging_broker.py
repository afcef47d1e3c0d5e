"""Any broker answers, also one that lags behind the metadata log: its answer alone fails nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from spark_broker import Producer
from spark_broker.client.connections import ConnectionPool
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import UNKNOWN_TOPIC_GRACE_MS, Backoff, Deadline
from spark_broker.client.settings import parse_addresses
from spark_broker.errors import RequestTimedOutError, UnknownTopicOrPartitionError
from spark_broker.protocol.messages import CallRequest, Message, MetadataRequest
from tests.client.fake_broker import FakeCluster

LONGER_THAN_GRACE_S = UNKNOWN_TOPIC_GRACE_MS / 1000 + 0.5


def every_broker_lags(cluster: FakeCluster) -> None:
    """From now on all answer as they would now, whatever changes."""
    snapshot = cluster.metadata(None)

    def stale(broker: int, request: CallRequest) -> Message | None:
        del broker
        if not isinstance(request, MetadataRequest):
            return None
        names = request.topics
        topics = [topic for topic in snapshot.topics if names is None or topic.name in names]
        return msgspec.structs.replace(snapshot, topics=topics)

    cluster.call_hook = stale


def catch_up(cluster: FakeCluster) -> None:
    cluster.call_hook = lambda broker, request: None


@contextmanager
def later(cluster: FakeCluster) -> Iterator[None]:
    """The brokers catch up later than the time for which the absence of a topic is doubted."""
    timer = threading.Timer(LONGER_THAN_GRACE_S, catch_up, [cluster])
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.fixture
def metadata(cluster: FakeCluster) -> Iterator[ClusterMetadata]:
    addresses = parse_addresses(cluster.bootstrap.split(","))
    cluster_metadata = ClusterMetadata(
        addresses, ConnectionPool(), Backoff(10, 50), request_timeout_ms=5000, max_age_ms=300_000
    )
    yield cluster_metadata
    cluster_metadata.close()


def test_an_append_does_not_fail_because_lagging_brokers_do_not_know_the_topic(cluster: FakeCluster) -> None:
    cluster.metadata_offset = 10
    every_broker_lags(cluster)
    lagging_hook = cluster.call_hook
    catch_up(cluster)
    cluster.create("t")
    cluster.metadata_offset = 12
    with Producer(cluster.bootstrap, config={"retry.backoff.ms": 10}) as producer:
        producer.send("t", b"first").result(10)
        cluster.call_hook = lagging_hook
        with later(cluster):
            cluster.kill(0)  # its leader: the producer asks the others, which do not know the topic yet
            started = time.monotonic()
            producer.send("t", b"second").result(10)
            assert time.monotonic() - started > LONGER_THAN_GRACE_S / 2, "nobody could say who leads now"
    assert [row["value"] for row in cluster.rows("t", 0)] == [b"first", b"second"]


def test_absence_is_believed_of_a_broker_that_does_not_lag(cluster: FakeCluster, metadata: ClusterMetadata) -> None:
    cluster.metadata_offset = 10
    cluster.create("t")
    metadata.topic("t", Deadline.after_ms(5000))
    with pytest.raises(UnknownTopicOrPartitionError, match="does not exist"):
        metadata.topic("u", Deadline.after_ms(20_000))
    with pytest.raises(UnknownTopicOrPartitionError, match="has partitions 0 to 0"):
        metadata.topic("t", Deadline.after_ms(20_000), partition=1)


def test_a_partition_that_lagging_brokers_do_not_show_yet_is_awaited(
    cluster: FakeCluster, metadata: ClusterMetadata
) -> None:
    cluster.metadata_offset = 10
    cluster.create("t")
    every_broker_lags(cluster)
    lagging_hook = cluster.call_hook
    catch_up(cluster)
    cluster.metadata_offset = 11
    metadata.topic("t", Deadline.after_ms(5000))  # newer than what they answer from now on
    cluster.call_hook = lagging_hook
    cluster.create("t", partitions=2)
    cluster.create("u")
    with later(cluster):
        assert len(metadata.topic("t", Deadline.after_ms(20_000), partition=1).partitions) == 2
    assert metadata.topic("u", Deadline.after_ms(20_000)).name == "u"


def test_what_only_lagging_brokers_answer_says_so_at_the_deadline(
    cluster: FakeCluster, metadata: ClusterMetadata
) -> None:
    cluster.metadata_offset = 10
    cluster.create("t")
    metadata.topic("t", Deadline.after_ms(5000))
    cluster.metadata_offset = 9
    with pytest.raises(RequestTimedOutError, match="lag behind"):
        metadata.topic("u", Deadline.after_ms(LONGER_THAN_GRACE_S * 1000))
