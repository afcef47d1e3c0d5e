"""The nemesis as `make chaos` runs it, in small: faults of a cluster of processes, and under `full` of executors.

A program of its own, since it goes into a network namespace where it can.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.chaos.nemesis import Outcome, plan

ROOT = Path(__file__).parents[2]
KINDS = ("a", "b", "c")


def chaos(directory: Path, *arguments: str) -> Outcome:
    """Run the nemesis on one kind of cluster; its outcome. Fails with its explanation."""
    command = [sys.executable, "-m", "tests.chaos.run", "--output", "json", "--keep", str(directory), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    (outcome,) = msgspec.json.decode(done.stdout, type=list[Outcome])
    assert outcome.ok, "\n".join([outcome.problem, outcome.page, *outcome.copy_problems, *outcome.replica_differences])
    assert done.returncode == 0
    return outcome


@pytest.mark.timeout(300)
def test_a_few_faults_of_processes_lose_double_and_reorder_nothing(tmp_path: Path) -> None:
    outcome = chaos(
        tmp_path, "--on", "processes", "--faults", "3", "--seed", "11", "--no-dataframe", "--snapshot-seconds", "2"
    )

    assert len(outcome.faults) == 3
    assert outcome.acknowledged > 1000
    assert outcome.transactions["committed"] > 0
    assert outcome.whole_reads > 0


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_every_fault_of_spark_executors_and_of_the_driver_loses_doubles_and_reorders_nothing(tmp_path: Path) -> None:
    outcome = chaos(tmp_path, "--on", "spark", "--faults", "16", "--seed", "12")

    kinds = {fault.kind for fault in outcome.faults}
    assert {"kill-jvm", "kill-broker", "kill-keeper", "kill-jobs", "kill-stages", "kill-driver"} <= kinds
    assert outcome.acknowledged > 1000
    assert outcome.transactions["committed"] > 0


def test_the_faults_are_drawn_from_the_seed_alone() -> None:
    def drawn(seed: int) -> list[tuple[int, str, bool, float]]:
        return [(fault.number, fault.kind, fault.overlaps, fault.rng.random()) for fault in plan(seed, 20, KINDS)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_every_kind_of_fault_comes_before_any_comes_again() -> None:
    kinds = [fault.kind for fault in plan(5, 9, KINDS)]

    assert [set(kinds[at : at + 3]) for at in (0, 3, 6)] == [set(KINDS)] * 3
