"""Which replica leads, and which does not, when none is known to be complete."""

from __future__ import annotations

import pytest

from spark_broker.controller.events import HeartbeatReceived
from spark_broker.errors import (
    ERRORS,
    ElectionNotNeededError,
    EligibleLeadersNotAvailableError,
    PreferredLeaderNotAvailableError,
    SparkBrokerError,
)
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    ElectLeadersRequest,
    ElectLeadersResponse,
    HeartbeatRequest,
    LogEnd,
    ReassignPartitionRequest,
)
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.stories import come_back, damage, lose, register_again, restarted

ALLOWED = {"unclean.leader.election.enable": "true"}


def three_brokers(config: dict[str, str] | None = None) -> Cluster:
    """A topic on brokers 0, 1 and 2, of which 0 leads."""
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(config=config)
    return cluster


def one_replica() -> Cluster:
    cluster = Cluster()
    cluster.start_brokers(1)
    cluster.create_topic(factor=1)
    return cluster


def reaches(cluster: Cluster, broker: int, epoch: int, end: int) -> None:
    """Set how far the broker's replica of t-0 reaches."""
    cluster.logs[broker, cluster.topic().topic_id, 0] = (epoch, end)


def elect(cluster: Cluster, **values: object) -> list[type[SparkBrokerError] | None]:
    """The error of each partition of an unclean election; None if a leader was elected."""
    answer = cluster.call(ElectLeadersRequest(**{"unclean": True, **values}))  # type: ignore[arg-type]
    assert isinstance(answer, ElectLeadersResponse)
    return [ERRORS[result.error_code] if result.error_code else None for result in answer.results]


def leader(cluster: Cluster) -> tuple[int, tuple[int, ...]]:
    return cluster.partition().leader, cluster.partition().isr


def test_the_only_replica_leads_again_after_a_machine_crash_under_a_higher_epoch() -> None:
    """No other replica has more, so waiting for an operator would save nothing. A note warns of lost records."""
    cluster = one_replica()
    before = cluster.partition().leader_epoch
    register_again(cluster, 0, "machine_crash")
    assert leader(cluster) == (-1, ())
    cluster.beat(0)
    assert leader(cluster) == (0, (0,))
    assert cluster.partition().leader_epoch > before
    assert any("unclean election: broker 0 leads t-0" in note for note in cluster.notes)


def test_a_last_replica_that_restarted_uncleanly_leads_only_if_no_other_has_more() -> None:
    """Known bug 12 with min.insync.replicas=1, where no replica is eligible beside the last ISR member."""
    cluster = three_brokers()
    lose(cluster, 1, 2, 0)
    reaches(cluster, 0, 0, 20)
    reaches(cluster, 1, 0, 30)
    reaches(cluster, 2, 0, 10)
    come_back(cluster, 0, "machine_crash")
    come_back(cluster, 2)
    assert leader(cluster) == (-1, ())
    come_back(cluster, 1)
    assert leader(cluster) == (1, (1,))


def test_replicas_with_the_same_records_are_elected_in_order_of_preference() -> None:
    cluster = restarted(three_brokers())
    for broker in (2, 1, 0):
        come_back(cluster, broker, "machine_crash")
    assert leader(cluster) == (0, (0,))


@pytest.mark.parametrize("stale", ["leader epoch", "incarnation"])
def test_a_log_end_from_before_is_not_compared(stale: str) -> None:
    """The log may have changed since the report: under a leader in between, or by another crash."""
    cluster = three_brokers()
    lose(cluster, 1, 2, 0)
    come_back(cluster, 0, "machine_crash")
    come_back(cluster, 1)
    register_again(cluster, 2)
    state, broker = cluster.partition(), cluster.image.brokers[2]
    epoch = state.leader_epoch - (stale == "leader epoch")
    ends = [LogEnd(cluster.topic().topic_id, 0, epoch, 0, 99)]
    beat = HeartbeatRequest(broker.epoch, cluster.image.next_offset, cluster.now_ms, ready=True, log_ends=ends)
    if stale == "incarnation":
        beat = HeartbeatRequest(broker.epoch, 0, cluster.now_ms, ready=False, log_ends=ends)
    cluster.handle(HeartbeatReceived(cluster.session_of[2], beat, cluster.now_ms))
    if stale == "incarnation":
        register_again(cluster, 2, "machine_crash")
    assert leader(cluster) == (-1, ())
    cluster.pass_time(1_000, alive=[0, 1])
    assert leader(cluster) == (-1, ())
    cluster.beat(2)
    assert cluster.partition().leader != -1


