"""Clocks that jump in the simulator where a schedule has them; a broker whose clock is far off is fenced."""

from __future__ import annotations

from tests.sim.test_findings import cluster, run_until


def test_a_broker_whose_clock_is_an_hour_off_is_fenced_and_serves_again_when_it_is_right() -> None:
    world = cluster()
    machine = world.machines[0]
    broker = machine.broker_id

    machine.clock.skew_ms = -3_600_000
    run_until(world, lambda: world.invariants.image.brokers[broker].fenced)
    leaders = [state.leader for _, _, state in world.invariants.image.partitions()]
    assert broker not in leaders
    assert -1 not in leaders

    machine.clock.skew_ms = 0
    run_until(world, lambda: not world.invariants.image.brokers[broker].fenced)
