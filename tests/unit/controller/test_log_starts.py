"""What the controller records when records are deleted, and who hears of it."""

from __future__ import annotations

import pytest

from spark_broker.controller.delta import MetadataDelta
from spark_broker.controller.describe import describe
from spark_broker.controller.records import LogStartsRecord, decode_records, encode_records
from spark_broker.controller.snapshot import image_from_snapshot, to_records
from spark_broker.errors import (
    InvalidTopicError,
    InvariantError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.messages import EnsureOffsetsTopicRequest, RaiseLogStartsRequest
from tests.unit.controller.cluster import Cluster


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    cluster.start_brokers(1)
    cluster.create_topic("t", partitions=3, factor=1)
    return cluster


def delete(cluster: Cluster, *starts: tuple[int, int], topic_id: str = "") -> None:
    cluster.call(RaiseLogStartsRequest(topic_id or cluster.topic().topic_id, list(starts)))


def test_log_starts_rise_by_partition_and_never_fall(cluster: Cluster) -> None:
    delete(cluster, (1, 7))
    assert cluster.topic().log_starts == (0, 7)
    delete(cluster, (2, 5), (1, 3))
    assert cluster.topic().log_starts == (0, 7, 5)
    offset = cluster.image.next_offset
    delete(cluster, (1, 7), (0, 0))
    assert cluster.image.next_offset == offset, "a repetition writes nothing"
    assert [cluster.topic().log_start(partition) for partition in range(4)] == [0, 7, 5, 0]
    with pytest.raises(InvariantError, match="fall"):
        cluster.image.apply([LogStartsRecord(cluster.topic().topic_id, [0, 6, 5])])


def test_brokers_and_clients_hear_of_it_and_a_snapshot_keeps_it(cluster: Cluster) -> None:
    before = cluster.image
    delete(cluster, (0, 4))
    assert [topic.name for topic in MetadataDelta(before, cluster.image).topics_changed] == ["t"]
    assert describe(cluster.image).topics[0].log_starts == [4]
    records = decode_records(encode_records(to_records(cluster.image)))
    assert image_from_snapshot(records, cluster.image.next_offset) == cluster.image


def test_what_cannot_be_deleted_is_refused(cluster: Cluster) -> None:
    with pytest.raises(UnknownTopicIdError):
        delete(cluster, (0, 4), topic_id="f" * 32)
    with pytest.raises(UnknownTopicOrPartitionError, match="t-3"):
        delete(cluster, (0, 4), (3, 1))
    assert cluster.topic().log_starts == ()
    cluster.call(EnsureOffsetsTopicRequest())
    with pytest.raises(InvalidTopicError):
        delete(cluster, (0, 1), topic_id=cluster.topic("__consumer_offsets").topic_id)
