"""Schedules with bit flips: damage is found while brokers run, and healed; other schedules stay as they are."""

from __future__ import annotations

import random

from spark_broker.testing.simulation.bit_flips import with_bit_flips
from spark_broker.testing.simulation.swarm import Swarm
from tests.sim.counting import counts_of
from tests.sim.kinds import has_bit_flips

SEEDS = [seed for seed in range(600, 1200) if has_bit_flips(seed)][:40]


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


def test_what_rots_is_set_aside_and_healed() -> None:
    """The end of each schedule checks that all replicas agree and that no broker lists a damaged one."""
    counts = counts_of(SEEDS)
    assert counts["fault: bit flip"] >= 5
    assert counts["replicas quarantined"] >= 5
