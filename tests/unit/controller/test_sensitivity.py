"""The random stories find each known bug that is put in on purpose: otherwise they would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from spark_broker.controller import fencing, isr, partition_change, registration
from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.election import Election
from spark_broker.controller.image import MetadataImage, PartitionRegistration, TopicState
from spark_broker.controller.log_ends import Key, LogEnds
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import PartitionChangeRecord
from spark_broker.errors import InvariantError
from tests.support.sensitivity import Hunts
from tests.unit.controller.test_properties import ClusterMachine

STORIES_MAX = 2000

Patch = pytest.MonkeyPatch


def keep_a_last_member_after_a_machine_crash(patch: Patch) -> None:
    """12: the last replica stays in the ISR though it lost its tail, and is elected over a complete one."""

    def buggy(
        topic: TopicState,
        number: int,
        state: PartitionRegistration,
        *,
        leader: int,
        isr: tuple[int, ...],
        lost: Collection[int],
    ) -> PartitionChangeRecord | None:
        last = set(isr) <= set(lost)
        return change(topic, number, state, leader=leader, isr=isr, lost=() if last else lost)

    patch.setattr(registration, "change", buggy)


def keep_eligible_after_a_machine_crash(patch: Patch) -> None:
    """12: a replica stays eligible after it lost records."""
    original = partition_change._with_eligible

    def buggy(
        before: PartitionRegistration, target: PartitionRegistration, lost: Collection[int], damaged: Collection[int]
    ) -> PartitionRegistration:
        del lost
        return original(before, target, (), damaged)

    patch.setattr(partition_change, "_with_eligible", buggy)


def stay_eligible_beside_a_full_isr(patch: Patch) -> None:
    """12: the high watermark advances, and an eligible replica lacks what is committed since."""
    patch.setattr(partition_change, "min_insync_replicas", lambda topic: 99)


def elect_any_live_replica(patch: Patch) -> None:
    """16: an unclean election that was not permitted."""

    def buggy(state: PartitionRegistration, electable: Callable[[int], bool], disks: Disks = ALL_WELL) -> Election:
        del disks
        live = [broker for broker in state.replicas if electable(broker)]
        return Election(live[0], (live[0],)) if live else Election(-1, state.isr)

    patch.setattr(fencing, "elect", buggy)


def elect_the_last_replica_without_comparing_it(patch: Patch) -> None:
    """12: when no replica is known to be complete, the first that is back is taken for complete."""

    def buggy(
        self: LogEnds, image: MetadataImage, key: Key, state: PartitionRegistration
    ) -> dict[int, tuple[int, int]]:
        del self, image, key
        return dict.fromkeys(state.replicas, (0, 0))

    patch.setattr(LogEnds, "known", buggy)


def let_an_older_incarnation_join(patch: Patch) -> None:
    """9, KIP-903: a follower joins the ISR on what it had fetched before its machine crashed."""
    patch.setattr(isr, "_check_joins", lambda image, member: None)


BUGS: list[Callable[[Patch], None]] = [
    keep_a_last_member_after_a_machine_crash,
    keep_eligible_after_a_machine_crash,
    stay_eligible_beside_a_full_isr,
    elect_any_live_replica,
    elect_the_last_replica_without_comparing_it,
    let_an_older_incarnation_join,
]


def find(name: str, stories: int) -> dict[str, object]:
    """`after` is 0 if no story found the bug, else the number of allowed stories: which one found it is not known."""
    put_in = next(bug for bug in BUGS if bug.__name__ == name)
    search = settings(
        max_examples=stories,
        stateful_step_count=40,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch)
        try:
            run_state_machine_as_test(ClusterMachine, settings=search)
        except (AssertionError, InvariantError):
            return {"after": stories}
    return {"after": 0}


FIND = find

pytestmark = pytest.mark.slow  # hunts on all cores, in processes of their own


@pytest.mark.parametrize(
    ("name", "tries"),
    [pytest.param(bug.__name__, STORIES_MAX, id=bug.__name__) for bug in BUGS],
)
def test_random_stories_find_the_bug(name: str, tries: int, hunts: Hunts) -> None:
    assert hunts[name].result()["after"], f"{tries} stories did not find it"
