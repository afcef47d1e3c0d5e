"""What happened in schedules that must break no rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

from spark_broker.testing.simulation.schedule import ScheduleResult, run_schedule

ACKNOWLEDGED = "acknowledged"


@cache
def _result(seed: int) -> ScheduleResult:
    """Kept: a seed's schedule may have several features, and tests of each count what it does."""
    return run_schedule(seed)[0]


def counts_of(seeds: Iterable[int]) -> Counter[str]:
    """How often each thing happened in these schedules; fails if one breaks a rule, and names all that do."""
    counts: Counter[str] = Counter()
    broken = []
    for seed in seeds:
        result = _result(seed)
        counts.update(result.counts)
        counts[ACKNOWLEDGED] += result.acknowledged
        if result.violation is not None:
            broken.append(f"seed {seed}: {result.violation}")
    assert not broken, "\n".join(broken)
    return counts
