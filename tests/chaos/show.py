"""What a run looks like: a table that grows with the faults, and a summary at the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tests.chaos.nemesis import Fault, Outcome, Tell

SHOWN = 15
"""Faults that the live table shows: the last ones."""

LOST = ("LOST", "NOT_DELIVERED", "TORN_TRANSACTION", "TORN_BATCH")
TWICE = ("DUPLICATE", "COMMITTED_TWICE")
REORDERED = ("REORDERED", "MISPLACED", "INCONSISTENT_OFFSETS", "WENT_BACK")
ABORTED = ("ABORTED_READ", "UNCOMMITTED_READ")


@contextmanager
def progress() -> Iterator[Tell]:
    """A live table on a terminal, a line for each fault elsewhere. All of it on stderr."""
    console = Console(stderr=True, highlight=False)
    if not sys.stderr.isatty():
        yield _lines(console)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield lambda outcome, doing, count: live.update(_table(outcome, doing, count))


def _lines(console: Console) -> Tell:
    shown: set[tuple[str, int]] = set()

    def tell(outcome: Outcome, doing: str, count: int) -> None:
        if outcome.faults and (outcome.target, len(outcome.faults)) not in shown:
            shown.add((outcome.target, len(outcome.faults)))
            last = outcome.faults[-1]
            console.print(
                Text(f"{len(outcome.faults)}/{outcome.planned}  " + "  ".join(_cells(last)[1:])), soft_wrap=True
            )
        elif doing and not doing[0].isdigit() and (doing, count) not in shown:
            shown.add((doing, count))
            if doing != "appending on":
                console.print(Text(f"{outcome.target}: {doing}, {count:,} records acknowledged"), soft_wrap=True)

    return tell


COLUMNS = ("fault", "kind", "target", "lasted", "unavailable", "served again", "in sync", "acknowledged")


def _cells(fault: Fault) -> tuple[str, ...]:
    healed = "not awaited" if fault.healed_s < 0 else f"{fault.healed_s:.1f} s"
    times = (fault.lasted_s, fault.unavailable_s, fault.recovered_s)
    return (
        str(fault.number),
        fault.kind,
        fault.target,
        *(f"{seconds:.1f} s" for seconds in times),
        healed,
        f"{fault.acknowledged:,}",
    )


def _table(outcome: Outcome, doing: str, count: int) -> Group:
    done = f"{len(outcome.faults)} of {outcome.planned} faults, {count:,} records acknowledged"
    title = f"{outcome.target}, seed {outcome.seed}: {done}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in {"kind", "target"} else "right")
    for fault in outcome.faults[-SHOWN:]:
        table.add_row(*_cells(fault))
    return Group(table, Text(doing, style="bold yellow"))


def summary(outcomes: Sequence[Outcome], command: str) -> None:
    """On stdout: faults by kind, records, what was found, and how to run it again."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for outcome in outcomes:
        table.add_column(f"{outcome.target}, seed {outcome.seed}", justify="right")
    for name, cells in _rows(outcomes):
        table.add_row(name, *cells)
    console.print(table)
    for outcome in outcomes:
        for kind, why in outcome.missing.items():
            console.print(Text(f"{outcome.target}: no {kind}: {why}"), soft_wrap=True)
        for text in (outcome.problem, outcome.page, *outcome.replica_differences[:SHOWN], *outcome.copy_problems):
            if text:
                console.print(Text(text, style="red"), soft_wrap=True)
        if outcome.history:
            console.print(Text(f"the history: {outcome.history}"), soft_wrap=True)
    console.print(Text(f"again: {command}"), soft_wrap=True)


def _rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[str]]]:
    kinds = [Counter(fault.kind for fault in outcome.faults) for outcome in outcomes]
    for kind in sorted({kind for counter in kinds for kind in counter}):
        yield kind, [str(counter[kind] or "") for counter in kinds]
    yield "faults", [str(len(outcome.faults)) for outcome in outcomes]
    yield "records acknowledged", [f"{outcome.acknowledged:,}" for outcome in outcomes]
    yield "records of unknown outcome", [f"{outcome.failed:,}" for outcome in outcomes]
    yield "transactions committed", [f"{outcome.transactions.get('committed', 0):,}" for outcome in outcomes]
    yield "transactions aborted", [f"{outcome.transactions.get('aborted', 0):,}" for outcome in outcomes]
    yield "records removed by compaction", [f"{outcome.removed:,}" for outcome in outcomes]
    yield "whole reads on the way", [str(outcome.whole_reads) for outcome in outcomes]
    for name, group in (("lost", LOST), ("twice", TWICE), ("reordered", REORDERED), ("aborted and read", ABORTED)):
        yield name, [str(sum(outcome.violations.get(kind, 0) for kind in group)) for outcome in outcomes]
    yield "violations in all", [str(sum(outcome.violations.values())) for outcome in outcomes]
    yield "replicas that differ", [str(len(outcome.replica_differences)) for outcome in outcomes]
    yield (
        "longest unavailability",
        [f"{max((fault.unavailable_s for fault in outcome.faults), default=0.0):.1f} s" for outcome in outcomes],
    )
    yield "run, seconds", [f"{outcome.seconds:.0f}" for outcome in outcomes]
    yield "check, seconds", [f"{outcome.check_seconds:.1f}" for outcome in outcomes]
