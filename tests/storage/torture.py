"""A run of a log on a simulated disk that remembers, before every change of the disk, what a crash there may leave.

`Run` performs steps on a `PartitionLog` and keeps the tiny model beside it: the batches, the log start, and the offset
up to which they are synced. `points` are the places to crash at; `check` opens the log after a crash and compares.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from spark_broker.errors import DamagedLogError, KafkaStorageError, StorageFullError
from spark_broker.protocol.frame import Frame
from spark_broker.storage.checkpoints import read_leader_epochs, write_leader_epochs
from spark_broker.storage.config import LogConfig
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.retention import RetentionClock
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import CHANGING, Fault, Operation, ProcessKilled, SimFileSystem
from tests.storage.logs import everything, make_frame, open_log, same, sim_directory

Step = tuple[str, int]
"""A name of `STEPS` and its number: rows of a batch, or how many offsets or bytes."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A log with the batches of `frames` that starts at `start` and ends with a batch, from `least` to `most`."""

    frames: tuple[Frame, ...]
    start: int
    least: int
    most: int

    def problem(self, log: PartitionLog) -> str:
        """Why the log is none of these; empty if it is one."""
        start, end = log.log_start_offset, log.log_end_offset
        if start != self.start or not self.least <= end <= self.most:
            return f"the log is [{start}, {end}), not [{self.start}, {self.least}..{self.most})"
        frames = everything(log)
        wanted = [f for f in self.frames if start < f.header.next_offset <= end]
        if not same(frames, wanted) or [f.header for f in wanted] != list(log.headers(start)):
            return f"it holds {[f.header.base_offset for f in frames]} of [{start}, {end})"
        return "" if not frames or frames[-1].header.next_offset == end else "its end is not a batch's end"


@dataclass(frozen=True, slots=True)
class Point:
    """A place to crash at: the disk before an operation (None: between two steps), and the logs that may be found."""

    fs: SimFileSystem
    step: Step
    operation: Operation | None
    process: tuple[Expected, ...]
    machine: tuple[Expected, ...]

    def __str__(self) -> str:
        what = "after it" if self.operation is None else f"before {self.operation.kind} {self.operation.path}"
        return f"step {self.step}, {what}"


@lru_cache(maxsize=1000)
def frame_at(base_offset: int, rows: int, epoch: int, first: bool) -> Frame:
    """The batch at this place. Timestamps never fall, and sometimes repeat."""
    timestamp_us = base_offset - base_offset % 5 + 10 * epoch
    return make_frame(base_offset, rows, leader_epoch=epoch, first=first, timestamp_us=timestamp_us)


