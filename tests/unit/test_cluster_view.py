"""What a client believes of the cluster never goes back, whichever broker answers."""

from __future__ import annotations

import pyarrow as pa
import pytest
from msgspec.structs import replace

from spark_broker.client.cluster_view import ClusterView, merge
from spark_broker.errors import UnknownSchemaError
from spark_broker.protocol.messages import BrokerMetadata, MetadataResponse, PartitionMetadata, TopicMetadata
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.protocol.schema_ids import UNKNOWN

TOPIC_ID = "0" * 32
OTHER_ID = "1" * 32
SCHEMA = schema_to_bytes(DEFAULT_SCHEMA)


def broker(broker_id: int, *, fenced: bool = False) -> BrokerMetadata:
    return BrokerMetadata(broker_id, "h", 1, None, 1, 0, "", 0, fenced)


def answer(
    *states: tuple[int, int],
    topic_id: str = TOPIC_ID,
    controller_epoch: int = 1,
    schemas: int = 1,
    fenced: bool = False,
    offset: int = -1,
    cluster_id: str = "c",
) -> MetadataResponse:
    """Metadata of one topic; a state is (leader, leader epoch)."""
    partitions = [
        PartitionMetadata(n, leader, epoch, [1, 2], [1, 2], epoch) for n, (leader, epoch) in enumerate(states)
    ]
    topic = TopicMetadata("t", topic_id, partitions, [SCHEMA] * schemas, {})
    brokers = [broker(1, fenced=fenced), broker(2)]
    return MetadataResponse(cluster_id, controller_epoch, brokers, [topic], metadata_offset=offset)


def leaders(view: ClusterView) -> list[tuple[int, int]]:
    topic = view.topic("t")
    assert topic is not None
    return [(state.leader, state.leader_epoch) for state in topic.partitions]


def test_a_leader_epoch_never_goes_back() -> None:
    view = merge(ClusterView(), answer((1, 5), (2, 7)), ["t"])
    view = merge(view, answer((2, 4), (1, 8)), ["t"])
    assert leaders(view) == [(1, 5), (1, 8)]


def test_a_topic_created_again_begins_at_its_own_epochs() -> None:
    view = merge(ClusterView(), answer((1, 5)), ["t"])
    view = merge(view, answer((2, 0), topic_id=OTHER_ID), ["t"])
    assert leaders(view) == [(2, 0)]


def test_partitions_and_schemas_are_never_lost_to_a_broker_that_lags_behind() -> None:
    view = merge(ClusterView(), answer((1, 1), (1, 1), schemas=2), ["t"])
    view = merge(view, answer((1, 1)), ["t"])
    topic = view.topic("t")
    assert topic is not None
    assert len(topic.partitions) == 2
    assert topic.schema_id == 1


def test_an_older_controllers_brokers_are_ignored() -> None:
    view = merge(ClusterView(), answer((1, 1), controller_epoch=2, fenced=True), ["t"])
    view = merge(view, answer((1, 1), controller_epoch=1), ["t"])
    assert view.controller_epoch == 2
    assert view.live_broker(1) is None
    assert view.leader("t", 0) is None, "nobody waits for a fenced leader"


def test_a_topic_that_is_missing_from_an_answer_about_it_is_gone() -> None:
    view = merge(ClusterView(), answer((1, 1)), ["t"])
    empty = MetadataResponse("c", 1, [broker(1)], [])
    assert merge(view, empty, ["other"]).topic("t") is not None
    assert merge(view, empty, ["t"]).topic("t") is None
    assert merge(view, empty, None).topic("t") is None


def test_a_broker_that_lags_behind_changes_and_removes_nothing() -> None:
    view = merge(ClusterView(), answer((1, 1), (1, 1), topic_id=OTHER_ID, offset=20, fenced=True), ["t"])
    nothing = MetadataResponse("c", 1, [broker(1)], [], metadata_offset=19)
    for asked in (["t"], None):
        after = merge(view, nothing, asked)
        assert leaders(after) == [(1, 1), (1, 1)]
        assert after.live_broker(1) is None
        assert after.metadata_offset == 20
    earlier_topic = merge(view, answer((2, 5), offset=19), ["t"]).topic("t")
    assert earlier_topic is view.topic("t")
    assert merge(view, MetadataResponse("c", 1, [broker(1)], [], metadata_offset=20), ["t"]).topic("t") is None


def test_a_broker_that_lags_behind_shows_topics_that_were_not_asked_for_before() -> None:
    view = merge(ClusterView(), MetadataResponse("c", 1, [broker(1)], [], metadata_offset=20), ["other"])
    assert leaders(merge(view, answer((1, 1), offset=19), ["t"])) == [(1, 1)]


def test_offsets_of_another_clusters_metadata_log_are_not_compared() -> None:
    view = merge(ClusterView(), answer((1, 5), offset=20), ["t"])
    view = merge(view, answer((2, 0), topic_id=OTHER_ID, offset=3, cluster_id="another"), ["t"])
    assert leaders(view) == [(2, 0)]
    assert view.metadata_offset == 3


def test_what_is_decoded_of_a_topic_is_kept_while_only_leaders_change() -> None:
    view = merge(ClusterView(), answer((1, 1)), ["t"])
    before = view.topic("t")
    assert before is not None
    assert before.schemas
    after = merge(view, answer((2, 2)), ["t"]).topic("t")
    assert after is not None
    assert after.schemas is before.schemas


def test_a_controller_with_a_lower_epoch_counts_where_the_metadata_went_on() -> None:
    """Found by the simulator with seed 50009497: older metadata was accepted, and its controller counted from a lower
    epoch again. A producer kept the fenced brokers of the lost records, and waited for ever.
    """
    view = merge(ClusterView(), answer((1, 1), controller_epoch=5, fenced=True, offset=54), ["t"])
    view = merge(view, answer((1, 1_000_002), controller_epoch=3, offset=1_000_056), ["t"])
    assert view.controller_epoch == 3
    assert view.leader("t", 0) is not None


def test_a_schema_in_the_middle_may_not_be_known_and_comes_later() -> None:
    """Older metadata was accepted, and no broker has told of the lost schema yet."""
    first, lost, last = (
        schema_to_bytes(pa.schema([(name, pa.int32()) for name in names])) for names in ("n", "ns", "nsd")
    )
    before, after = (
        replace(answer((1, 1)), topics=[replace(answer((1, 1)).topics[0], schemas=schemas)])
        for schemas in ([first, UNKNOWN, last], [first, lost, last])
    )
    topic = merge(ClusterView(), before, ["t"]).topic("t")
    assert topic is not None
    assert topic.schema == topic.schema_of(2)
    for schema_id in (1, 3, -1):
        with pytest.raises(UnknownSchemaError):
            topic.schema_of(schema_id)
    for answers in ((before, after), (after, before)):
        view = ClusterView()
        for each in answers:
            view = merge(view, each, ["t"])
        merged = view.topic("t")
        assert merged is not None
        assert merged.schema_of(1).names == ["n", "s"]
