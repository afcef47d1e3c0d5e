"""A run with several workers says where a test was that ended its worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from tests.support.stacks import StacksOfTests, StacksOfWorkers

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(StacksOfWorkers())

def pytest_sessionstart(session):
    session.config.pluginmanager.register(StacksOfTests(session.config))
"""

HANGS = """
import threading
import pytest

@pytest.mark.timeout(1.5, method="thread")
def test_it():
    threading.Event().wait()
"""

CRASHES = """
import ctypes

def test_it():
    ctypes.string_at(0)
"""


@pytest.mark.parametrize(("test", "last"), [(HANGS, "threading.Event().wait()"), (CRASHES, "ctypes.string_at(0)")])
def test_the_stack_of_a_test_that_ends_its_worker_is_shown_at_the_end(tmp_path: Path, test: str, last: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", "--max-worker-restart=0"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    shown = ended.stdout.partition("stacks of gw0")[2]
    line = next(number for number, text in enumerate(test.splitlines(), 1) if last in text)
    assert f'test_it.py", line {line} in test_it' in shown, ended.stdout
    assert "site-packages/pluggy/" not in shown
    assert list(tmp_path.glob("stacks-*")) == []