@dataclass(slots=True)
class Run:
    """The log, its model, and the points passed. Recording every point is optional: it copies the disk."""

    config: LogConfig = field(default_factory=LogConfig)
    recording: bool = True
    fs: SimFileSystem = field(init=False)
    directory: Path = field(init=False)
    log: PartitionLog = field(init=False)
    frames: tuple[Frame, ...] = ()
    start: int = 0
    synced: int = 0
    epoch: int = 0
    points: list[Point] = field(default_factory=list)
    _now: tuple[Step, tuple[Expected, ...], tuple[Expected, ...]] = (("begin", 0), (), ())

    def __post_init__(self) -> None:
        self.fs, self.directory = sim_directory()
        self.log = open_log(self.directory, config=self.config, fs=self.fs)
        self.settle(("begin", 0), (), 0, 0)
        if self.recording:
            self.fs.on_operation = self._record

    @property
    def end(self) -> int:
        return self.frames[-1].header.next_offset if self.frames else self.start

    def perform(self, steps: Sequence[Step]) -> None:
        for step in steps:
            STEPS[step[0]](self, step)

    def attempt(self, step: Step) -> str:
        """Perform a step that may fail. Returns "done", "full" (the log goes on), or "died" (process or log failed).

        The log must then be one that the step may leave, and the model goes on from it.
        """
        try:
            self.perform([step])
            return "done"
        except (StorageFullError, OSError):  # A checkpoint raises the system's error.
            if step[0] != "close" and not self.log.is_unusable:
                self._adopt(self._now[1], self.synced)
                return "full"
        except (KafkaStorageError, ProcessKilled):
            pass  # The log refuses everything, or its process has ended.
        self.fs = self.fs.crash_process()
        self.fs.on_operation = None
        self.reopen(StartKind.PROCESS_CRASH, self._now[1])
        return "died"

    def lose_power(self, rng: random.Random) -> None:
        """The machine crashes and restarts."""
        self.fs = self.fs.crash_machine(rng)
        self.reopen(StartKind.MACHINE_CRASH, self._now[2])

    def reopen(self, start: StartKind, allowed: Sequence[Expected]) -> None:
        """Another process opens the log on the present disk, which gets room if it needs some."""
        try:
            self.log = open_log(self.directory, start, self.config, self.fs)
        except StorageFullError:
            assert self.fs.capacity_bytes is not None
            self.fs = self.fs.crash_process()
            self.fs.capacity_bytes = None
            self.log = open_log(self.directory, start, self.config, self.fs)
        self._adopt(allowed, self.synced if start is StartKind.PROCESS_CRASH else self.log.log_end_offset)

    def _adopt(self, allowed: Sequence[Expected], synced: int) -> None:
        """Go on from the log that was found."""
        fitting = [expected for expected in allowed if not expected.problem(self.log)]
        assert fitting, [expected.problem(self.log) for expected in allowed]
        end = self.log.log_end_offset
        frames = [frame for frame in fitting[0].frames if frame.header.next_offset <= end]
        if frames and frames[-1].header.next_offset < end:
            frames = []  # Only the log start is left.
        self.settle(("found", end), frames, self.log.log_start_offset, min(synced, end))

    def during(
        self, step: Step, action: Callable[[], object], process: Sequence[Expected], machine: Sequence[Expected]
    ) -> None:
        """Carry out an action that may be interrupted; meanwhile a crash may leave one of these logs."""
        self._now = (step, tuple(process), tuple(machine))
        action()

    def settle(self, step: Step, frames: Sequence[Frame], start: int, synced: int) -> None:
        """End the step: this is the log now, synced up to `synced` or to its recovery point, if that is higher."""
        self.frames, self.start = tuple(frames), start
        self.synced = max(synced, self.log.recovery_point)
        assert self.synced <= self.end, "nothing is synced that is not there"
        assert not self.now().problem(self.log), (step, self.now().problem(self.log))
        self._now = (step, (self.now(),), (self.now(least=self.synced),))
        if self.recording:
            self.points.append(Point(self.fs.copy(), step, None, self._now[1], self._now[2]))

    def now(self, *, least: int | None = None, most: int | None = None) -> Expected:
        """The present log; with `least`, any prefix that reaches at least that far."""
        return Expected(
            self.frames, self.start, self.end if least is None else least, self.end if most is None else most
        )

    def _record(self, operation: Operation) -> Fault | None:
        if operation.kind in CHANGING:
            step, process, machine = self._now
            self.points.append(Point(self.fs.copy(), step, operation, process, machine))
        return None

    def append(self, step: Step) -> None:
        """Append `number` // 10 batches (at least one) of `number` % 10 rows; a "roll" begins a segment first."""
        name, number = step
        added: list[Frame] = []
        # A replica that was rebuilt within a batch of its leader gets that batch whole.
        end = self.end - (name == "within" and not self.frames and self.start > 0)
        number += name == "within"
        for position in range(max(1, number // 10)):
            first = (not self.frames and not added) or (name == "roll" and position == 0) or self._rolls(added)
            added.append(frame_at(end, number % 10 or 1, self.epoch, first))
            end = added[-1].header.next_offset
        frames = (*self.frames, *added)
        during = [Expected(frames, self.start, self.end, end)], [Expected(frames, self.start, self.synced, end)]
        self.during(step, lambda: self.log.append_many(added), *during)
        self.settle(step, frames, self.start, self.synced)

    def _rolls(self, added: Sequence[Frame]) -> bool:
        return not added and self.log.should_roll(400, 0, 0)

    def flush(self, step: Step) -> None:
        self.during(step, self.log.flush, [self.now()], [self.now(least=self.synced)])
        self.settle(step, self.frames, self.start, self.end)

    def truncate(self, step: Step) -> None:
        """Truncate so many offsets from the end."""
        offset = max(0, self.end - step[1])
        kept = tuple(f for f in self.frames if f.header.next_offset <= offset)
        first = self.log.segment_base_offsets[0] if self.log.segment_base_offsets else self.end
        boundary = max(kept[-1].header.next_offset, first) if kept else first
        if offset >= self.end:
            boundary, kept = self.end, self.frames
        start = min(self.start, boundary)
        if offset < first:
            return self.restart_at(step, offset)
        done = Expected(kept, start, boundary, boundary)
        synced = min(self.synced, boundary)
        before = [Expected(self.frames, s, max(s, boundary), self.end) for s in {start, self.start}]
        machine = [Expected(self.frames, s, max(s, synced), self.end) for s in {start, self.start}]
        self.during(step, lambda: self.log.truncate_to(offset), [*before, done], [*machine, done])
        self.settle(step, kept, start, synced)
        return None

    def restart(self, step: Step) -> None:
        """Restart the log, at so many offsets from its present end."""
        self.restart_at(step, max(0, self.end + step[1]))

    def retain(self, step: Step) -> None:
        """Apply retention, which keeps at least so many bytes."""
        self.log.config = replace(self.config, retention_bytes=step[1], retention_ms=-1)
        self.advance(
            ("advance", self.log.retention_start(high_watermark=self.end, clock=RetentionClock(0)) - self.start)
        )

    def restart_at(self, step: Step, offset: int) -> None:
        done = Expected((), offset, offset, offset)
        before = self.now(least=self.start)
        self.during(step, lambda: self.log.truncate_fully_and_start_at(offset), [before, done], [before, done])
        self.settle(step, (), offset, offset)

    def advance(self, step: Step) -> None:
        """Advance the log start by so many offsets."""
        offset = min(self.end, self.start + step[1])
        process = [self.now(), Expected(self.frames, offset, self.end, self.end)]
        machine = [
            self.now(least=max(self.start, self.synced)),
            Expected(self.frames, offset, max(offset, self.synced), self.end),
        ]
        self.during(step, lambda: self.log.advance_log_start(offset), process, machine)
        self.settle(step, self.frames, offset, max(self.synced, offset))

    def new_epoch(self, step: Step) -> None:
        """A leader epoch begins, and its checkpoint is written."""
        epochs = [*read_leader_epochs(self.directory, fs=self.fs), (self.epoch + 1, self.end)]
        self.during(
            step,
            lambda: write_leader_epochs(self.directory, epochs, fs=self.fs),
            [self.now()],
            [self.now(least=self.synced)],
        )
        self.epoch += 1
        self.settle(step, self.frames, self.start, self.synced)

    def crash(self, step: Step) -> None:
        """The process dies; the next one opens the log."""
        self._now = (step, (self.now(),), (self.now(least=self.synced),))
        self.fs = self.fs.crash_process()
        self.reopen(StartKind.PROCESS_CRASH, self._now[1])

    def close(self, step: Step) -> None:
        """A clean stop and start."""
        self.during(step, lambda: self.log.close(clean=True), [self.now()], [self.now(least=self.synced)])
        self._now = (step, (self.now(),), (self.now(),))
        self.fs = self.fs.crash_process()
        self.reopen(StartKind.CLEAN, self._now[1])


STEPS: dict[str, Callable[[Run, Step], None]] = {
    "append": Run.append,
    "roll": Run.append,
    "within": Run.append,
    "flush": Run.flush,
    "truncate": Run.truncate,
    "restart": Run.restart,
    "advance": Run.advance,
    "retain": Run.retain,
    "epoch": Run.new_epoch,
    "crash": Run.crash,
    "close": Run.close,
}


def check(fs: SimFileSystem, start: StartKind, allowed: Sequence[Expected], config: LogConfig | None = None) -> None:
    """Recovery after this crash gives an allowed log; it takes a batch, and later syncs are durable."""
    directory = Path("/p-0")
    try:
        log = open_log(directory, start, config, fs)
    except DamagedLogError as error:
        raise AssertionError(f"a crash alone is not damage: {error}; {_listing(fs, directory)}") from error
    problems = [expected.problem(log) for expected in allowed]
    assert "" in problems, f"{problems}; {_listing(fs, directory)}"
    read_leader_epochs(directory, fs=fs)
    start_offset, frames = log.log_start_offset, everything(log)
    added = frame_at(log.log_end_offset, 2, 99, log.should_roll(400, 0, 0))
    log.append_many([added])
    log.flush()
    again = open_log(directory, StartKind.MACHINE_CRASH, config, fs.crash_machine_keeping(0))
    assert again.log_start_offset == start_offset
    assert same(everything(again), [*frames, added]), "what was synced after the recovery outlives the machine"


def process_crashes(
    disk: SimFileSystem, operation: Operation | None, cuts: Callable[[int], Iterable[int]]
) -> Iterator[SimFileSystem]:
    """The disk if the process dies here, or within the next write after each of `cuts(length)` bytes."""
    yield disk.copy().crash_process()
    if operation is None or not isinstance(operation.detail, bytes):
        return
    for length in cuts(len(operation.detail)):
        fs = disk.copy()
        fd = fs.open(Path(operation.path), 2)
        fs.pwritev(fd, [memoryview(operation.detail[:length])], operation.position)
        yield fs.crash_process()


def machine_crashes(
    disk: SimFileSystem, *, most_subsets: int, draws: int, rng: random.Random
) -> Iterator[SimFileSystem]:
    """The disk if the machine crashes here: each subset of unsynced changes, or a sample, and some torn ones."""
    count = 1 << disk.unsynced_changes
    kept = range(count) if count <= most_subsets else sorted({rng.randrange(count) for _ in range(most_subsets)})
    for subset in kept:
        yield disk.copy().crash_machine_keeping(subset)
    for _ in range(draws):
        yield disk.copy().crash_machine(random.Random(rng.getrandbits(32)))


Checks = Callable[[SimFileSystem, StartKind, Sequence[Expected]], None]
"""`check`, or one that does it once for equal disks."""


def check_process_crashes(check: Checks, point: Point, cuts: Callable[[int], Iterator[int]]) -> None:
    """Check recovery after each of `process_crashes`."""
    for left in process_crashes(point.fs, point.operation, cuts):
        check(left, StartKind.PROCESS_CRASH, point.process)


def check_machine_crashes(check: Checks, point: Point, *, most_subsets: int, draws: int, rng: random.Random) -> None:
    """Check recovery after each of `machine_crashes`."""
    for left in machine_crashes(point.fs, most_subsets=most_subsets, draws=draws, rng=rng):
        check(left, StartKind.MACHINE_CRASH, point.machine)


def check_interrupted_recoveries(check: Checks, point: Point, kept_of: Callable[[int], Collection[int]]) -> None:
    """Crash here, and then let the process or the machine crash again at each operation of the recovery.

    `kept_of(n)` are the subsets of n unsynced changes to try.
    """
    crashed = [(point.fs.copy().crash_process(), StartKind.PROCESS_CRASH)]
    for kept in kept_of(point.fs.unsynced_changes):
        crashed.append((point.fs.copy().crash_machine_keeping(kept), StartKind.MACHINE_CRASH))
    for fs, start in crashed:
        disks, recovered = _recovery(fs, start)
        for disk in disks:
            check(disk.copy().crash_process(), start, [recovered])
            for kept in kept_of(disk.unsynced_changes):
                check(disk.copy().crash_machine_keeping(kept), StartKind.MACHINE_CRASH, point.machine)


def _recovery(fs: SimFileSystem, start: StartKind) -> tuple[list[SimFileSystem], Expected]:
    """The disk before each change that a recovery makes, and the log that it found."""
    disks: list[SimFileSystem] = []

    def remember(operation: Operation) -> None:
        if operation.kind in CHANGING:
            disks.append(fs.copy())

    fs.on_operation = remember
    log = open_log(Path("/p-0"), start, fs=fs)
    end = log.log_end_offset
    return disks, Expected(tuple(everything(log)), log.log_start_offset, end, end)


@contextmanager
def telling(what: object) -> Iterator[None]:
    """A failure inside names where it was."""
    try:
        yield
    except AssertionError as error:
        error.add_note(str(what))
        raise


def _listing(fs: SimFileSystem, directory: Path) -> str:
    return ", ".join(f"{name}: {fs.size_of(directory / name)}" for name in fs.list_directory(directory))
