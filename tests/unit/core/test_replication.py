"""docs/known-bugs.md, replication: each test replays one bug, whose number its text names.

Broker 1 leads first, and all three are in the ISR, whose minimum is two. A value is a batch of one row, so offsets
count values.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_broker.core.batch import BatchInfo
from spark_broker.core.effects import ProposeIsr, RestartLog, SaveEpochs, SetAside, TruncateLog
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.events import Fetched, LeaderAndIsr, RecoveredLog
from spark_broker.core.producers import ProducerStates
from spark_broker.core.replica import ACKS_ALL, Diverging, FetchPosition, Replica
from spark_broker.errors import (
    FencedLeaderEpochError,
    IneligibleReplicaError,
    InvariantError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    StaleBrokerEpochError,
    UnknownLeaderEpochError,
)
from tests.unit.core.harness import LAG_MAX_MS, Cluster, Request


def lose_answer(cluster: Cluster, *followers: int) -> None:
    """The leader counts what the followers have, but its answers are lost."""
    for follower in followers:
        request = cluster.ask(follower)
        assert request is not None
        assert cluster.serve(request) is not None


def acknowledge_unheard(cluster: Cluster, *values: int, followers: tuple[int, ...] = (2, 3)) -> None:
    """Broker 1 acknowledges the values. The followers have them, but their high watermarks do not cover them."""
    outcomes = [cluster.append(1, value) for value in values]
    for follower in followers:
        cluster.fetch(follower)
    lose_answer(cluster, *followers)
    assert [outcome.base_offset is not None for outcome in outcomes] == [True] * len(values)


def leave_isr(cluster: Cluster, broker: int) -> None:
    """The broker's session ends and comes back: it is live, but outside the ISR."""
    cluster.controller.fence(broker)
    cluster.controller.unfence(broker)
    cluster.deliver_all()


def opened(
    *, log_end_offset: int, high_watermark: int = 0, epochs: list[tuple[int, int]], log_start_offset: int = 0
) -> Replica:
    """Broker 2's replica, just opened on this log."""
    log = RecoveredLog(
        log_start_offset, log_end_offset, high_watermark, EpochHistory.from_pairs(epochs), ProducerStates()
    )
    return Replica(2, log, min_insync_replicas=2, lag_max_ms=LAG_MAX_MS)


def follow(replica: Replica, leader_epoch: int) -> None:
    replica.assign(LeaderAndIsr(1, leader_epoch, leader_epoch, (1, 2, 3), (1, 2, 3)), {1: 1, 2: 1, 3: 1}, 0)


def answer(replica: Replica, *, log_start_offset: int = 0, diverging: Diverging | None = None) -> Fetched:
    """The leader's answer to the replica's present fetch."""
    position = replica.fetch_position()
    return Fetched(position, position.leader_epoch, 0, log_start_offset, diverging)


def test_an_epoch_that_wrote_nothing_leaves_no_trace_at_its_deposed_leader() -> None:
    """3, KAFKA-10706: no record is truncated, but the history's conflicting tail is, on disk too."""
    cluster = Cluster()
    acknowledge_unheard(cluster, 10)
    cluster.elect(2)
    assert cluster.nodes[2].log.saved_epochs.to_pairs() == [(0, 0), (1, 1)]
    cluster.elect(3)
    assert cluster.replica(2).epochs.to_pairs() == [(0, 0)]
    assert cluster.nodes[2].log.saved_epochs.to_pairs() == [(0, 0)]


def test_an_epoch_past_the_log_end_is_forgotten_on_disk_before_batches_of_an_older_one_follow() -> None:
    """3: a leader crashed before its first append. Its file would name its epoch for batches of an older one."""
    cluster = Cluster()
    acknowledge_unheard(cluster, 10)
    cluster.append(1, 11)
    cluster.elect(2)
    cluster.crash(2)
    cluster.controller.fence(2)
    cluster.start(2)
    cluster.deliver_all()
    cluster.replicate(2)
    assert cluster.values(2) == [10, 11]
    assert cluster.nodes[2].log.state().epochs.epoch_at(1) == 0


def test_a_cut_inside_a_batch_leaves_no_epoch_behind_that_began_with_it() -> None:
    """3: files are truncated to the batch's beginning, lower than requested; history and producers follow the log."""
    replica = opened(log_end_offset=12, epochs=[(0, 0), (1, 6), (3, 10)])
    follow(replica, 4)
    effects = replica.fetched(answer(replica, diverging=Diverging(2, 9)))
    cut = "broker 1, which leads in leader epoch 4, has epoch 2 up to 9; our log ends at 12 in epoch 3"
    assert effects == [SaveEpochs(EpochHistory.from_pairs([(0, 0), (1, 6)])), TruncateLog(9, cut)]
    assert replica.truncated(ProducerStates(), 6) == [SaveEpochs(EpochHistory.from_pairs([(0, 0)]))]
    assert replica.fetch_position() == FetchPosition(4, 6, 0)


