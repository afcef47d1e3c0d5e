"""Transactions of one partition: what is refused, what readers of committed records see, and what a failover keeps.

Broker 1 leads first. Batches have one row, so offsets count batches and markers. Numbers: docs/known-bugs.md.
"""

from __future__ import annotations

import pytest

from spark_broker.core.batch import BatchInfo
from spark_broker.core.events import Fetched
from spark_broker.core.leadership import CONFIRMATION_MS
from spark_broker.core.producers import ProducerStates
from spark_broker.core.replica import ACKS_ALL, AwaitTransaction
from spark_broker.core.transaction_index import AbortedTransaction, TransactionIndex
from spark_broker.errors import (
    InvalidProducerEpochError,
    InvalidRequestError,
    InvalidTxnStateError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
)
from tests.unit.core.harness import Cluster, Outcome, Producer

PID = 50
OTHER = 51


def sent(sequence: int = 0, *, epoch: int = 0, pid: int = PID) -> Producer:
    return Producer(pid, epoch, sequence, transactional=True)


def write(
    cluster: Cluster, value: int, sequence: int = 0, *, epoch: int = 0, pid: int = PID, broker: int = 1
) -> Outcome:
    """Append a batch of a transaction, which the coordinator confirms on request."""
    producer = sent(sequence, epoch=epoch, pid=pid)
    outcome = cluster.append(broker, value, producer=producer)
    if outcome.awaits:
        replica = cluster.replica(broker)
        replica.transaction_confirmed(replica.assignment.leader_epoch, pid, epoch, cluster.now_ms)
        outcome = cluster.append(broker, value, producer=producer)
    assert not outcome.awaits
    return outcome


def mark(cluster: Cluster, epoch: int, *, committed: bool, pid: int = PID, broker: int = 1) -> Outcome:
    """Write the marker that begins `epoch`."""
    return cluster.append_marker(broker, 1000 + cluster.replica(broker).log_end_offset, pid, epoch, committed=committed)


def stable(cluster: Cluster, broker: int = 1) -> int:
    return cluster.replica(broker).last_stable_offset


def shown(cluster: Cluster, broker: int = 1) -> list[int]:
    """The values that readers of committed records see."""
    replica = cluster.replica(broker)
    transactions = replica.producers.transactions
    return [
        entry.value
        for entry in cluster.nodes[broker].log.entries
        if entry.info.next_offset <= replica.last_stable_offset
        and not entry.info.control
        and not (entry.info.transactional and transactions.is_aborted(entry.info.producer_id, entry.base_offset))
    ]


def test_the_first_batch_waits_for_the_coordinator_and_later_ones_do_not() -> None:
    cluster = Cluster()
    assert cluster.append(1, 10, producer=sent()).awaits
    assert cluster.replica(1).log_end_offset == 0
    write(cluster, 10)
    assert not cluster.append(1, 11, producer=sent(1)).awaits


def test_a_confirmation_is_asked_for_again_after_a_while() -> None:
    """The request renews the transaction's time-out at its coordinator."""
    cluster = Cluster()
    write(cluster, 10)
    cluster.tick(CONFIRMATION_MS - 1)
    assert not cluster.append(1, 11, producer=sent(1)).awaits
    cluster.tick(1)
    assert cluster.append(1, 12, producer=sent(2)).awaits


def test_a_retry_is_recognised_without_asking_the_coordinator() -> None:
    cluster = Cluster()
    write(cluster, 10)
    cluster.tick(CONFIRMATION_MS)
    cluster.replicate()
    assert cluster.append(1, 10, producer=sent()).base_offset == 0


def test_a_transactional_batch_needs_a_producer_and_acks_all() -> None:
    leader = Cluster().replica(1)
    for acks, pid in [(1, PID), (0, PID), (ACKS_ALL, -1)]:
        with pytest.raises(InvalidRequestError):
            leader.prepare_append(0, acks, pid, 0, 0, transactional=True)


