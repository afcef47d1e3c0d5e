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
TIMEOUT_S = 280


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
    assert shown.count("greetings") == 2, shown
    assert sorted(re.findall(r"'value': b'(\w+)'", shown)) == ["hallo", "hello"]


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


@pytest.mark.full
def test_the_shell_session_gives_back_the_lines(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    shown = run(["bash", "-euo", "pipefail", "-c", snippet("sh")], tmp_path)
    assert sorted(re.findall(r'"value":"(\w+)"', shown)) == ["hallo", "hello"]
    assert not (tmp_path / "spark-broker" / "cluster.json").exists()
