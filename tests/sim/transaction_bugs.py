"""Known bugs of transactions, put back into production code: known bugs 19 to 24, and what a coordinator can do wrong.

`forget_confirmation` (core.leadership) is not here: without it, the epoch that a marker begins refuses a late batch all
the same. It matters only where that epoch has expired, which takes longer than a coordinator's confirmation holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from spark_broker.broker import marker_queue, partition_reader
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.core import transaction_coordinator, transaction_producers
from spark_broker.core.batch import BatchInfo
from spark_broker.core.leadership import Leadership
from spark_broker.core.producers import ProducerStates
from spark_broker.core.replica import Replica
from spark_broker.core.transaction_changes import NO_VERSION, Ending, Initialized
from spark_broker.core.transaction_coordinator import (
    AnswerRequest,
    AppendRecords,
    Effect,
    TransactionShard,
)
from spark_broker.core.transaction_decision import Answered, Decision, Resources
from spark_broker.core.transaction_index import TransactionIndex
from spark_broker.core.transaction_state import MarkerTarget, TransactionMetadata, TransactionState
from spark_broker.protocol.messages import (
    InitProducerIdResponse,
    InitTransactionsRequest,
    WriteTransactionMarkersResponse,
)
from spark_broker.storage.producer_snapshots import ProducerSnapshots
from tests.sim import bugs
from tests.sim.kinds import has_single_use, has_transactions

Patch = pytest.MonkeyPatch

bug = partial(bugs.bug, shows=has_transactions)


def keep_sequence_numbers_over_a_marker(patch: Patch) -> None:
    """Known bug 23: a number used again after an abort is taken for a duplicate of the aborted batch."""
    replay = ProducerStates.replay

    def buggy(self: ProducerStates, batch: BatchInfo) -> None:
        before = self._entries.get(batch.producer_id)
        replay(self, batch)
        if batch.control and before is not None:
            self._entries[batch.producer_id] = self._entries[batch.producer_id]._replace(batches=before.batches)

    patch.setattr(ProducerStates, "replay", buggy)


@bug("23")
def take_a_number_of_an_aborted_batch_for_a_duplicate(patch: Patch) -> None:
    """The batches before a marker are still remembered after it."""
    keep_sequence_numbers_over_a_marker(patch)
    patch.setattr(ProducerStates, "check_marker", lambda self, producer, epoch: not self.is_fenced(producer, epoch))


@bug("24", quick=False)
def let_a_late_marker_end_a_newer_transaction(patch: Patch) -> None:
    """KIP-890: nobody looks at a marker's epoch."""
    patch.setattr(ProducerStates, "check_marker", lambda self, producer_id, producer_epoch: True)


@bug("24", quick=False)
def write_no_marker_where_nothing_was_appended(patch: Patch) -> None:
    """KIP-890: a batch that is still on its way meets no new epoch, and hangs for ever."""
    check = ProducerStates.check_marker

    def buggy(self: ProducerStates, producer_id: int, producer_epoch: int) -> bool:
        return producer_id in self._entries and check(self, producer_id, producer_epoch)

    patch.setattr(ProducerStates, "check_marker", buggy)


@bug("24")
def begin_no_epoch_with_a_marker(patch: Patch) -> None:
    """KIP-890: a marker is of the epoch that it ends, and a late batch joins the next transaction."""
    markers = TransactionMetadata.markers

    def buggy(self: TransactionMetadata) -> list[MarkerTarget]:
        return [replace(target, producer_epoch=target.producer_epoch - 1) for target in markers(self)]

    def check(self: ProducerStates, producer_id: int, producer_epoch: int) -> bool:
        return not self.is_fenced(producer_id, producer_epoch)

    patch.setattr(TransactionMetadata, "markers", buggy)
    patch.setattr(ProducerStates, "check_marker", check)


@bug("24")
def take_an_uncommitted_marker_for_a_decision(patch: Patch) -> None:
    """The last stable offset passes a transaction whose marker may be lost with its leader."""
    ended = TransactionIndex.ended

    def buggy(self: TransactionIndex, producer_id: int, marker_offset: int, *, aborted: bool) -> None:
        ended(self, producer_id, marker_offset, aborted=aborted)
        self._ended.clear()

    patch.setattr(TransactionIndex, "ended", buggy)


@bug("19", quick=False)
def lose_aborted_transactions_at_a_restart(patch: Patch) -> None:
    """A producer snapshot says nothing of aborted transactions."""
    newest = ProducerSnapshots.newest

    def buggy(self, *args):  # type: ignore[no-untyped-def]
        snapshot = newest(self, *args)
        if snapshot is not None:
            snapshot[1].transactions = TransactionIndex(snapshot[1].transactions.ongoing())
        return snapshot

    patch.setattr(ProducerSnapshots, "newest", buggy)


@bug("19", quick=False)
def begin_with_a_snapshot_above_the_high_watermark(patch: Patch) -> None:
    """A marker between the high watermark and the snapshot counts as committed."""

    def buggy(self: ReplicaLog, high_watermark: int) -> ProducerStates:
        del high_watermark
        return self._replay(self.log_end_offset, self.log_end_offset)

    patch.setattr(ReplicaLog, "rebuild_producers", buggy)


@bug("24")
def store_batches_of_unconfirmed_transactions(patch: Patch) -> None:
    """KIP-890: nobody asks the coordinator, so nobody sends the marker."""
    patch.setattr(Leadership, "is_confirmed", lambda self, producer_id, producer_epoch, now_ms: True)


