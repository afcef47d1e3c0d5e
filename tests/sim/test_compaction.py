"""Schedules with compaction: they compact, purge and leave followers behind, and break no rule."""

from __future__ import annotations

import itertools

import pytest

from tests.sim.counting import counts_of
from tests.sim.kinds import has_compaction


def seeds(count: int) -> list[int]:
    return list(itertools.islice((seed for seed in itertools.count(90_000_000) if has_compaction(seed)), count))


@pytest.mark.timeout(300)
def test_schedules_with_compaction_compact_and_break_no_rule() -> None:
    counts = counts_of(seeds(60))
    assert counts["passes of compaction"] > 200
    assert counts["replicas rebuilt"] > 5
    assert counts["fault: leave a follower behind"] > 10
    assert counts["process_crash starts"] > 50


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_schedules_with_compaction_break_no_rule() -> None:
    assert counts_of(seeds(100))["passes of compaction"] > 330
