"""What the command line says of mistakes in its use and of what is missing."""

from __future__ import annotations

import importlib.util

import pytest

from spark_broker.cli import output
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster
from tests.support.ports import refused_address


def test_an_unknown_option_names_the_nearest(run: Run) -> None:
    ended = run("topics", "create", "t", "--partition", "3")
    assert ended.status == 2
    assert "--partitions" in ended.err


def test_an_unknown_command_names_the_nearest(run: Run) -> None:
    ended = run("topics", "lst")
    assert ended.status == 2
    assert "'list'" in ended.err


def test_a_state_that_no_transaction_has_is_refused_with_those_there_are(run: Run, cluster: FakeCluster) -> None:
    """Story: a mistyped state was an empty list, and nothing was said."""
    ended = run("transactions", "list", "--state", "BOGUS")
    assert (ended.status, ended.out) == (2, "")
    assert "preparecommit" in ended.err.lower()
    assert run("transactions", "list", "--state", "prepareabort", "-o", "json").json == []


def test_nobody_answering_is_one_line_that_names_the_address(run: Run) -> None:
    address = refused_address()
    ended = run("topics", "list", "--bootstrap-server", address, "--output", "json")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith("error: [BOOTSTRAP_UNREACHABLE]")
    assert address in ended.err


def test_an_address_that_is_none_is_named(run: Run) -> None:
    ended = run("topics", "list", "-b", "nowhere")
    assert ended.status == 1
    assert "'nowhere' is not `host:port`" in ended.err


def test_without_a_cluster_the_ways_to_name_one_are_listed(run: Run) -> None:
    ended = run("topics", "list")
    assert ended.status == 1
    assert "--bootstrap-server" in ended.err
    assert "cluster start" in ended.err


def test_a_missing_package_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name))
    ended = run("topics", "list")
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    assert "pip install 'spark-broker[cli]'" in ended.err


def test_an_error_is_red_on_a_terminal_and_one_line_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output.print_error("first\n  second")
    assert capsys.readouterr().err == "error: first second\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    output.print_error("first")
    assert capsys.readouterr().err == f"{output.RED}error: first{output.PLAIN}\n"


FORGED = "g\n2026-11-28 ERROR\t\x1b[2J\x1b]0;owned\x07\r\x9b31m\x7f\u2028\u202eback\u2066\x00"
SHOWN = r"g\n2026-11-28 ERROR\t\x1b[2J\x1b]0;owned\x07\r\x9b31m\x7f\u2028\u202eback\u2066\x00"


def test_control_characters_of_names_are_shown_and_do_nothing_to_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the id of a group cleared the screen of whoever listed the groups, and set its title."""
    monkeypatch.setenv("COLUMNS", "400")
    output.print_table([FORGED, "[/b]"], [(FORGED, "[/b] \\ Łódź")], title=FORGED, right=[FORGED])
    title, header, _, row = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert title.strip() == SHOWN
    assert header.split("  ")[0].strip() == SHOWN
    assert row.strip() == f"{SHOWN}   [/b] \\ Łódź"
    output.note(FORGED)
    output.print_line(FORGED)
    assert capsys.readouterr() == (SHOWN + "\n", SHOWN + "\n")
    output.print_error("one\n\ttwo \x1b[2J\u2028")
    assert capsys.readouterr().err == "error: one two \\x1b[2J\\u2028\n"


@pytest.mark.parametrize("command", ["topics", "cluster", "perf"])
def test_a_command_without_arguments_explains_itself(run: Run, command: str) -> None:
    ended = run(command, "--help")
    assert ended.status == 0
    assert "Usage: spark-broker" in ended.out


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version").out.startswith("spark-broker ")
