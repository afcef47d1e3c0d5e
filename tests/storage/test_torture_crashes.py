"""At every operation of a run the process crashes, also within a write, or the machine, with every subset lost."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator

import pytest

from spark_broker.storage.config import LogConfig
from spark_broker.testing.simulation.filesystem import Fault, Operation
from tests.storage.once import Once
from tests.storage.torture import (
    Run,
    Step,
    check,
    check_interrupted_recoveries,
    check_machine_crashes,
    check_process_crashes,
    telling,
)

RUNS: dict[str, list[Step]] = {
    "append and flush": [("append", 1), ("append", 23), ("flush", 0), ("append", 2)],
    "roll": [("append", 2), ("roll", 1), ("append", 1), ("roll", 2), ("flush", 0)],
    "truncate in the active segment": [("append", 1), ("append", 31), ("flush", 0), ("truncate", 2), ("append", 3)],
    "truncate into a sealed segment": [("append", 31), ("roll", 1), ("roll", 1), ("truncate", 3), ("append", 1)],
    "truncate everything": [("append", 2), ("roll", 2), ("flush", 0), ("truncate", 4), ("append", 1)],
    "truncate to a sealed end": [("append", 2), ("roll", 2), ("truncate", 2), ("append", 1), ("flush", 0)],
    "truncate below the log start": [("append", 3), ("append", 3), ("advance", 4), ("truncate", 2), ("append", 1)],
    "retention": [("append", 2), ("roll", 2), ("roll", 2), ("advance", 3), ("advance", 3), ("append", 1)],
    "retention of what is not synced": [("append", 2), ("append", 2), ("advance", 3), ("flush", 0)],
    "restart further on": [("append", 2), ("roll", 2), ("flush", 0), ("restart", 100), ("append", 1), ("flush", 0)],
    "restart within": [("append", 2), ("roll", 2), ("append", 2), ("flush", 0), ("restart", -1), ("append", 1)],
    "restart before": [("restart", 50), ("append", 2), ("flush", 0), ("restart", -50), ("append", 1)],
    "restart within a batch": [("append", 3), ("flush", 0), ("restart", 7), ("within", 2), ("append", 1), ("roll", 1)],
    "checkpoints": [("epoch", 0), ("append", 1), ("epoch", 0), ("append", 1), ("flush", 0), ("epoch", 0)],
    "crashes between": [("append", 2), ("crash", 0), ("flush", 0), ("roll", 1), ("crash", 0), ("append", 1)],
    "clean stops between": [("append", 2), ("close", 0), ("append", 1), ("roll", 1), ("close", 0), ("append", 1)],
}

REFUSED = ("create", "rename", "unlink", "pwritev")
"""What a disk without room, or a quota, may refuse. A rename may need room for its longer name."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def every(length: int) -> Iterator[int]:
    """Every number of bytes of a write except the full length."""
    yield from range(1, length)


