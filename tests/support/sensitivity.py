"""The command line of the sensitivity tables: every bug is hunted in a process of its own."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

TRIES_MAX = 10_000

Find = Callable[[str, int], dict[str, object]]
"""Hunts for the bug of this name with so many tries; the row of the table, `after` 0 when it was not found."""


def main(find: Find, bugs: Sequence[str], description: str, arguments: Sequence[str] | None = None) -> int:
    """Print (or write) the table as JSON; status 1 when a bug was not found."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("bugs", nargs="*", default=list(bugs))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tries", type=int, default=TRIES_MAX)
    parser.add_argument("--processes", type=int, default=None)
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    table = []
    with ProcessPoolExecutor(options.processes, mp_context=context, max_tasks_per_child=1) as pool:
        for found in pool.map(find, options.bugs, [options.tries] * len(options.bugs)):
            table.append(found)
            line = f"{found['number']:>6} {found['bug']:<50} {found['after']:>6} {found.get('rule') or 'NOT FOUND'}"
            sys.stderr.write(f"{line}: {found.get('message', '')}\n")
    text = json.dumps(table, indent=1)
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
    return 0 if all(found["after"] for found in table) else 1
