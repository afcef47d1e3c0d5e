"""Replicas move by hand, to heal, and to give a new broker its share. Preferred leaders lead again."""

from __future__ import annotations

from collections import Counter

import pytest

from spark_broker.controller.describe import describe
from spark_broker.controller.events import SparkLost
from spark_broker.controller.housekeeping import FIRST_BALANCE_MS
from spark_broker.controller.image import PartitionRegistration
from spark_broker.errors import FencedLeaderEpochError, InvalidReplicaAssignmentError, UnknownTopicOrPartitionError
from spark_broker.protocol.messages import (
    AlterIsr,
    AlterPartitionRequest,
    AlterPartitionResponse,
    CreateTopicRequest,
    ElectLeadersRequest,
    IsrMember,
    ReassignPartitionRequest,
)
from spark_broker.troubles import Trouble, troubles
from tests.unit.controller.cluster import Cluster, catch_up, registration, settle


def replica_counts(cluster: Cluster) -> Counter[int]:
    return Counter(b for p in cluster.topic().partitions for b in p.replicas)


def test_a_move_adds_first_and_removes_when_the_new_replicas_are_in_sync() -> None:
    cluster = Cluster()
    cluster.start_brokers(4)
    cluster.create_topic(factor=2)
    assert cluster.partition().replicas == (0, 1)
    cluster.call(ReassignPartitionRequest("t", 0, [2, 3]))
    moving = cluster.partition()
    assert (moving.replicas, moving.adding, moving.removing) == ((2, 3, 0, 1), (2, 3), (0, 1))
    assert (moving.isr, moving.leader) == ((0, 1), 0)
    catch_up(cluster)
    moved = cluster.partition()
    assert (moved.replicas, moved.adding, moved.removing) == ((2, 3), (), ())
    assert (set(moved.isr), moved.leader, moved.leader_epoch) == ({2, 3}, 2, moving.leader_epoch + 1)


def test_clients_are_told_which_replicas_a_move_still_fills() -> None:
    cluster = Cluster()
    cluster.start_brokers(4)
    cluster.create_topic(factor=2)
    cluster.call(ReassignPartitionRequest("t", 0, [2, 1]))
    (described,) = describe(cluster.image).topics[0].partitions
    assert (described.replicas, described.adding, described.isr) == ([2, 1, 0], [2], [0, 1])
    assert troubles(described, min_insync_replicas=1) == set()
    cluster.end_session(0)
    cluster.pass_time(30_000, alive=[1, 2, 3])
    (described,) = describe(cluster.image).topics[0].partitions
    assert (described.adding, described.isr) == ([2], [1])
    assert troubles(described, min_insync_replicas=1) == {Trouble.UNDER_REPLICATED}, "a replica that leaves counts"
    catch_up(cluster)
    (described,) = describe(cluster.image).topics[0].partitions
    assert (described.adding, troubles(described, min_insync_replicas=1)) == ([], set())


def test_a_move_that_only_drops_or_reorders_replicas_is_done_at_once() -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic()
    cluster.call(ReassignPartitionRequest("t", 0, [1, 0]))
    state = cluster.partition()
    assert (state.replicas, set(state.isr), state.leader, state.reassigning) == ((1, 0), {0, 1}, 0, False)


def test_a_replica_that_leaves_ends_the_leader_epoch() -> None:
    """Simulator, seed 466845: a replica left and came back before its broker was notified. The leader counted, as an
    ISR member's, what the broker fetched with its old log. Then the broker deleted that log."""
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(factor=2)
    before = cluster.partition()
    cluster.call(ReassignPartitionRequest("t", 0, [0, 2]))
    assert cluster.partition().leader_epoch == before.leader_epoch, "nobody has left yet"
    catch_up(cluster)
    moved = cluster.partition()
    assert (moved.replicas, moved.leader, moved.leader_epoch) == ((0, 2), before.leader, before.leader_epoch + 1)
    cluster.call(ReassignPartitionRequest("t", 0, [1, 0, 2]))
    assert cluster.partition().leader_epoch == moved.leader_epoch, "to come is not to leave"

    topic, epochs = cluster.topic(), {broker.id: broker.epoch for broker in cluster.image.brokers.values()}
    late = AlterIsr(
        topic.topic_id, 0, before.leader_epoch, cluster.partition().partition_epoch,
        [IsrMember(broker, epochs[broker]) for broker in (0, 2, 1)],
    )  # fmt: skip
    answer = cluster.call(AlterPartitionRequest(0, epochs[0], [late]))
    assert isinstance(answer, AlterPartitionResponse)
    assert [result.error_code for result in answer.results] == [FencedLeaderEpochError.code]


