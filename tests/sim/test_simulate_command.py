"""`spark-broker simulate`: one seed as a story, many as a table, and a status that scripts can use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spark_broker.cli.app import app
from spark_broker.errors import ProcessLimitError
from spark_broker.testing.simulation import schedule
from spark_broker.testing.simulation.world import World
from tests.sim.bugs import acknowledge_before_the_commit
from tests.support.waiting import eventually


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_a_seed_is_told_as_a_story() -> None:
    result = run("--seed", "3", "--events", "120")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[-2:] == ["controller#1", "starts"] or "starts" in lines[0]
    assert any("registered (clean start)" in line for line in lines)
    assert "no rule was broken" in lines[-1]


def test_the_same_seed_prints_the_same_story() -> None:
    assert run("--seed", "5", "--events", "120").stdout == run("--seed", "5", "--events", "120").stdout


def test_a_run_that_is_killed_leaves_no_process() -> None:
    """Story: its workers waited for their next task for ever."""
    command = [sys.executable, "-m", "spark_broker.cli.main", "simulate", "--schedules", "100000", "--processes", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        try:
            eventually(lambda: len(_workers_of(started.pid)) == 2, 60, "two workers")
            workers = _workers_of(started.pid)
        finally:
            started.kill()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 60, "the end of its workers")


def _workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_many_schedules_are_added_up() -> None:
    result = run("--schedules", "3", "--first-seed", "10", "--events", "80", "--processes", "1", "--output", "json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["schedules"] == 3
    assert summary["first_seed"] == 10
    assert summary["findings"] == []
    assert summary["coverage"]["clean starts"] >= 9


def test_a_broken_rule_is_shown_with_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge_before_the_commit(monkeypatch)
    result = run("--seed", "0")
    assert result.exit_code == 1
    assert "broken: acknowledged is committed" in result.stdout
    assert "again: spark-broker simulate --seed 0 --events 500" in result.stdout


def test_seeds_that_break_a_rule_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge_before_the_commit(monkeypatch)
    result = run("--schedules", "2", "--processes", "1", "--output", "json")
    assert result.exit_code == 1
    findings = json.loads(result.stdout.splitlines()[-1])["findings"]
    assert findings[0]["seed"] in (0, 1)
    assert findings[0]["rule"] == "acknowledged is committed"
    told = [line for line in result.stderr.splitlines() if "breaks a rule: acknowledged is committed" in line]
    assert len(told) == len(findings), "each at once, not only at the end"


def test_an_error_that_nobody_expects_is_a_finding_with_its_seed_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a judge that met an error ended a thousand schedules, and no line said which of them it was."""

    def met(world: World) -> None:
        raise ProcessLimitError(f"Too many open files, with {len(world.machines)} machines")

    monkeypatch.setattr(schedule, "end", met)
    result = run("--schedules", "2", "--events", "20", "--processes", "1", "--output", "json")
    assert result.exit_code == 1
    findings = json.loads(result.stdout.splitlines()[-1])["findings"]
    assert [(finding["seed"], finding["rule"]) for finding in findings] == [
        (0, "a schedule runs to its end"),
        (1, "a schedule runs to its end"),
    ]
    assert all("ProcessLimitError: " in finding["message"] for finding in findings)
    assert all("(test_simulate_command.py:" in finding["message"] for finding in findings)
