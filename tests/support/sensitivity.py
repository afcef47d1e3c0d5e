"""Sensitivity tables, on all cores: several bugs are hunted at a time."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from spark_broker.testing.simulation.many import end_with_parent

TRIES_MAX = 10_000

NEAR_FILE = Path(__file__).parents[1] / "sim" / "near.json"
"""A seed shortly before one that finds it, for each bug of random schedules. `tests/sim/near.py` writes it."""

Find = Callable[[str, int], dict[str, object]]
"""Hunts for the bug of this name with so many tries. Returns the table's row; `after` is 0 when it was not found."""

Hunts = Mapping[str, Future[dict[str, object]]]
"""The hunts under way, by the bug's name."""


def near(schedules: str) -> dict[str, int]:
    """By bug, where to begin: in schedules of the "core", or of the "simulator"."""
    recorded: dict[str, dict[str, int]] = json.loads(NEAR_FILE.read_text(encoding="utf-8"))
    return recorded[schedules]


@contextmanager
def hunting(find: Find, tries: Mapping[str, int], processes: int | None = None) -> Iterator[Hunts]:
    """Hunt for these bugs, each with so many tries, as many at a time as there are cores.

    At the end, hunts that have not begun are cancelled; others are waited for, so that no process outlives the tests.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_parent) as pool:
        try:
            yield {bug: pool.submit(find, bug, most) for bug, most in tries.items()}
        finally:
            pool.shutdown(cancel_futures=True)


def hunting_for_selected(request: pytest.FixtureRequest, find: Find) -> Iterator[Hunts]:
    """Body of the fixture `hunts`: hunts for the bug of every selected test of this module that uses it.

    In one process beside the worker's own, so that nothing of a bug stays there, and other workers keep their cores.
    Such a test has two parameters: the bug's `name`, and with how many `tries` it has to be found.
    """
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    using = [test.callspec.params for test in tests if test.module is request.module and "hunts" in test.fixturenames]
    tries = {str(params["name"]): cast("int", params["tries"]) for params in using}
    with hunting(find, tries, processes=1) as hunts:
        yield hunts


def main(find: Find, bugs: Sequence[str], description: str, arguments: Sequence[str] | None = None) -> int:
    """Print (or write) the table as JSON; status 1 when a bug was not found."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("bugs", nargs="*", default=list(bugs))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tries", type=int, default=TRIES_MAX)
    parser.add_argument("--processes", type=int, default=None)
    options = parser.parse_args(arguments)
    table = []
    with hunting(find, dict.fromkeys(options.bugs, options.tries), options.processes) as hunts:
        for hunt in hunts.values():
            row = hunt.result()
            table.append(row)
            line = f"{row['number']:>6} {row['bug']:<50} {row['after']:>6} {row.get('rule') or 'NOT FOUND'}"
            sys.stderr.write(f"{line}: {row.get('message', '')}\n")
    text = json.dumps(table, indent=1)
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
    return 0 if all(row["after"] for row in table) else 1
