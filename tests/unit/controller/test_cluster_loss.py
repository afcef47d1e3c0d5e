"""All disks are gone, and other brokers start over the same metadata: what goes on, and what waits."""

from __future__ import annotations

from collections import Counter

import pytest

from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.errors import InvalidReplicationFactorError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, NO_LEADER
from spark_broker.protocol.messages import (
    ConfirmHistoryRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    EnsureOffsetsTopicRequest,
    ReassignPartitionRequest,
    ReportTieringRequest,
)
from tests.unit.controller.cluster import Cluster, settle

DELAY_MS = 60_000

TOPICS = ("table", CONSUMER_OFFSETS_TOPIC)
"""Those that go on."""


@pytest.fixture
def before() -> MetadataImage:
    """Three topics on three brokers: `table` has a history, `begun` is to have one, `log` has none."""
    cluster = Cluster()
    cluster.start_brokers(3)
    for name, config in (("table", {"delta.path": "/lake"}), ("begun", {"delta.path": "/other"}), ("log", {})):
        cluster.create_topic(name, partitions=2, factor=3, config=config)
    cluster.call(EnsureOffsetsTopicRequest())
    topic_id = cluster.topic("table").topic_id
    cluster.call(ConfirmHistoryRequest(topic_id, cluster.image.controller_epoch, "id", 0, 0, [0, 0], [70, 90]))
    return cluster.image


def partitions(cluster: Cluster, name: str) -> list[PartitionRegistration]:
    return list(cluster.topic(name).partitions)


