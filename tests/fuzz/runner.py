"""Runs workers, and turns what becomes of them into findings that can be tried again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.fuzz.worker import CASE_TIMEOUT_S, Report, read_current

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60
MAX_FINDINGS = 20
"""A target with more is broken in one place: the first ones say where."""


@dataclass(frozen=True)
class Finding:
    """An input that did harm. `path`: its bytes."""

    target: str
    seed: int
    what: str
    path: Path

    def __str__(self) -> str:
        again = f"python -m tests.fuzz --target {self.target} --seed {self.seed} --count 1"
        return (
            f"target {self.target}, seed {self.seed}: {last_lines(self.what)}\n  again: {again}\n  input: {self.path}"
        )


def last_lines(text: str, lines: int = 12) -> str:
    """The end of a stack trace says what happened."""
    return "\n".join(text.strip().splitlines()[-lines:])


@dataclass
class Outcome:
    """What a run came to: inputs tried, of which accepted, and what did harm."""

    tried: int
    accepted: int
    findings: list[Finding]


def run(
    target: str,
    *,
    first_seed: int,
    count: int,
    seconds: float,
    directory: Path,
    on_progress: Callable[[int], None] = lambda tried: None,
) -> Outcome:
    """Try inputs in a process of their own, in another one after each crash, until `count` or the time is used up."""
    directory.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(0, 0, [])
    seed, end = first_seed, first_seed + count
    while seed < end and len(outcome.findings) < MAX_FINDINGS:
        accepted = 0
        done = False
        worker = _start(target, seed, end - seed, seconds, directory)
        for report in _reports(worker, seconds):
            accepted, seed, done = report.accepted, report.next_seed, report.done
            if report.finding:
                outcome.findings.append(_finding(target, seed - 1, report.finding, directory))
            on_progress(seed - first_seed)
        outcome.accepted += accepted
        if done:
            break
        seed = _crashed(target, worker, directory, outcome) + 1
    outcome.tried = seed - first_seed
    return outcome


def _start(target: str, seed: int, count: int, seconds: float, directory: Path) -> subprocess.Popen[str]:
    arguments = [target, str(seed), str(count), str(seconds), str(directory)]
    with (directory / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.worker", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        )


def _reports(worker: subprocess.Popen[str], seconds: float) -> Iterator[Report]:
    """The worker's lines until it ends; killed when it outlives every limit of its own."""
    reaper = threading.Timer(seconds + START_TIMEOUT_S + 2 * CASE_TIMEOUT_S, worker.kill)
    reaper.start()
    with worker:  # waits for its end, and closes its output
        try:
            assert worker.stdout is not None
            for line in worker.stdout:
                if line.endswith("\n"):
                    yield msgspec.json.decode(line, type=Report)
        except BaseException:
            worker.kill()
            raise
    reaper.cancel()


def _crashed(target: str, worker: subprocess.Popen[str], directory: Path, outcome: Outcome) -> int:
    """Note the input at which the worker ended. Returns its seed."""
    seed, _ = read_current(directory)
    said = (directory / "stderr").read_text(errors="replace")[-4000:]
    if seed == 2**64 - 1:
        raise RuntimeError(f"a worker ended with {worker.returncode} before its first input:\n{said}")
    what = f"the process ended with {worker.returncode}\n{said}"
    outcome.findings.append(_finding(target, seed, what, directory))
    return seed


def _finding(target: str, seed: int, what: str, directory: Path) -> Finding:
    """The input is what the worker left. If the worker is already past it, the seed makes it again."""
    path = directory / f"{target}-{seed}.bin"
    current, data = read_current(directory)
    if current == seed:
        path.write_bytes(data)
    else:
        path.write_bytes(_made_again(target, seed))
    return Finding(target, seed, what, path)


def _made_again(target: str, seed: int) -> bytes:
    from tests.fuzz.targets import TARGETS, input_of

    return input_of(target, seed) if target in TARGETS else seed.to_bytes(8, "little")
