"""Clocks that are an hour wrong, in a whole simulated cluster."""

from __future__ import annotations

import pytest

from spark_broker.testing.simulation.world import World
from tests.sim.test_findings import cluster, run_until

HOUR_MS = 3_600_000


def leaders(world: World) -> set[int]:
    return {state.leader for _, _, state in world.invariants.image.partitions()}


@pytest.mark.parametrize("skew_ms", [-HOUR_MS, HOUR_MS])
def test_a_leader_whose_clock_turns_wrong_leads_no_more_until_it_is_right(skew_ms: int) -> None:
    world = cluster()
    for machine in world.machines:
        machine.clock.skew_ms = 0
    (leader,) = leaders(world)
    (wrong,) = [machine for machine in world.machines if machine.broker_id == leader]
    wrong.clock.skew_ms = skew_ms
    run_until(world, lambda: leaders(world).isdisjoint({leader, -1}))
    until_ms = world.scheduler.now_ms + 5_000
    while world.scheduler.now_ms < until_ms:
        world.step()
        assert leader not in leaders(world)
        assert len(world.invariants.image.live_brokers()) == 2
    wrong.clock.skew_ms = 0
    run_until(world, lambda: world.invariants.image.is_live(leader))


def test_a_broker_that_starts_with_a_wrong_clock_is_never_unfenced() -> None:
    world = cluster()
    wrong = world.machines[0]
    for machine in world.machines:
        machine.clock.skew_ms = 0
    world.kill(wrong, restart_ms=1)
    run_until(world, lambda: not world.invariants.image.is_live(wrong.broker_id))
    wrong.clock.skew_ms = -HOUR_MS
    run_until(world, lambda: wrong.running)
    until_ms = world.scheduler.now_ms + 5_000
    while world.scheduler.now_ms < until_ms:
        world.step()
        assert not world.invariants.image.is_live(wrong.broker_id)