def damaged_only_replica() -> Cluster:
    cluster = one_replica()
    register_again(cluster, 0)
    damage(cluster, 0, [(cluster.topic().topic_id, 0)])
    reaches(cluster, 0, -1, 0)
    return cluster


def test_a_damaged_last_replica_never_leads_by_itself() -> None:
    cluster = damaged_only_replica()
    assert not cluster.image.brokers[0].fenced
    assert (leader(cluster), cluster.partition().damaged) == ((-1, ()), (0,))
    cluster.pass_time(60_000, alive=[0])
    lose(cluster, 0)
    come_back(cluster, 0)
    cluster.pass_time(60_000, alive=[0])
    assert leader(cluster) == (-1, ())


def test_a_damaged_last_replica_begins_anew_at_a_higher_epoch_when_the_loss_is_accepted() -> None:
    cluster = damaged_only_replica()
    before = cluster.partition().leader_epoch
    assert elect(cluster, partitions=[("t", 0)]) == [None]
    assert (leader(cluster), cluster.partition().damaged) == ((0, (0,)), ())
    assert cluster.partition().leader_epoch > before


def test_a_replica_with_records_is_preferred_to_a_damaged_one() -> None:
    cluster = three_brokers()
    lose(cluster, 1, 2)
    register_again(cluster, 0)
    damage(cluster, 0, [(cluster.topic().topic_id, 0)])
    come_back(cluster, 2)
    cluster.pass_time(1_000, alive=[0, 2])
    assert leader(cluster) == (-1, ())
    assert elect(cluster, partitions=[("t", 0)]) == [None]
    assert leader(cluster) == (2, (2,))


def test_an_unclean_election_on_demand_takes_the_most_complete_of_the_live_replicas() -> None:
    cluster = three_brokers()
    lose(cluster, 1, 2, 0)
    reaches(cluster, 1, 0, 20)
    reaches(cluster, 2, 0, 30)
    come_back(cluster, 1)
    come_back(cluster, 2)
    before = cluster.partition()
    assert before.leader == -1
    assert elect(cluster) == [None]
    after = cluster.partition()
    assert leader(cluster) == (2, (2,))
    assert (after.leader_epoch, after.elr, after.last_known_elr) == (before.leader_epoch + 1, (), ())
    assert any("unclean election: broker 2 leads t-0" in note for note in cluster.notes)


def test_who_was_passed_over_by_an_unclean_election_is_a_follower_when_it_is_back() -> None:
    cluster = three_brokers()
    lose(cluster, 1, 2, 0)
    come_back(cluster, 2)
    elect(cluster)
    come_back(cluster, 0)
    lose(cluster, 2)
    assert leader(cluster) == (-1, (2,))


def test_an_unclean_election_does_nothing_to_a_partition_that_has_a_leader() -> None:
    cluster = three_brokers()
    before = cluster.image
    assert elect(cluster, partitions=[("t", 0)]) == [ElectionNotNeededError]
    assert elect(cluster) == []
    assert cluster.image == before


def test_an_unclean_election_without_a_live_replica_says_so() -> None:
    cluster = three_brokers()
    lose(cluster, 0, 1, 2)
    assert elect(cluster, partitions=[("t", 0)]) == [EligibleLeadersNotAvailableError]