def test_a_producer_appends_nothing_outside_of_its_open_transaction() -> None:
    cluster = Cluster()
    write(cluster, 10)
    with pytest.raises(InvalidTxnStateError):
        cluster.append(1, 11, producer=Producer(PID, 0, 1))
    with pytest.raises(InvalidTxnStateError):
        write(cluster, 11, epoch=1)


def test_a_marker_needs_a_leader_and_enough_members_in_sync() -> None:
    cluster = Cluster()
    write(cluster, 10)
    with pytest.raises(NotLeaderOrFollowerError):
        mark(cluster, 1, committed=True, broker=2)
    cluster.controller.fence(2, 3)
    cluster.deliver_all()
    with pytest.raises(NotEnoughReplicasError):
        mark(cluster, 1, committed=True)
    assert cluster.replica(1).log_end_offset == 1


def test_bug_24_a_late_batch_is_refused_after_its_marker_even_where_the_producer_had_appended_nothing() -> None:
    cluster = Cluster()
    mark(cluster, 1, committed=False)
    with pytest.raises(InvalidProducerEpochError):
        cluster.append(1, 10, producer=sent())


def test_bug_24_a_late_batch_joins_no_newer_transaction() -> None:
    cluster = Cluster()
    write(cluster, 10)
    mark(cluster, 1, committed=False)
    write(cluster, 11, epoch=1)
    with pytest.raises(InvalidProducerEpochError):
        cluster.append(1, 12, producer=sent(1))


def test_bug_24_a_late_marker_of_an_older_epoch_ends_no_newer_transaction() -> None:
    cluster = Cluster()
    write(cluster, 10)
    mark(cluster, 1, committed=False)
    write(cluster, 11, epoch=1)
    with pytest.raises(InvalidProducerEpochError):
        mark(cluster, 1, committed=False)
    mark(cluster, 2, committed=True)
    with pytest.raises(InvalidProducerEpochError):
        mark(cluster, 1, committed=False)
    cluster.replicate()
    assert shown(cluster) == [11]


def test_bug_24_a_marker_is_written_once_and_its_repetition_waits_until_it_is_committed() -> None:
    cluster = Cluster()
    write(cluster, 10)
    first = mark(cluster, 1, committed=True)
    again = mark(cluster, 1, committed=True)
    assert cluster.replica(1).log_end_offset == 2
    assert not first.answered
    assert not again.answered
    cluster.replicate()
    assert first.base_offset == 1
    assert again.base_offset is not None


def test_bug_24_a_confirmation_is_forgotten_at_the_marker() -> None:
    """The next epoch's batch asks again, although the coordinator was asked a moment ago."""
    cluster = Cluster()
    write(cluster, 10)
    mark(cluster, 1, committed=True)
    assert cluster.append(1, 11, producer=sent(epoch=1)).awaits


def test_bug_24_a_confirmation_is_forgotten_at_a_new_leadership() -> None:
    cluster = Cluster()
    write(cluster, 10)
    cluster.replicate()
    cluster.elect(2)
    cluster.settle()
    cluster.elect(1)
    cluster.settle()
    assert cluster.append(1, 11, producer=sent(1)).awaits


def test_bug_24_a_confirmation_that_comes_after_the_marker_or_the_leadership_is_nothing() -> None:
    cluster = Cluster()
    leader = cluster.replica(1)
    assert cluster.append(1, 10, producer=sent()).awaits
    mark(cluster, 1, committed=False)
    leader.transaction_confirmed(0, PID, 0, cluster.now_ms)
    with pytest.raises(InvalidProducerEpochError):
        cluster.append(1, 10, producer=sent())
    cluster.replicate()
    cluster.elect(2)
    cluster.settle()
    cluster.elect(1)
    leader.transaction_confirmed(0, PID, 1, cluster.now_ms)
    assert cluster.append(1, 11, producer=sent(epoch=1)).awaits


