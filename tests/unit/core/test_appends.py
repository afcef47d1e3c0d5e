"""Appends: what acks promise, and the outcome of a waiting batch when the partition changes.

Broker 1 leads first, and all three are in the ISR, whose minimum is two. A value is a batch of one row, so offsets
count values.
"""

from __future__ import annotations

import pytest

from spark_broker.core.replica import BatchInfo
from spark_broker.errors import (
    DuplicateSequenceNumberError,
    InvalidProducerEpochError,
    InvariantError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OutOfOrderSequenceNumberError,
    RequestTimedOutError,
)
from tests.unit.core.harness import APPEND_TIMEOUT_MS, LAG_MAX_MS, Cluster, Outcome, Producer

PRODUCER_ID = 7


def sent(sequence: int, *, epoch: int = 0) -> Producer:
    return Producer(PRODUCER_ID, epoch, sequence)


def append_committed(cluster: Cluster, *values: int) -> None:
    """Append values of the idempotent producer, with their indexes as sequence numbers; all brokers know the commit."""
    for sequence, value in enumerate(values):
        cluster.append(1, value, producer=sent(sequence))
    cluster.replicate()


def test_acks_all_is_answered_when_every_member_of_the_isr_has_the_batch() -> None:
    cluster = Cluster()
    outcome = cluster.append(1, 10)
    cluster.replicate(2)
    assert not outcome.answered
    cluster.fetch(3)
    assert not outcome.answered
    cluster.fetch(3)
    assert outcome.base_offset == 0


def test_acks_1_and_0_are_answered_by_the_leader_alone() -> None:
    cluster = Cluster()
    assert [cluster.append(1, 10 + acks, acks=acks).base_offset for acks in (0, 1)] == [0, 1]
    assert cluster.replica(1).high_watermark == 0


def test_acks_all_is_refused_while_the_isr_is_too_small_and_nothing_is_stored() -> None:
    cluster = Cluster()
    cluster.controller.fence(2, 3)
    cluster.deliver_all()
    with pytest.raises(NotEnoughReplicasError):
        cluster.append(1, 10)
    assert cluster.append(1, 11, acks=1).base_offset == 0
    assert cluster.values(1) == [11]


def test_an_isr_that_shrinks_after_the_append_leaves_it_waiting_until_it_grows_or_times_out() -> None:
    cluster = Cluster()
    outcomes = [cluster.append(1, 10)]
    cluster.controller.fence(2, 3)
    cluster.deliver_all()
    cluster.tick(APPEND_TIMEOUT_MS)
    assert isinstance(outcomes[0].error, RequestTimedOutError)
    cluster.controller.unfence(2)
    cluster.settle()
    assert cluster.replica(1).high_watermark == 1


def test_a_batch_that_is_stored_elsewhere_than_granted_is_our_own_bug() -> None:
    cluster = Cluster()
    with pytest.raises(InvariantError):
        cluster.replica(1).appended(BatchInfo(1, 2, 0, 0), 0)
    with pytest.raises(InvariantError):
        cluster.replica(2).appended(BatchInfo(0, 1, 0, 0), 0)


def test_a_leader_that_is_elected_again_still_answers_what_it_had_stored() -> None:
    """It answers once, and only when the followers have shown in the new epoch that they have the batch."""
    cluster = Cluster()
    outcome = cluster.append(1, 10)
    cluster.fetch(2)
    cluster.fetch(3)
    cluster.controller.fence(*cluster.nodes, shrink=False)
    cluster.controller.unfence(1)
    cluster.deliver(1)
    assert cluster.replica(1).assignment.leader_epoch == 2
    assert not outcome.answered
    cluster.controller.unfence(2)
    cluster.controller.unfence(3)
    cluster.deliver_all()
    assert not outcome.answered
    cluster.replicate()
    assert outcome.base_offset == 0


def test_a_leader_that_heard_of_an_epoch_in_between_has_refused_it() -> None:
    cluster = Cluster()
    outcome = cluster.append(1, 10)
    cluster.elect(2)
    assert isinstance(outcome.error, NotLeaderOrFollowerError)
    cluster.elect(1)
    cluster.replicate()
    assert outcome.base_offset is None


def test_what_only_a_deposed_leader_has_is_refused_and_gone() -> None:
    cluster = Cluster()
    outcome = cluster.append(1, 10)
    cluster.elect(2)
    cluster.append(2, 20)
    cluster.replicate()
    assert isinstance(outcome.error, NotLeaderOrFollowerError)
    assert cluster.values(1) == cluster.values(3) == [20]


def test_a_retry_returns_the_original_offset_only_once_it_is_committed() -> None:
    """22: after a failover the new leader has the batch, but does not know yet that the others have it."""
    cluster = Cluster()
    first = cluster.append(1, 10, producer=sent(0))
    cluster.fetch(2)
    cluster.elect(2)
    assert first.error is not None
    retry = cluster.append(2, 10, producer=sent(0))
    assert not retry.answered
    cluster.replicate(1, 3)
    assert retry.base_offset == 0
    assert cluster.values(2) == cluster.values(1) == cluster.values(3) == [10]


