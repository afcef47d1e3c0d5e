"""Put the sensitivity tables into docs/reliability.md: `python -m tests.sensitivity_tables FILE...`.

The files are what `python -m tests.sim.sensitivity --write FILE` and `python -m tests.storage.sensitivity --write FILE`
wrote. When one of the bugs was not found, the status is 1 and nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- sensitivity -->\n", "<!-- /sensitivity -->"


class Row(msgspec.Struct, frozen=True):
    """One bug put back. `after`: schedules or cases until it was found; 0: it was not.

    `first_seed`: where the hunt began that found it. `seed`: the schedule's that shows it. Cases have neither.
    """

    number: str
    bug: str
    what: str
    after: int
    rule: str = ""
    how: str = "simulator"
    seed: int = 0
    first_seed: int = 0


def order(row: Row) -> tuple[int, str]:
    """By number in the list of known bugs; those that are not in it come last."""
    first = row.number.split(",")[0].strip()
    return (int(first) if first.isdecimal() else 1000, row.bug)


def table(rows: Iterable[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| No | Put back | Found by | After |", "|---|---|---|---|"]
    for row in sorted(rows, key=order):
        what = " ".join(row.what.split()).rstrip(".") or row.bug.replace("_", " ")
        after = f"seed {row.seed}" if row.first_seed else row.after
        lines.append(f"| {row.number or '–'} | {what} | {row.how}: {row.rule} | {after} |")
    return "\n".join(line.replace("\n", " ") for line in lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the files, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    rows = [row for path in options.files for row in msgspec.json.decode(path.read_bytes(), type=list[Row])]
    missed = [row.bug for row in rows if not row.after]
    if missed:
        sys.stderr.write(f"not found: {', '.join(missed)}\n")
        return 1
    page = PAGE.read_text(encoding="utf-8")
    head, tail = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(head + table(rows) + tail, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
