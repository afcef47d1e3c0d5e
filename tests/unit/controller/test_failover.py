"""Leaders and ISRs when brokers go and come back, as stories of a whole cluster."""

from __future__ import annotations

from spark_broker.controller.effects import CloseSession
from spark_broker.controller.events import HeartbeatReceived, PortProbed, SparkLost
from spark_broker.controller.fencing import OTHERS_COME_MS
from spark_broker.controller.records import BrokerChangeRecord, PartitionChangeRecord
from spark_broker.protocol.messages import HeartbeatRequest, RegisterBrokerResponse
from tests.unit.controller.cluster import Cluster, registration
from tests.unit.controller.stories import come_back, damage, lose, restarted


def three_brokers(**values: object) -> Cluster:
    cluster = Cluster(**values)  # type: ignore[arg-type]
    cluster.start_brokers(3)
    cluster.create_topic(partitions=3)
    return cluster


def test_a_lost_brokers_partitions_are_led_by_followers_in_one_decision() -> None:
    cluster = three_brokers()
    before = [cluster.partition(number=p) for p in range(3)]
    cluster.end_session(0)
    outcome = cluster.handle(PortProbed(0, cluster.session_of[0], refused=True))
    assert [type(record) for record in outcome.records] == [BrokerChangeRecord] + [PartitionChangeRecord] * 3
    after = [cluster.partition(number=p) for p in range(3)]
    assert [p.leader for p in before] == [0, 1, 2]
    assert [p.leader for p in after] == [1, 1, 2]
    assert [set(p.isr) for p in after] == [{1, 2}] * 3
    assert [p.leader_epoch for p in after] == [1, 0, 0]
    assert [p.partition_epoch for p in after] == [1, 1, 1]


def test_sparks_loss_signal_elects_at_once() -> None:
    cluster = three_brokers()
    cluster.handle(SparkLost(1))
    assert cluster.partition().leader == 1
    assert cluster.image.brokers[0].fenced


def test_when_all_are_lost_in_one_decision_any_of_them_may_lead_again() -> None:
    cluster = three_brokers()
    cluster.tick(50)
    for broker in range(3):
        cluster.end_session(broker)
    cluster.tick(9000)
    assert all(broker.fenced for broker in cluster.image.brokers.values())
    assert [(p.leader, len(p.isr)) for p in cluster.topic().partitions] == [(-1, 3)] * 3
    come_back(cluster, 1)
    cluster.pass_time(OTHERS_COME_MS, alive=[1])
    assert [p.leader for p in cluster.topic().partitions] == [1] * 3


def test_a_restarted_controller_has_a_higher_epoch_and_raises_every_leader_epoch() -> None:
    before = three_brokers()
    after = restarted(before)
    assert after.image.controller_epoch == before.image.controller_epoch + 1
    for number in range(3):
        assert after.partition(number=number).leader_epoch > before.partition(number=number).leader_epoch


def test_brokers_that_outlive_their_controller_resume_under_the_next_one_and_lead_again() -> None:
    before = three_brokers()
    after = restarted(before)
    for broker in (2, 1, 0):
        answer = after.register(registration(broker + 1, f"directory-{broker}", broker_id=broker))
        assert isinstance(answer, RegisterBrokerResponse)
        assert answer.broker_epoch == before.image.brokers[broker].epoch
        assert answer.controller_epoch == before.image.controller_epoch + 1
        after.beat(broker)
    assert [(p.leader, len(p.isr)) for p in after.topic().partitions] == [(0, 3), (1, 3), (2, 3)]
    assert all(p.leader_epoch == 2 for p in after.topic().partitions)


