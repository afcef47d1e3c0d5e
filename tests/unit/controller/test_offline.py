"""A replica that its broker cannot use does not lead and is not elected, and is back as soon as the broker says so."""

from __future__ import annotations

import pytest

from spark_broker.controller.events import StopRequested
from spark_broker.controller.log_ends import Key
from spark_broker.errors import (
    EligibleLeadersNotAvailableError,
    PreferredLeaderNotAvailableError,
    StorageFullError,
    error_from_code,
)
from spark_broker.protocol.messages import (
    CreatePartitionsRequest,
    CreateTopicRequest,
    ElectLeadersRequest,
    ElectLeadersResponse,
    EnsureOffsetsTopicRequest,
)
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.stories import lose, register_again, restarted


@pytest.fixture
def cluster() -> Cluster:
    """Three brokers, each preferred for one of three partitions."""
    cluster = Cluster(leader_imbalance_check_interval_ms=1000)
    cluster.start_brokers(3)
    cluster.create_topic(partitions=3)
    assert leaders(cluster) == [0, 1, 2]
    cluster.notes.clear()
    return cluster


def leaders(cluster: Cluster) -> list[int]:
    return [state.leader for state in cluster.topic().partitions]


def key(cluster: Cluster, number: int = 0) -> Key:
    return (cluster.topic().topic_id, number)


def take_offline(cluster: Cluster, broker: int, *numbers: int) -> None:
    cluster.offline[broker] = {key(cluster, number) for number in numbers}
    cluster.beat(broker)


def test_it_hands_over_and_leaves_the_isr_and_its_broker_leads_the_others_on(cluster: Cluster) -> None:
    take_offline(cluster, 0, 0, 1)
    first, second, third = cluster.topic().partitions
    assert (first.leader, first.isr) == (1, (1, 2))
    assert (second.leader, second.isr) == (1, (1, 2))
    assert (third.leader, set(third.isr)) == (2, {0, 1, 2})
    assert cluster.image.is_live(0)


def test_one_line_says_that_it_is_offline_and_another_that_it_is_back(cluster: Cluster) -> None:
    for _ in range(3):
        take_offline(cluster, 0, 0, 1)
    take_offline(cluster, 0)
    take_offline(cluster, 0)
    offline, back = (note for note in cluster.notes if note.startswith("broker 0"))
    assert offline.startswith("broker 0 of launch 1 cannot use its replicas of t-0, t-1: its log says why.")
    assert back == "broker 0 can use 2 replicas again that were offline"


def test_without_another_replica_nobody_leads_until_it_is_back(cluster: Cluster) -> None:
    for broker in (1, 2, 0):
        take_offline(cluster, broker, 0)
    state = cluster.topic().partitions[0]
    assert (state.leader, state.isr) == (-1, (0,)), "it is the last that has everything"
    take_offline(cluster, 1)
    assert leaders(cluster)[0] == -1
    take_offline(cluster, 0)
    assert leaders(cluster)[0] == 0


def test_it_is_not_elected_when_the_leader_is_lost_or_its_broker_comes_back(cluster: Cluster) -> None:
    cluster.offline[2] = {key(cluster)}
    cluster.beat(2)
    lose(cluster, 0)
    assert leaders(cluster)[0] == 1
    lose(cluster, 1)
    assert leaders(cluster)[0] == -1
    lose(cluster, 2)
    register_again(cluster, 2)
    cluster.beat(2)
    assert cluster.image.is_live(2)
    assert leaders(cluster)[0] == -1


def test_it_is_elected_neither_as_preferred_nor_uncleanly_nor_by_the_balance(cluster: Cluster) -> None:
    take_offline(cluster, 0, 0)

    def ask(*, unclean: bool) -> type[Exception]:
        answer = cluster.call(ElectLeadersRequest([("t", 0)], unclean=unclean))
        assert isinstance(answer, ElectLeadersResponse)
        return type(error_from_code(answer.results[0].error_code, ""))

    assert ask(unclean=False) is PreferredLeaderNotAvailableError
    for _ in range(10):
        cluster.tick(1000)
        for broker in range(3):
            cluster.beat(broker)
    assert leaders(cluster)[0] == 1
    for broker in (1, 2):
        lose(cluster, broker)
    assert leaders(cluster)[0] == -1
    assert ask(unclean=True) is EligibleLeadersNotAvailableError


def test_another_controller_learns_of_it_before_the_broker_is_live(cluster: Cluster) -> None:
    take_offline(cluster, 0, 0)
    after = restarted(cluster)
    after.offline = cluster.offline
    for broker in (0, 1, 2):
        register_again(after, broker)
    after.beat(0)
    assert leaders(after)[0] != 0


def test_what_a_lost_broker_had_said_does_not_count(cluster: Cluster) -> None:
    take_offline(cluster, 0, 0)
    lose(cluster, 0)
    assert cluster.controller.disks.offline == {}


def test_a_stopping_cluster_moves_nothing(cluster: Cluster) -> None:
    cluster.handle(StopRequested(1, None))
    before = [state.isr for state in cluster.topic().partitions]
    take_offline(cluster, 0, 1)
    assert [state.isr for state in cluster.topic().partitions] == before


def test_replicas_of_removed_topics_and_unknown_ones_are_no_matter(cluster: Cluster) -> None:
    cluster.offline[0] = {("unknown", 0), (cluster.topic().topic_id, 99)}
    before = cluster.image
    cluster.beat(0)
    assert cluster.image == before


@pytest.mark.parametrize(
    "request_",
    [
        CreateTopicRequest(name="new", partitions=2, replication_factor=1, schema=b"", config={}),
        CreateTopicRequest(
            name="new", assignment=[[0, 1]], partitions=-1, replication_factor=-1, schema=b"", config={}
        ),
        CreatePartitionsRequest("t", 5),
        EnsureOffsetsTopicRequest(),
    ],
    ids=["new topic", "assigned", "grows", "offsets"],
)
def test_where_no_disk_has_room_nothing_is_created_and_the_error_says_why(
    cluster: Cluster, request_: CreateTopicRequest | CreatePartitionsRequest | EnsureOffsetsTopicRequest
) -> None:
    for broker in range(3):
        cluster.beat(broker, full=True)
    before = cluster.image
    with pytest.raises(StorageFullError, match=r"brokers \[0, 1, 2\] are full"):
        cluster.call(request_)
    assert cluster.image == before
    for broker in range(3):
        cluster.beat(broker, full=False)
    cluster.call(request_)
    assert cluster.image != before


def test_new_partitions_are_made_where_there_is_room(cluster: Cluster) -> None:
    cluster.beat(1, full=True)
    cluster.create_topic("two", 4, 2)
    assert all(1 not in state.replicas for state in cluster.topic("two").partitions)
    cluster.create_topic("three", 4, 3)
    assert all(len(state.replicas) == 3 for state in cluster.topic("three").partitions)
    assert all(state.leader != 1 for state in cluster.topic("three").partitions)
