"""The figures of a run, as a table for people and as rows of docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from spark_broker.errors import InvalidDataError

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def marks(section: str) -> tuple[str, str]:
    """The lines of the document around a section's figures."""
    return f"<!-- {section}: begin -->", f"<!-- {section}: end -->"


class Figure(msgspec.Struct, frozen=True):
    """One line: what was measured, the result, and the goal."""

    name: str
    result: str
    goal: str = ""


def machine() -> str:
    """Where and when the figures were made."""
    cores = len(os.sched_getaffinity(0))
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{now}, {cores} cores, {platform.machine()}, Python {platform.python_version()}"


def markdown(figures: list[Figure], where: str) -> str:
    """The rows as Markdown."""
    lines = [f"Measured {where}.", "", "| Measured | Result | Goal |", "|---|---|---|"]
    lines += [f"| {figure.name} | {figure.result} | {figure.goal} |" for figure in figures]
    return "\n".join(lines)


def write(figures: list[Figure], where: str, section: str, document: Path = DOCUMENT) -> None:
    """Replace a section of the document. Raises InvalidDataError when it has no place for it."""
    begin_line, end_line = marks(section)
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(begin_line)
    _, end, after = rest.partition(end_line)
    if not begin or not end:
        raise InvalidDataError(f"{document} has no lines {begin_line} and {end_line}")
    document.write_text(f"{before}{begin_line}\n{markdown(figures, where)}\n{end_line}{after}", encoding="utf-8")
