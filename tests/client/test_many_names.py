"""More topics and partitions than one request holds: a client goes on, and is told what does not pass."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, TopicPartition
from spark_broker.errors import UnknownTopicOrPartitionError
from tests.client.fake_broker import FakeCluster

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
