"""KIP-966: replicas that left an ISR below the minimum stay eligible as long as they lost nothing."""

from __future__ import annotations

import pytest

from spark_broker.controller.fencing import OTHERS_COME_MS
from spark_broker.controller.identity import BrokerIdentity, identify
from spark_broker.controller.image import EMPTY_IMAGE, PartitionRegistration
from spark_broker.controller.records import PartitionChangeRecord, PartitionRecord, TopicRecord
from spark_broker.errors import InvariantError
from spark_broker.protocol.messages import (
    AlterIsr,
    AlterPartitionRequest,
    AlterTopicConfigRequest,
    IsrMember,
    MetadataResponse,
    ReassignPartitionRequest,
)
from spark_broker.protocol.messages import MetadataRequest as Describe
from tests.unit.controller.cluster import Cluster, registration
from tests.unit.controller.stories import come_back, damage, lose, register_again, restarted

Sets = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def three_brokers(minimum: int = 2) -> Cluster:
    """A topic on brokers 0, 1 and 2, of which 0 leads."""
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(config={"min.insync.replicas": str(minimum)})
    return cluster


def sets(state: PartitionRegistration) -> Sets:
    return state.leader, state.isr, state.elr, state.last_known_elr


def alter(cluster: Cluster, isr: list[int], lacking: list[int] | None = None) -> None:
    """The leader proposes this ISR."""
    topic, state = cluster.topic(), cluster.partition()
    members = [IsrMember(broker, cluster.image.brokers[broker].epoch) for broker in isr]
    change = AlterIsr(topic.topic_id, 0, state.leader_epoch, state.partition_epoch, members, lacking or [])
    cluster.call(AlterPartitionRequest(state.leader, cluster.image.brokers[state.leader].epoch, [change]))


def test_who_leaves_an_isr_that_keeps_the_minimum_is_not_eligible() -> None:
    cluster = three_brokers()
    lose(cluster, 2)
    assert sets(cluster.partition()) == (0, (0, 1), (), ())


def test_who_leaves_an_isr_below_the_minimum_is_eligible_until_the_isr_has_the_minimum_again() -> None:
    cluster = three_brokers()
    lose(cluster, 2, 1)
    assert sets(cluster.partition()) == (0, (0,), (1,), ())
    come_back(cluster, 2)
    assert sets(cluster.partition()) == (0, (0,), (1,), ())
    alter(cluster, [0, 2])
    assert sets(cluster.partition()) == (0, (0, 2), (), ())


def test_an_eligible_replica_leads_when_no_member_of_the_isr_is_live() -> None:
    cluster = three_brokers()
    lose(cluster, 2, 1, 0)
    assert sets(cluster.partition()) == (-1, (0,), (1,), ())
    epoch = cluster.partition().leader_epoch
    come_back(cluster, 2)
    assert cluster.partition().leader == -1
    come_back(cluster, 1)
    cluster.pass_time(OTHERS_COME_MS, alive=[1, 2])
    assert sets(cluster.partition()) == (1, (1,), (0,), ())
    assert cluster.partition().leader_epoch == epoch + 1
    assert not cluster.unclean


def test_a_live_eligible_replica_takes_over_at_once() -> None:
    cluster = three_brokers(minimum=3)
    alter(cluster, [0, 1])
    lose(cluster, 1, 0)
    assert sets(cluster.partition()) == (2, (2,), (0, 1), ())


@pytest.mark.parametrize("start_kind", ["clean", "process_crash"])
def test_a_process_that_ends_keeps_its_eligibility(start_kind: str) -> None:
    cluster = three_brokers()
    lose(cluster, 2, 1)
    come_back(cluster, 1, start_kind)
    assert cluster.partition().elr == (1,)


def test_a_machine_crash_ends_eligibility_in_the_decision_that_registers_the_broker() -> None:
    cluster = three_brokers()
    lose(cluster, 2, 1)
    register_again(cluster, 1, "machine_crash")
    assert sets(cluster.partition()) == (0, (0,), (), (1,))
    lose(cluster, 0)
    cluster.beat(1)
    assert cluster.partition().leader == -1


def test_a_damaged_replica_is_not_eligible() -> None:
    cluster = three_brokers()
    lose(cluster, 2, 1)
    register_again(cluster, 1)
    damage(cluster, 1, [(cluster.topic().topic_id, 0)])
    assert sets(cluster.partition()) == (0, (0,), (), (1,))
    assert cluster.partition().damaged == (1,)
    alter(cluster, [0, 1])
    assert cluster.partition().damaged == ()


def test_a_replica_that_told_the_leader_that_it_lacks_committed_records_is_not_eligible() -> None:
    cluster = three_brokers()
    alter(cluster, [0], lacking=[2])
    assert sets(cluster.partition()) == (0, (0,), (1,), (2,))
    alter(cluster, [0], lacking=[1])
    assert sets(cluster.partition()) == (0, (0,), (), (1, 2))


