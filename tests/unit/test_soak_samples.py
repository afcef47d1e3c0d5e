"""Whether a process's resources grow: a line through its memory, the highest counts of threads and files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.soak import census
from tests.soak.census import Census
from tests.soak.samples import Line, Sample, growth
from tests.support.waiting import eventually

MINUTE_S = 60.0


def taken(count: int, *, leak_mb: float = 0.0, warm_up_mb: float = 0.0, files: int = 10) -> list[Sample]:
    """One a minute. `warm_up_mb`: what the first sixth lacks; `files`: open files in the last quarter."""
    return [
        Sample(
            at_s=n * MINUTE_S,
            memory_mb=100.0 + leak_mb * n - (warm_up_mb if n < count // 6 else 0.0),
            threads=20 + n % 2,
            files=files if n >= count - count // 4 else 10,
        )
        for n in range(count)
    ]


def test_what_stays_has_no_slope_whatever_it_was_at_first() -> None:
    broker_growth = growth("broker 0", taken(60, warm_up_mb=50.0))
    assert (broker_growth.memory, broker_growth.threads, broker_growth.files) == (Line(100.0, 0.0), 0, 0)
    assert broker_growth.used is broker_growth.objects is None


def test_a_leak_is_told_in_percent_of_the_mean_an_hour() -> None:
    broker_growth = growth("broker 0", taken(60, leak_mb=0.5))
    assert broker_growth.memory.percent_h == pytest.approx(30 / broker_growth.memory.mean * 100, rel=0.01)


def test_what_is_used_and_what_is_held_are_told_apart() -> None:
    counted = [
        msgspec.structs.replace(sample, census=Census(20.0, 1000 + 10 * n))
        for n, sample in enumerate(taken(60, leak_mb=0.5))
    ]
    broker_growth = growth("broker 0", counted)
    assert broker_growth.used == Line(20.0, 0.0)
    assert broker_growth.objects is not None
    assert broker_growth.objects.percent_h == pytest.approx(600 / broker_growth.objects.mean * 100, rel=0.01)


def test_a_process_says_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "from tests.soak import census; census.begin(); input()"]
    monkeypatch.setenv(census.DIRECTORY, str(tmp_path))
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        eventually(lambda: Census.of(process.pid) is not None)
        usage = Census.of(process.pid)
        process.communicate(b"\n")
    assert usage is not None
    assert 0.1 < usage.used_mb < 200
    assert usage.objects > 10_000


def test_files_that_are_open_at_the_end_only_are_told() -> None:
    assert growth("broker 0", taken(60, files=17)).files == 7