def test_bug_24_the_last_stable_offset_moves_on_once_transactions_end() -> None:
    cluster = Cluster()
    write(cluster, 10)
    write(cluster, 20, pid=OTHER)
    cluster.append(1, 30)
    cluster.replicate()
    assert stable(cluster) == 0
    mark(cluster, 1, committed=False)
    cluster.replicate()
    assert stable(cluster) == 1
    mark(cluster, 1, committed=True, pid=OTHER)
    cluster.replicate()
    assert stable(cluster) == 5
    assert shown(cluster) == shown(cluster, 2) == [20, 30]


def test_the_last_stable_offset_is_never_above_the_high_watermark() -> None:
    cluster = Cluster()
    cluster.append(1, 10)
    write(cluster, 11)
    assert (stable(cluster), cluster.replica(1).high_watermark) == (0, 0)
    cluster.replicate()
    assert (stable(cluster), cluster.replica(1).high_watermark) == (1, 2)


def test_a_transaction_is_undecided_while_its_marker_is_above_the_high_watermark() -> None:
    cluster = Cluster()
    write(cluster, 10)
    cluster.replicate()
    mark(cluster, 1, committed=True)
    assert stable(cluster) == 0
    cluster.fetch(2)
    cluster.fetch(3)
    assert stable(cluster) == 0, "they have asked for it, and have not said that they have it"
    cluster.replicate()
    assert stable(cluster) == 2


def test_a_marker_that_is_cut_off_leaves_the_transaction_open() -> None:
    cluster = Cluster()
    write(cluster, 10)
    cluster.replicate()
    cluster.controller.fence(1)
    cluster.deliver(2)
    cluster.deliver(3)
    mark(cluster, 1, committed=True)  # the deposed leader does not know of its successor
    assert stable(cluster) == 0
    cluster.controller.unfence(1)
    cluster.settle()
    assert stable(cluster, 2) == stable(cluster, 1) == 0
    assert cluster.replica(1).producers.transactions.first_offset(PID) == 0
    mark(cluster, 1, committed=False, broker=2)
    cluster.settle()
    assert stable(cluster, 1) == cluster.replica(1).log_end_offset
    assert shown(cluster, 1) == shown(cluster, 2) == []


def test_after_a_restart_a_marker_above_the_checkpoint_decides_nothing_yet() -> None:
    cluster = Cluster()
    write(cluster, 10)
    cluster.replicate()
    cluster.checkpoint(2)
    mark(cluster, 1, committed=True)
    cluster.replicate()
    assert stable(cluster, 2) == 2
    cluster.crash(2)
    cluster.start(2)
    assert (cluster.replica(2).high_watermark, stable(cluster, 2)) == (1, 0)
    cluster.settle()
    assert stable(cluster, 2) == 2


def test_a_new_leader_shows_no_last_stable_offset_before_it_knows_what_is_committed() -> None:
    """14, KIP-207: the latest offset never falls for readers of committed records, either."""
    cluster = Cluster()
    write(cluster, 10)
    mark(cluster, 1, committed=True)
    cluster.replicate()
    before = cluster.replica(1).latest_offset(0, read_committed=True)
    write(cluster, 11, epoch=1)
    cluster.replicate()
    cluster.elect(2)
    cluster.settle()
    assert before == 2
    assert cluster.replica(2).latest_offset(1, read_committed=True) == 2
    assert cluster.replica(2).latest_offset(1) == 3


def test_a_read_beyond_the_last_stable_offset_gets_nothing_and_no_error() -> None:
    cluster = Cluster()
    write(cluster, 10)
    cluster.replicate()
    leader = cluster.replica(1)
    assert leader.check_read(0, 0, read_committed=True) == 0
    assert leader.check_read(0, 1, read_committed=True) == 1
    assert leader.check_read(0, 0) == 1


