"""The random schedules find each known bug that is put in on purpose: otherwise they would prove nothing."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from spark_broker.core.batch import NO_PRODUCER, BatchInfo
from spark_broker.core.effects import Effect, SaveEpochs
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.replica import Replica, Role
from tests.sim.bugs import (
    commit_below_the_minimum,
    count_the_current_isr_only,
    cut_at_the_leaders_end_only,
    join_without_the_epoch_start,
    keep_producers_over_a_cut,
    leave_conflicting_epochs,
    never_truncate,
    show_a_new_leaders_high_watermark_at_once,
    take_a_stale_answer_for_a_refusal,
    take_late_answers,
    truncate_by_own_high_watermark,
)
from tests.support.sensitivity import Hunts
from tests.unit.core.hunt import PutIn, hunt
from tests.unit.core.model_controller import ModelController

SCHEDULES_MAX = 800

Patch = pytest.MonkeyPatch


def leave_epochs_past_the_log_end_on_disk(patch: Patch) -> None:
    """3: the epoch of a leader that wrote nothing stays in the file and comes back at the next start."""

    def buggy(self: Replica, history: EpochHistory) -> list[Effect]:
        if history == self.epochs:
            return []
        self.epochs = history
        return [SaveEpochs(history)]

    patch.setattr(Replica, "_set_epochs", buggy)


def judge_sequence_numbers_at_followers(patch: Patch) -> None:
    """21, KAFKA-6003: a follower refuses what its leader has accepted."""
    remember = Replica._remember

    def buggy(self: Replica, batch: BatchInfo) -> None:
        if self.role is Role.FOLLOWER and batch.producer_id != NO_PRODUCER and not batch.control:
            self.producers.check(
                batch.producer_id, batch.producer_epoch, batch.sequence, transactional=batch.transactional
            )
        remember(self, batch)

    patch.setattr(Replica, "_remember", buggy)


def stay_eligible_after_a_machine_crash(patch: Patch) -> None:
    """12, KIP-966: a replica that lost records with its machine stays eligible."""
    change = ModelController._change

    def buggy(self: ModelController, leader: int, isr: tuple[int, ...], lost: Collection[int] = ()) -> None:
        change(self, leader, isr, () if set(lost) & set(self.metadata.elr) else lost)

    patch.setattr(ModelController, "_change", buggy)


def stay_eligible_beside_a_full_isr(patch: Patch) -> None:
    """12, KIP-966: high watermarks advance without replicas that stay eligible."""
    of = ModelController.of

    def buggy(replicas: tuple[int, ...], min_insync_replicas: int) -> ModelController:
        del min_insync_replicas
        return of(replicas, 99)

    patch.setattr(ModelController, "of", staticmethod(buggy))


BUGS: list[PutIn] = [
    stay_eligible_after_a_machine_crash,
    stay_eligible_beside_a_full_isr,
    truncate_by_own_high_watermark,
    never_truncate,
    cut_at_the_leaders_end_only,
    leave_conflicting_epochs,
    leave_epochs_past_the_log_end_on_disk,
    take_late_answers,
    count_the_current_isr_only,
    take_a_stale_answer_for_a_refusal,
    commit_below_the_minimum,
    join_without_the_epoch_start,
    show_a_new_leaders_high_watermark_at_once,
    keep_producers_over_a_cut,
    judge_sequence_numbers_at_followers,
]


def find(name: str, schedules: int) -> dict[str, object]:
    """How many schedules it took to find the bug; 0 if none found it."""
    return hunt(BUGS, name, schedules)


FIND = find

pytestmark = pytest.mark.slow  # hunts on all cores, in processes of their own


@pytest.mark.parametrize(("name", "tries"), [(bug.__name__, SCHEDULES_MAX) for bug in BUGS])
def test_random_schedules_find_the_bug(name: str, tries: int, hunts: Hunts) -> None:
    assert hunts[name].result()["after"], f"{tries} schedules did not find it"