def some(length: int) -> Iterator[int]:
    """Lengths near the beginning, the middle and the end of a write."""
    yield from sorted({1, 8, 79, 80, 81, length // 2, length - 8, length - 1} & set(range(1, length)))


def run_of(steps: list[Step]) -> Run:
    run = Run(LogConfig())
    run.perform(steps)
    return run


@pytest.mark.quick
@pytest.mark.parametrize("name", RUNS)
def test_a_crash_at_any_operation_leaves_a_legal_log(name: str) -> None:
    rng, once = random.Random(name), Once(check)
    for point in run_of(RUNS[name]).points:
        with telling(point):
            check_process_crashes(once, point, some)
            check_machine_crashes(once, point, most_subsets=4, draws=2, rng=rng)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["roll", "truncate into a sealed segment", "retention"])
def test_a_recovery_that_is_cut_short_is_done_by_the_next(name: str) -> None:
    once = Once(check)
    for point in run_of(RUNS[name]).points[::5]:
        with telling(point):
            check_interrupted_recoveries(
                once, point, kept_of=lambda count: {0, (1 << count) - 1, 0b0101 % (1 << count)}
            )


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_every_crash_with_every_subset_of_unsynced_changes(name: str) -> None:
    """Exhaustive up to 7 unsynced changes. Process crashes tear writes at every byte, machine crashes at random."""
    rng, once = random.Random(name), Once(check)
    for point in run_of(RUNS[name]).points:
        with telling(point):
            check_process_crashes(once, point, every)
            check_machine_crashes(once, point, most_subsets=1 << 7, draws=10, rng=rng)


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_every_recovery_that_is_cut_short_is_done_by_the_next(name: str) -> None:
    rng, once = random.Random(name), Once(check)
    for point in run_of(RUNS[name]).points:
        with telling(point):
            check_interrupted_recoveries(
                once, point, kept_of=lambda count: {0, (1 << count) - 1, rng.randrange(1 << count)}
            )


def goes_on_after_a_refusal(steps: list[Step], number: int, at: int) -> bool:
    """A full disk, or a quota, refuses the change of the disk with this number, and later has room. False: there are
    fewer changes.
    """
    run = Run(recording=False)
    run.fs.capacity_bytes = 1 << 40
    left, refused = at, False

    def refuse(operation: Operation) -> Fault | None:
        nonlocal left, refused
        if refused or operation.kind not in REFUSED:
            return None
        left -= 1
        refused = left < 0
        return Fault(number) if refused else None

    for step in steps:
        run.fs.on_operation = None if refused else refuse
        with telling(f"change {at} is refused; step {step}"):
            run.attempt(step)
    run.fs.on_operation = None
    with telling(f"change {at} was refused"):
        run.perform([("append", 2), ("roll", 1), ("append", 1), ("crash", 0), ("roll", 2), ("flush", 0)])
        run.lose_power(random.Random(at))
    names = run.fs.list_directory(run.directory)
    assert not [name for name in names if name.endswith((".deleted", ".tmp"))]
    bases = {int(name.split(".")[0]) for name in names if name.endswith((".arrow", ".index"))}
    assert bases == set(run.log.segment_base_offsets), "what is below the log start is gone, too"
    return refused


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("name", RUNS)
def test_whatever_a_full_disk_refuses_the_log_is_legal_and_stays_so(name: str, number: int) -> None:
    """Story: the last file of a segment that was cut off could not be deleted. The next segment of that offset lost its
    index when the log was opened: what had been acknowledged since was damaged.
    """
    at = 0
    while goes_on_after_a_refusal(RUNS[name], number, at):
        at += 1
    assert at > 3


def random_run(seed: int) -> list[Step]:
    """Twenty steps of any kind, more appends than others."""
    rng = random.Random(seed)
    kinds = ["append"] * 5 + ["roll"] * 3 + ["within", "flush", "truncate", "truncate", "advance", "restart"]
    kinds += ["epoch", "crash", "close"]
    ranges = {
        "append": (1, 39),
        "within": (1, 8),
        "roll": (1, 29),
        "truncate": (0, 12),
        "advance": (0, 8),
        "restart": (-5, 20),
    }
    return [(kind, rng.randint(*ranges.get(kind, (0, 0)))) for kind in rng.choices(kinds, k=20)]


def torment(seed: int) -> None:
    rng, once = random.Random(seed), Once(check)
    steps = random_run(seed)
    with telling(f"seed {seed}: {steps}"):
        for point in rng.sample(run_of(steps).points, 12):
            with telling(point):
                check_process_crashes(once, point, some)
                check_machine_crashes(once, point, most_subsets=6, draws=6, rng=rng)


@pytest.mark.parametrize("seed", range(5))
def test_random_runs(seed: int) -> None:
    torment(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 1100, 50))
def test_many_random_runs(first: int) -> None:
    for seed in range(first, first + 50):
        torment(seed)