def test_bug_15_retention_at_a_leader_keeps_what_is_undecided() -> None:
    cluster = Cluster()
    cluster.append(1, 9)
    write(cluster, 10)
    write(cluster, 11, 1)
    cluster.replicate()
    cluster.advance_log_start(1, 2)
    assert cluster.replica(1).log_start_offset == 0
    cluster.advance_log_start(1, 1)
    assert cluster.replica(1).log_start_offset == stable(cluster) == 1


def test_bug_15_a_follower_that_hears_of_a_log_start_has_no_last_stable_offset_below_it() -> None:
    """KAFKA-9491: its high watermark is raised to the log start, past which it does not know the decisions."""
    cluster = Cluster()
    write(cluster, 10)
    write(cluster, 11, 1)
    mark(cluster, 1, committed=False)
    cluster.replicate(2, 3, rounds=1)
    cluster.replicate(2, 3, rounds=1)
    cluster.crash(3)
    cluster.start(3)
    replica = cluster.replica(3)
    assert (replica.high_watermark, replica.log_end_offset) == (0, 3)
    replica.fetched(Fetched(replica.fetch_position(), 0, high_watermark=3, log_start_offset=1))
    assert (replica.high_watermark, replica.last_stable_offset) == (1, 1)


def test_bug_19_state_after_truncation_and_reload_is_that_of_the_log() -> None:
    cluster = Cluster()
    write(cluster, 10)
    cluster.replicate()
    cluster.controller.fence(1)
    cluster.deliver(2)
    cluster.deliver(3)
    write(cluster, 11, 1)
    mark(cluster, 1, committed=False)
    write(cluster, 12, epoch=1)
    cluster.controller.unfence(1)
    cluster.settle()
    for broker in (1, 2, 3):
        assert cluster.replica(broker).producers == cluster.nodes[broker].log.rebuilt_producers()
        assert cluster.replica(broker).producers.transactions.ongoing() == [(PID, 0)]
    cluster.crash(1)
    cluster.start(1)
    assert cluster.replica(1).producers == cluster.replica(2).producers


def test_bug_20_retention_erases_neither_producers_nor_what_is_left_of_an_aborted_transaction() -> None:
    cluster = Cluster()
    write(cluster, 10)
    write(cluster, 11, 1)
    mark(cluster, 1, committed=False)
    cluster.replicate()
    cluster.advance_log_start(1, 1)
    cluster.replicate()
    cluster.crash(1)
    cluster.start(1)
    cluster.settle()
    for broker in (1, 2, 3):
        replica = cluster.replica(broker)
        assert (replica.log_start_offset, shown(cluster, broker)) == (1, [])
        assert [pid for pid, _ in replica.producers.entries()] == [PID]


def test_bug_20_an_unknown_producer_does_not_begin_in_the_middle_and_an_open_transactions_is_not_forgotten() -> None:
    cluster = Cluster()
    write(cluster, 10)
    cluster.tick(1000)
    leader = cluster.replica(1)
    assert leader.expire_producers(cluster.now_ms, cluster.now_ms) == []
    mark(cluster, 1, committed=True)
    assert leader.expire_producers(cluster.now_ms, cluster.now_ms) == []
    assert leader.expire_producers(cluster.now_ms + 1, cluster.now_ms + 1) == [PID]
    with pytest.raises(UnknownProducerIdError):
        cluster.append(1, 11, producer=sent(3, epoch=1))


def test_bug_20_a_forgotten_producer_that_begins_anew_is_remembered_as_the_log_says() -> None:
    """A replica that replays its older batches too, as at the next start, has the same state."""
    forgot, whole = ProducerStates(), ProducerStates()
    batches = [BatchInfo(offset, offset + 1, 0, offset, PID, 0, offset) for offset in range(7)]
    for batch in batches:
        forgot.replay(batch)
        whole.replay(batch)
    assert forgot.expire(100, 100) == [PID]
    anew = BatchInfo(7, 8, 0, 200, PID, 1, 0)
    forgot.replay(anew)
    whole.replay(anew)
    assert forgot == whole