def test_a_lower_minimum_ends_eligibility() -> None:
    """From then on, high watermarks advance with the smaller ISR."""
    cluster = three_brokers()
    lose(cluster, 2, 1)
    before = cluster.partition()
    cluster.call(AlterTopicConfigRequest("t", {"min.insync.replicas": "1"}))
    assert sets(cluster.partition()) == (0, (0,), (), ())
    assert cluster.partition().partition_epoch == before.partition_epoch + 1
    assert cluster.partition().leader_epoch == before.leader_epoch


def test_a_controlled_shutdown_leaves_an_eligible_replica() -> None:
    cluster = three_brokers()
    lose(cluster, 2)
    cluster.beat(0, wants_shutdown=True)
    assert sets(cluster.partition()) == (1, (1,), (0,), ())


def test_a_driver_that_restarts_changes_nobodys_eligibility() -> None:
    cluster = three_brokers()
    lose(cluster, 2, 1)
    after = restarted(cluster)
    assert sets(after.partition()) == (-1, (0,), (1,), ())
    come_back(after, 1)
    after.pass_time(OTHERS_COME_MS, alive=[1])
    assert sets(after.partition()) == (1, (1,), (0,), ())


def test_a_move_does_not_end_with_fewer_in_sync_than_the_minimum() -> None:
    cluster = Cluster()
    cluster.start_brokers(4)
    cluster.create_topic(factor=2, config={"min.insync.replicas": "2"})
    assert cluster.partition().replicas == (0, 1)
    lose(cluster, 1)
    cluster.call(ReassignPartitionRequest("t", 0, [2, 1]))
    alter(cluster, [0, 2])
    moving = cluster.partition()
    assert (moving.replicas, moving.removing) == ((2, 1, 0), (0,))
    come_back(cluster, 1)
    alter(cluster, [0, 1, 2])
    assert (cluster.partition().replicas, set(cluster.partition().isr)) == ((2, 1), {1, 2})


def test_an_eligible_replica_that_is_moved_away_stays_until_the_move_ends() -> None:
    cluster = Cluster()
    cluster.start_brokers(4)
    cluster.create_topic(factor=2, config={"min.insync.replicas": "2"})
    lose(cluster, 1)
    assert cluster.partition().elr == (1,)
    cluster.call(ReassignPartitionRequest("t", 0, [2, 3]))
    assert (cluster.partition().elr, set(cluster.partition().replicas)) == ((1,), {0, 1, 2, 3})
    alter(cluster, [0, 2])
    assert cluster.partition().elr == ()
    alter(cluster, [0, 2, 3])
    assert (cluster.partition().replicas, cluster.partition().isr) == ((2, 3), (2, 3))


def test_the_id_of_the_last_complete_replica_passes_to_no_empty_directory() -> None:
    cluster = three_brokers()
    lose(cluster, 2, 1, 0)
    register_again(cluster, 0, "machine_crash")
    assert sets(cluster.partition()) == (-1, (), (1,), (0,))
    request = registration(1, "empty")
    lost = {b: identify(cluster.image, request, lost=[b]) for b in (0, 1, 2)}
    assert lost[1] == BrokerIdentity(3)
    assert lost[2] == BrokerIdentity(2, new_directory=True)
    register_again(cluster, 1, "machine_crash")
    assert all(identify(cluster.image, request, lost=[b]) == BrokerIdentity(3) for b in (0, 1, 2))


def test_clients_see_who_is_eligible() -> None:
    cluster = three_brokers()
    lose(cluster, 2, 1, 0)
    register_again(cluster, 0, "machine_crash")
    described = cluster.call(Describe(["t"]))
    assert isinstance(described, MetadataResponse)
    (partition,) = described.topics[0].partitions
    assert (partition.isr, partition.elr, partition.last_known_elr) == ([], [1], [0])


TOPIC_ID = "0" * 32


def test_a_record_from_before_the_elr_that_kept_a_damaged_member_in_the_isr_is_read_as_a_lost_one() -> None:
    image = EMPTY_IMAGE.apply([TopicRecord("t", TOPIC_ID, {}), PartitionRecord(TOPIC_ID, 0, [0, 1], [0], 0, 3, 5)])
    state = image.apply([PartitionChangeRecord(TOPIC_ID, 0, leader=-1, damaged=[0])]).partition(TOPIC_ID, 0)
    assert state is not None
    assert (*sets(state), state.damaged) == (-1, (), (), (0,), (0,))


@pytest.mark.parametrize(
    "change",
    [
        PartitionChangeRecord(TOPIC_ID, 0, elr=[0]),
        PartitionChangeRecord(TOPIC_ID, 0, elr=[1], last_known_elr=[1]),
        PartitionChangeRecord(TOPIC_ID, 0, elr=[7]),
        PartitionChangeRecord(TOPIC_ID, 0, damaged=[1]),
        PartitionChangeRecord(TOPIC_ID, 0, isr=[]),
    ],
)
def test_sets_that_overlap_are_never_applied(change: PartitionChangeRecord) -> None:
    image = EMPTY_IMAGE.apply([TopicRecord("t", TOPIC_ID, {}), PartitionRecord(TOPIC_ID, 0, [0, 1], [0], 0, 0, 0)])
    with pytest.raises(InvariantError):
        image.apply([change])
