"""What happened in schedules that must break no rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from spark_broker.testing.simulation.schedule import run_schedule


def counts_of(seeds: Iterable[int]) -> Counter[str]:
    """How often each thing happened in these schedules; fails at the first that breaks a rule."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        result = run_schedule(seed)[0]
        assert result.violation is None, f"seed {seed}: {result.violation}"
        counts.update(result.counts)
    return counts