@pytest.mark.parametrize("epochs", [[], [(0, 0)], [(0, 0), (1, 9)]])
def test_a_sparse_history_never_cuts_what_is_committed(epochs: list[tuple[int, int]]) -> None:
    """4, KAFKA-7897: the replica is rebuilt instead, and its log stays whole until then."""
    replica = opened(log_end_offset=10, high_watermark=8, epochs=epochs)
    follow(replica, 2)
    effects = replica.fetched(answer(replica, diverging=Diverging(0, 5)))
    assert [type(effect) for effect in effects] == [SetAside]
    assert replica.log_end_offset == 10


def test_only_an_unclean_election_explains_a_leader_that_lacks_what_is_committed() -> None:
    for unclean_epoch, expected in ((-1, SetAside), (0, SetAside), (1, RestartLog), (2, RestartLog)):
        replica = opened(log_end_offset=10, high_watermark=8, epochs=[(0, 0)])
        replica.assign(LeaderAndIsr(1, 2, 2, (1, 2), (1,), unclean_epoch), {1: 1, 2: 1}, 0)
        (effect,) = replica.fetched(answer(replica, diverging=Diverging(0, 5)))
        assert isinstance(effect, expected), unclean_epoch
        assert "diverges from ours at 5, below the high watermark 8" in effect.reason


def test_a_log_that_ends_within_a_batch_of_the_leader_is_rebuilt() -> None:
    """It is empty, and began anew there after an unclean election. Otherwise nothing could ever be appended to it."""
    replica = opened(log_start_offset=33, log_end_offset=33, high_watermark=33, epochs=[])
    follow(replica, 2)
    came = answer(replica, log_start_offset=32)
    assert replica.fetched(came) == []
    assert replica.fetched(came, BatchInfo(33, 35, 0, 0)) == []
    assert replica.fetched(came, BatchInfo(30, 33, 0, 0)) == [], "what is left out, as it is there already"
    (effect,) = replica.fetched(came, BatchInfo(32, 34, 0, 0))
    assert isinstance(effect, RestartLog)
    assert "batch from 32 to 34 cannot be appended: our log ends within it, at 33" in effect.reason


def test_a_new_leader_writes_its_epoch_down_before_anything_else() -> None:
    """5: an election's first effect saves the epoch and the log end."""
    replica = opened(log_end_offset=3, epochs=[(0, 0)])
    effects = replica.assign(LeaderAndIsr(2, 4, 4, (1, 2), (1, 2)), {1: 1, 2: 1}, 0)
    assert effects[0] == SaveEpochs(EpochHistory.from_pairs([(0, 0), (4, 3)]))


def test_epochs_and_offsets_of_a_history_strictly_increase() -> None:
    """5: anything else is our own bug, and so is an epoch that the log has already."""
    for pairs in ([(1, 0), (1, 5)], [(2, 0), (1, 5)], [(1, 5), (2, 5)], [(1, 5), (2, 4)]):
        with pytest.raises(InvariantError):
            EpochHistory.from_pairs(pairs)
    replica = opened(log_end_offset=3, epochs=[(0, 0), (4, 2)])
    with pytest.raises(InvariantError):
        replica.assign(LeaderAndIsr(2, 4, 4, (1, 2), (1, 2)), {1: 1, 2: 1}, 0)


def test_an_answer_to_another_position_is_ignored() -> None:
    """2: two fetchers overlap. The slower one's divergence was found before the log was truncated and filled again. Its
    truncation would lose batches that the leader has counted since."""
    replica = opened(log_end_offset=10, epochs=[(0, 0), (1, 5)])
    follow(replica, 4)
    late = answer(replica, diverging=Diverging(0, 5))
    replica.truncate_to(5)
    replica.truncated(ProducerStates(), 5)
    replica.follower_appended([BatchInfo(5, 10, 3, 0)], 0)
    assert replica.fetched(late) == []
    assert replica.log_end_offset == 10


def test_every_request_of_another_leader_epoch_is_refused_and_stores_nothing() -> None:
    """7 and 8, KIP-320, KIP-359: this holds for append, fetch, offset lookup and a follower's fetch."""
    cluster = Cluster()
    cluster.elect(2)
    cluster.elect(1)
    leader = cluster.replica(1)
    for epoch, error in ((1, FencedLeaderEpochError), (3, UnknownLeaderEpochError)):
        with pytest.raises(error):
            cluster.append(1, 10, epoch=epoch)
        with pytest.raises(error):
            leader.check_read(epoch, 0)
        with pytest.raises(error):
            leader.latest_offset(epoch)
        with pytest.raises(error):
            cluster.serve_or_raise(Request(2, 1, 1, 1, FetchPosition(epoch, 0, -1)))
    assert cluster.values(1) == []
    with pytest.raises(NotLeaderOrFollowerError):
        cluster.append(2, 10)


