"""A broker whose disk is full hands its leaderships over, and leads again only when it has room."""

from __future__ import annotations

import pytest

from spark_broker.controller.events import StopRequested
from spark_broker.errors import PreferredLeaderNotAvailableError
from spark_broker.protocol.messages import ElectLeadersRequest, ElectLeadersResponse, ReassignPartitionRequest
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.stories import come_back, damage, lose, register_again, restarted


@pytest.fixture
def cluster() -> Cluster:
    """Three brokers, each preferred for two of six partitions."""
    cluster = Cluster(leader_imbalance_check_interval_ms=1000)
    cluster.start_brokers(3)
    cluster.create_topic(partitions=6)
    assert leaders(cluster) == [0, 1, 2, 0, 1, 2]
    cluster.notes.clear()
    return cluster


def leaders(cluster: Cluster) -> list[int]:
    return [state.leader for state in cluster.topic().partitions]


def test_it_resigns_to_in_sync_replicas_with_room_and_stays_in_sync(cluster: Cluster) -> None:
    before = cluster.topic().partitions
    cluster.beat(0, full=True)
    after = cluster.topic().partitions
    assert 0 not in leaders(cluster)
    assert all(set(state.isr) == {0, 1, 2} for state in after)
    moved = [old.leader == 0 for old in before]
    assert [new.leader_epoch - old.leader_epoch for old, new in zip(before, after, strict=True)] == moved
    assert [new.leader == old.leader for old, new in zip(before, after, strict=True)] == [
        not has_moved for has_moved in moved
    ]


def test_there_is_one_line_when_it_is_full_and_one_when_it_has_room(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.beat(0, full=True)
        cluster.tick(300)
    for _ in range(3):
        cluster.beat(0, full=False)
    full, has_room = (note for note in cluster.notes if "disk" in note)
    assert full.startswith("the disk of broker 0 of launch 1 is full: 2 leaderships moved to brokers with room, 0 stay")
    assert has_room == "broker 0 has room on its disk again"


def test_it_stays_leader_where_nobody_else_has_room(cluster: Cluster) -> None:
    cluster.beat(1, full=True)
    cluster.beat(2, full=True)
    assert leaders(cluster) == [0] * 6
    before = cluster.image
    cluster.beat(0, full=True)
    assert cluster.image == before


def test_it_resigns_as_soon_as_somebody_else_has_room(cluster: Cluster) -> None:
    for broker in (1, 2, 0):
        cluster.beat(broker, full=True)
    cluster.beat(2, full=False)
    cluster.beat(0)
    assert leaders(cluster) == [2] * 6


def test_a_replica_that_is_not_in_sync_or_not_live_is_no_successor(cluster: Cluster) -> None:
    lose(cluster, 2)
    come_back(cluster, 2)  # live, and outside every ISR
    cluster.beat(1, full=True)
    cluster.beat(0, full=True)
    assert set(leaders(cluster)) == {0}
    assert all(2 not in state.isr for state in cluster.topic().partitions)


def test_an_eligible_replica_does_not_lead_alone_in_place_of_one_that_is_in_sync() -> None:
    """It has every committed record, but the ISR would shrink to it. It joins the ISR without an election."""
    cluster = Cluster()
    cluster.start_brokers(2)
    cluster.create_topic(factor=2, config={"min.insync.replicas": "2"})
    lose(cluster, 1)
    come_back(cluster, 1)
    assert (cluster.partition().isr, cluster.partition().elr) == ((0,), (1,))
    cluster.beat(0, full=True)
    assert (cluster.partition().leader, cluster.partition().isr) == (0, (0,))


def test_the_preferred_leader_is_not_elected_while_it_is_full(cluster: Cluster) -> None:
    cluster.beat(0, full=True)
    away = cluster.topic().partitions
    answer = cluster.call(ElectLeadersRequest([("t", 0)]))
    assert isinstance(answer, ElectLeadersResponse)
    assert answer.results[0].error_code == PreferredLeaderNotAvailableError.code
    assert "room" in answer.results[0].error_message
    cluster.pass_time(5000, alive=[0, 1, 2])
    assert cluster.topic().partitions == away
    cluster.beat(0, full=False)
    cluster.pass_time(3000, alive=[0, 1, 2])
    assert leaders(cluster) == [0, 1, 2, 0, 1, 2]


def test_elections_prefer_those_with_room(cluster: Cluster) -> None:
    cluster.beat(1, full=True)
    lose(cluster, 0)
    assert leaders(cluster) == [2] * 6


def test_a_full_one_is_elected_where_there_is_no_other(cluster: Cluster) -> None:
    cluster.beat(1, full=True)
    lose(cluster, 0)
    lose(cluster, 2)
    assert leaders(cluster) == [1] * 6


def test_controlled_shutdown_hands_over_to_those_with_room(cluster: Cluster) -> None:
    cluster.beat(1, full=True)
    cluster.beat(0, wants_shutdown=True)
    assert leaders(cluster) == [2] * 6


def test_a_full_broker_that_shuts_down_hands_over_as_ever(cluster: Cluster) -> None:
    cluster.beat(1, full=True)
    cluster.beat(2, full=True)
    cluster.beat(0, full=True)
    assert leaders(cluster) == [0] * 6
    cluster.beat(0, wants_shutdown=True)
    assert 0 not in leaders(cluster)


def test_damage_hands_over_to_those_with_room(cluster: Cluster) -> None:
    cluster.beat(1, full=True)
    damage(cluster, 0, [(cluster.topic().topic_id, number) for number in range(6)])
    assert leaders(cluster) == [2] * 6


def test_another_process_of_the_leader_leaves_it_to_those_with_room(cluster: Cluster) -> None:
    cluster.beat(1, full=True)
    cluster.end_session(0)
    register_again(cluster, 0)
    assert leaders(cluster) == [2] * 6


def test_the_end_of_a_move_elects_one_with_room() -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic()
    cluster.beat(1, full=True)
    cluster.call(ReassignPartitionRequest("t", 0, [1, 2]))
    assert (cluster.partition().replicas, cluster.partition().leader) == ((1, 2), 2)


def test_a_new_topic_is_led_where_there_is_room(cluster: Cluster) -> None:
    cluster.beat(1, full=True)
    topic = cluster.create_topic("new", partitions=3)
    assert 1 in {state.replicas[0] for state in topic.partitions}
    assert all(state.leader != 1 for state in topic.partitions)


def test_one_that_comes_back_full_leads_what_waits_for_it(cluster: Cluster) -> None:
    """It was the last member of the ISR: no other replica has every committed record."""
    cluster.beat(0, full=True)
    lose(cluster, 1)
    lose(cluster, 2)
    lose(cluster, 0)
    come_back(cluster, 1)
    assert leaders(cluster) == [-1] * 6
    come_back(cluster, 0)
    assert leaders(cluster) == [0] * 6


def test_a_controller_that_starts_hears_of_it_before_it_elects(cluster: Cluster) -> None:
    after = restarted(cluster)
    after.full = {0}
    for broker in (1, 2, 0):
        come_back(after, broker)
    assert set(leaders(after)) <= {1, 2}


def test_no_leader_moves_while_the_cluster_stops(cluster: Cluster) -> None:
    cluster.handle(StopRequested(99))
    before = leaders(cluster)
    cluster.beat(0, full=True)
    assert leaders(cluster) == before
