"""Where the hunt for each bug begins: shortly before a seed that shows it. `make near` writes `near.json` again.

A change of the order of events gives seeds other stories. The hunts then take longer, until `make near` has run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.sim import sensitivity
from tests.sim.bugs import hunted
from tests.support.sensitivity import NEAR_FILE, TRIES_MAX, hunting, near
from tests.unit.core import test_sensitivity, test_transaction_sensitivity
from tests.unit.core.groups import test_group_sensitivity

NEARBY = 300
"""So many seeds from the last known one on are tried before the search begins at seed 0."""

BEFORE = 1
"""A hunt begins so many seeds before its finder: that one must pass, so that not every seed counts as a find."""

CORE = {
    bug.__name__: module
    for module in (test_sensitivity, test_transaction_sensitivity, test_group_sensitivity)
    for bug in module.BUGS
}


def find_again(bug: str, tries: int) -> dict[str, object]:
    """The row of a bug ("core name" or "simulator name") near the seed that is known, or else from seed 0."""
    schedules, name = bug.split()
    find = sensitivity.find if schedules == "simulator" else CORE[name].find
    known = near(schedules).get(name)
    if known is not None:
        row = find(name, NEARBY, known)
        if row["after"]:
            return row
    return find(name, tries)


def main(path: Path = NEAR_FILE) -> int:
    """Hunt for every bug on all cores. A bug that was not found keeps its seed; the status is 1 then."""
    bugs = [*(f"core {name}" for name in sorted(CORE)), *(f"simulator {name}" for name in hunted())]
    found = {"core": near("core"), "simulator": near("simulator")}
    missed: list[str] = []
    console = Console(stderr=True)
    with Progress(console=console) as progress, hunting(find_again, dict.fromkeys(bugs, TRIES_MAX)) as hunts:
        bar = progress.add_task("bugs", total=len(hunts))
        for bug, hunt in hunts.items():
            row = hunt.result()
            schedules, name = bug.split()
            if row["after"]:
                found[schedules][name] = max(0, int(str(row["seed"])) - BEFORE)
            else:
                missed.append(bug)
            progress.update(bar, advance=1, description=name)
    kept = {schedules: dict(sorted(seeds.items())) for schedules, seeds in found.items()}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {path}")
    if missed:
        console.print(f"not found by {TRIES_MAX:,} schedules: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