def test_a_fenced_broker_does_not_come_back_into_the_isr_by_fetching() -> None:
    """7, KAFKA-6880: it joins only once the controller knows that it is live."""
    cluster = Cluster()
    cluster.controller.fence(3)
    cluster.deliver_all()
    cluster.replicate(3)
    assert cluster.nodes[1].proposal is None
    cluster.controller.unfence(3)
    cluster.deliver_all()
    cluster.replicate(3)
    reason = "broker 3 has caught up: it ends at 0"
    assert cluster.nodes[1].proposal == ProposeIsr(0, 1, ((1, 1), (2, 1), (3, 1)), reason=reason)


def test_an_earlier_incarnation_is_refused_and_a_later_one_not_yet_known() -> None:
    """9, KIP-903: broker epochs decide."""
    cluster = Cluster()
    late = cluster.ask(3)
    assert late is not None
    cluster.crash(3)
    cluster.start(3)
    early = cluster.ask(3)
    assert early is not None
    with pytest.raises(UnknownLeaderEpochError):
        cluster.serve_or_raise(early)
    cluster.deliver(1)
    assert cluster.serve_or_raise(early) is not None
    with pytest.raises(StaleBrokerEpochError):
        cluster.serve_or_raise(late)


def test_an_isr_proposal_for_an_earlier_incarnation_is_refused() -> None:
    """9, KAFKA-14139: the leader saw it catch up, and then it restarted without its last batch."""
    cluster = Cluster()
    cluster.replicate()
    leave_isr(cluster, 3)
    acknowledge_unheard(cluster, 10, followers=(2,))
    cluster.replicate(3)
    cluster.crash(3, lost_batches=1)
    cluster.start(3)
    assert isinstance(cluster.decide(1), IneligibleReplicaError)
    assert cluster.controller.assignment.isr == (1, 2)
    assert cluster.nodes[1].proposal is None


def test_a_new_incarnation_has_proved_nothing_yet() -> None:
    """9: as an ISR member it counts from its own first fetch on, whatever its predecessor had."""
    cluster = Cluster()
    outcome = cluster.append(1, 10)
    cluster.replicate(2)
    cluster.fetch(3)
    cluster.crash(3)
    cluster.start(3)
    cluster.deliver(1)
    assert cluster.replica(1).followers[3].log_end_offset == -1
    assert not outcome.answered
    cluster.replicate(3)
    assert outcome.base_offset == 0


def test_a_shrink_counts_only_once_the_controller_has_taken_it() -> None:
    """10: until then the slow member can still be elected."""
    cluster = Cluster()
    outcome = cluster.append(1, 10)
    cluster.tick(LAG_MAX_MS)
    cluster.replicate(2)
    cluster.tick(1)
    assert cluster.replica(1).proposed_isr == (1, 2)
    assert not outcome.answered
    cluster.decide(1)
    assert not outcome.answered
    cluster.deliver(1)
    assert outcome.base_offset == 0


def test_the_high_watermark_stands_still_while_the_isr_is_too_small() -> None:
    """10, KIP-966: a record on one broker is not committed if two must have it."""
    cluster = Cluster()
    cluster.controller.fence(2, 3)
    cluster.deliver_all()
    cluster.append(1, 10, acks=1)
    assert cluster.replica(1).high_watermark == 0
    cluster.controller.unfence(2)
    cluster.settle()
    assert cluster.replica(1).high_watermark == 1


def test_no_more_replicas_are_asked_for_than_there_are() -> None:
    """10: the minimum is min(min.insync.replicas, replication factor)."""
    cluster = Cluster(brokers=1, min_insync_replicas=2)
    assert cluster.append(1, 10).base_offset == 0


def test_a_follower_below_the_high_watermark_does_not_join() -> None:
    """11."""
    cluster = Cluster()
    leave_isr(cluster, 3)
    acknowledge_unheard(cluster, 10, 11, followers=(2,))
    cluster.fetch(3, max_batches=1)
    lose_answer(cluster, 3)
    assert cluster.replica(1).followers[3].log_end_offset == 1
    assert cluster.nodes[1].proposal is None


def test_a_member_that_says_that_it_lost_committed_data_leaves_the_isr_at_once() -> None:
    """4 and 28: a member that was rebuilt after damage must not be elected before it has caught up."""
    cluster = Cluster()
    acknowledge_unheard(cluster, 10, 11)
    node = cluster.nodes[3]
    node.log.restart_at(0, EpochHistory(), ProducerStates())
    cluster.replica(3).restarted(node.log.state())
    lose_answer(cluster, 3)
    cluster.tick()
    assert cluster.replica(1).proposed_isr == (1, 2)
    cluster.decide(1)
    cluster.settle()
    assert cluster.values(3) == [10, 11]
    assert set(cluster.controller.assignment.isr) == {1, 2, 3}


