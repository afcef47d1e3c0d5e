"""Topics: what may be created, grown, changed and deleted, and what is refused with which error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from spark_broker.config import TopicConfig, load_cluster_settings
from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage
from spark_broker.controller.records import TopicConfigRecord
from spark_broker.controller.topic_config import altered_config, stored_config
from spark_broker.controller.topics import MAX_PARTITIONS, alter_topic_config
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InconsistentTopicIdError,
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidTopicError,
    SparkBrokerError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    CallRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    ElectLeadersRequest,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    InitProducerIdRequest,
    MetadataRequest,
    MetadataResponse,
    ReassignPartitionRequest,
)
from spark_broker.protocol.schema import schema_to_bytes
from tests.unit.controller.cluster import Cluster, settle

INTERNAL: list[tuple[str, EnsureOffsetsTopicRequest | EnsureTransactionsTopicRequest]] = [
    (CONSUMER_OFFSETS_TOPIC, EnsureOffsetsTopicRequest()),
    (TRANSACTION_STATE_TOPIC, EnsureTransactionsTopicRequest()),
]


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    cluster.start_brokers(3)
    return cluster


def test_a_topic_is_created_in_full(cluster: Cluster) -> None:
    topic = cluster.create_topic("t", 6, 3)
    assert topic.schemas == (b"schema",)
    assert sorted(p.leader for p in topic.partitions) == [0, 0, 1, 1, 2, 2]
    assert all(set(p.isr) == {0, 1, 2} and p.leader_epoch == 0 for p in topic.partitions)


def test_the_clusters_defaults_fill_what_the_request_leaves_open() -> None:
    cluster = Cluster(num_partitions=4, default_replication_factor=2, retention_ms=1234)
    cluster.start_brokers(2)
    topic = cluster.create_topic("t", -1, -1, {"segment.ms": "99"})
    assert (len(topic.partitions), len(topic.partitions[0].replicas)) == (4, 2)
    assert topic.config == {"retention.ms": "1234", "segment.ms": "99"}
    assert TopicConfig.parse(topic.config) == TopicConfig(retention_ms=1234, segment_ms=99)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (CreateTopicRequest("", 1, 1, b"", {}), InvalidTopicError),
        (CreateTopicRequest("..", 1, 1, b"", {}), InvalidTopicError),
        (CreateTopicRequest("a/b", 1, 1, b"", {}), InvalidTopicError),
        (CreateTopicRequest("a\n", 1, 1, b"", {}), InvalidTopicError),
        (CreateTopicRequest("a" * 250, 1, 1, b"", {}), InvalidTopicError),
        (CreateTopicRequest("__mine", 1, 1, b"", {}), InvalidTopicError),
        (CreateTopicRequest("mine", 1, 1, b"", {}, internal=True), InvalidTopicError),
        (CreateTopicRequest("t", 0, 1, b"", {}), InvalidPartitionsError),
        (CreateTopicRequest("t", -2, 1, b"", {}), InvalidPartitionsError),
        (CreateTopicRequest("t", MAX_PARTITIONS + 1, 1, b"", {}), InvalidPartitionsError),
        (CreateTopicRequest("t", 1, 0, b"", {}), InvalidReplicationFactorError),
        (CreateTopicRequest("t", 1, 4, b"", {}), InvalidReplicationFactorError),
        (CreateTopicRequest("t", 1, 1, b"", {"retention.ms": "soon"}), InvalidConfigError),
        (CreateTopicRequest("t", 1, 1, b"", {"delta.path": "/lake/" + "x" * 243}), InvalidConfigError),
        (CreateTopicRequest("t", -1, -1, b"", {}, [[0, 0]]), InvalidReplicaAssignmentError),
        (CreateTopicRequest("t", -1, -1, b"", {}, [[0, 9]]), InvalidReplicaAssignmentError),
        (CreateTopicRequest("t", -1, -1, b"", {}, [[]]), InvalidReplicaAssignmentError),
        (CreateTopicRequest("t", -1, -1, b"", {}, [[0, 1], [2]]), InvalidReplicaAssignmentError),
        (CreateTopicRequest("t", 3, -1, b"", {}, [[0], [1]]), InvalidReplicaAssignmentError),
        (DeleteTopicRequest("t"), UnknownTopicOrPartitionError),
        (CreatePartitionsRequest("t", 3), UnknownTopicOrPartitionError),
        (AlterTopicConfigRequest("t", {}), UnknownTopicOrPartitionError),
        (InitProducerIdRequest(), InvalidRequestError),
    ],
)
def test_a_bad_request_is_a_typed_error_and_changes_nothing(
    cluster: Cluster, request_: CallRequest, error: type[SparkBrokerError]
) -> None:
    before = cluster.image
    with pytest.raises(error):
        cluster.call(request_)
    assert cluster.image == before


def test_a_topic_whose_tables_name_leaves_no_room_is_altered_but_gets_no_such_table_anew() -> None:
    """Its path was accepted before there was a check."""
    path = "/lake/" + "x" * 243
    stored = {"delta.path": path}
    assert altered_config(TopicConfig(), stored, {"segment.bytes": "4096"})["delta.path"] == path
    with pytest.raises(InvalidConfigError, match=r"delta\.path"):
        altered_config(TopicConfig(), {}, stored)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/lake/a%20b",
            "/lake/a#b",
            "/lake/a?b",
            "/lake/a\\b",
            "/lake/t ",
            " /lake/t",
            "/lake/a\tb",
            "/lake/a\u202eb",
        ),
        *("lake/t", "./t", "~/t", "file:lake", "file://lake/t", "s3://bucket/a%20b", "C:\\lake"),
    ],
)
def test_a_path_that_is_another_directory_for_another_process_is_refused(cluster: Cluster, path: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"delta\.path"):
        cluster.create_topic("t", partitions=1, factor=1, config={"delta.path": path})
    cluster.create_topic("t", partitions=1, factor=1)
    with pytest.raises(InvalidConfigError, match=r"delta\.path"):
        cluster.call(AlterTopicConfigRequest("t", {"delta.path": path}))
    assert altered_config(TopicConfig(), {"delta.path": path}, {"segment.bytes": "4096"})["delta.path"] == path


@pytest.mark.parametrize(
    "path",
    ["/lake/a b", "/lake/é+&=:*[]{}'\"`|^<>,;@!$()", "file:/lake/t", "file:///lake/t", "s3a://bucket/t", "dbfs:/t"],
)
def test_a_path_that_everybody_reads_alike_is_accepted(cluster: Cluster, path: str) -> None:
    cluster.create_topic("t", partitions=1, factor=1, config={"delta.path": path})


@pytest.mark.parametrize("path", ["/lake/t", "file:/lake/t/", "file:///lake/t", "/lake/t_dead_letters"])
def test_a_table_is_one_topics(cluster: Cluster, path: str) -> None:
    """Story: both wrote into it, and each was read with the other's records."""
    cluster.create_topic("t", partitions=1, factor=1, config={"delta.path": "/lake/t"})
    with pytest.raises(InvalidConfigError, match="is a table of topic 't'"):
        cluster.create_topic("other", partitions=1, factor=1, config={"delta.path": path})
    cluster.create_topic("other", partitions=1, factor=1, config={"delta.path": "/lake/other"})
    with pytest.raises(InvalidConfigError, match="is a table of topic 't'"):
        cluster.call(AlterTopicConfigRequest("other", {"delta.path": path}))
    cluster.call(AlterTopicConfigRequest("t", {"delta.path": "/lake/t/"}))
    cluster.call(AlterTopicConfigRequest("other", {"segment.ms": "99"}))


