"""Random schedules of groups keep every promise: replay gives the live state, one owner, convergence, good commits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.core.groups.world import STEP_WEIGHTS, World, run_schedule

SCHEDULES = 100

pytestmark = pytest.mark.slow


def test_random_schedules_keep_every_promise() -> None:
    commits = rebalances = loads = moves = 0
    for seed in range(SCHEDULES):
        world = run_schedule(seed)
        commits += sum(len(offsets) for offsets in world.taken.values())
        rebalances += sum(group.epoch for group in world.shard.state.groups.values())
        loads += world.generation
        moves += sum(len({owner.member_id for _, owner in leases}) > 1 for leases in world.leases.values())
    assert min(commits, rebalances, loads, moves) > SCHEDULES, "the schedules do too little to prove anything"


@given(st.integers(0, 2**32), st.lists(st.sampled_from(list(STEP_WEIGHTS)), min_size=60, max_size=200))
def test_any_order_of_events_keeps_every_promise(seed: int, events: list[Callable[[World], None]]) -> None:
    """Hypothesis makes a story short that breaks one."""
    world = World(seed)
    for event in events:
        world.step(event)
    world.heal()
