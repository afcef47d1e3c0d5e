"""How soon the simulator finds each known bug: `python -m tests.sim.sensitivity [--write FILE] [bug ...]`."""

from __future__ import annotations

import gc
import sys

import pytest

from spark_broker.testing.simulation.schedule import run_schedule
from tests.sim import (
    compaction_bugs,
    damage_bugs,
    group_bugs,
    lost_file_bugs,
    older_metadata_bugs,
    producer_bugs,
    reader_bugs,
    sharing_bugs,
    tiering_bugs,
    transaction_bugs,
    unclean_bugs,
)
from tests.sim.bugs import BUGS, hunted
from tests.support.sensitivity import TRIES_MAX, main, near

FILES = (
    compaction_bugs,
    damage_bugs,
    group_bugs,
    lost_file_bugs,
    older_metadata_bugs,
    producer_bugs,
    reader_bugs,
    sharing_bugs,
    tiering_bugs,
    transaction_bugs,
    unclean_bugs,
)
"""Importing these modules registers their bugs."""

NEAR = near("simulator")


def find(name: str, schedules: int = TRIES_MAX, first_seed: int = 0) -> dict[str, object]:
    """Run seeds with this bug until one breaks a rule. `after` is 0 when none did."""
    bug = BUGS[name]
    row: dict[str, object] = {"number": bug.number, "bug": name, "what": bug.what, "after": 0}
    with pytest.MonkeyPatch.context() as patch:
        bug.put_in(patch)
        for seed in range(first_seed, first_seed + schedules):
            if not bug.shows(seed):
                continue
            violation = run_schedule(seed)[0].violation
            if violation is not None:
                if f"TypeError: {name}.<locals>" in violation.message:
                    raise AssertionError(f"{name} is not put in as the code is now: {violation.message}")
                after = seed - first_seed + 1
                return {
                    **row,
                    "after": after,
                    "seed": seed,
                    "rule": violation.rule,
                    "message": violation.message[:300],
                }
            if seed % 50 == 0:
                gc.collect()
    return row


def find_near(name: str, tries: int) -> dict[str, object]:
    """`find`, from the seed of `NEAR`, or from 0. The row's `first_seed` says which."""
    first_seed = NEAR.get(name, 0)
    return {**find(name, tries, first_seed), "first_seed": first_seed}


def measure(name: str, tries: int) -> dict[str, object]:
    """`find` from seed 0; for a bug that is not found so, `find_near`."""
    row = find(name, tries)
    return row if row["after"] or name not in NEAR else find_near(name, tries)


if __name__ == "__main__":
    sys.exit(main(measure, hunted(), __doc__ or ""))