def test_a_table_whose_name_leaves_room_for_the_table_beside_it_is_accepted(cluster: Cluster) -> None:
    cluster.create_topic("t", partitions=1, factor=1, config={"delta.path": "/lake/" + "x" * 242 + "/"})


def test_an_unknown_setting_names_the_nearest_one(cluster: Cluster) -> None:
    with pytest.raises(InvalidConfigError, match=r"retention\.ms"):
        cluster.create_topic(config={"retension.ms": "1"})


def test_an_assignment_is_taken_as_it_is(cluster: Cluster) -> None:
    cluster.call(CreateTopicRequest("t", -1, -1, b"", {}, [[2, 0], [1, 2]]))
    assert [p.replicas for p in cluster.topic().partitions] == [(2, 0), (1, 2)]
    assert [p.leader for p in cluster.topic().partitions] == [2, 1]


def test_a_name_is_taken_until_its_topic_is_deleted(cluster: Cluster) -> None:
    first = cluster.create_topic()
    with pytest.raises(TopicAlreadyExistsError):
        cluster.create_topic()
    cluster.call(DeleteTopicRequest("t"))
    assert cluster.image.topic("t") is None
    assert cluster.create_topic().topic_id != first.topic_id


def test_a_topic_grows_and_never_shrinks(cluster: Cluster) -> None:
    cluster.create_topic(partitions=2, factor=2)
    before = cluster.topic().partitions
    cluster.call(CreatePartitionsRequest("t", 5))
    assert cluster.topic().partitions[:2] == before
    assert [len(p.replicas) for p in cluster.topic().partitions] == [2] * 5
    for total in (5, 4, 0, -1):
        with pytest.raises(InvalidPartitionsError):
            cluster.call(CreatePartitionsRequest("t", total))


