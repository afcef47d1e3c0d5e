"""Records, the image that they build, and what changed between two images."""

from __future__ import annotations

import msgspec
import pytest

from spark_broker.controller.delta import MetadataDelta
from spark_broker.controller.image import EMPTY_IMAGE
from spark_broker.controller.records import (
    BrokerChangeRecord,
    ClusterRecord,
    PartitionChangeRecord,
    PartitionRecord,
    TopicRecord,
    decode_records,
    encode_records,
)
from spark_broker.controller.snapshot import image_from_snapshot, to_records
from spark_broker.errors import InvalidRequestError, InvariantError
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
)
from tests.unit.controller.cluster import Cluster


def test_a_snapshot_survives_encoding_and_rebuilds_an_equal_image() -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic("a", partitions=4, config={"retention.ms": "5000"})
    cluster.create_topic("b", factor=2)
    cluster.call(DeleteTopicRequest("b"))
    cluster.end_session(0)
    records = decode_records(encode_records(to_records(cluster.image)))
    assert image_from_snapshot(records, cluster.image.next_offset) == cluster.image


def test_a_snapshot_remembers_ids_whose_brokers_are_gone() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    rebuilt = image_from_snapshot(to_records(cluster.image), cluster.image.next_offset)
    assert (rebuilt.next_broker_id, rebuilt.last_launch) == (2, 2)


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 40, b"\x91\x92\x63\x01", encode_records([])[:0] + b"\x81\x01\x02"])
def test_records_that_do_not_decode_are_a_typed_error(garbage: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_records(garbage)


def test_an_election_raises_the_leader_epoch_even_when_the_same_broker_wins() -> None:
    topic_id = "0" * 32
    image = EMPTY_IMAGE.apply(
        [
            TopicRecord("t", topic_id, {}),
            PartitionRecord(topic_id, 0, [0, 1], [0, 1], 0, leader_epoch=4, partition_epoch=7),
        ]
    )
    state = image.apply([PartitionChangeRecord(topic_id, 0, leader=0)]).partition(topic_id, 0)
    assert state is not None
    assert (state.leader, state.leader_epoch, state.partition_epoch) == (0, 5, 8)


@pytest.mark.parametrize(
    "change",
    [
        PartitionChangeRecord("0" * 32, 0, isr=[]),
        PartitionChangeRecord("0" * 32, 0, isr=[0, 5]),
        PartitionChangeRecord("0" * 32, 0, leader=5),
        PartitionChangeRecord("0" * 32, 1, leader=0),
        BrokerChangeRecord(0, 0, fenced=True),
    ],
)
def test_a_record_that_breaks_an_invariant_is_never_applied(change: PartitionChangeRecord) -> None:
    topic_id = "0" * 32
    image = EMPTY_IMAGE.apply([TopicRecord("t", topic_id, {}), PartitionRecord(topic_id, 0, [0, 1], [0, 1], 0, 0, 0)])
    with pytest.raises(InvariantError):
        image.apply([change])


def test_a_cluster_id_never_changes() -> None:
    with pytest.raises(InvariantError):
        EMPTY_IMAGE.apply([ClusterRecord("a"), ClusterRecord("b")])


def test_a_delta_names_exactly_what_changed() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    kept = cluster.create_topic("kept", partitions=2, factor=2)
    removed = cluster.create_topic("removed", factor=1)
    before = cluster.image
    cluster.call(DeleteTopicRequest("removed"))
    cluster.call(CreatePartitionsRequest("kept", 3))
    added = cluster.create_topic("added", factor=1)
    delta = MetadataDelta(before, cluster.image)
    assert [topic.name for topic in delta.topics_removed] == [removed.name]
    assert delta.partitions_changed == [(kept.topic_id, 2), (added.topic_id, 0)]
    assert [topic.name for topic in delta.topics_changed] == ["added"]
    assert delta.brokers_changed == []


def test_a_delta_tells_of_settings_and_of_brokers() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    cluster.create_topic(factor=1)
    before = cluster.image
    cluster.call(AlterTopicConfigRequest("t", {"retention.ms": "1"}))
    cluster.start_broker("another")
    delta = MetadataDelta(before, cluster.image)
    assert [topic.config["retention.ms"] for topic in delta.topics_changed] == ["1"]
    assert delta.partitions_changed == []
    assert delta.brokers_changed == [2]


def test_a_recreated_topic_is_another_topic() -> None:
    cluster = Cluster()
    cluster.start_brokers(1)
    first = cluster.create_topic(factor=1)
    before = cluster.image
    cluster.call(DeleteTopicRequest("t"))
    cluster.call(CreateTopicRequest("t", 1, 1, b"", {}))
    delta = MetadataDelta(before, cluster.image)
    assert [topic.topic_id for topic in delta.topics_removed] == [first.topic_id]
    assert delta.partitions_changed == [(cluster.topic().topic_id, 0)]


def test_records_of_a_log_from_before_the_elr_are_still_read() -> None:
    topic_id = "0" * 32
    older = [[10, topic_id, 0, [0, 1], [0], 0, 3, 4, [], [], []], [11, topic_id, 0, 1, None, None, None, None, []]]
    partition, change = decode_records(msgspec.msgpack.encode(older))
    assert partition == PartitionRecord(topic_id, 0, [0, 1], [0], 0, 3, 4)
    assert change == PartitionChangeRecord(topic_id, 0, leader=1, damaged=[])
