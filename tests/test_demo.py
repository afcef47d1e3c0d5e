"""`make demo`, with fewer rows: the whole of it, on real executors, with a real `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import eventually

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 400

pytestmark = [pytest.mark.spark, pytest.mark.full, pytest.mark.timeout(TIMEOUT_S + 60)]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "120"}


def test_the_demo_ends_well_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "jobs" / "demo.py", "--rows", "100000"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("100,000 of 100,000, all equal") == 2
    assert "kill -9" in done.stdout
    assert list(tmp_path.glob("spark-broker-demo-*")) == []


def test_an_interrupted_demo_ends_its_applications(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, ROOT / "jobs" / "demo.py"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    try:
        assert "brokers are live" in demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
        said, _ = demo.communicate(timeout=TIMEOUT_S)
    finally:
        demo.kill()
    assert demo.returncode == 1
    assert "interrupted" in said
    (directory,) = tmp_path.glob("spark-broker-demo-*")

    def running() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(directory) in _text(path)]

    eventually(lambda: not running(), 30, "the end of every process")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # The process ended meanwhile.