def test_settings_are_changed_and_reset_to_the_clusters() -> None:
    cluster = Cluster(retention_ms=1234)
    cluster.start_brokers(1)
    cluster.create_topic(factor=1, config={"retention.ms": "1"})
    cluster.call(AlterTopicConfigRequest("t", {"min.insync.replicas": "2"}))
    assert cluster.topic().config == {"retention.ms": "1", "min.insync.replicas": "2"}
    cluster.call(AlterTopicConfigRequest("t", {"retention.ms": None, "min.insync.replicas": None}))
    assert cluster.topic().config == {"retention.ms": "1234"}
    with pytest.raises(InvalidConfigError):
        cluster.call(AlterTopicConfigRequest("t", {"retention.msx": None}))


def test_the_offsets_topic_is_created_once_and_keeps_everything(cluster: Cluster) -> None:
    cluster.call(EnsureOffsetsTopicRequest())
    topic = cluster.topic("__consumer_offsets")
    cluster.call(EnsureOffsetsTopicRequest())
    assert cluster.topic("__consumer_offsets") is topic
    assert topic.internal
    assert (len(topic.partitions), len(topic.partitions[0].replicas)) == (50, 3)
    config = TopicConfig.parse(topic.config)
    assert (config.retention_ms, config.segment_index_bytes) == (-1, 65_536)


def test_the_offsets_topic_waits_for_brokers_that_will_be_back_soon(cluster: Cluster) -> None:
    cluster.end_session(2)
    cluster.tick(500)
    with pytest.raises(CoordinatorNotAvailableError):
        cluster.call(EnsureOffsetsTopicRequest())
    cluster.pass_time(31_000, alive=[0, 1])
    cluster.call(EnsureOffsetsTopicRequest())
    assert len(cluster.topic("__consumer_offsets").partitions[0].replicas) == 2


def test_an_internal_topic_is_neither_deleted_nor_grown(cluster: Cluster) -> None:
    cluster.call(EnsureOffsetsTopicRequest())
    with pytest.raises(InvalidTopicError):
        cluster.call(DeleteTopicRequest("__consumer_offsets"))
    with pytest.raises(InvalidTopicError):
        cluster.call(CreatePartitionsRequest("__consumer_offsets", 100))


def test_metadata_describes_topics_and_brokers(cluster: Cluster) -> None:
    cluster.create_topic("a", 2, 2)
    everything, nothing = cluster.call(MetadataRequest()), cluster.call(MetadataRequest(["missing"]))
    assert isinstance(everything, MetadataResponse)
    assert isinstance(nothing, MetadataResponse)
    assert [(t.name, len(t.partitions)) for t in everything.topics] == [("a", 2)]
    assert [(b.id, b.fenced) for b in everything.brokers] == [(0, False), (1, False), (2, False)]
    assert nothing.topics == []


def test_producer_ids_are_given_out_once(cluster: Cluster) -> None:
    request = AllocateProducerIdsRequest(0, cluster.image.brokers[0].epoch)
    blocks = [cluster.call(request) for _ in range(3)]
    ids = [b.first_id + i for b in blocks if isinstance(b, AllocateProducerIdsResponse) for i in range(b.count)]
    assert len(ids) == len(set(ids)) == 3000


@pytest.mark.parametrize(("name", "ensure"), INTERNAL)
def test_an_internal_topic_that_was_made_by_one_broker_gets_replicas_on_those_that_come(
    name: str, ensure: EnsureOffsetsTopicRequest | EnsureTransactionsTopicRequest
) -> None:
    """Story: a group that was there before the second broker. Its positions had one replica for good."""
    cluster = Cluster()
    cluster.start_broker("a")
    cluster.call(ensure)
    assert {(state.replicas, state.lacking) for state in cluster.topic(name).partitions} == {((0,), 2)}
    cluster.start_broker("b")
    settle(cluster, [0, 1], name)
    assert {(frozenset(state.isr), state.lacking) for state in cluster.topic(name).partitions} == {
        (frozenset({0, 1}), 1)
    }
    cluster.start_broker("c")
    cluster.start_broker("d")
    settle(cluster, [0, 1, 2, 3], name)
    assert {(len(state.isr), state.lacking) for state in cluster.topic(name).partitions} == {(3, 0)}
    leaders = Counter(state.replicas[0] for state in cluster.topic(name).partitions)
    assert set(leaders) == {0, 1, 2, 3}, "leaders are spread"


