"""Wall clocks are set wrong while brokers run, and right again: the controller notices, and may fence a broker."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_broker.testing.simulation.scheduler import Timer
from spark_broker.testing.simulation.swarm import Swarm

if TYPE_CHECKING:
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World

SHARE = 0.1
"""Share of the schedules without transactions that have clocks that jump."""

FAULT = "clock jumps"
JUMPS_MS = (3_000, 60_000, 3_600_000)
"""Within the bound of a warning, within that of fencing, and beyond both."""

SETTLED_MS = 5_000
"""A schedule lasts for less than the hour of production."""


def with_clock_jumps(seed: int, swarm: Swarm) -> Swarm:
    """The draw of a seed, with clock jumps if it has them. A generator of its own leaves the other seeds as they are.

    All clocks agree except for the jumps: a broker whose clock is always wrong would stay fenced.
    """
    rng = random.Random(f"{seed}/clock jumps draw")
    if rng.random() >= SHARE:
        return swarm
    usual = sum(swarm.faults.values()) or 1.0
    return replace(swarm, clock_skew_ms=0, faults={**swarm.faults, FAULT: usual * rng.choice([0.1, 0.3])})


def jump(world: World, machine: SimulatedMachine, rng: random.Random, for_ms: float) -> str:
    """Set the machine's clock wrong for a while; returns by how much."""
    by_ms = rng.choice(JUMPS_MS) * rng.choice([-1, 1])
    machine.clock.skew_ms = by_ms
    Timer(world.scheduler, world.operator, "clock set right", lambda: set_right(machine)).set(for_ms)
    return f"the clock of {machine} is set {by_ms / 1000:+.0f} s wrong"


def set_right(machine: SimulatedMachine) -> None:
    """Set the machine's clock right: in a schedule with jumps, all machines then have the same time."""
    machine.clock.skew_ms = 0
