"""Schedules with bit flips: damage is found while brokers run, and healed; other schedules stay as they are."""

from __future__ import annotations

import random

from spark_broker.testing.simulation.bit_flips import with_bit_flips
from spark_broker.testing.simulation.swarm import Swarm
from tests.sim.kinds import has_bit_flips


def drawn(seed: int) -> tuple[Swarm, Swarm]:
    swarm = Swarm.draw(random.Random(f"{seed}/draw"))
    return swarm, with_bit_flips(seed, swarm)


def test_only_schedules_with_bit_flips_are_changed() -> None:
    for seed in range(100):
        before, after = drawn(seed)
        assert (after is before) is not has_bit_flips(seed)
        if after is not before:
            assert "bit flip" in after.faults
            assert "change minimum" not in after.faults
            assert min(after.min_insync_replicas, after.replication_factor) == 2