def test_bug_21_followers_take_what_the_leader_has_without_judging_it() -> None:
    cluster = Cluster()
    write(cluster, 10)
    cluster.append_unjudged(1, 11, sent(7))
    cluster.append_unjudged(1, 12, sent(3, epoch=4))
    cluster.replicate()
    assert cluster.replica(2).producers == cluster.replica(3).producers == cluster.replica(1).producers


def test_bug_22_a_retry_after_a_failover_and_retention_has_its_original_offset() -> None:
    cluster = Cluster()
    cluster.append(1, 9)
    write(cluster, 10)
    mark(cluster, 1, committed=True)
    write(cluster, 11, epoch=1)
    cluster.replicate()
    cluster.advance_log_start(1, 3)
    cluster.elect(3)
    cluster.settle()
    assert cluster.append(3, 11, producer=sent(epoch=1)).base_offset == 3


def test_bug_23_a_number_used_again_after_an_abort_is_no_duplicate() -> None:
    cluster = Cluster()
    write(cluster, 10)
    mark(cluster, 1, committed=False)
    again = write(cluster, 11, epoch=1)
    mark(cluster, 2, committed=True)
    cluster.replicate()
    assert again.base_offset == 2
    assert shown(cluster) == [11]


def test_bug_23_after_a_marker_numbers_begin_at_0() -> None:
    cluster = Cluster()
    write(cluster, 10)
    mark(cluster, 1, committed=True)
    with pytest.raises(OutOfOrderSequenceNumberError):
        cluster.append(1, 11, producer=sent(1, epoch=1))


def test_the_index_knows_exactly_the_batches_between_an_aborted_beginning_and_its_marker() -> None:
    index = TransactionIndex()
    for first, marker, aborted in [(2, 5, True), (7, 9, False), (11, 15, True)]:
        index.began(PID, first)
        index.began(PID, first + 1)
        index.ended(PID, marker, aborted=aborted)
    assert index.aborted() == [AbortedTransaction(PID, 2, 5), AbortedTransaction(PID, 11, 15)]
    assert [offset for offset in range(17) if index.is_aborted(PID, offset)] == [2, 3, 4, 5, 11, 12, 13, 14, 15]
    assert not any(index.is_aborted(OTHER, offset) for offset in range(17))


def test_a_marker_without_a_transaction_ends_nothing() -> None:
    index = TransactionIndex()
    index.ended(PID, 3, aborted=True)
    assert index.aborted() == []
    assert index.last_stable_offset(10) == 10


def test_the_index_keeps_markers_only_until_they_are_committed() -> None:
    """A follower does not collect them, although no reader asks it for offsets."""
    index = TransactionIndex()
    for number in range(10):
        index.began(PID, 2 * number)
        index.ended(PID, 2 * number + 1, aborted=False)
    index.committed(20)
    assert [index.last_stable_offset(mark) for mark in (0, 7, 20)] == [0, 7, 20]
    assert index == TransactionIndex()


def test_a_loaded_index_is_in_order_whatever_the_order_of_the_file() -> None:
    index = TransactionIndex([(OTHER, 9), (PID, 4)], [AbortedTransaction(PID, 3, 4), AbortedTransaction(PID, 0, 1)])
    assert index.ongoing() == [(PID, 4), (OTHER, 9)]
    assert index.last_stable_offset(20) == 4
    assert [offset for offset in range(6) if index.is_aborted(PID, offset)] == [0, 1, 3, 4]


def test_a_replica_that_does_not_lead_awaits_nothing() -> None:
    cluster = Cluster()
    follower = cluster.replica(2)
    follower.transaction_confirmed(0, PID, 0, 0)
    with pytest.raises(NotLeaderOrFollowerError):
        follower.prepare_append(0, ACKS_ALL, PID, 0, 0, transactional=True)
    granted = cluster.replica(1).prepare_append(0, ACKS_ALL, PID, 0, 0, transactional=True)
    assert isinstance(granted, AwaitTransaction)
