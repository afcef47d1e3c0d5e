"""The random schedules find each known bug of producers and transactions that is put in on purpose."""

from __future__ import annotations

import pytest

from spark_broker.core.batch import BatchInfo
from spark_broker.core.effects import Effect
from spark_broker.core.leadership import Leadership
from spark_broker.core.producers import ProducerStates, StoredBatch
from spark_broker.core.replica import Replica
from spark_broker.core.transaction_index import TransactionIndex
from spark_broker.errors import OutOfOrderSequenceNumberError, UnknownProducerIdError
from tests.sim.transaction_bugs import keep_sequence_numbers_over_a_marker
from tests.support.sensitivity import Hunts, near
from tests.unit.core.hunt import PutIn, hunt

SCHEDULES_MAX = 800

Patch = pytest.MonkeyPatch


def forget_where_transactions_began_over_a_cut(patch: Patch) -> None:
    """19, KAFKA-5435: after a truncation, open transactions are taken for decided."""
    rebuilt = Replica.truncated

    def buggy(self: Replica, producers: ProducerStates, log_end_offset: int) -> list[Effect]:
        return rebuilt(self, ProducerStates(producers.entries()), log_end_offset)

    patch.setattr(Replica, "truncated", buggy)


def begin_at_any_number(patch: Patch) -> None:
    """20: a producer may begin at any number, so a lost batch leaves a gap that is not noticed."""
    check = ProducerStates.check

    def buggy(
        self: ProducerStates, producer_id: int, producer_epoch: int, sequence: int, *, transactional: bool = False
    ) -> StoredBatch | None:
        try:
            return check(self, producer_id, producer_epoch, sequence, transactional=transactional)
        except (UnknownProducerIdError, OutOfOrderSequenceNumberError):
            return None

    patch.setattr(ProducerStates, "check", buggy)


def forget_producers_with_open_transactions(patch: Patch) -> None:
    """20: an idle transaction's producer expires, and its retries are no longer recognised."""

    def buggy(self: ProducerStates, before_ms: int, _: int) -> list[int]:
        idle = [pid for pid, entry in self._entries.items() if entry.last_append_ms < before_ms]
        for producer_id in idle:
            del self._entries[producer_id]
        return idle

    patch.setattr(ProducerStates, "expire", buggy)


def leave_the_epoch_as_it_was_at_a_marker(patch: Patch) -> None:
    """24, KIP-890: a marker does not fence batches that the ended transaction still sends."""
    replay = ProducerStates.replay

    def buggy(self: ProducerStates, batch: BatchInfo) -> None:
        before = self._entries.get(batch.producer_id)
        replay(self, batch)
        if batch.control and before is not None:
            self._entries[batch.producer_id] = before

    patch.setattr(ProducerStates, "replay", buggy)


def take_any_marker(patch: Patch) -> None:
    """24: a late marker ends the transaction that came after its own."""
    patch.setattr(ProducerStates, "check_marker", lambda *_: True)


def append_without_the_coordinator(patch: Patch) -> None:
    """24, KIP-890: a late batch of a transaction that is over waits for a marker that never comes."""
    patch.setattr(Leadership, "is_confirmed", lambda *_: True)


def take_a_confirmation_for_every_epoch(patch: Patch) -> None:
    """24: the coordinator's confirmation of one transaction also admits batches of the next, unknown one."""

    def buggy(self: Leadership, producer_id: int, producer_epoch: int, now_ms: int) -> bool:
        del producer_epoch, now_ms
        return producer_id in self._confirmed

    patch.setattr(Leadership, "is_confirmed", buggy)
    patch.setattr(Leadership, "forget_confirmation", lambda *_: None)


def decide_by_markers_that_are_not_committed(patch: Patch) -> None:
    """24: the last stable offset passes a marker that may yet be truncated."""

    def buggy(self: TransactionIndex, high_watermark: int) -> int:
        return min([high_watermark, *self._ongoing.values()])

    patch.setattr(TransactionIndex, "last_stable_offset", buggy)


def forget_aborted_transactions_that_began_before_the_log_start(patch: Patch) -> None:
    """20: an aborted transaction's records that retention has left are shown as committed."""

    def buggy(self: TransactionIndex, log_start_offset: int) -> None:
        for producer_id, aborted in self._aborted.items():
            self._aborted[producer_id] = [
                transaction for transaction in aborted if transaction.first_offset >= log_start_offset
            ]

    patch.setattr(TransactionIndex, "start_at", buggy)


def let_retention_leave_the_last_stable_offset_behind(patch: Patch) -> None:
    """15, KAFKA-9491."""

    def buggy(self: Replica) -> int:
        return self.producers.transactions.last_stable_offset(self.high_watermark)

    patch.setattr(Replica, "last_stable_offset", property(buggy))


BUGS: list[PutIn] = [
    forget_where_transactions_began_over_a_cut,
    begin_at_any_number,
    forget_producers_with_open_transactions,
    keep_sequence_numbers_over_a_marker,
    leave_the_epoch_as_it_was_at_a_marker,
    take_any_marker,
    append_without_the_coordinator,
    take_a_confirmation_for_every_epoch,
    decide_by_markers_that_are_not_committed,
    forget_aborted_transactions_that_began_before_the_log_start,
    let_retention_leave_the_last_stable_offset_behind,
]


def find(name: str, schedules: int, first_seed: int = 0) -> dict[str, object]:
    """How many schedules it took to find the bug; 0 if none found it."""
    return hunt(BUGS, name, schedules, first_seed, transactional=True)


def find_near(name: str, schedules: int) -> dict[str, object]:
    """`find`, from the seed that is recorded."""
    return find(name, schedules, near("core").get(name, 0))


FIND = find_near

pytestmark = pytest.mark.slow  # hunts in a process of its own


@pytest.mark.parametrize(("name", "tries"), [(bug.__name__, SCHEDULES_MAX) for bug in BUGS])
def test_random_schedules_find_the_bug(name: str, tries: int, hunts: Hunts) -> None:
    assert hunts[name].result()["after"], f"{tries} schedules did not find it"
