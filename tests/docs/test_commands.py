"""Every command line that a page, a notebook or a hint shows is one that there is, with options that it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from spark_broker.cli.app import app
from tests.test_tidy import ROOT, package_files, tracked_files

FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
CONTINUED = re.compile(r"\\\n\s*")
CALLED = re.compile(r"(?:^|[\s(/!])(?<!--name )spark-broker +([^|;#&>)\n]*)", re.MULTILINE)
OPTION = re.compile(r"--?[A-Za-z][\w-]*")

COMMANDS = typer.main.get_command(app)


def shown_in(path: Path) -> Iterator[str]:
    """What a reader may type of this file: its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"] == "code", "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        yield from (source for is_code, source in cells if is_code)
        text = "\n".join(source for is_code, source in cells if not is_code)
    if path.suffix != ".py":
        yield from FENCED.findall(text)
        text = FENCED.sub("", text)
    yield from INLINE.findall(text)


def called_in(code: str) -> Iterator[list[str]]:
    """The words behind each `spark-broker` of some code."""
    for match in CALLED.finditer(CONTINUED.sub(" ", code)):
        if words := [word for each in match[1].split() if (word := each.strip("'\",."))]:
            yield words


def wrong(words: list[str]) -> str:
    """What of a command line is not there; empty: all is."""
    command = COMMANDS
    rest = list(words)
    while rest and hasattr(command, "commands") and rest[0][0] not in "-{":  # `{name}` of an f-string is any of them
        if rest[0] not in command.commands:
            return f"there is no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    there = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    missing = [found[0] for word in rest if (found := OPTION.match(word)) and found[0] not in {*there, "-h", "--help"}]
    return f"{command.name} has no {', '.join(missing)}" if missing else ""


def test_every_command_that_is_shown_is_there() -> None:
    pages = [ROOT / "README.md", *(p for p in tracked_files() if p.suffix in (".md", ".ipynb")), *package_files()]
    called = [(path, words) for path in pages for code in shown_in(path) for words in called_in(code)]
    assert len(called) > 100
    assert [(path.name, " ".join(words), why) for path, words in called if (why := wrong(words))] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("spark-broker leader-election --unclean", "leader-election has no --unclean"),
        ("printf 'x' | spark-broker produces t", "there is no command 'produces'"),
        ("spark-broker topics alter t", "there is no command 'alter'"),
        ("spark-broker consume t \\\n  --num 2 --all | jq --slurp .", "consume has no --all"),
        ("spark-submit --name spark-broker --py-files x", None),
        ("spark-broker topics list -h", ""),
    ],
)
def test_a_command_that_is_not_there_is_found(code: str, found: str | None) -> None:
    assert [wrong(words) for words in called_in(code)] == ([] if found is None else [found])
