"""Older metadata that was accepted lacks schemas: their ids are not given out again, and brokers tell of them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spark_broker.controller import lineage
from spark_broker.controller.events import ControllerStarted
from spark_broker.controller.image import MetadataImage, TopicState
from spark_broker.controller.snapshot import image_from_snapshot, to_records
from spark_broker.errors import LeaderNotAvailableError
from spark_broker.model import NO_LEADER
from spark_broker.protocol.messages import AlterTopicSchemaRequest, RegisterBrokerResponse, TopicSchema
from spark_broker.protocol.schema import schema_from_bytes, schema_to_bytes
from spark_broker.protocol.schema_ids import UNKNOWN, is_known
from tests.unit.controller.cluster import CLUSTER_ID, Cluster, registration

OLD = pa.schema([("n", pa.int32())])


def alter(cluster: Cluster, **columns: pa.DataType) -> TopicState:
    cluster.call(AlterTopicSchemaRequest("t", schema_to_bytes(pa.schema(list(columns.items())))))
    return cluster.topic("t")


def columns(message: bytes) -> list[str]:
    return list(schema_from_bytes(message).names)


class Story:
    """A copy of the metadata was made, and the topic was altered after that. Then the copy was restored."""

    def __init__(self) -> None:
        cluster = Cluster()
        cluster.start_brokers(3)
        cluster.create_topic("t", 1, 3, schema=schema_to_bytes(OLD))
        self.older = cluster.image
        self.lost = alter(cluster, s=pa.int64()).schemas[1]
        self.newest = cluster.image

    def accepted(self, seen: MetadataImage | None = None, writer: str = "v") -> Cluster:
        """A cluster on the copy, in which all brokers have registered. None has told of anything yet."""
        cluster = Cluster(self.older)
        cluster.handle(ControllerStarted(writer * 32, CLUSTER_ID, accept_older_metadata=True))
        for broker in range(3):
            request = registration(
                cluster.new_launch(),
                f"directory-{broker}",
                broker_id=broker,
                cluster_id=CLUSTER_ID,
                seen=lineage.seen(seen or self.newest),
            )
            assert isinstance(cluster.register(request), RegisterBrokerResponse)
        return cluster

    def told(self, cluster: Cluster, schema_id: int = 1, message: bytes | None = None) -> TopicSchema:
        return TopicSchema(cluster.topic("t").topic_id, schema_id, self.lost if message is None else message)


def compare(cluster: Cluster) -> None:
    """Every broker names its log ends."""
    for broker in (0, 1, 2):
        cluster.beat(broker)
    assert cluster.partition().leader != NO_LEADER


def test_the_id_of_a_schema_that_older_metadata_lacks_is_not_given_out_again() -> None:
    """Story: the topic was altered after the copy was made, and once more after the copy was accepted. Both times it
    was schema 1. BIGINTs of the first one were read as DOUBLEs of the second one, and nobody noticed.
    """
    cluster = Story().accepted()
    compare(cluster)
    topic = alter(cluster, d=pa.float64())
    assert columns(topic.schemas[-1]) == ["n", "d"]
    known = [schema_id for schema_id in range(len(topic.schemas)) if is_known(topic.schemas, schema_id)]
    assert known == [0, len(topic.schemas) - 1]
    assert known[1] > 1
    assert topic.schemas[1] == UNKNOWN
    assert image_from_snapshot(to_records(cluster.image), cluster.image.next_offset) == cluster.image
    assert len(alter(cluster, e=pa.float64()).schemas) == len(topic.schemas) + 1, "ids are spared once"


def test_a_copy_that_is_accepted_again_gives_no_schema_id_twice() -> None:
    story = Story()
    seen, given = story.newest, {1}
    for writer in "abcd":
        cluster = story.accepted(seen, writer)
        compare(cluster)
        for number in range(3):
            new = len(alter(cluster, **{f"{writer}{number}": pa.float64()}).schemas) - 1
            assert new not in given
            given.add(new)
        seen = cluster.image


def test_brokers_tell_of_the_schemas_that_older_metadata_lacks() -> None:
    story = Story()
    cluster = story.accepted()
    assert len(cluster.topic("t").schemas) == 1
    cluster.schemas[2] = [story.told(cluster)]
    cluster.beat(2)
    assert cluster.topic("t").schemas == (schema_to_bytes(OLD), story.lost)
    assert "has schema 1" in " ".join(cluster.notes)
    before = cluster.topic("t")
    cluster.beat(2)
    assert cluster.topic("t").schemas == before.schemas, "it may still tell of what is known by now"
    compare(cluster)
    assert columns(alter(cluster, d=pa.float64()).schemas[-1]) == ["n", "s", "d"]
    assert image_from_snapshot(to_records(cluster.image), cluster.image.next_offset) == cluster.image


def test_a_topic_is_not_altered_before_all_have_told_of_its_schemas() -> None:
    story = Story()
    cluster = story.accepted()
    cluster.beat(0)
    with pytest.raises(LeaderNotAvailableError, match="t-0 were not compared yet"):
        alter(cluster, d=pa.float64())
    compare(cluster)
    alter(cluster, d=pa.float64())
    for broker in (0, 1, 2):  # From now on the topic is one as any other.
        cluster.end_session(broker)
    cluster.tick(60_000)
    alter(cluster, e=pa.float64())


def test_what_is_told_late_can_be_read_with_what_came_meanwhile() -> None:
    """A replica that was not compared had the schema: somebody had accepted a loss."""
    story = Story()
    cluster = story.accepted()
    compare(cluster)
    altered = alter(cluster, d=pa.float64())
    cluster.schemas[1] = [story.told(cluster)]
    cluster.beat(1)
    topic = cluster.topic("t")
    assert topic.schemas[1] == story.lost
    assert topic.schemas[: len(altered.schemas)][2:] == altered.schemas[2:]
    assert columns(topic.schemas[-1]) == ["n", "d", "s"]
    cluster.beat(1)
    assert cluster.topic("t").schemas == topic.schemas


def test_nothing_else_is_taken_for_a_schema_that_was_lost() -> None:
    story = Story()
    cluster = story.accepted()
    spared = cluster.topic("t").next_schema_id
    before = cluster.topic("t").schemas
    cluster.schemas[0] = [
        story.told(cluster, 0),  # It is known, and stays what it is.
        story.told(cluster, spared),  # Nobody can have got this id.
        story.told(cluster, 2, b"no schema"),
        TopicSchema("f" * 32, 1, story.lost),
    ]
    cluster.beat(0)
    assert cluster.topic("t").schemas == before
    fresh = Cluster()
    fresh.start_brokers(3)
    fresh.create_topic("t", 1, 3, schema=schema_to_bytes(OLD))
    fresh.schemas[0] = [story.told(fresh)]
    fresh.beat(0)
    assert len(fresh.topic("t").schemas) == 1, "no older metadata was accepted"
