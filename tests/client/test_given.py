"""What callers hand in: whatever has `__index__` is an integer, and anything else is a typed error in the caller."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from spark_broker import Admin, Consumer, NewTopic, OffsetAndMetadata, Producer, TopicPartition
from spark_broker.errors import InvalidDataError
from tests.client.fake_broker import FakeCluster
from tests.client.test_consumer import Values, poll_rows, values_of
from tests.support.committed import committed_offset

ONE = np.int64(1)
T1 = TopicPartition("t", 1)
NUMPY_T1 = TopicPartition("t", ONE)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(cluster: FakeCluster, values: Values) -> None:
    """Story: the sender's, fetcher's or commit's thread died; later calls hung, to other topics, too."""
    cluster.create("t", 2)
    with Producer(cluster.bootstrap) as producer:
        producer.append("t", values("a", "b"), partition=ONE).result(10)  # type: ignore[arg-type]
        producer.send("t", b"c", partition=ONE).result(10)  # type: ignore[arg-type]
    with Consumer(cluster.bootstrap, group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.assign([NUMPY_T1])
        (batch, *_) = poll_rows(consumer, 3)
        consumer.seek(NUMPY_T1, batch.offsets[1])
        assert consumer.position(NUMPY_T1) == 1
        consumer.pause(NUMPY_T1)
        consumer.resume(NUMPY_T1)
        assert values_of(poll_rows(consumer, 2), 1) == ["b", "c"]
        consumer.commit({NUMPY_T1: ONE})  # type: ignore[dict-item]
        assert committed_offset(consumer, T1) == 1
        consumer.commit({NUMPY_T1: OffsetAndMetadata(np.int64(2), ONE)})  # type: ignore[arg-type]
        assert consumer.committed(NUMPY_T1) == OffsetAndMetadata(2, 1)
        consumer.seek(T1, OffsetAndMetadata(1, -1))  # Kafka's word for an epoch that is not known.
        assert values_of(poll_rows(consumer, 2), 1) == ["b", "c"]
        consumer.commit({T1: OffsetAndMetadata(3, -1)})
        assert committed_offset(consumer, T1) == 3
        assert consumer.end_offsets([NUMPY_T1]) == {T1: 3}
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(NewTopic("u", np.int64(2), ONE))  # type: ignore[arg-type]
        admin.create_partitions("u", np.int64(3))  # type: ignore[arg-type]
        assert len(admin.describe_topic("u").partitions) == 3
        assert admin.list_offsets({NUMPY_T1: "latest"}) == {T1: 3}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda consumer: consumer.assign([("t", 0)]),
        lambda consumer: consumer.assign(T1),
        lambda consumer: consumer.assign("t"),
        lambda consumer: consumer.assign([TopicPartition("t", "0")]),  # type: ignore[arg-type]
        lambda consumer: consumer.assign([TopicPartition(None, 0)]),  # type: ignore[arg-type]
        lambda consumer: consumer.seek(T1, 1.5),
        lambda consumer: consumer.seek(T1, None),
        lambda consumer: consumer.poll(None),
        lambda consumer: consumer.poll("1"),
        lambda consumer: consumer.commit({T1: "1"}),
        lambda consumer: consumer.commit([T1]),
        lambda consumer: consumer.end_offsets(T1),
        lambda consumer: consumer.committed(("t", 1)),
    ],
)
def test_anything_else_is_a_typed_error_in_the_caller(
    cluster: FakeCluster, values: Values, wrong: Callable[[Consumer], object]
) -> None:
    cluster.create("t", 2)
    cluster.store("t", 1, values("a"))
    with Consumer(cluster.bootstrap, group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.assign([T1])
        with pytest.raises(InvalidDataError):
            wrong(consumer)
        assert values_of(poll_rows(consumer, 1), 1) == ["a"], "the consumer goes on"


def test_a_partition_that_is_no_number_fails_the_append_alone(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 2)
    with Producer(cluster.bootstrap) as producer:
        for failing in (producer.append("t", values("a"), partition="1"), producer.send("t", b"a", partition=1.5)):  # type: ignore[arg-type]
            with pytest.raises(InvalidDataError, match="partition is"):
                failing.result(10)
        assert producer.append("t", values("a"), partition=1).result(10)[0].count == 1