def test_a_move_can_be_taken_back() -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(factor=1)
    cluster.call(ReassignPartitionRequest("t", 0, [1]))
    cluster.call(ReassignPartitionRequest("t", 0, [0]))
    assert cluster.partition().replicas == (0,)
    assert not cluster.partition().reassigning


@pytest.mark.parametrize("replicas", [[], [0, 0], [0, 9]])
def test_a_move_to_what_is_no_replica_set_is_refused(replicas: list[int]) -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    cluster.create_topic(factor=1)
    with pytest.raises(InvalidReplicaAssignmentError):
        cluster.call(ReassignPartitionRequest("t", 0, replicas))
    with pytest.raises(UnknownTopicOrPartitionError):
        cluster.call(ReassignPartitionRequest("t", 1, [0]))


def test_replicas_of_a_broker_that_stays_away_are_made_anew_on_others() -> None:
    cluster = Cluster()
    cluster.start_brokers(4)
    cluster.create_topic(partitions=8, factor=3)
    cluster.handle(SparkLost(2))
    cluster.pass_time(29_000, alive=[0, 2, 3])
    assert not any(p.reassigning for p in cluster.topic().partitions)
    cluster.pass_time(1_500, alive=[0, 2, 3])
    assert any(p.reassigning for p in cluster.topic().partitions)
    settle(cluster, [0, 2, 3])
    assert all(set(p.replicas) == set(p.isr) == {0, 2, 3} for p in cluster.topic().partitions)


def test_healing_is_throttled() -> None:
    cluster = Cluster(replica_reassignment_max_partitions=2)
    cluster.start_brokers(3)
    cluster.create_topic(partitions=9, factor=2)
    cluster.handle(SparkLost(2))
    cluster.pass_time(35_000, alive=[0, 2])
    assert sum(p.reassigning for p in cluster.topic().partitions) == 2
    settle(cluster, [0, 2])
    assert replica_counts(cluster)[1] == 0


def test_healing_leaves_alone_what_has_no_broker_left_to_go_to() -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(factor=3)
    cluster.handle(SparkLost(2))
    cluster.pass_time(40_000, alive=[0, 2])
    assert set(cluster.partition().replicas) == {0, 1, 2}
    assert not cluster.partition().reassigning


def test_healing_leaves_alone_what_has_nobody_to_copy_from() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    topic = cluster.create_topic(partitions=2, factor=1)
    lost = topic.partitions[0].leader
    cluster.handle(SparkLost(cluster.image.brokers[lost].launch))
    cluster.pass_time(40_000, alive=[1 - lost])
    assert cluster.partition().replicas == (lost,)


def test_healing_goes_to_another_failure_domain() -> None:
    cluster = Cluster()
    for number, machine in enumerate(["a", "a", "b", "b", "c"]):
        cluster.start_broker(f"directory-{number}", machine=machine)
    cluster.create_topic(partitions=1, factor=2)
    kept, lost = cluster.partition().replicas
    cluster.handle(SparkLost(cluster.image.brokers[lost].launch))
    alive = [b for b in range(5) if b != lost]
    cluster.pass_time(31_000, alive=alive)
    settle(cluster, alive)
    machines = {cluster.image.brokers[b].machine for b in cluster.partition().replicas}
    assert kept in cluster.partition().replicas
    assert len(machines) == 2


def test_healing_that_lost_its_own_target_chooses_another() -> None:
    cluster = Cluster(replica_reassignment_delay_ms=1000)
    cluster.start_brokers(4)
    cluster.create_topic(factor=2)
    cluster.handle(SparkLost(cluster.image.brokers[1].launch))
    cluster.pass_time(2_000, alive=[0, 2, 3])
    (first,) = cluster.partition().adding
    cluster.handle(SparkLost(cluster.image.brokers[first].launch))
    other = 5 - first
    cluster.pass_time(3_000, alive=[0, other])
    assert cluster.partition().adding == (other,)
    settle(cluster, [0, other])
    assert set(cluster.partition().replicas) == {0, other}


def test_a_move_that_copies_nothing_keeps_no_other_partition_from_being_healed() -> None:
    """Story: ten moves to a broker that had gone, or whose disk was full, were all that may go on at a time."""
    cluster = Cluster(replica_reassignment_max_partitions=1, replica_reassignment_delay_ms=1000)
    cluster.start_brokers(3)
    for name, replicas in (("stuck", [0, 1]), ("hurt", [0, 2])):
        cluster.call(CreateTopicRequest(name, 1, 2, b"", {}, [replicas]))
    cluster.call(ReassignPartitionRequest("stuck", 0, [0, 1, 2]))
    cluster.handle(SparkLost(cluster.image.brokers[2].launch))
    for _ in range(3):
        cluster.pass_time(1000, alive=[0, 1])
        catch_up(cluster, "hurt")
    assert cluster.partition("stuck").adding == (2,), "there is no other broker for it"
    assert set(cluster.partition("hurt").replicas) == {0, 1}