def test_a_partition_whose_only_disk_is_lost_begins_anew_on_the_broker_that_it_is_moved_to() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    cluster.create_topic(factor=1)
    lost = cluster.partition().leader
    lose(cluster, lost)
    cluster.call(ReassignPartitionRequest("t", 0, [1 - lost]))
    assert leader(cluster) == (-1, (lost,))
    assert elect(cluster) == [None]
    cluster.pass_time(500, alive=[1 - lost])
    state = cluster.partition()
    assert (state.leader, state.isr, state.replicas, state.reassigning) == (1 - lost, (1 - lost,), (1 - lost,), False)


def test_a_preferred_election_says_why_a_partition_stays_as_it_is() -> None:
    cluster = three_brokers()
    assert elect(cluster, unclean=False, partitions=[("t", 0)]) == [ElectionNotNeededError]
    lose(cluster, 0)
    assert elect(cluster, unclean=False, partitions=[("t", 0)]) == [PreferredLeaderNotAvailableError]
    come_back(cluster, 0)
    assert elect(cluster, unclean=False) == [PreferredLeaderNotAvailableError]


def test_without_the_setting_nobody_but_a_complete_replica_ever_leads() -> None:
    cluster = three_brokers()
    lose(cluster, 1, 2, 0)
    come_back(cluster, 1)
    cluster.pass_time(120_000, alive=[1])
    assert leader(cluster) == (-1, (0,))


def test_with_the_setting_a_live_replica_leads_once_the_others_have_been_away_for_the_session_time_out() -> None:
    cluster = three_brokers(ALLOWED)
    lose(cluster, 1, 2, 0)
    come_back(cluster, 1)
    cluster.pass_time(8_500, alive=[1])
    assert leader(cluster) == (-1, (0,))
    cluster.pass_time(1_000, alive=[1])
    assert leader(cluster) == (1, (1,))


def test_with_the_setting_a_live_broker_is_asked_how_far_its_replica_reaches_before_anybody_is_elected() -> None:
    """Story: older metadata was accepted, and a broker with a full disk named no log end. Its records were lost."""
    cluster = three_brokers(ALLOWED)
    lose(cluster, 1, 2, 0)
    come_back(cluster, 0, "machine_crash")
    reaches(cluster, 1, 0, 30)
    cluster.silent.add(1)
    come_back(cluster, 1)
    cluster.pass_time(20_000, alive=[0, 1])
    assert leader(cluster)[0] == -1
    cluster.silent.clear()
    cluster.pass_time(1_000, alive=[0, 1])
    assert leader(cluster) == (1, (1,))


def test_with_the_setting_nobody_waits_for_a_damaged_replica_that_says_nothing() -> None:
    """Story: its directory could not be moved away. It neither was offline, nor said how far it reaches."""
    cluster = three_brokers(ALLOWED)
    lose(cluster, 1, 2)
    cluster.silent.add(0)
    damage(cluster, 0, [(cluster.topic().topic_id, 0)])
    for broker in (1, 2):
        come_back(cluster, broker)
    cluster.pass_time(1_000, alive=[0, 1, 2])
    assert leader(cluster)[0] in (1, 2)


def test_the_setting_can_be_turned_on_when_it_is_needed() -> None:
    cluster = three_brokers()
    lose(cluster, 1, 2, 0)
    come_back(cluster, 1)
    cluster.pass_time(10_000, alive=[1])
    cluster.call(AlterTopicConfigRequest("t", {**ALLOWED}))
    cluster.tick(500)
    assert leader(cluster) == (1, (1,))


def test_a_driver_that_restarts_loses_no_records_by_the_setting() -> None:
    """Brokers come back one by one, and the first is not the most complete."""
    cluster = three_brokers(ALLOWED)
    lose(cluster, 2)
    cluster = restarted(cluster)
    come_back(cluster, 2)
    cluster.pass_time(5_000, alive=[2])
    assert cluster.partition().leader == -1
    come_back(cluster, 0)
    assert leader(cluster) == (0, (0, 1))
    assert not cluster.unclean


def test_a_controlled_shutdown_hands_nothing_over_uncleanly() -> None:
    cluster = three_brokers(ALLOWED)
    lose(cluster, 1, 2)
    come_back(cluster, 1)
    cluster.beat(0, wants_shutdown=True)
    assert leader(cluster) == (0, (0,))