@pytest.mark.parametrize(("name", "ensure"), INTERNAL)
def test_an_internal_topic_of_an_earlier_version_is_compacted_from_the_next_controller_on(
    name: str, ensure: EnsureOffsetsTopicRequest | EnsureTransactionsTopicRequest
) -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.call(ensure)
    made = cluster.topic(name)
    assert made.config["cleanup.policy"] == "compact"
    earlier = TopicConfigRecord(made.topic_id, {**made.config, "cleanup.policy": "delete"})
    later = Cluster(cluster.image.apply([earlier])).topic(name)
    assert dict(later.config) == dict(made.config)


@pytest.mark.parametrize(("name", "ensure"), INTERNAL)
def test_an_internal_topic_takes_what_coordinators_append_whatever_the_defaults_of_topics_are(
    name: str, ensure: EnsureOffsetsTopicRequest | EnsureTransactionsTopicRequest
) -> None:
    """Story: with segment.bytes=2560 as the cluster's default, a group's commits did not fit, for good."""

    def small(image: MetadataImage = EMPTY_IMAGE) -> Cluster:
        return Cluster(image, segment_bytes=2560, max_message_bytes=2000)

    cluster = small()
    cluster.start_brokers(3)
    cluster.call(ensure)
    config = TopicConfig.parse(dict(cluster.topic(name).config))
    assert (config.segment_bytes, config.max_message_bytes) == (100 << 20, TopicConfig().max_message_bytes)
    earlier = {**cluster.topic(name).config, "segment.bytes": "2560", "max.message.bytes": "2000"}
    image = cluster.image.apply([TopicConfigRecord(cluster.topic(name).topic_id, earlier)])
    assert dict(small(image).topic(name).config) == earlier, "what is set for the topic stays"
    del earlier["segment.bytes"]
    image = cluster.image.apply([TopicConfigRecord(cluster.topic(name).topic_id, earlier)])
    later = TopicConfig.parse(dict(small(image).topic(name).config))
    assert later.segment_bytes == 100 << 20


OF_USERS: dict[str, Any] = {
    "timestamp_column": "event_time",
    "key_columns": ["customer"],
    "storage_format": "delta",
    "unclean_leader_election_enable": True,
}


@pytest.mark.parametrize("default", OF_USERS)
@pytest.mark.parametrize(("name", "ensure"), INTERNAL)
def test_an_internal_topic_has_no_columns_and_no_table_whatever_the_defaults_of_topics_are(
    name: str, ensure: EnsureOffsetsTopicRequest | EnsureTransactionsTopicRequest, default: str
) -> None:
    """Story: with timestamp.column as a default, the first commit ended one coordinator after the other."""
    cluster = Cluster(**{default: OF_USERS[default]})
    cluster.start_brokers(3)
    cluster.call(ensure)
    config = TopicConfig.parse(dict(cluster.topic(name).config))
    assert (config.timestamp_column, config.key_columns, config.storage_format) == ("", (), "arrow")
    assert config.unclean_leader_election_enable == (
        default == "unclean_leader_election_enable" and name == CONSUMER_OFFSETS_TOPIC
    )


@pytest.mark.parametrize("default", OF_USERS)
def test_internal_topics_of_earlier_versions_lose_what_they_inherited(default: str) -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    records = []
    for name, ensure in INTERNAL:
        cluster.call(ensure)
        topic = cluster.topic(name)
        value = OF_USERS[default]
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()
        records.append(TopicConfigRecord(topic.topic_id, {**topic.config, default.replace("_", "."): text}))
    later = Cluster(cluster.image.apply(records), **{default: OF_USERS[default]})
    kept = {CONSUMER_OFFSETS_TOPIC} if default == "unclean_leader_election_enable" else set()
    assert {name for name, _ in INTERNAL if default.replace("_", ".") in later.topic(name).config} == kept


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (CONSUMER_OFFSETS_TOPIC, {"timestamp.column": "event_time"}),
        (CONSUMER_OFFSETS_TOPIC, {"delta.path": "/tables/t"}),
        (CONSUMER_OFFSETS_TOPIC, {"max.message.bytes": "1"}),
        (TRANSACTION_STATE_TOPIC, {"max.message.bytes": "16777215"}),
        (TRANSACTION_STATE_TOPIC, {"segment.bytes": "1048576"}),
        (CONSUMER_OFFSETS_TOPIC, {"cleanup.policy": "delete"}),
        (CONSUMER_OFFSETS_TOPIC, {"cleanup.policy": "compact,delete"}),
        (TRANSACTION_STATE_TOPIC, {"unclean.leader.election.enable": "true"}),
        (TRANSACTION_STATE_TOPIC, {"unclean.leader.election.enable": " TRUE "}),
    ],
)
def test_what_coordinators_cannot_do_without_is_not_altered(name: str, values: dict[str, str]) -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    for _, ensure in INTERNAL:
        cluster.call(ensure)
    before = dict(cluster.topic(name).config)
    with pytest.raises(InvalidConfigError, match=next(iter(values))):
        cluster.call(AlterTopicConfigRequest(name, dict(values)))
    cluster.call(AlterTopicConfigRequest(name, dict.fromkeys(values, None)))
    assert dict(cluster.topic(name).config) == before


