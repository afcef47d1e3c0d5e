"""How soon the simulator finds each known bug: `python -m tests.sim.sensitivity [--write FILE] [bug ...]`."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from spark_broker.testing.simulation.schedule import run_schedule
from spark_broker.testing.simulation.transaction_draw import TransactionDraw
from tests.sim.bugs import BUGS
from tests.sim.damage_bugs import DAMAGE, has_bit_flips
from tests.sim.transaction_bugs import TRANSACTIONAL

SCHEDULES_MAX = 10_000


def find(name: str, schedules: int = SCHEDULES_MAX, first_seed: int = 0) -> dict[str, object]:
    """Run seeds with this bug until one breaks a rule. `after` is 0 when none did."""
    logging.getLogger("spark_broker").setLevel(logging.CRITICAL)
    bug = BUGS[name]
    found: dict[str, object] = {"number": bug.number, "bug": name, "what": bug.what, "after": 0}
    with pytest.MonkeyPatch.context() as patch:
        bug.put_in(patch)
        for seed in range(first_seed, first_seed + schedules):
            if name in TRANSACTIONAL and TransactionDraw.draw(seed) is None:
                continue
            if name in DAMAGE and not has_bit_flips(seed):
                continue
            violation = run_schedule(seed)[0].violation
            if violation is not None:
                after = seed - first_seed + 1
                return {
                    **found,
                    "after": after,
                    "seed": seed,
                    "rule": violation.rule,
                    "message": violation.message[:300],
                }
            if seed % 50 == 0:
                gc.collect()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print (or write) the table as JSON; status 1 when a bug was not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bugs", nargs="*", default=sorted(BUGS))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--schedules", type=int, default=SCHEDULES_MAX)
    parser.add_argument("--processes", type=int, default=None)
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    table = []
    with ProcessPoolExecutor(options.processes, mp_context=context, max_tasks_per_child=1) as pool:
        for found in pool.map(find, options.bugs, [options.schedules] * len(options.bugs)):
            table.append(found)
            line = f"{found['number']:>6} {found['bug']:<45} {found['after']:>6} {found.get('rule', 'NOT FOUND')}"
            sys.stderr.write(line + "\n")
    text = json.dumps(table, indent=1)
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
    return 0 if all(found["after"] for found in table) else 1


if __name__ == "__main__":
    sys.exit(main())
