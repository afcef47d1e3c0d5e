"""Unclean elections in the simulator: they happen where a schedule has them, lose records, and readers are notified."""

from __future__ import annotations

import pytest

from tests.sim.counting import counts_of
from tests.sim.kinds import may_have_unclean_elections

SEEDS = [seed for seed in range(400) if may_have_unclean_elections(seed)]


@pytest.mark.timeout(300)
def test_unclean_elections_lose_records_and_readers_are_told() -> None:
    counts = counts_of(SEEDS)
    assert counts["unclean elections"] >= 5
    assert counts["readers told of a cut"] >= 1


def test_elsewhere_nobody_is_elected_who_may_lack_records() -> None:
    counts = counts_of(seed for seed in range(60) if not may_have_unclean_elections(seed))
    assert counts["elections"] > 50
    assert counts["unclean elections"] == counts["readers told of a cut"] == 0
