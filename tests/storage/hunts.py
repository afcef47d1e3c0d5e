"""The torture as endless runs of cases, to count after how many of them a bug is found.

A case is one crash with its recovery, one damaged file that is opened, or one life of a log: it raises when it finds
something. Every hunt has the same cases each time.
"""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from spark_broker.errors import DamagedLogError
from spark_broker.protocol.frame import Frame
from spark_broker.storage.config import LogConfig
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import SimFileSystem
from tests.storage import (
    replica_damage,
    replica_torture,
    test_torture_crashes,
    test_torture_damage,
    test_torture_replica,
    torture,
)
from tests.storage.logs import everything, open_log, same, sim_directory
from tests.storage.replica_torture import Legal
from tests.storage.test_log_machine import LogMachine
from tests.storage.torture import Run, frame_at

Case = Callable[[], object]
Hunt = Callable[[], Iterator[Case]]


def crashes_of_logs() -> Iterator[Case]:
    """A crash at every operation of a log's scripted runs, in random order, and then of random runs."""
    scripts = list(test_torture_crashes.RUNS.values())
    for runs in itertools.chain([scripts], ([test_torture_crashes.random_run(seed)] for seed in itertools.count())):
        points = [point for steps in runs for point in test_torture_crashes.run_of(steps).points]
        rng = random.Random(len(points))
        for point in rng.sample(points, len(points)):
            yield from _crashes(point, torture.check, rng)


def crashes_of_replicas() -> Iterator[Case]:
    """The same for everything that a replica keeps."""
    scripts = list(test_torture_replica.RUNS.values())
    for runs in itertools.chain([scripts], ([test_torture_replica.random_run(seed)] for seed in itertools.count())):
        points = [point for steps in runs for point in test_torture_replica.run_of(steps).points]
        rng = random.Random(len(points))
        for point in rng.sample(points, len(points)):
            yield from _crashes(point, replica_torture.check, rng)


AnyPoint = torture.Point | replica_torture.Point


def _crashes(point: AnyPoint, check: Callable[..., None], rng: random.Random) -> Iterator[Case]:
    """The process crashes, perhaps within a write; or the machine, which loses all unsynced changes, none, or some."""
    yield lambda: check(point.fs.copy().crash_process(), StartKind.PROCESS_CRASH, point.process)
    operation = point.operation
    if operation is not None and isinstance(operation.detail, bytes):
        yield partial(_crash_within, point, check, operation.detail[: rng.randrange(len(operation.detail))])
    count = 1 << point.fs.unsynced_changes
    for kept in sorted({0, count - 1, rng.randrange(count), rng.randrange(count)}):
        yield partial(_crash_machine, point, check, kept)
    yield lambda: check(point.fs.copy().crash_machine(rng), StartKind.MACHINE_CRASH, point.machine)


def _crash_within(point: AnyPoint, check: Callable[..., None], written: bytes) -> None:
    fs = point.fs.copy()
    if point.operation is not None:
        fd = fs.open(Path(point.operation.path), 2)
        fs.pwritev(fd, [memoryview(written)], point.operation.position)
    check(fs.crash_process(), StartKind.PROCESS_CRASH, point.process)


def _crash_machine(point: AnyPoint, check: Callable[..., None], kept: int) -> None:
    check(point.fs.copy().crash_machine_keeping(kept), StartKind.MACHINE_CRASH, point.machine)


def lives_of_logs() -> Iterator[Case]:
    """The rules of the state machine in random order: crashes, full disks, reads, look-ups by time."""
    return (partial(_live, seed) for seed in itertools.count())


def _live(seed: int) -> None:
    rng = random.Random(seed)
    machine = LogMachine()
    rules: list[Callable[[], None]] = [
        *[lambda: machine.append(number=rng.randint(1, 39))] * 3,
        *[lambda: machine.roll(number=rng.randint(1, 39))] * 2,
        lambda: machine.truncate(offsets=rng.randint(0, 30)),
        lambda: machine.delete_records(offsets=rng.randint(0, 20)),
        lambda: machine.restart(offsets=rng.randint(-20, 20)),
        machine.flush,
        machine.begin_an_epoch,
        machine.stop_cleanly,
        machine.kill_the_process,
        *[lambda: machine.let_the_process_die_soon(changes=rng.randint(0, 4), kept_bytes=rng.randint(0, 900))] * 2,
        *[lambda: machine.lose_power(seed=rng.getrandbits(32))] * 2,
        lambda: machine.fill_the_disk(free_bytes=rng.randint(0, 1000)),
        machine.free_the_disk,
        *[lambda: machine.look_up_a_time(timestamp_us=rng.randint(0, machine.run.end + 20))] * 3,
    ]
    for rule in rng.choices(rules, k=30):
        rule()
        machine.is_what_the_model_says()