def test_healing_goes_where_there_is_room() -> None:
    """Story: a broker without room had the fewest replicas, so that it was to get them all."""
    cluster = Cluster(replica_reassignment_delay_ms=1000)
    cluster.start_brokers(4)
    cluster.call(CreateTopicRequest("t", 1, 2, b"", {}, [[0, 1]]))
    for broker in (2, 3):
        cluster.beat(broker, full=True)
    cluster.handle(SparkLost(cluster.image.brokers[1].launch))
    cluster.pass_time(5_000, alive=[0, 2, 3])
    assert not cluster.partition().reassigning
    cluster.beat(3, full=False)
    settle(cluster, [0, 2, 3])
    assert set(cluster.partition().replicas) == {0, 3}


def test_healing_can_be_switched_off() -> None:
    cluster = Cluster(replica_reassignment_delay_ms=-1)
    cluster.start_brokers(3)
    cluster.create_topic(factor=2)
    cluster.handle(SparkLost(cluster.image.brokers[1].launch))
    cluster.pass_time(100_000, alive=[0, 2])
    assert set(cluster.partition().replicas) == {0, 1}


def test_a_new_broker_is_given_its_share_of_replicas_and_leaders() -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(partitions=12, factor=3)
    cluster.start_broker("fresh")
    settle(cluster, [0, 1, 2, 3])
    counts = replica_counts(cluster)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert all(len(set(p.replicas)) == len(p.isr) == 3 for p in cluster.topic().partitions)
    preferred = Counter(p.replicas[0] for p in cluster.topic().partitions)
    assert preferred[3] >= 2


def test_a_broker_that_comes_back_after_healing_gets_replicas_again() -> None:
    cluster = Cluster()
    cluster.start_brokers(4)
    cluster.create_topic(partitions=8, factor=2)
    cluster.handle(SparkLost(cluster.image.brokers[1].launch))
    cluster.pass_time(31_000, alive=[0, 2, 3])
    settle(cluster, [0, 2, 3])
    assert replica_counts(cluster)[1] == 0
    cluster.register(registration(cluster.new_launch(), "directory-1", broker_id=1))
    cluster.beat(1)
    settle(cluster, [0, 1, 2, 3])
    assert replica_counts(cluster)[1] >= 3


def leaders(partitions: tuple[PartitionRegistration, ...]) -> list[int]:
    return [p.leader for p in partitions]


def back_after_a_failover(**values: object) -> Cluster:
    cluster = Cluster(**values)  # type: ignore[arg-type]
    cluster.start_brokers(3)
    cluster.create_topic(partitions=3)
    fail_over_and_back(cluster)
    return cluster


def fail_over_and_back(cluster: Cluster) -> None:
    cluster.handle(SparkLost(1))
    cluster.register(registration(cluster.new_launch(), "directory-0", broker_id=0))
    cluster.beat(0)
    catch_up(cluster)
    assert leaders(cluster.topic().partitions) == [1, 1, 2]


def test_leaders_go_back_on_demand() -> None:
    cluster = back_after_a_failover()
    cluster.call(ElectLeadersRequest([("t", 0)]))
    assert leaders(cluster.topic().partitions) == [0, 1, 2]
    before = cluster.image
    cluster.call(ElectLeadersRequest())
    assert cluster.image == before
    with pytest.raises(UnknownTopicOrPartitionError):
        cluster.call(ElectLeadersRequest([("t", 9)]))


def test_leaders_go_back_by_themselves_after_the_interval() -> None:
    cluster = Cluster(leader_imbalance_check_interval_ms=60_000)
    cluster.start_brokers(3)
    cluster.create_topic(partitions=3)
    cluster.pass_time(FIRST_BALANCE_MS + 1_000, alive=[0, 1, 2])
    fail_over_and_back(cluster)
    cluster.pass_time(50_000, alive=[0, 1, 2])
    assert leaders(cluster.topic().partitions) == [1, 1, 2]
    cluster.pass_time(15_000, alive=[0, 1, 2])
    assert leaders(cluster.topic().partitions) == [0, 1, 2]


def test_leaders_stay_where_they_are_when_told_so() -> None:
    cluster = back_after_a_failover(leader_imbalance_check_interval_ms=1000, auto_leader_rebalance_enable=False)
    cluster.pass_time(20_000, alive=[0, 1, 2])
    assert leaders(cluster.topic().partitions) == [1, 1, 2]


def test_a_preferred_leader_that_is_not_in_sync_does_not_lead() -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic()
    cluster.handle(SparkLost(1))
    cluster.register(registration(cluster.new_launch(), "directory-0", broker_id=0))
    cluster.beat(0)
    cluster.call(ElectLeadersRequest())
    assert cluster.partition().leader == 1