def with_an_id_taken_over(before: MetadataImage) -> tuple[Cluster, int]:
    """A new cluster of broker 3 and one whose empty directory has taken an old id over, when the loss counts."""
    cluster = Cluster(before)
    cluster.start_broker("new-a")
    cluster.pass_time(DELAY_MS // 2 + 5_000, alive=[3])
    taken_over = cluster.start_broker("new-b")
    assert taken_over in (0, 1, 2)
    cluster.pass_time(DELAY_MS, alive=[3, taken_over])
    return cluster, taken_over


def test_topics_with_a_history_go_on_over_new_brokers_and_others_wait(before: MetadataImage) -> None:
    cluster = Cluster(before)
    for directory in ("new-a", "new-b"):
        cluster.start_broker(directory)
    cluster.pass_time(DELAY_MS - 5_000, alive=[3, 4])
    assert {state.leader for state in partitions(cluster, "table")} == {NO_LEADER}, "the old ones may still come"
    cluster.pass_time(10_000, alive=[3, 4])
    for name in ("table", "__consumer_offsets"):
        for state, old in zip(partitions(cluster, name), before.topics[before.topic_ids[name]].partitions, strict=True):
            assert set(state.replicas) == {3, 4}
            assert state.isr == (state.leader,)
            assert state.leader_epoch > old.leader_epoch
    assert len({state.leader for state in partitions(cluster, "table")}) == 2, "leaders are spread"
    assert {state.leader for name in ("begun", "log") for state in partitions(cluster, name)} == {NO_LEADER}
    assert "their disks count as lost" in " ".join(cluster.notes)
    assert cluster.topic("table").history == before.topics[before.topic_ids["table"]].history


def test_a_topic_whose_table_is_gone_waits_for_its_disks_until_the_table_is_found(before: MetadataImage) -> None:
    """The disks may be all that is left of it."""
    cluster = Cluster(before)
    topic_id = cluster.topic("table").topic_id
    cluster.start_broker("new-a")
    cluster.call(ReportTieringRequest(topic_id, "the table is gone", found=False))
    cluster.pass_time(3 * DELAY_MS, alive=[3])
    assert {state.leader for state in partitions(cluster, "table")} == {NO_LEADER}
    cluster.call(ReportTieringRequest(topic_id, "the table is gone", found=True))
    cluster.pass_time(5_000, alive=[3])
    assert {state.leader for state in partitions(cluster, "table")} == {3}


def test_one_old_broker_that_is_back_is_enough_to_wait(before: MetadataImage) -> None:
    cluster = Cluster(before)
    cluster.start_broker("new-a")
    old = next(broker for broker in before.brokers.values() if broker.id == 1)
    cluster.start_broker(old.directory_id)
    cluster.pass_time(3 * DELAY_MS, alive=[1, 3])
    for name in ("table", "begun", "log"):
        assert {state.leader for state in partitions(cluster, name)} == {1}, "it is in every ISR"


def test_an_empty_directory_that_takes_an_old_id_over_brings_no_disk_back(before: MetadataImage) -> None:
    cluster, taken_over = with_an_id_taken_over(before)
    assert {state.leader for state in partitions(cluster, "table")} <= {3, taken_over}


def test_the_delay_may_say_never(before: MetadataImage) -> None:
    cluster = Cluster(before, cluster_loss_delay_ms=-1)
    cluster.start_broker("new-a")
    cluster.pass_time(3 * DELAY_MS, alive=[3])
    assert {state.leader for state in partitions(cluster, "table")} == {NO_LEADER}


def test_a_topic_has_as_many_replicas_as_before_once_there_are_brokers_for_them(before: MetadataImage) -> None:
    """Story: one broker was there a second before the others. The topics had one replica from then on, and each further
    broker took it over.
    """
    cluster = Cluster(before)
    cluster.start_broker("new-a")
    cluster.pass_time(DELAY_MS + 5_000, alive=[3])
    assert {state.replicas for state in partitions(cluster, "table")} == {(3,)}
    second = cluster.start_broker("new-b")  # It takes over an old id, as the third one does.
    settle(cluster, [3, second], *TOPICS)
    assert {frozenset(state.replicas) for state in partitions(cluster, "table")} == {frozenset({3, second})}
    third = cluster.start_broker("new-c")
    settle(cluster, [3, second, third], *TOPICS)
    for name in TOPICS:
        states = partitions(cluster, name)
        assert {(frozenset(state.replicas), state.lacking) for state in states} == {(frozenset({3, second, third}), 0)}
    preferred = Counter(state.replicas[0] for name in TOPICS for state in partitions(cluster, name))
    assert set(preferred) == {3, second, third}
    assert max(preferred.values()) - min(preferred.values()) <= 2, "leaders are spread"


def test_a_partition_that_lacks_replicas_may_lose_the_broker_that_it_has(before: MetadataImage) -> None:
    cluster = Cluster(before)
    cluster.start_broker("new-a")
    cluster.pass_time(DELAY_MS + 5_000, alive=[3])
    cluster = Cluster(cluster.image)
    cluster.start_broker("new-b")
    cluster.pass_time(DELAY_MS + 5_000, alive=[4])
    assert {(state.replicas, state.lacking) for state in partitions(cluster, "table")} == {((4,), 2)}


def test_whoever_names_the_replicas_of_a_partition_says_how_many_it_has(before: MetadataImage) -> None:
    cluster = Cluster(before)
    cluster.start_broker("new-a")
    cluster.pass_time(DELAY_MS + 5_000, alive=[3])
    with pytest.raises(InvalidReplicationFactorError):
        cluster.call(CreatePartitionsRequest("table", 3))
    cluster.call(ReassignPartitionRequest("table", 0, [3]))
    second = cluster.start_broker("new-b")
    settle(cluster, [3, second], *TOPICS)
    assert [(len(state.replicas), state.lacking) for state in partitions(cluster, "table")] == [(1, 0), (2, 1)]


@pytest.mark.slow
def test_an_id_that_was_taken_over_does_not_count_as_lost_for_good(before: MetadataImage) -> None:
    """Story: the loss was remembered as long as the controller lived. When a new broker with an old id was started
    again, others got its partitions at once, without its records.
    """
    cluster, again = with_an_id_taken_over(before)
    cluster.call(CreateTopicRequest("later", 1, 1, b"", {"delta.path": "/later"}, [[again]]))
    topic_id = cluster.topic("later").topic_id
    cluster.call(ConfirmHistoryRequest(topic_id, cluster.image.controller_epoch, "id", 0, 0, [0], [70]))
    for directory_is in ("as it was", "as after a crash of the machine"):
        cluster.end_session(again)
        cluster.pass_time(2 * DELAY_MS, alive=[3])
        (state,) = partitions(cluster, "later")
        assert (state.leader, state.replicas) == (NO_LEADER, (again,)), "it waits for its only log"
        kind = "clean" if directory_is == "as it was" else "machine_crash"
        assert cluster.start_broker("new-b", broker_id=again, start_kind=kind) == again
        cluster.pass_time(5_000, alive=[3, again])
        (state,) = partitions(cluster, "later")
        assert (state.leader, state.replicas) == (again, (again,))


def test_replicas_that_are_lacking_go_where_there_is_room(before: MetadataImage) -> None:
    cluster = Cluster(before)
    cluster.start_broker("new-a")
    cluster.pass_time(DELAY_MS + 5_000, alive=[3])
    second = cluster.start_broker("new-b")
    cluster.beat(second, full=True)
    settle(cluster, [3, second], *TOPICS)
    assert {(state.replicas, state.lacking) for state in partitions(cluster, "table")} == {((3,), 2)}
    cluster.beat(second, full=False)
    settle(cluster, [3, second], *TOPICS)
    assert {frozenset(state.replicas) for state in partitions(cluster, "table")} == {frozenset({3, second})}