def lives_with_failing_syncs() -> Iterator[Case]:
    """An fsync fails now and then; in the end the machine loses all unsynced changes."""
    return (partial(_live_with_failing_syncs, seed) for seed in itertools.count())


def _live_with_failing_syncs(seed: int) -> None:
    rng = random.Random(seed)
    run = Run(LogConfig(segment_bytes=1500), recording=False)
    for name in rng.choices(["append", "append", "roll", "flush", "truncate", "close"], k=12):
        if rng.random() < 0.3:
            run.fs.fail_next("fsync", errno.EIO, path=rng.choice([".arrow", ".index"]))
        run.attempt((name, rng.randint(1, 9)))
        run.fs.heal()
    run.fs = run.fs.crash_machine_keeping(0)
    run.reopen(StartKind.MACHINE_CRASH, run._now[2])


def damage_at_rest() -> Iterator[Case]:
    """For each file, a flipped bit in every seventh byte, and then the file truncated to every seventh length."""
    test_torture_damage.image_of.cache_clear()
    for start in reversed(StartKind):
        image = test_torture_damage.image_of(start)
        for name in test_torture_damage.FILES:
            least = image.synced if start is StartKind.MACHINE_CRASH else image.end
            size = image.fs.size_of(test_torture_damage.DIRECTORY / name)
            for byte in range(0, size, 7):
                yield partial(
                    test_torture_damage.check_damage, start, test_torture_damage.flip(byte), name, least=least
                )
            least = image.end if start is StartKind.CLEAN else image.synced
            for length in range(0, size, 7):
                yield partial(
                    test_torture_damage.check_damage, start, test_torture_damage.cut(length), name, least=least
                )


def damage_while_open() -> Iterator[Case]:
    """A flipped bit in a byte of a file of an open log."""
    image = test_torture_damage.image_of(StartKind.CLEAN)
    return (partial(_flip_while_open, image, name, byte) for name, byte in test_torture_damage.changed_after(11))


def _flip_while_open(image: test_torture_damage.Image, name: str, byte: int) -> None:
    fs = image.fs.copy()
    log = open_log(test_torture_damage.DIRECTORY, StartKind.CLEAN, fs=fs)
    test_torture_damage.flip(byte)(fs, test_torture_damage.DIRECTORY / name)
    try:
        assert same(test_torture_damage.served(log), list(image.frames)), "other batches than were written"
    except DamagedLogError:
        return


def damage_of_replicas() -> Iterator[Case]:
    """Damage in every second byte of snapshots and checkpoints."""
    for start in StartKind:
        fs, legal = replica_damage.image_of(start)
        for _, damage in replica_damage.damages(fs, 2):
            yield partial(_open_damaged, fs.copy(), start, legal, damage)


def _open_damaged(fs: SimFileSystem, start: StartKind, legal: Legal, damage: replica_damage.Damage) -> None:
    damage(fs)
    replica_damage.opens_as(fs, start, legal)


def disordered_ends() -> Iterator[Case]:
    """KAFKA-3919: unsynced batches are complete but in any order, some missing and some stored twice."""
    return (partial(_open_disordered, seed) for seed in itertools.count())


def _open_disordered(seed: int) -> None:
    rng = random.Random(seed)
    fs, directory = sim_directory()
    log = open_log(directory, fs=fs)
    count = rng.randint(3, 8)
    frames = [frame_at(number, 1, 0, number == 0) for number in range(count)]
    synced = rng.randint(1, count - 1)
    log.append_many(frames[:synced])
    log.flush()
    log._save_state()
    end = log.size_bytes
    rest = [rng.choice(frames) for _ in range(rng.randint(0, 3))]
    _write_at_end(fs, [*frames[synced : rng.randint(synced, count)], *rest], end)
    log = open_log(directory, StartKind.MACHINE_CRASH, fs=fs.crash_machine_keeping(-1))
    recovered_frames = everything(log)
    assert synced <= len(recovered_frames), "what was synced"
    assert same(recovered_frames, frames[: len(recovered_frames)]), "a prefix of what was written"


def _write_at_end(fs: SimFileSystem, frames: list[Frame], position: int) -> None:
    path = test_torture_damage.DIRECTORY / test_torture_damage.FILES[0]
    fd = fs.open(path, 2)
    fs.pwritev(fd, [memoryview(bytes(frame.message)) for frame in frames], position)
    fs.fsync(fd)
