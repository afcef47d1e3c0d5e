"""Printing: tables for people, one JSON document for scripts; notes, errors and progress on stderr. And questions.

Whatever is for people is `visible`: names and values of strangers do nothing to a terminal. JSON is for programs, and
has what there is.

typer and rich are imported where they are used. A command that prints no table does not wait for them, and `main` can
report that they are missing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import msgspec

from spark_broker.cli.streams import answers_awaited
from spark_broker.visible import visible

if TYPE_CHECKING:
    from rich.progress import Progress

RED, PLAIN = "\033[31m", "\033[0m"

LINES_OF_PROGRESS = 10
"""How many lines a job of known length prints where there is no terminal for a bar."""


ITEMS_SHOWN = 20
"""How many items `abridged` names."""


def print_json(value: object) -> None:
    """One line of JSON on stdout, in UTF-8 whatever the terminal has. Takes dataclasses, Structs and what they hold.

    Bytes of a file's name that are not UTF-8 are written as Python reads them back: `\\udcff`.
    """
    sys.stdout.flush()  # what was printed as text before
    try:
        line = msgspec.json.encode(value)
    except UnicodeEncodeError:
        line = json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "", right: Sequence[str] = ()
) -> None:
    """A table on stdout. The columns named in `right` are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = [visible(name) for name in columns]
    for name, shown in zip(columns, names, strict=True):
        # Rich would take a string for markup: a column may be called `[/b]`.
        table.add_column(Text(shown), justify="right" if name in right else "left", overflow="fold")
    cells = [[cell if isinstance(cell, Text) else Text(visible(str(cell))) for cell in row] for row in rows]
    for row in cells:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else _width(names, cells), highlight=False)
    if title:
        console.print(Text(visible(title), style="bold"), soft_wrap=True)
    console.print(table)


def note(text: str) -> None:
    """A line for the person at the terminal, on stderr, where scripts do not read it."""
    print(visible(text), file=sys.stderr)


def print_line(text: str) -> None:
    """A line for people on stdout."""
    sys.stdout.write(visible(text) + "\n")


def print_error(text: str) -> None:
    """One line on stderr; red on a terminal."""
    one_line = visible(re.sub(r"[ \t\r\n]+", " ", text.strip(" \t\r\n")))
    coloured = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"{RED}error: {one_line}{PLAIN}" if coloured else f"error: {one_line}", file=sys.stderr)


def counted(number: int, one: str, many: str) -> str:
    """`1 batch`, `2,000 batches`."""
    return f"{number:,} {one if number == 1 else many}"


def dashed(value: object) -> str:
    """The value; `-` for None."""
    return "-" if value is None else str(value)


def abridged(items: Sequence[str]) -> str:
    """The first of them with commas, and how many more there are; `-` for none."""
    more = len(items) - ITEMS_SHOWN
    return ", ".join(items[:ITEMS_SHOWN]) + (f" and {more:,} more" if more > 0 else "") or "-"


def fail(text: str) -> NoReturn:
    """End the command with this line and status 1. For a failure that is no SparkBrokerError."""
    import typer

    print_error(text)
    raise typer.Exit(1)


def confirm(question: str, *, yes: bool) -> None:
    """Ask at a terminal, and end the command unless the answer is yes. `yes`: it is given already."""
    if yes or not sys.stdin.isatty():
        return
    import typer

    with answers_awaited():
        typer.confirm(visible(question), abort=True)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Gives a function that shows how much is done: in place on a terminal, else in a few lines (if `total` is known).

    Nothing is shown while someone types on that terminal.
    """
    if not sys.stderr.isatty():
        yield _lines(what, total)
    elif sys.stdin.isatty() and total is None:
        yield lambda done: None
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        bar = (BarColumn(), MofNCompleteColumn()) if total else (TextColumn("{task.completed:,.0f}"),)
        columns = (TextColumn("{task.description}"), *bar, TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(what, total=total, rate="")
            yield lambda done: bars.update(task, completed=done, rate=_rate(bars, done))


def _lines(what: str, total: int | None) -> Callable[[int], None]:
    told = 0

    def tell(done: int) -> None:
        nonlocal told
        step = done * LINES_OF_PROGRESS // total if total else 0
        if step > told:
            told = step
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return tell


def _rate(bars: Progress, done: int) -> str:
    elapsed_s = bars.tasks[0].elapsed or 0.0
    return f"{done / elapsed_s:,.0f}/s" if elapsed_s > 0 else ""


def _width(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> int:
    """A width at which nothing is wrapped: programs that read a pipe split columns at white space."""
    from rich.cells import cell_len  # A letter may be as wide as two.

    cells = zip(columns, *([str(cell) for cell in row] for row in rows), strict=True)
    return sum(max(cell_len(cell) for cell in column) + 3 for column in cells) + 8
