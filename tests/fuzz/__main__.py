"""`python -m tests.fuzz`: try damaged inputs for as long as you like; says how to try a finding again."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.fuzz.runner import Outcome, run
from tests.fuzz.targets import ALL, TARGETS

UNLIMITED = 2**62


def main() -> int:
    """The number of findings is the exit status (at most 1)."""
    arguments = _arguments()
    targets = arguments.target or sorted(set(TARGETS) - {ALL})
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="spark-broker-fuzz-"))
    count = arguments.count or UNLIMITED
    console = Console()
    total = Outcome(0, 0, [])
    columns = (TextColumn("{task.description:>10}"), BarColumn(), TextColumn("{task.fields[tried]:>12,} inputs"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=len(targets), tried=0)
        for target in targets:
            progress.update(bar, description=target)
            before = total.tried
            outcome = run(
                target,
                first_seed=arguments.seed,
                count=count,
                seconds=arguments.seconds / len(targets),
                directory=directory / target,
                on_progress=lambda tried, before=before: progress.update(bar, tried=before + tried),  # type: ignore[misc]
            )
            total.tried += outcome.tried
            total.accepted += outcome.accepted
            total.findings += outcome.findings
            progress.update(bar, advance=1, tried=total.tried)
            for finding in outcome.findings:
                progress.console.print(str(finding), markup=False, highlight=False)
    console.print(f"{total.tried:,} inputs, {total.accepted:,} accepted, {len(total.findings)} findings")
    return min(len(total.findings), 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="time for all targets together")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, help="inputs of each target (default: as many as there is time for)")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one (may be repeated)")
    parser.add_argument("--directory", type=Path, help="where inputs of findings are kept")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
