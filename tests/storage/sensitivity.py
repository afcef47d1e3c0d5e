"""How soon the torture finds each known bug of storage.

`python -m tests.storage.sensitivity [--write FILE] [bug ...]`
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

from tests.storage.bugs import BUGS
from tests.storage.hunts import Hunt

CASES_MAX = 10_000


def hunt_for(hunt: Hunt, cases: int = CASES_MAX) -> tuple[int, Exception | None]:
    """How many cases were tried, and what the last one found. A run that cannot be made is found as well."""
    after = 0
    try:
        for case in islice(hunt(), cases):
            after += 1
            case()
    except Exception as error:  # noqa: BLE001  whatever it is: without the bug nothing is raised
        return after + 1, error
    return after, None


def find(name: str, cases: int = CASES_MAX) -> dict[str, object]:
    """Hunt for this bug. `after` is 0 when it was not found."""
    logging.getLogger("spark_broker").setLevel(logging.CRITICAL)
    bug = BUGS[name]
    found: dict[str, object] = {"number": bug.number, "bug": name, "what": bug.what, "how": "storage torture"}
    with pytest.MonkeyPatch.context() as patch:
        bug.put_in(patch)
        after, error = hunt_for(bug.hunt, cases)
    if error is None:
        return {**found, "after": 0, "rule": "", "message": ""}
    return {**found, "after": after, "rule": bug.hunt.__name__.replace("_", " "), "message": _first_line(error)}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print (or write) the table as JSON; status 1 when a bug was not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bugs", nargs="*", default=list(BUGS))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--cases", type=int, default=CASES_MAX)
    parser.add_argument("--processes", type=int, default=None)
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    table = []
    with ProcessPoolExecutor(options.processes, mp_context=context, max_tasks_per_child=1) as pool:
        for found in pool.map(find, options.bugs, [options.cases] * len(options.bugs)):
            table.append(found)
            line = f"{found['number']:>6} {found['bug']:<40} {found['after']:>6} {found['rule'] or 'NOT FOUND'}"
            sys.stderr.write(f"{line}: {found['message']}\n")
    text = json.dumps(table, indent=1)
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
    return 0 if all(found["after"] for found in table) else 1


if __name__ == "__main__":
    sys.exit(main())
