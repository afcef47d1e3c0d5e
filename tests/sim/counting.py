"""What happened in schedules that must break no rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

from spark_broker.testing.simulation.schedule import run_schedule


@cache
def _counts(seed: int) -> Mapping[str, int]:
    """Kept: a seed's schedule may have several features, and tests of each count what it does."""
    result = run_schedule(seed)[0]
    assert result.violation is None, f"seed {seed}: {result.violation}"
    return Counter({**result.counts, ACKNOWLEDGED: result.acknowledged})


ACKNOWLEDGED = "acknowledged"


def counts_of(seeds: Iterable[int]) -> Counter[str]:
    """How often each thing happened in these schedules; fails if one breaks a rule, and names all that do."""
    counts: Counter[str] = Counter()
    broken = []
    for seed in seeds:
        try:
            counts.update(_counts(seed))
        except AssertionError as error:
            broken.append(str(error))
    assert broken == []
    return counts