@bug("24")
def show_what_is_undecided(patch: Patch) -> None:
    """Readers of committed records get all that is below the high watermark."""
    check = Replica.check_read

    def buggy(self: Replica, leader_epoch: int, offset: int, *, read_committed: bool = False) -> int:
        del read_committed
        return check(self, leader_epoch, offset)

    patch.setattr(Replica, "check_read", buggy)


@bug("24")
def show_what_was_aborted(patch: Patch) -> None:
    """Readers of committed records get aborted batches too."""
    is_left_out = partition_reader.is_left_out
    patch.setattr(
        partition_reader, "is_left_out", lambda header, replica, **_: is_left_out(header, replica, read_committed=False)
    )


@bug("24", quick=False)
def send_markers_before_the_decision_is_committed(patch: Patch) -> None:
    """The decision may be lost with the leader, and the next one may decide otherwise."""
    appended = TransactionShard.appended

    def buggy(self: TransactionShard, append: AppendRecords, now_ms: int) -> list[Effect]:
        effects = appended(self, append, now_ms)
        if any(isinstance(change, Ending) for change in append.changes):
            held = (answer for answer in self._held if isinstance(answer, transaction_coordinator._HeldAnswer))
            self._held = deque(held)
            effects = [*effects, *self._mark(append.transactional_id)]
        return effects

    patch.setattr(TransactionShard, "appended", buggy)


@bug("24")
def answer_before_the_record_is_committed(patch: Patch) -> None:
    """What a client was told may never have happened."""
    patch.setattr(TransactionShard, "_answer", lambda self, waiting, answer: [AnswerRequest(waiting.token, answer)])


def _after_loading(patch: Patch, change: Callable[[TransactionShard, TransactionMetadata], None]) -> None:
    """A new leader of the shard has `change` made to what it read."""
    restore = TransactionShard._restore

    def buggy(self: TransactionShard) -> None:
        restore(self)
        for transaction in self.transactions.values():
            change(self, transaction)

    patch.setattr(TransactionShard, "_restore", buggy)


@bug("24", quick=False)
def swap_winners_and_losers_at_a_fail_over(patch: Patch) -> None:
    """The next coordinator commits the losers."""

    def swap(shard: TransactionShard, found: TransactionMetadata) -> None:
        del shard
        if found.state is TransactionState.PREPARE_COMMIT and found.grouped:
            found.winners = frozenset(found.writers) - found.winners

    _after_loading(patch, swap)


@bug("24", quick=False)
def forget_the_last_version_at_a_fail_over(patch: Patch) -> None:
    """The next coordinator lets a version be committed once more."""

    def forget(shard: TransactionShard, found: TransactionMetadata) -> None:
        del shard
        found.last_committed = NO_VERSION

    _after_loading(patch, forget)


@partial(bugs.bug, shows=has_single_use)("24")
def forget_every_application(patch: Patch) -> None:
    """An application is forgotten as if it had one version, and commits a version once more."""

    def buggy(self: TransactionShard, transaction: TransactionMetadata, now_ms: int) -> bool:
        return transaction.grouped and now_ms - transaction.active_ms >= self._resources.timeout_max_ms

    patch.setattr(TransactionShard, "_is_expired", buggy)


@bug("24", quick=False)
def abort_what_was_decided_at_a_fail_over(patch: Patch) -> None:
    """The next coordinator aborts what its predecessor had decided to commit."""

    def abort(shard: TransactionShard, found: TransactionMetadata) -> None:
        del shard
        if found.state is TransactionState.PREPARE_COMMIT:
            found.state, found.winners = TransactionState.PREPARE_ABORT, frozenset()

    _after_loading(patch, abort)


@bug("24")
def forget_open_transactions_at_a_fail_over(patch: Patch) -> None:
    """The next coordinator never times them out: they hold up readers for ever."""
    _after_loading(patch, lambda shard, found: shard._open.clear())


@bug("24", quick=False)
def take_any_answer_for_a_marker(patch: Patch) -> None:
    """A marker that a leader refused counts as written."""

    def buggy(answer: WriteTransactionMarkersResponse) -> set[tuple[int, str, int]]:
        return {(result.producer_id, result.topic_id, result.partition) for result in answer.results}

    patch.setattr(marker_queue, "_done", buggy)


@bug("24", quick=False)
def give_a_new_producer_the_epoch_of_the_old(patch: Patch) -> None:
    """A zombie is not fenced: it writes on in its successor's transaction."""
    initialize = transaction_producers.initialize

    def buggy(found: TransactionMetadata | None, request: InitTransactionsRequest, resources: Resources) -> Decision:
        decision = initialize(found, request, resources)
        if found is None or not isinstance(decision, Answered):
            return decision
        same = InitProducerIdResponse(found.identity.producer_id, found.identity.producer_epoch)
        return Answered(same, (Initialized(same.producer_id, same.producer_epoch, request.timeout_ms),))

    patch.setattr(transaction_producers, "initialize", buggy)


@bug("24")
def commit_losers_too(patch: Patch) -> None:
    """Whoever has joined is committed, whether it won or not."""
    markers = TransactionMetadata.markers

    def buggy(self: TransactionMetadata) -> list[MarkerTarget]:
        return [replace(target, committed=self.committing) for target in markers(self)]

    patch.setattr(TransactionMetadata, "markers", buggy)


@bug("24")
def end_a_transaction_before_its_markers(patch: Patch) -> None:
    """The next transaction begins while partitions still show the last one as open."""
    mark = TransactionShard._mark

    def buggy(self: TransactionShard, transactional_id: str) -> list[Effect]:
        effects = mark(self, transactional_id)
        if self._unmarked.pop(transactional_id, None) is None:
            return effects
        return [*effects, *self._end(transactional_id)]

    patch.setattr(TransactionShard, "_mark", buggy)
