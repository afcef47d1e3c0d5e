"""The figures of a run, as a table for people and as rows of docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from spark_broker.errors import InvalidDataError

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


class Figure(msgspec.Struct, frozen=True):
    """One line: what was measured, the result, and what it is meant to reach."""

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
    lines += [f"| {one.name} | {one.result} | {one.goal} |" for one in figures]
    return "\n".join(lines)


def write(figures: list[Figure], where: str, document: Path = DOCUMENT) -> None:
    """Replace the figures in the document. Raises InvalidDataError when it has no place for them."""
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidDataError(f"{document} has no lines {BEGIN} and {END}")
    document.write_text(f"{before}{BEGIN}\n{markdown(figures, where)}\n{END}{after}", encoding="utf-8")
