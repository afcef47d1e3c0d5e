"""A replica's log after a crash at every operation of a run, and with damage in each of its small files."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

import pytest

from spark_broker.storage import log
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import CHANGING, Operation, SimFileSystem
from tests.storage.once import Once
from tests.storage.replica_torture import PLAIN, Legal, Point, ReplicaRun, Step, check, open_replica
from tests.storage.torture import machine_crashes, process_crashes, telling

BEGIN: list[Step] = [("data", 1), ("txn", 2), ("plain", PLAIN), ("roll", 1), ("commit", 2), ("txn", 2)]

RUNS: dict[str, list[Step]] = {
    "transactions": [*BEGIN, ("flush", 0), ("abort", 2), ("txn", 2), ("roll", 3), ("abort", 2), ("commit", 4)],
    "epochs": [("epoch", 0), ("data", 1), ("epoch", 0), ("epoch", 0), ("data", 1), ("flush", 0), ("truncate", 1)],
    "truncate in a segment": [*BEGIN, ("flush", 0), ("truncate", 2), ("abort", 2), ("data", 1)],
    "truncate behind a roll": [*BEGIN, ("epoch", 0), ("roll", 3), ("roll", 1), ("truncate", 3), ("epoch", 0)],
    "truncate and roll there again": [*BEGIN, ("roll", 1), ("truncate", 1), ("epoch", 0), ("roll", 3), ("flush", 0)],
    "truncate all": [("data", 1), ("txn", 2), ("flush", 0), ("truncate", 9), ("epoch", 0), ("txn", 2), ("flush", 0)],
    "retention": [*BEGIN, ("abort", 2), ("roll", 1), ("roll", 3), ("advance", 8), ("advance", 9), ("data", 1)],
    "retention within a batch": [("data", 1), ("abort", 1), ("roll", 1), ("data", 1), ("advance", 4), ("data", 3)],
    "retention of all": [("txn", 1), ("abort", 1), ("flush", 0), ("advance", 9), ("epoch", 0), ("data", 1)],
    "truncate to the log start": [("data", 1), ("roll", 1), ("advance", 2), ("data", 3), ("truncate", 9), ("roll", 3)],
    "restart further on": [*BEGIN, ("flush", 0), ("restart", 50), ("epoch", 0), ("data", 9), ("commit", 9)],
    "restart within": [*BEGIN, ("advance", 2), ("restart", -3), ("epoch", 0), ("txn", 1), ("roll", 1)],
    "restart at the log start": [("data", 1), ("roll", 1), ("advance", 2), ("restart", -2), ("data", 3)],
    "restart of one begun within a batch": [("data", 1), ("data", 1), ("advance", 3), ("restart", 9), ("data", 1)],
    "restart twice": [*BEGIN, ("restart", 50), ("data", 9), ("flush", 0), ("restart", -20), ("epoch", 0), ("data", 1)],
    "crashes between": [*BEGIN, ("crash", 0), ("roll", 3), ("crash", 0), ("advance", 4), ("crash", 0), ("abort", 2)],
    "clean stops between": [*BEGIN, ("close", 0), ("roll", 3), ("advance", 4), ("close", 0), ("abort", 2)],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def save_each_recovery_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size. `test_torture_crashes.py` has logs that save none between two rolls."""
    monkeypatch.setattr(log, "UNSAID_BYTES_MAX", 0)


def run_of(steps: list[Step]) -> ReplicaRun:
    run = ReplicaRun()
    run.perform(steps)
    return run


Checks = Callable[[SimFileSystem, StartKind, Sequence[Legal]], None]
"""`check`, or one that does it once for equal disks."""


def check_process_crashes(check: Checks, point: Point, lengths: int) -> None:
    """Check recovery after the process died here, or in the next write, after about `lengths` different lengths."""

    def cuts(size: int) -> range:
        return range(1, size, max(1, size // lengths))

    for left in process_crashes(point.fs, point.operation, cuts):
        check(left, StartKind.PROCESS_CRASH, point.process)


def check_machine_crashes(check: Checks, point: Point, *, most_subsets: int, draws: int, rng: random.Random) -> None:
    """Check recovery after each of `machine_crashes`."""
    for left in machine_crashes(point.fs, most_subsets=most_subsets, draws=draws, rng=rng):
        check(left, StartKind.MACHINE_CRASH, point.machine)


def check_interrupted_recoveries(check: Checks, point: Point, kept: Collection[int]) -> None:
    """Crash here, and then again at each change that the recovery makes."""
    crashed = [(point.fs.copy().crash_process(), StartKind.PROCESS_CRASH, point.process)]
    crashed += [
        (point.fs.copy().crash_machine_keeping(subset), StartKind.MACHINE_CRASH, point.machine) for subset in kept
    ]
    for fs, start, allowed in crashed:
        for disk in _disks_of_recovery(fs, start):
            check(disk.copy().crash_process(), start, allowed)
            for subset in kept:
                check(disk.copy().crash_machine_keeping(subset), StartKind.MACHINE_CRASH, point.machine)


def _disks_of_recovery(fs: SimFileSystem, start: StartKind) -> list[SimFileSystem]:
    disks: list[SimFileSystem] = []

    def remember(operation: Operation) -> None:
        if operation.kind in CHANGING:
            disks.append(fs.copy())

    fs.on_operation = remember
    open_replica(start, fs)
    return disks


def torment(steps: list[Step], *, every: int, subsets: int, draws: int, lengths: int, rng: random.Random) -> None:
    points, once = run_of(steps).points, Once(check)
    for point in points[rng.randrange(every) :: every]:
        with telling(point):
            check_process_crashes(once, point, lengths)
            check_machine_crashes(once, point, most_subsets=subsets, draws=draws, rng=rng)


@pytest.mark.quick
@pytest.mark.parametrize("name", RUNS)
def test_a_crash_at_an_operation_leaves_a_legal_replica(name: str) -> None:
    torment(RUNS[name], every=3, subsets=2, draws=1, lengths=2, rng=random.Random(name))


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_a_crash_at_every_operation_leaves_a_legal_replica(name: str) -> None:
    torment(RUNS[name], every=1, subsets=12, draws=3, lengths=8, rng=random.Random(name))


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_a_recovery_that_is_cut_short_is_done_by_the_next(name: str) -> None:
    once = Once(check)
    for point in run_of(RUNS[name]).points[::7]:
        with telling(point):
            check_interrupted_recoveries(once, point, {0, (1 << point.fs.unsynced_changes) - 1})


def random_run(seed: int) -> list[Step]:
    """Twenty steps of any kind, with some more often than others."""
    rng = random.Random(seed)
    kinds = ["data", "data", "txn", "txn", "commit", "abort", "abort", "roll", "roll", "roll"]
    kinds += ["epoch", "truncate", "truncate", "advance", "restart", "flush", "crash", "close"]
    ranges = {"truncate": (0, 4), "advance": (0, 9), "restart": (-6, 20)}
    return [(kind, rng.randint(*ranges.get(kind, (1, 3)))) for kind in rng.choices(kinds, k=20)]


def torment_randomly(seed: int) -> None:
    steps = random_run(seed)
    with telling(f"seed {seed}: {steps}"):
        torment(steps, every=8, subsets=2, draws=2, lengths=3, rng=random.Random(seed))


@pytest.mark.parametrize("seed", range(4))
def test_random_runs(seed: int) -> None:
    torment_randomly(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 1100, 50))
def test_many_random_runs(first: int) -> None:
    for seed in range(first, first + 50):
        torment_randomly(seed)
