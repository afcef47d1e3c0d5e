"""`spark-broker simulate`: one seed as a story, many as a table, and a status that scripts can use."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from spark_broker.cli.app import app
from tests.sim.bugs import acknowledge_before_the_commit


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