def say_that_it_has_no_room(cluster: Cluster, follower: int) -> None:
    request = cluster.ask(follower)
    assert request is not None
    cluster.serve(replace(request, position=replace(request.position, no_room=True)))


def test_a_member_that_has_everything_stays_without_room() -> None:
    cluster = Cluster()
    acknowledge_unheard(cluster, 10)
    say_that_it_has_no_room(cluster, 3)
    cluster.tick()
    assert cluster.nodes[1].proposal is None


def test_a_follower_without_room_joins_again_only_when_it_has_room() -> None:
    """Below the minimum the high watermark stands still, so otherwise the follower would join and leave for ever."""
    cluster = Cluster(min_insync_replicas=3)
    acknowledge_unheard(cluster, 10)
    cluster.append(1, 11)
    say_that_it_has_no_room(cluster, 3)
    cluster.tick()
    cluster.decide(1)
    cluster.deliver_all()
    assert cluster.controller.assignment.isr == (1, 2)
    say_that_it_has_no_room(cluster, 3)
    assert cluster.nodes[1].proposal is None
    cluster.fetch(3)
    assert cluster.nodes[1].proposal is not None


def test_no_read_reaches_past_the_high_watermark() -> None:
    """13: a read between it and the log end finds no records; a read past the log end is an error."""
    cluster = Cluster()
    acknowledge_unheard(cluster, 10, 11)
    cluster.append(1, 12)
    leader = cluster.replica(1)
    assert [leader.check_read(0, offset) for offset in range(4)] == [2, 2, 2, 3]
    with pytest.raises(OffsetOutOfRangeError):
        leader.check_read(0, 4)


def test_a_new_leader_shows_no_latest_offset_before_it_knows_what_is_committed() -> None:
    """14, KIP-207: its high watermark is below the one that its predecessor showed."""
    cluster = Cluster()
    acknowledge_unheard(cluster, 10, 11)
    shown = cluster.replica(1).latest_offset(0)
    cluster.elect(2)
    with pytest.raises(OffsetNotAvailableError):
        cluster.replica(2).latest_offset(1)
    with pytest.raises(OffsetNotAvailableError):
        cluster.replica(2).check_read(1, 3)
    cluster.replicate(1, 3)
    assert cluster.replica(2).latest_offset(1) == shown == 2


def test_a_follower_takes_the_leaders_log_start_and_has_its_high_watermark_there() -> None:
    """15, KAFKA-9491."""
    replica = opened(log_end_offset=5, high_watermark=1, epochs=[(0, 0)])
    follow(replica, 1)
    replica.fetched(answer(replica, log_start_offset=3))
    assert (replica.log_start_offset, replica.high_watermark) == (3, 3)


def test_a_log_start_past_the_high_watermark_found_on_disk_lifts_it() -> None:
    """15: the checkpoint is older than the log start. The high watermark never passes the log end, either."""
    assert opened(log_end_offset=9, high_watermark=2, log_start_offset=4, epochs=[(0, 4)]).high_watermark == 4
    assert opened(log_end_offset=9, high_watermark=20, epochs=[(0, 0)]).high_watermark == 9


def test_a_leader_never_moves_its_log_start_past_what_is_committed() -> None:
    """15: that would commit and acknowledge records that no follower has."""
    cluster = Cluster()
    outcome = cluster.append(1, 10)
    with pytest.raises(InvariantError):
        cluster.replica(1).advance_log_start(1)
    assert not outcome.answered


def test_metadata_that_goes_back_is_ignored() -> None:
    """18: a replica's knowledge of its partition never goes back."""
    cluster = Cluster()
    cluster.elect(2)
    old = LeaderAndIsr(1, 0, 0, (1, 2, 3), (1, 2, 3))
    assert cluster.replica(1).assign(old, {1: 1, 2: 1, 3: 1}, 0) == []
    assert cluster.leaders() == [2]


def test_a_stopped_replica_stays_stopped() -> None:
    """27: new metadata does not make a replica with a failed disk lead again."""
    cluster = Cluster()
    outcome = cluster.append(1, 10)
    leader = cluster.replica(1)
    error = NotLeaderOrFollowerError("the disk failed")
    cluster._carry_out(1, leader.stop(error))
    assert outcome.error is error
    assert leader.assign(LeaderAndIsr(1, 7, 7, (1, 2, 3), (1, 2, 3)), {1: 1, 2: 1, 3: 1}, 0) == []
    with pytest.raises(NotLeaderOrFollowerError):
        leader.prepare_append(-1, ACKS_ALL, -1, -1, -1)