def test_a_retry_of_a_committed_batch_is_answered_although_the_isr_is_too_small() -> None:
    """22: it is stored as its acks require, so only a new batch is refused."""
    cluster = Cluster()
    append_committed(cluster, 10)
    cluster.controller.fence(2, 3)
    cluster.deliver_all()
    assert cluster.append(1, 10, producer=sent(0)).base_offset == 0
    with pytest.raises(NotEnoughReplicasError):
        cluster.append(1, 11, producer=sent(1))
    assert cluster.values(1) == [10]


def test_a_retry_of_an_uncommitted_batch_waits_although_the_isr_is_too_small() -> None:
    """22: if it were refused, the client would believe that the batch is not stored."""
    cluster = Cluster()
    cluster.append(1, 10, producer=sent(0))
    cluster.controller.fence(2, 3)
    cluster.deliver_all()
    retry = cluster.append(1, 10, producer=sent(0))
    assert not retry.answered
    cluster.controller.unfence(2)
    cluster.settle()
    assert retry.base_offset == 0


def test_a_retry_with_acks_all_of_a_batch_stored_with_acks_1_waits() -> None:
    cluster = Cluster()
    assert cluster.append(1, 10, acks=1, producer=sent(0)).base_offset == 0
    retry = cluster.append(1, 10, producer=sent(0))
    assert not retry.answered
    cluster.replicate()
    assert retry.base_offset == 0


def test_retries_of_older_batches_are_answered_before_newer_ones() -> None:
    cluster = Cluster()
    first = cluster.append(1, 10, producer=sent(0))
    second = cluster.append(1, 11, producer=sent(1))
    again = cluster.append(1, 10, producer=sent(0))
    for follower in (2, 3, 2, 3):
        cluster.fetch(follower, max_batches=1)
    assert [first.base_offset, again.base_offset, second.base_offset] == [0, 0, None]


def test_a_retry_after_its_segment_has_gone_returns_the_original_offset() -> None:
    """22: this holds on the leader, and on a replica that began at the leader's log start."""
    cluster = Cluster()
    cluster.controller.fence(3)
    cluster.deliver_all()
    append_committed(cluster, 10, 11, 12)
    cluster.advance_log_start(1, 3)
    cluster.controller.unfence(3)
    cluster.settle()
    assert cluster.values(1) == cluster.values(3) == []
    assert cluster.append(1, 11, producer=sent(1)).base_offset == 1
    cluster.elect(3)
    assert cluster.append(3, 11, producer=sent(1)).base_offset == 1


def test_producers_after_a_cut_are_those_of_the_log() -> None:
    """19, KAFKA-5435: a deposed leader forgets the batch that it loses, and takes its successor's of that number."""
    cluster = Cluster()
    append_committed(cluster, 10)
    cluster.append(1, 11, producer=sent(1))
    cluster.elect(2)
    retried = cluster.append(2, 12, producer=sent(1))
    cluster.replicate()
    assert retried.base_offset == 1
    for broker in cluster.nodes:
        assert cluster.replica(broker).producers == cluster.nodes[broker].log.rebuilt_producers()
    assert cluster.replica(1).producers == cluster.replica(2).producers


def test_producers_after_a_restart_are_those_of_the_log() -> None:
    """19: only what is in the log, or in the snapshot at its start, is remembered."""
    cluster = Cluster()
    append_committed(cluster, 10, 11, 12)
    cluster.advance_log_start(1, 2)
    before = cluster.replica(1).producers
    cluster.crash(1)
    cluster.start(1)
    assert cluster.replica(1).producers == before


def test_retention_does_not_let_a_producer_begin_again() -> None:
    """20, KIP-360: all of its batches are gone, but its sequence goes on."""
    cluster = Cluster()
    append_committed(cluster, *range(10, 17))
    cluster.advance_log_start(1, 7)
    with pytest.raises(DuplicateSequenceNumberError):
        cluster.append(1, 99, producer=sent(0))
    with pytest.raises(OutOfOrderSequenceNumberError):
        cluster.append(1, 99, producer=sent(8))
    assert cluster.append(1, 17, acks=1, producer=sent(7)).base_offset == 7


def test_followers_copy_what_their_own_rule_would_refuse() -> None:
    """21, KAFKA-6003: only the leader decides."""
    cluster = Cluster()
    append_committed(cluster, 10)
    cluster.append_unjudged(1, 11, sent(40))
    cluster.append_unjudged(1, 12, Producer(8, 3, 9))
    cluster.replicate()
    assert cluster.values(2) == cluster.values(3) == [10, 11, 12]
    assert cluster.replica(2).producers == cluster.replica(1).producers


