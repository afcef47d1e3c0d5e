"""Random schedules of whole clusters break no rule, and the same seed is the same story."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spark_broker.testing.simulation.many import run_many
from spark_broker.testing.simulation.schedule import run_schedule
from tests.sim.regressions import REGRESSIONS, Regression

SCHEDULES = 300
ALL_SCHEDULES = 700
STORIES = 6

PRINT_DIGESTS = f"""
from spark_broker.testing.simulation.schedule import run_schedule
for seed in range({STORIES}):
    print(run_schedule(seed, 200, story=True)[0].digest)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("first_seed", "schedules"),
    [(0, SCHEDULES), pytest.param(SCHEDULES, ALL_SCHEDULES - SCHEDULES, marks=pytest.mark.full)],
)
def test_schedules_break_no_rule(first_seed: int, schedules: int) -> None:
    summary = run_many(schedules, first_seed=first_seed)
    assert summary.schedules == schedules
    assert [(finding.seed, finding.rule, finding.message) for finding in summary.findings] == []
    # A cluster in which nothing happens proves nothing.
    for what in ("elections", "truncations", "ISR shrinks", "ISR grows", "controller restarts", "process_crash starts"):
        assert summary.counts[what] > schedules / 20, what
    assert summary.counts["replicas quarantined"] > schedules / 100
    assert summary.acknowledged > schedules


def test_a_seed_is_one_story_under_any_hash_seed() -> None:
    digests = [_digests(hash_seed) for hash_seed in ("0", "4711")]
    assert len(digests[0]) == STORIES
    assert len(set(digests[0])) == STORIES
    assert digests[0] == digests[1]


def _digests(hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", PRINT_DIGESTS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return ended.stdout.split()


def test_a_story_does_not_depend_on_whether_it_is_told() -> None:
    told, silent = run_schedule(1, 200, story=True)[0], run_schedule(1, 200)[0]
    assert (told.events, told.virtual_ms, told.acknowledged) == (silent.events, silent.virtual_ms, silent.acknowledged)


@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda regression: f"{regression.seed}-{regression.events}")
def test_what_was_found_once_is_mended(regression: Regression) -> None:
    violation = run_schedule(regression.seed, regression.events)[0].violation
    assert violation is None, f"{regression.found}: {violation}"
