"""The random schedules find each known bug that is put in on purpose: otherwise they would prove nothing.

Here are those that the simulator cannot find, or too seldom; `tests/sim/bugs.py` has ten more of the same code.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from spark_broker.core.batch import NO_PRODUCER, BatchInfo
from spark_broker.core.effects import Effect, SaveEpochs
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.replica import Replica, Role
from spark_broker.errors import IneligibleReplicaError
from tests.support.sensitivity import Hunts, near
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


def take_a_stale_answer_for_a_refusal(patch: Patch) -> None:
    """10: a proposal that was taken, its answer lost, is forgotten when its repetition is refused."""
    refused = Replica.isr_refused

    def buggy(self: Replica, leader_epoch: int, partition_epoch: int, error_code: int) -> list[Effect]:
        del error_code
        return refused(self, leader_epoch, partition_epoch, IneligibleReplicaError.code)

    patch.setattr(Replica, "isr_refused", buggy)


BUGS: list[PutIn] = [
    stay_eligible_after_a_machine_crash,
    stay_eligible_beside_a_full_isr,
    leave_epochs_past_the_log_end_on_disk,
    judge_sequence_numbers_at_followers,
    take_a_stale_answer_for_a_refusal,
]


def find(name: str, schedules: int, first_seed: int = 0) -> dict[str, object]:
    """How many schedules it took to find the bug; 0 if none found it."""
    return hunt(BUGS, name, schedules, first_seed)


def find_near(name: str, schedules: int) -> dict[str, object]:
    """`find`, from the seed that is recorded."""
    return find(name, schedules, near("core").get(name, 0))


FIND = find_near

pytestmark = pytest.mark.slow  # hunts in a process of its own


@pytest.mark.parametrize(("name", "tries"), [(bug.__name__, SCHEDULES_MAX) for bug in BUGS])
def test_random_schedules_find_the_bug(name: str, tries: int, hunts: Hunts) -> None:
    assert hunts[name].result()["after"], f"{tries} schedules did not find it"