def test_a_sequence_number_used_again_in_a_later_epoch_is_a_new_batch() -> None:
    """23: an abort raises the epoch. Numbers begin at 0 again and are no duplicates of the earlier epoch's."""
    cluster = Cluster()
    append_committed(cluster, 10, 11)
    renewed = [cluster.append(1, value, producer=sent(0, epoch=1)) for value in (20, 20)]
    cluster.replicate()
    assert [outcome.base_offset for outcome in renewed] == [2, 2]
    with pytest.raises(InvalidProducerEpochError):
        cluster.append(1, 12, producer=sent(2))


def test_a_follower_that_waits_at_the_log_end_stays_in_the_isr() -> None:
    """In a long poll the stream reports the follower as idle, without a fetch of this partition."""
    cluster = Cluster()
    cluster.replicate()
    leader = cluster.replica(1)
    for _ in range(4):
        cluster.tick(LAG_MAX_MS // 2)
        cluster.idle(2)
    cluster.append(1, 10, acks=1)
    cluster.tick()
    assert leader.proposed_isr == (1, 2)


def test_a_follower_that_is_idle_behind_the_log_end_leaves_the_isr() -> None:
    """It fetches other partitions of the stream, and never reports that it has this batch."""
    cluster = Cluster()
    cluster.replicate()
    cluster.append(1, 10, acks=1)
    cluster.replicate(2)
    for _ in range(4):
        cluster.tick(LAG_MAX_MS // 2)
        cluster.idle(3)
    assert cluster.replica(1).proposed_isr == (1, 2)


def test_a_follower_of_another_incarnation_is_not_kept_by_being_idle() -> None:
    cluster = Cluster()
    cluster.append(1, 10, acks=1)
    cluster.replicate(2)
    cluster.tick(LAG_MAX_MS)
    cluster.idle(3, broker_epoch=9)
    cluster.tick(1)
    assert cluster.replica(1).proposed_isr == (1, 2)


@pytest.mark.parametrize(("caught_up", "proposed"), [(True, (1, 2, 3)), (False, None)])
def test_an_idle_follower_that_is_live_again_joins_the_isr_if_it_has_caught_up(
    caught_up: bool, proposed: tuple[int, ...] | None
) -> None:
    """It caught up while it was fenced, and has nothing new to report."""
    cluster = Cluster()
    cluster.controller.fence(3)
    cluster.deliver_all()
    cluster.fetch(3)
    cluster.append(1, 10)
    cluster.replicate(2, *([3] if caught_up else []))
    cluster.controller.unfence(3)
    cluster.deliver_all()
    cluster.idle(3)
    assert cluster.replica(1).proposed_isr == proposed


def test_an_append_is_answered_once_whichever_way_it_ends() -> None:
    """The append expires and is committed later; the client is only notified of the expiry."""
    cluster = Cluster()
    outcome: Outcome = cluster.append(1, 10)
    cluster.tick(APPEND_TIMEOUT_MS)
    assert isinstance(outcome.error, RequestTimedOutError)
    cluster.settle()
    assert outcome.base_offset is None
    assert cluster.replica(1).high_watermark == 1


def test_lowering_the_minimum_lets_what_everybody_in_the_isr_has_be_committed() -> None:
    cluster = Cluster()
    cluster.controller.fence(2, 3)
    cluster.deliver_all()
    cluster.append(1, 10, acks=1)
    cluster.replica(1).configure(1)
    cluster.deliver(1)
    assert cluster.replica(1).high_watermark == 1


def test_a_minimum_that_is_lowered_with_a_new_leader_commits_nothing_of_the_old_one() -> None:
    """Story: a broker was cut off while its appends waited for a second replica. It came back to another leader and a
    lower minimum at once, and its high watermark rose over records that nobody else has."""
    cluster = Cluster()
    outcome: Outcome = cluster.append(1, 10)
    cluster.controller.fence(2, 3)
    cluster.deliver_all()
    assert cluster.replica(1).high_watermark == 0
    cluster.controller.fence(1)
    cluster.controller.unfence(2)
    cluster.replica(1).configure(1)
    cluster.deliver_all()
    assert cluster.replica(1).assignment.leader == 2
    assert cluster.replica(1).high_watermark == 0
    assert outcome.base_offset is None


def test_a_minimum_that_is_raised_with_a_smaller_isr_commits_nothing_by_the_old_one() -> None:
    """Those who have left the ISR may be elected while it is below the minimum."""
    cluster = Cluster(min_insync_replicas=1)
    outcome: Outcome = cluster.append(1, 10)
    cluster.controller.fence(2, 3)
    cluster.replica(1).configure(2)
    cluster.deliver_all()
    assert cluster.replica(1).high_watermark == 0
    assert outcome.base_offset is None
