"""Each known bug, put in on purpose, is found by the random schedules: otherwise they would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import pytest

from spark_broker.core import replica
from spark_broker.core.batch import NO_PRODUCER, BatchInfo
from spark_broker.core.divergence import Diverging, FetchPosition
from spark_broker.core.effects import Effect, ProposeIsr, SaveEpochs
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.events import Fetched
from spark_broker.core.leadership import Leadership
from spark_broker.core.producers import ProducerStates
from spark_broker.core.replica import Replica, Role
from spark_broker.errors import IneligibleReplicaError
from tests.support.sensitivity import Hunts, hunting_for_selected
from tests.unit.core.checker import ViolationError
from tests.unit.core.model_controller import ModelController
from tests.unit.core.schedule import run

SCHEDULES_MAX = 800

Patch = pytest.MonkeyPatch


def truncate_by_own_high_watermark(patch: Patch) -> None:
    """1, KIP-101: a new epoch's follower goes back to what it knows to be committed."""
    follow = Replica._follow

    def buggy(self: Replica) -> list[Effect]:
        return [*follow(self), *self.truncate_to(self.high_watermark)]

    patch.setattr(Replica, "_follow", buggy)


def never_truncate(patch: Patch) -> None:
    """2 and 6: a new epoch's follower goes on from its log end, wherever the logs part."""

    def buggy(epochs: EpochHistory, log_end_offset: int, position: FetchPosition) -> Diverging | None:
        del epochs
        return None if position.fetch_offset <= log_end_offset else Diverging(-1, log_end_offset)

    patch.setattr(replica, "find_divergence", buggy)


def cut_at_the_leaders_end_only(patch: Patch) -> None:
    """2, KIP-279: the follower's own end of the epoch is not looked at."""

    def buggy(epochs: EpochHistory, log_end_offset: int, diverging: Diverging) -> int:
        del epochs
        return min(diverging.end_offset, log_end_offset)

    patch.setattr(replica, "truncation_offset", buggy)


def leave_conflicting_epochs(patch: Patch) -> None:
    """3, KAFKA-10706: the history keeps what begins at or past the log end."""
    patch.setattr(EpochHistory, "truncate_to", lambda self, _: self)


def leave_epochs_past_the_log_end_on_disk(patch: Patch) -> None:
    """3: what a leader that wrote nothing has left in the file comes back at the next start."""

    def buggy(self: Replica, history: EpochHistory) -> list[Effect]:
        if history == self.epochs:
            return []
        self.epochs = history
        return [SaveEpochs(history)]

    patch.setattr(Replica, "_set_epochs", buggy)


def take_late_answers(patch: Patch) -> None:
    """2: a divergence that was found before the log was cut and filled again cuts it once more."""

    def buggy(self: Replica, answer: Fetched) -> bool:
        return self.role is Role.FOLLOWER and answer.leader_epoch == self.assignment.leader_epoch

    patch.setattr(Replica, "awaits", buggy)


def count_the_current_isr_only(patch: Patch) -> None:
    """10: the high watermark does not wait for proposed members."""
    patch.setattr(Leadership, "maximal_isr", property(lambda self: frozenset(self._assignment.isr)))


def take_a_stale_answer_for_a_refusal(patch: Patch) -> None:
    """10: a proposal that was taken, its answer lost, is forgotten when its repetition is refused."""
    refused = Replica.isr_refused

    def buggy(self: Replica, leader_epoch: int, partition_epoch: int, error_code: int) -> list[Effect]:
        del error_code
        return refused(self, leader_epoch, partition_epoch, IneligibleReplicaError.code)

    patch.setattr(Replica, "isr_refused", buggy)


def commit_below_the_minimum(patch: Patch) -> None:
    """10, KIP-966: the high watermark moves however small the ISR is."""
    patch.setattr(Replica, "effective_min_isr", property(lambda self: 0))


def join_without_the_epoch_start(patch: Patch) -> None:
    """11: a new leader's own high watermark is all that a joining follower must have."""
    grow = Leadership.grow

    def buggy(self: Leadership, follower: int, live: Mapping[int, int], high_watermark: int) -> list[ProposeIsr]:
        start, self.epoch_start_offset = self.epoch_start_offset, 0
        effects = grow(self, follower, live, high_watermark)
        self.epoch_start_offset = start
        return effects

    patch.setattr(Leadership, "grow", buggy)


def show_a_new_leaders_high_watermark_at_once(patch: Patch) -> None:
    """14, KIP-207: the latest offset falls."""
    patch.setattr(Replica, "latest_offset", lambda self, _, **__: self.high_watermark)


def keep_producers_over_a_cut(patch: Patch) -> None:
    """19, KAFKA-5435: the state is not rebuilt after truncation."""
    rebuilt = Replica.producers_rebuilt

    def buggy(self: Replica, producers: ProducerStates, log_end_offset: int) -> list[Effect]:
        del producers
        return rebuilt(self, self.producers, log_end_offset)

    patch.setattr(Replica, "producers_rebuilt", buggy)


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
    """12, KIP-966: what a replica lost with its machine does not end its eligibility."""
    change = ModelController._change

    def buggy(self: ModelController, leader: int, isr: tuple[int, ...], lost: Collection[int] = ()) -> None:
        change(self, leader, isr, () if set(lost) & set(self.metadata.elr) else lost)

    patch.setattr(ModelController, "_change", buggy)


def stay_eligible_beside_a_full_isr(patch: Patch) -> None:
    """12, KIP-966: high watermarks move on without those that are still eligible."""
    of = ModelController.of

    def buggy(replicas: tuple[int, ...], min_insync_replicas: int) -> ModelController:
        del min_insync_replicas
        return of(replicas, 99)

    patch.setattr(ModelController, "of", staticmethod(buggy))


BUGS: list[Callable[[Patch], None]] = [
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
    """After how many schedules the bug was found; 0: it was not."""
    put_in = next(bug for bug in BUGS if bug.__name__ == name)
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch)
        for seed in range(schedules):
            try:
                run(seed)
            except ViolationError:
                return {"after": seed + 1}
    return {"after": 0}


@pytest.fixture(scope="module")
def hunts(request: pytest.FixtureRequest) -> Iterator[Hunts]:
    """All of them, on all cores."""
    yield from hunting_for_selected(request, find)


@pytest.mark.parametrize(("name", "tries"), [(bug.__name__, SCHEDULES_MAX) for bug in BUGS])
def test_random_schedules_find_the_bug(name: str, tries: int, hunts: Hunts) -> None:
    assert hunts[name].result()["after"], f"{tries} schedules did not find it"