def test_a_fenced_process_that_wakes_up_is_told_to_register_again_and_is_then_unfenced() -> None:
    cluster = three_brokers()
    cluster.pass_time(9_500, alive=[1, 2])
    assert cluster.image.brokers[0].fenced
    beat = HeartbeatRequest(cluster.image.brokers[0].epoch, cluster.image.next_offset, cluster.now_ms, ready=True)
    outcome = cluster.handle(HeartbeatReceived(cluster.session_of[0], beat, cluster.now_ms))
    assert [type(effect) for effect in outcome.effects] == [CloseSession]
    cluster.register(registration(1, "directory-0", broker_id=0))
    cluster.beat(0)
    assert not cluster.image.brokers[0].fenced


def test_a_heartbeat_of_an_older_incarnation_ends_its_session() -> None:
    cluster = three_brokers()
    beat = HeartbeatRequest(cluster.image.brokers[0].epoch - 1, cluster.image.next_offset, 0, ready=True)
    outcome = cluster.handle(HeartbeatReceived(cluster.session_of[0], beat, 0))
    assert [type(effect) for effect in outcome.effects] == [CloseSession]
    assert not outcome.records


def test_a_broker_is_not_unfenced_before_it_knows_of_its_own_registration() -> None:
    cluster = Cluster()
    cluster.register(registration(cluster.new_launch(), "d"))
    epoch = cluster.image.brokers[0].epoch
    cluster.handle(HeartbeatReceived(cluster.session_of[0], HeartbeatRequest(epoch, epoch - 1, 0, ready=True), 0))
    assert cluster.image.brokers[0].fenced


def test_a_damaged_replica_leaves_the_isr_before_its_broker_may_lead() -> None:
    cluster = restarted(three_brokers())
    topic_id = cluster.topic().topic_id
    cluster.register(registration(cluster.new_launch(), "directory-0", broker_id=0, start_kind="process_crash"))
    damage(cluster, 0, [(topic_id, 0)])
    assert (cluster.partition().leader, cluster.partition().isr) == (-1, (1, 2))
    cluster.pass_time(OTHERS_COME_MS, alive=[0])
    assert [p.leader for p in cluster.topic().partitions] == [-1, 0, 0]


def test_damage_of_a_live_brokers_replica_raises_the_leader_epoch_and_is_heard() -> None:
    """The lost log's fetches, and the ISR proposals that rest on them, then belong to an older epoch."""
    cluster = three_brokers()
    topic_id, before = cluster.topic().topic_id, cluster.partition()
    damage(cluster, 2, [(topic_id, 0)], number=7)
    state = cluster.partition()
    assert (state.leader, state.isr) == (before.leader, (0, 1))
    assert (state.leader_epoch, state.partition_epoch) == (before.leader_epoch + 1, before.partition_epoch + 1)
    damage(cluster, 2, [(topic_id, 0)], number=7)
    assert cluster.partition() == state
    damage(cluster, 2, [(topic_id, 0)], number=8)  # It has left the ISR already; the new replica is damaged, too.
    assert cluster.partition().leader_epoch == state.leader_epoch + 1


def test_a_damage_report_that_is_repeated_does_not_remove_the_replica_again() -> None:
    cluster = restarted(three_brokers())
    topic_id = cluster.topic().topic_id
    for broker in (1, 2):
        come_back(cluster, broker)
    cluster.register(registration(cluster.new_launch(), "directory-0", broker_id=0, start_kind="process_crash"))
    damage(cluster, 0, [(topic_id, 0)])
    lose(cluster, 1)
    before = cluster.image
    damage(cluster, 0, [(topic_id, 0)])
    assert cluster.image == before


def test_a_large_loss_is_one_file_and_quick_enough_to_be_decided_at_once() -> None:
    cluster = Cluster()
    cluster.start_brokers(4)
    cluster.create_topic("wide", partitions=2000)
    leaders = [p.leader for p in cluster.topic("wide").partitions]
    cluster.end_session(0)
    outcome = cluster.handle(PortProbed(0, cluster.session_of[0], refused=True))
    assert len(outcome.records) == 1 + 1500
    moved = [p.leader for p in cluster.topic("wide").partitions]
    assert all(new != 0 and old in (0, new) for old, new in zip(leaders, moved, strict=True))
