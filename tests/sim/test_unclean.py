"""Unclean elections in the simulator: they happen where a schedule has them, lose records, and readers are told."""

from __future__ import annotations

from collections import Counter

import pytest

from spark_broker.testing.simulation.schedule import run_schedule
from tests.sim.kinds import may_have_unclean_elections

SEEDS = [seed for seed in range(400) if may_have_unclean_elections(seed)]


@pytest.mark.timeout(300)
def test_unclean_elections_lose_records_and_readers_are_told() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        result = run_schedule(seed)[0]
        assert result.violation is None, f"seed {seed}: {result.violation}"
        counts.update(result.counts)
    assert counts["unclean elections"] >= 5
    assert counts["readers told of a cut"] >= 1


def test_elsewhere_nobody_is_elected_who_may_lack_records() -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        if not may_have_unclean_elections(seed):
            counts.update(run_schedule(seed)[0].counts)
    assert counts["elections"] > 50
    assert counts["unclean elections"] == counts["readers told of a cut"] == 0