def test_sizes_of_an_internal_topic_may_grow_and_small_ones_of_before_do_no_harm(cluster: Cluster) -> None:
    cluster.call(EnsureOffsetsTopicRequest())
    name = CONSUMER_OFFSETS_TOPIC
    cluster.call(AlterTopicConfigRequest(name, {"max.message.bytes": "33554432", "segment.bytes": "33554432"}))
    assert cluster.topic(name).config["max.message.bytes"] == "33554432"
    small = {**cluster.topic(name).config, "max.message.bytes": "2000", "segment.bytes": "2560"}
    earlier = cluster.image.apply([TopicConfigRecord(cluster.topic(name).topic_id, small)])
    request = AlterTopicConfigRequest(name, {"segment.ms": "60000"})
    decision = alter_topic_config(earlier, request, load_cluster_settings(None))
    assert decision.records[0] == TopicConfigRecord(cluster.topic(name).topic_id, {**small, "segment.ms": "60000"})


def test_a_deletion_that_comes_late_or_again_deletes_no_newer_topic_of_the_name(cluster: Cluster) -> None:
    """Story: a client gave a deletion up and sent it again; the first request arrived when the topic was there anew."""
    cluster.create_topic()
    late = DeleteTopicRequest("t", cluster.topic("t").topic_id)
    cluster.call(late)
    cluster.call(late)
    cluster.create_topic()
    again = cluster.topic("t").topic_id
    cluster.call(late)
    assert cluster.topic("t").topic_id == again
    with pytest.raises(UnknownTopicOrPartitionError):
        cluster.call(DeleteTopicRequest("t", "ab" * 16))


WIDER = schema_to_bytes(pa.schema([("more", pa.int64())]))


@pytest.mark.parametrize(
    "late",
    [
        lambda id_: AlterTopicConfigRequest("t", {"retention.ms": "1000"}, id_),
        lambda id_: AlterTopicSchemaRequest("t", WIDER, id_),
        lambda id_: CreatePartitionsRequest("t", 9, id_),
        lambda id_: ReassignPartitionRequest("t", 0, [2, 1], id_),
        lambda id_: ElectLeadersRequest([("t", 0)], topic_ids={"t": id_}),
    ],
    ids=["settings", "schema", "partitions", "replicas", "leader"],
)
def test_a_change_that_comes_late_does_nothing_to_a_newer_topic_of_the_name(
    cluster: Cluster, late: Callable[[str], CallRequest]
) -> None:
    """Story: a frozen broker thawed, and passed on what its client had given up. The new topic's records went."""
    created = CreateTopicRequest("t", 2, 3, schema_to_bytes(pa.schema([("a", pa.int64())])), {})
    cluster.call(created)
    first = cluster.topic("t").topic_id
    cluster.call(DeleteTopicRequest("t", first))
    cluster.call(created)
    before = cluster.image
    with pytest.raises(InconsistentTopicIdError):
        cluster.call(late(first))
    assert cluster.image == before
    cluster.call(late(cluster.topic("t").topic_id))
    cluster.call(DeleteTopicRequest("t"))
    with pytest.raises(UnknownTopicOrPartitionError):
        cluster.call(late(first))


@pytest.mark.parametrize("text", ["604800000", "604800001"])
def test_retention_that_the_cluster_names_counts_for_tables_whatever_it_is(text: str) -> None:
    """Story: `retention.ms` that equals the built-in week was not kept: tables kept their rows for ever."""
    settings = load_cluster_settings({"retention.ms": text}).topic
    defaults = TopicConfig.parse(settings.given())  # as the controller's process gets them
    assert stored_config(defaults, {}) == {"retention.ms": text}
    assert altered_config(defaults, {}, {"retention.ms": None}) == {"retention.ms": text}
    assert altered_config(defaults, {"retention.ms": "5"}, {"segment.ms": "99"}) == {
        "retention.ms": "5",
        "segment.ms": "99",
    }
    assert stored_config(load_cluster_settings({}).topic, {}) == {}
