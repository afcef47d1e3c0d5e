"""The README's first program and its shell session run as they are printed, on real executors."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
TIMEOUT_S = 1600
"""The shell sessions start eight JVMs, one after the other: more than 800 s on a slow machine, beside two more
applications.
"""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)


def snippet(language: str, position: int = 0) -> str:
    return str(re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)[position])


def run(command: list[str], directory: Path) -> str:
    own = dict.fromkeys(("XDG_STATE_HOME", "XDG_DATA_HOME", "TMPDIR"), str(directory))
    environment = {**os.environ, **own}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_first_program(shown: str) -> None:
    """Story: the keys of its records all belonged to one partition of six."""
    assert shown.count("greetings") == 3, shown
    records = re.findall(r"(?m)^(\d) 0 b'\w+' b'(\w+)'$", shown)
    assert sorted(value for _, value in records) == ["ciao", "hallo", "hello"]
    assert len({partition for partition, _ in records}) == 3, shown


@pytest.mark.quick
@pytest.mark.usefixtures("spark")
def test_the_first_program_shows_what_it_appended_in_a_session_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "first.py"
    script.write_text(snippet("python"))
    runpy.run_path(str(script), run_name="__main__")
    check_first_program(capsys.readouterr().out)


@pytest.mark.full
def test_the_first_program_shows_what_it_appended(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(snippet("python"))
    check_first_program(run([sys.executable, str(script)], tmp_path))


def terminal(sessions: list[str], directory: Path) -> str:
    """What the README's shell sessions show, one after the other in one terminal, as a fresh one begins."""
    (directory / ".venv").symlink_to(sys.prefix)
    (directory / "jobs").symlink_to(README.parent / "jobs")
    activated = "source .venv/bin/activate"
    assert README.read_text().index(activated) < README.read_text().index("```sh\n")
    stops = "trap 'spark-broker cluster stop || true' EXIT"  # also where a command fails
    return run(["bash", "-euo", "pipefail", "-c", "\n".join([activated, stops, *sessions])], directory)


@pytest.mark.full
def test_the_shell_sessions_do_what_the_readme_says(tmp_path: Path) -> None:
    """Story: `words` was never created, and `spark-submit` was needed before it was on the path."""
    shown = terminal([snippet("sh", position) for position in range(4)], tmp_path)
    assert sorted(re.findall(r'"value":"(\w+)"', shown)) == ["hallo", "hello"]
    assert re.findall(r"(\d) rows are in (\w+)", shown) == [("3", "flights"), ("2", "words"), ("1", "words")]
    assert sorted(re.findall(r"(?m)^\|(one|two|three) *\|", shown)) == ["one", "three", "two"]
    assert re.findall(r"(\d) records of flights went to (\S+)", shown) == [
        ("2", "late.parquet"),
        ("3", "flights.parquet"),
    ]
    assert re.findall(r"'page': '(/\w+)', 'ms': (\d+)", shown) == [("/home", "12"), ("/cart", "30")]
    assert "history in" in shown
    assert not (tmp_path / "spark-broker" / "cluster.json").exists()
