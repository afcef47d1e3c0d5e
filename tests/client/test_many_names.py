"""More topics and partitions than one request holds: a client goes on, and is told what does not pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, Producer, TopicPartition
from spark_broker.client import metadata
from spark_broker.client.retry import Deadline
from spark_broker.errors import UnknownTopicOrPartitionError
from spark_broker.protocol.messages import CallRequest, MetadataRequest
from tests.client.fake_broker import FakeCluster
from tests.support.waiting import eventually

MANY = 10_001
WAIT_S = 30.0


def test_a_client_that_has_named_many_topics_goes_on(cluster: FakeCluster) -> None:
    """Story: it asked for all of them in one request, which every broker refused, for as long as the client lived."""
    cluster.create("t")
    nowhere = dict.fromkeys([TopicPartition(f"t{number}", 0) for number in range(MANY)], datetime.now(UTC))
    with Admin(cluster.bootstrap) as admin:
        with pytest.raises(UnknownTopicOrPartitionError):
            admin.list_offsets(nowhere)
        assert len(admin.describe_topic("t").partitions) == 1
        assert admin.list_offsets({TopicPartition("t", 0): "latest"}) == {TopicPartition("t", 0): 0}


def asked_for(cluster: FakeCluster) -> list[list[str] | None]:
    """The names in requests for metadata, from now on."""
    asked: list[list[str] | None] = []

    def note(broker: int, request: CallRequest) -> None:
        if isinstance(request, MetadataRequest):
            asked.append(request.topics)

    cluster.call_hook = note
    return asked


def test_names_of_topics_that_are_gone_are_forgotten(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a monitor lived beside topics that came and went. It asked for all that there had ever been, each time."""
    monkeypatch.setattr(metadata, "IDLE_S", 0.0)
    cluster.create("stays")
    with Admin(cluster.bootstrap) as admin:
        for number in range(5):
            cluster.create(f"t{number}")
            admin.list_offsets({TopicPartition(f"t{number}", 0): "latest"})
            del cluster.topics[f"t{number}"]
        admin.list_offsets({TopicPartition("stays", 0): "latest"})
        asked = asked_for(cluster)
        admin._metadata.refresh(Deadline.after_ms(20_000))
    assert asked == [["stays"]]


def test_keys_of_topics_that_are_gone_are_forgotten(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a program with a topic for each hour kept thousands of keys of each, and a view of the cluster."""
    monkeypatch.setattr(metadata, "IDLE_S", 0.0)
    with Producer(cluster.bootstrap) as producer:
        for number in range(5):
            cluster.create(f"t{number}", 2)
            producer.send(f"t{number}", b"v", key=b"k").result(WAIT_S)
            del cluster.topics[f"t{number}"]
            producer._metadata.refresh(Deadline.after_ms(20_000))
        cluster.create("last")
        producer.send("last", b"v").result(WAIT_S)
        assert list(producer._targets) == ["last"]


def test_a_name_that_was_used_lately_is_asked_for_though_no_topic_has_it(cluster: FakeCluster) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin._metadata.use(["t"])
        admin._metadata.refresh(Deadline.after_ms(20_000))
        asked = asked_for(cluster)
        admin._metadata.refresh(Deadline.after_ms(20_000))
    assert asked == [["t"]]


def test_a_consumer_waits_for_a_topic_for_as_long_as_it_reads_it(
    cluster: FakeCluster, values: Callable[..., pa.RecordBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the topic of the groups, which is created when a consumer needs it."""
    monkeypatch.setattr(metadata, "IDLE_S", 0.0)
    cluster.create("other")
    with Consumer(cluster.bootstrap, topics=["t", "other"], group_id="g", auto_offset_reset="earliest") as consumer:
        assert consumer.position(TopicPartition("other", 0)) == 0
        asked = asked_for(cluster)
        eventually(lambda: sum("t" in (names or ()) for names in asked) > 2, WAIT_S, "it asks for the topic")
        cluster.create("t")
        cluster.store("t", 0, values("a"))

        def reads() -> bool:
            with contextlib.suppress(UnknownTopicOrPartitionError):
                return bool(consumer.poll(0.2))
            return False

        eventually(reads, WAIT_S, "the record")


@pytest.mark.slow
def test_a_consumer_may_read_and_commit_many_partitions(values: Callable[..., pa.RecordBatch]) -> None:
    """Story: every request for its offsets was refused, and `poll` returned nothing, for ever."""
    cluster = FakeCluster(1)
    try:
        topics = ("a", "b")
        for name in topics:
            cluster.create(name, MANY // 2 + 1)
        partitions = [TopicPartition(name, number) for name in topics for number in range(MANY // 2 + 1)]
        cluster.store("b", 7, values("far"))
        with Consumer(cluster.bootstrap, group_id="g", auto_offset_reset="earliest") as consumer:
            consumer.assign(partitions)
            batches = consumer.poll(WAIT_S)
            assert [(batch.topic, batch.partition) for batch in batches] == [("b", 7)]
            consumer.commit({tp: 0 for tp in partitions if tp != TopicPartition("b", 7)})
            assert len(cluster.committed) == len(partitions) - 1
    finally:
        cluster.close()
