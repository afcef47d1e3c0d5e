"""Damage in each small file of a replica's log at rest is reported or harmless, but never believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from spark_broker.errors import DamagedLogError
from spark_broker.storage.checkpoints import LEADER_EPOCHS_FILE
from spark_broker.storage.log_state import LOG_STATE_FILE
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import SimFileSystem
from tests.storage.replica_torture import DIRECTORY, PLAIN, Legal, ReplicaRun, Step, open_replica

BATCHES: list[Step] = [
    ("data", 1),
    ("txn", 2),
    ("plain", PLAIN),
    ("abort", 2),
    ("roll", 1),
    ("epoch", 0),
    ("txn", 2),
    ("data", 3),
]
LATER: list[Step] = [
    ("advance", 7),
    ("epoch", 0),
    ("roll", 3),
    ("commit", 2),
    ("txn", 3),
    ("roll", 1),
    ("abort", 3),
    ("txn", 1),
]

Damage = Callable[[SimFileSystem], None]


def image_of(start: StartKind) -> tuple[SimFileSystem, Legal]:
    """The disk that an end of this kind leaves, all of it synced, and the log that it holds.

    There are aborted and open transactions on both sides of the snapshots. The log starts at an offset that only the
    snapshot there explains.
    """
    run = ReplicaRun(recording=False)
    run.perform([*BATCHES, *LATER, ("flush", 0)])
    run.log.close(clean=True)
    assert run.start > 0
    assert len(snapshots_of(run.fs)) > 1, "there is something to damage"
    fs = run.fs.crash_machine_keeping(0) if start is StartKind.MACHINE_CRASH else run.fs.crash_process()
    return fs, run.now()


def snapshots_of(fs: SimFileSystem) -> list[str]:
    return [name for name in fs.list_directory(DIRECTORY) if name.endswith(".snapshot")]


def opens_as(fs: SimFileSystem, start: StartKind, legal: Legal) -> bool:
    """False if the damage is reported. Raises AssertionError if the log differs from before."""
    try:
        problem = legal.problem(open_replica(start, fs))
    except DamagedLogError:
        return False
    assert not problem, problem
    return True


def damages(fs: SimFileSystem, every: int) -> Iterator[tuple[str, Damage]]:
    """Each small file with a flipped bit in every `every`-th byte, truncated at each of these bytes, or lost.

    LOG_STATE_FILE is never lost.
    """
    for name in [*snapshots_of(fs), LEADER_EPOCHS_FILE, LOG_STATE_FILE]:
        path = DIRECTORY / name
        for byte in range(0, fs.size_of(path), every):
            yield f"bit {byte % 8} of byte {byte} of {name}", partial(_flip, path=path, byte=byte)
            yield f"{name} cut to {byte} bytes", partial(SimFileSystem.truncate, path=path, length=byte)
        if name != LOG_STATE_FILE:
            yield f"{name} lost", partial(SimFileSystem.unlink, path=path)


def _flip(fs: SimFileSystem, path: Path, byte: int) -> None:
    fs.flip_bit(path, byte, byte % 8)
