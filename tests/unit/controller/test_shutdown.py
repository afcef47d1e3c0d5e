"""Controlled shutdown, of one broker and of the whole cluster."""

from __future__ import annotations

from spark_broker.controller.effects import Reply, Send, StoppedBrokers
from spark_broker.controller.events import HeartbeatReceived, SessionEnded, StopRequested
from spark_broker.errors import StaleLaunchError
from spark_broker.protocol.messages import HeartbeatRequest, StopBroker
from tests.unit.controller.cluster import Cluster, registration


def three_brokers() -> Cluster:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(partitions=3)
    return cluster


def stops(cluster: Cluster) -> list[int]:
    """The sessions to which the last event sent a stop."""
    return [e.session_id for e in cluster.effects if isinstance(e, Send) and isinstance(e.message, StopBroker)]


def replies(cluster: Cluster) -> list[StoppedBrokers]:
    return [e.result for e in cluster.effects if isinstance(e, Reply) and isinstance(e.result, StoppedBrokers)]


def test_a_broker_hands_over_before_it_may_stop() -> None:
    cluster = three_brokers()
    answer = cluster.beat(0, wants_shutdown=True)
    assert answer is not None
    assert not answer.shut_down
    assert [p.leader for p in cluster.topic().partitions] == [1, 1, 2]
    assert [set(p.isr) for p in cluster.topic().partitions] == [{1, 2}] * 3
    cluster.beat(1)
    answer = cluster.beat(0, wants_shutdown=True)
    assert answer is not None
    assert not answer.shut_down
    cluster.beat(2)
    answer = cluster.beat(0, wants_shutdown=True)
    assert answer is not None
    assert answer.shut_down


def test_a_broker_does_not_wait_for_one_that_is_lost_meanwhile() -> None:
    cluster = three_brokers()
    cluster.beat(0, wants_shutdown=True)
    cluster.beat(1)
    cluster.pass_time(9_500, alive=[1])
    assert cluster.image.brokers[2].fenced
    cluster.register(registration(1, "directory-0", broker_id=0))
    answer = cluster.beat(0, wants_shutdown=True)
    assert answer is not None
    assert answer.shut_down


def test_a_partition_that_nobody_else_can_lead_does_not_keep_the_broker() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    cluster.create_topic(factor=1)
    leader = cluster.partition().leader
    cluster.beat(leader, wants_shutdown=True)
    assert cluster.partition().leader == leader
    cluster.beat(1 - leader)
    answer = cluster.beat(leader, wants_shutdown=True)
    assert answer is not None
    assert answer.shut_down
    cluster.end_session(leader)
    assert (cluster.partition().leader, cluster.partition().isr) == (-1, (leader,))


def test_a_broker_that_stopped_is_fenced_without_a_probe_and_comes_back_as_before() -> None:
    cluster = three_brokers()
    cluster.beat(0, wants_shutdown=True)
    for broker in (1, 2):
        cluster.beat(broker)
    cluster.beat(0, wants_shutdown=True)
    assert cluster.end_session(0) == []
    assert cluster.image.brokers[0].fenced
    cluster.register(registration(cluster.new_launch(), "directory-0", broker_id=0))
    cluster.beat(0)
    assert cluster.image.brokers[0].live


def test_one_launch_is_stopped_and_the_caller_hears_when_it_has_left() -> None:
    cluster = three_brokers()
    cluster.handle(StopRequested(call_id=77, launch=2))
    assert stops(cluster) == [cluster.session_of[1]]
    assert replies(cluster) == []
    cluster.beat(1, wants_shutdown=True)
    for broker in (0, 2):
        cluster.beat(broker)
    cluster.beat(1, wants_shutdown=True)
    cluster.end_session(1)
    assert replies(cluster) == [StoppedBrokers((1,))]


def test_a_launch_that_is_not_there_is_stopped_already() -> None:
    cluster = three_brokers()
    cluster.handle(StopRequested(call_id=77, launch=50))
    assert replies(cluster) == [StoppedBrokers(())]


def test_the_whole_cluster_stops_without_moving_a_leader_or_shrinking_an_isr() -> None:
    cluster = three_brokers()
    before = cluster.topic().partitions
    cluster.handle(StopRequested(call_id=77))
    assert len(stops(cluster)) == 3
    for broker in range(3):
        answer = cluster.beat(broker, wants_shutdown=True)
        assert answer is not None
        assert answer.shut_down
    assert cluster.topic().partitions == before
    for broker in range(3):
        assert replies(cluster) == []
        cluster.end_session(broker)
    assert replies(cluster) == [StoppedBrokers((0, 1, 2))]
    assert [set(p.isr) for p in cluster.topic().partitions] == [{0, 1, 2}] * 3


def test_nobody_registers_with_a_cluster_that_stops() -> None:
    cluster = three_brokers()
    cluster.handle(StopRequested(call_id=77))
    assert isinstance(cluster.register(registration(cluster.new_launch(), "late")), StaleLaunchError)


def test_a_stop_is_not_undone_by_a_heartbeat_that_was_under_way() -> None:
    cluster = three_brokers()
    cluster.handle(StopRequested(call_id=77))
    beat = HeartbeatRequest(cluster.image.brokers[0].epoch, cluster.image.next_offset, 0, ready=True)
    cluster.handle(HeartbeatReceived(cluster.session_of[0], beat, 0))
    assert cluster.image.brokers[0].in_controlled_shutdown
    cluster.handle(SessionEnded(cluster.session_of[0]))
    assert cluster.image.brokers[0].in_controlled_shutdown
