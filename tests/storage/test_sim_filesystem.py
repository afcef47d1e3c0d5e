"""The simulated file system does what the real one does, and forgets what a real one may forget."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.errors import LogDirectoryLockedError
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import Fault, Operation, ProcessKilled, SimFileSystem

FILE = Path("/file")
NAMES = ("a", "b", "d/a", "d/b")


def write(fs: FileSystem, path: Path, data: bytes, position: int = 0, flags: int = os.O_CREAT) -> int:
    """Open, write once, and leave open."""
    fd = fs.open(path, os.O_RDWR | flags)
    fs.pwritev(fd, [memoryview(data)], position)
    return fd


def outcome(action: Callable[[], object]) -> object:
    """The action's result, or the errno that it raises."""
    try:
        return action()
    except OSError as error:
        return ("errno", error.errno)


Step = tuple[str, str, str, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "write",
                "append",
                "truncate",
                "cut",
                "rename",
                "unlink",
                "mkdir",
                "list",
                "read",
                "empty",
                "exclusive",
                "rmtree",
            ]
        ),
        st.sampled_from(NAMES),
        st.sampled_from(NAMES),
        st.integers(0, 20),
    ),
    max_size=25,
)


def perform(fs: FileSystem, base: Path, step: Step) -> object:
    kind, name, other, number = step
    path = base / name
    if kind in ("write", "append", "empty", "exclusive"):
        flags = {"append": 0, "write": os.O_CREAT, "empty": os.O_TRUNC, "exclusive": os.O_CREAT | os.O_EXCL}[kind]
        fd = fs.open(path, os.O_RDWR | flags)
        views = [memoryview(b"%d" % number), memoryview(b"xy")]
        result = (fs.pwritev(fd, views, number), fs.size(fd), fs.pread(fd, 7, number - 1 if number else 0))
        fs.close(fd)
        return result
    if kind == "cut":
        fd = fs.open(path, os.O_RDWR)
        fs.ftruncate(fd, number)
        fs.close(fd)
        return fs.size_of(path)
    actions: dict[str, Callable[[], object]] = {
        "truncate": lambda: fs.truncate(path, number),
        "rename": lambda: fs.rename(path, path.parent / Path(other).name),
        "unlink": lambda: fs.unlink(path),
        "mkdir": lambda: fs.mkdir(path.parent),
        "list": lambda: (fs.list_directory(path.parent), fs.exists(path), fs.is_directory(path), fs.size_of(path)),
        "read": lambda: fs.read_bytes(path),
        "rmtree": lambda: fs.remove_tree(base / "d"),
    }
    return actions[kind]()


@given(steps)
def test_it_answers_as_the_operating_system_does(sequence: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as real:
        fs, base = SimFileSystem(), Path("/base")
        fs.mkdir(base)
        for step in sequence:
            expected = outcome(partial(perform, LOCAL, Path(real), step))
            assert outcome(partial(perform, fs, base, step)) == expected, step
        used = sum(path.stat().st_size for path in Path(real).rglob("*") if path.is_file())
        assert fs.used_bytes == used


def test_a_file_without_a_name_lives_as_long_as_its_handle() -> None:
    fs = SimFileSystem()
    fd = write(fs, FILE, b"content")
    fs.unlink(FILE)
    assert (fs.pread(fd, 7, 0), fs.used_bytes, fs.exists(FILE)) == (b"content", 7, False)
    fs.close(fd)
    assert fs.used_bytes == 0


def test_the_end_of_a_process_loses_handles_and_locks_and_nothing_else() -> None:
    fs = SimFileSystem()
    fd = write(fs, FILE, b"unsynced")
    assert fs.lock(fd, wait_ms=0)
    after = fs.crash_process()
    assert after.read_bytes(FILE) == b"unsynced"
    assert after.boot_id() == SimFileSystem().boot_id()
    assert after.lock(after.open(FILE, os.O_RDWR), wait_ms=0)
    assert after.process() != fs.process()


def test_a_dead_process_can_do_nothing() -> None:
    fs = SimFileSystem()
    fd = write(fs, FILE, b"x")
    after = fs.crash_process()
    for action in (
        lambda: fs.pwritev(fd, [memoryview(b"y")], 0),
        lambda: fs.unlink(FILE),
        lambda: fs.open(FILE, os.O_RDWR),
        lambda: fs.read_bytes(FILE),
        lambda: fs.sync_directory(FILE.parent),
        lambda: fs.size_of(FILE),
    ):
        with pytest.raises(ProcessKilled):
            action()
    fs.close(fd)  # A `finally` does this, too.
    assert after.read_bytes(FILE) == b"x"


def test_every_subset_of_unsynced_writes_may_survive() -> None:
    fs = SimFileSystem()
    fd = write(fs, FILE, b"....")
    fs.fsync(fd)
    fs.sync_directory(FILE.parent)
    for at, data in ((0, b"aa"), (1, b"bb"), (4, b"cc")):
        fs.pwritev(fd, [memoryview(data)], at)
    assert fs.unsynced_changes == 3
    survivors = [fs.copy().crash_machine_keeping(kept).read_bytes(FILE) for kept in range(8)]
    assert survivors == [b"....", b"aa..", b".bb.", b"abb.", b"....cc", b"aa..cc", b".bb.cc", b"abb.cc"]
    assert fs.read_bytes(FILE) == b"abb.cc"


def test_a_name_is_durable_with_its_directory_and_content_with_its_file() -> None:
    fs = SimFileSystem()
    fs.fsync(write(fs, FILE, b"x"))
    assert not fs.copy().crash_machine_keeping(0).exists(FILE)
    fs.sync_directory(FILE.parent)
    assert fs.copy().crash_machine_keeping(0).read_bytes(FILE) == b"x"
    fs.rename(FILE, Path("/new"))
    before = fs.copy().crash_machine_keeping(0)
    assert (before.exists(FILE), before.exists(Path("/new"))) == (True, False)
    fs.unlink(Path("/new"))
    assert fs.unsynced_changes == 2
    assert fs.copy().crash_machine_keeping(0b01).list_directory(Path("/")) == ["new"]
    assert fs.copy().crash_machine_keeping(0b10).list_directory(Path("/")) == ["file"]


def test_a_cut_that_is_lost_brings_the_old_bytes_back_under_a_later_write() -> None:
    fs = SimFileSystem()
    fd = write(fs, FILE, b"abcdef")
    fs.fsync(fd)
    fs.sync_directory(FILE.parent)
    fs.ftruncate(fd, 2)
    fs.pwritev(fd, [memoryview(b"X")], 2)
    assert fs.read_bytes(FILE) == b"abX"
    assert fs.crash_machine_keeping(0b10).read_bytes(FILE) == b"abXdef"


def test_a_crash_of_the_machine_draws_legal_outcomes_of_every_kind() -> None:
    outcomes = set()
    for seed in range(300):
        fs = SimFileSystem()
        fd = write(fs, FILE, b"old")
        fs.fsync(fd)
        fs.sync_directory(FILE.parent)
        fs.pwritev(fd, [memoryview(b"n" * 1000)], 3)
        fs.pwritev(fd, [memoryview(b"last")], 1003)
        after = fs.crash_machine(random.Random(seed))
        outcomes.add(after.read_bytes(FILE))
        assert after.boot_id() != SimFileSystem().boot_id()
    new = b"old" + b"n" * 1000
    assert {b"old", new, new + b"last", b"old" + bytes(1000) + b"last"} <= outcomes
    assert all(data.startswith(b"old") for data in outcomes)
    assert any(data != b"old" and new.startswith(data) and len(data) < len(new) for data in outcomes), "torn at a byte"
    assert b"old" + bytes(509) + b"n" * 491 in outcomes, "torn at a sector"


def test_the_same_seed_loses_the_same() -> None:
    def survivor(seed: int) -> bytes:
        fs = SimFileSystem()
        fs.sync_directory(Path("/"))
        for number in range(20):
            write(fs, FILE, bytes([number]) * 700, number * 500)
        after = fs.crash_machine(random.Random(seed))
        return after.read_bytes(FILE) if after.exists(FILE) else b""

    assert [survivor(seed) for seed in range(20)] == [survivor(seed) for seed in range(20)]
    assert len({survivor(seed) for seed in range(20)}) > 5


def test_a_failed_fsync_loses_the_data_though_the_next_one_succeeds() -> None:
    fs = SimFileSystem()
    fd = write(fs, FILE, b"x")
    fs.sync_directory(FILE.parent)
    fs.fail_next("fsync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        fs.fsync(fd)
    fs.fsync(fd)
    assert fs.read_bytes(FILE) == b"x"
    assert fs.crash_machine_keeping(-1).read_bytes(FILE) == b""


def test_a_full_disk_takes_what_fits_and_then_refuses() -> None:
    fs = SimFileSystem()
    fs.capacity_bytes = 10
    fd = write(fs, FILE, b"12345678")
    assert fs.pwritev(fd, [memoryview(b"abcd")], 7) == 3
    with pytest.raises(OSError, match="No space left"):
        fs.pwritev(fd, [memoryview(b"d")], 10)
    assert fs.pwritev(fd, [memoryview(b"over")], 0) == 4
    assert fs.read_bytes(FILE) == b"over567abc"
    fs.capacity_bytes = 11
    assert fs.pwritev(fd, [memoryview(b"d")], 10) == 1
    fs.ftruncate(fd, 0)
    assert fs.pwritev(fd, [memoryview(b"x" * 11)], 0) == 11


@pytest.mark.parametrize("kept_bytes", [0, 1, 3])
def test_a_process_may_die_within_a_write(kept_bytes: int) -> None:
    fs = SimFileSystem()
    fd = write(fs, FILE, b"...")

    def die(operation: Operation) -> Fault | None:
        return Fault(kept_bytes=kept_bytes, kills=True) if operation.kind == "pwritev" else None

    fs.on_operation = die
    with pytest.raises(ProcessKilled):
        fs.pwritev(fd, [memoryview(b"abc")], 0)
    assert not fs.alive
    assert fs.another_process().read_bytes(FILE) == b"abc"[:kept_bytes] + b"..."[kept_bytes:]


def test_damage_at_rest_outlives_everything() -> None:
    fs = SimFileSystem()
    fd = write(fs, FILE, b"\x00\x00")
    fs.fsync(fd)
    fs.sync_directory(FILE.parent)
    fs.flip_bit(FILE, 1, 3)
    assert fs.read_bytes(FILE) == b"\x00\x08"
    assert fs.crash_machine_keeping(0).read_bytes(FILE) == b"\x00\x08"


def claim(fs: FileSystem, launch: int = 1) -> LogDirectory:
    return LogDirectory.claim(Path("/var/log.dirs"), cluster_id="c", launch=launch, fs=fs)


def test_a_log_directory_is_claimed_left_and_found_again() -> None:
    fs = SimFileSystem()
    first = claim(fs)
    first.update(broker_id=4, port=1)
    first.mark_recovered()
    assert (first.slot, first.is_new, first.start_kind) == (0, True, StartKind.CLEAN)
    second = claim(fs.another_process())
    assert second.slot == 1
    fs = fs.crash_process()
    third = claim(fs)
    assert (third.slot, third.meta, third.start_kind) == (0, first.meta, StartKind.PROCESS_CRASH)
    fs = fs.crash_machine(random.Random(0))
    fourth = claim(fs)
    assert (fourth.slot, fourth.meta, fourth.start_kind) == (0, first.meta, StartKind.MACHINE_CRASH)
    fourth.mark_clean()
    fourth.release()
    assert claim(fs.crash_machine_keeping(0)).start_kind is StartKind.CLEAN


def test_a_superseded_holder_is_killed() -> None:
    zombie = SimFileSystem()
    held = claim(zombie, launch=1)
    fs = zombie.another_process()
    mine = LogDirectory.claim(
        Path("/var/log.dirs"), cluster_id="c", launch=2, superseded=lambda holder: holder.launch < 2, fs=fs
    )
    assert mine.path == held.path
    assert not zombie.alive
    with pytest.raises(ProcessKilled):
        held.mark_clean()


def test_nobody_waits_for_a_lock_in_vain() -> None:
    fs = SimFileSystem()
    held = claim(fs)
    other = fs.another_process()
    with pytest.raises(LogDirectoryLockedError):
        type(held._lock).acquire(held.path, launch=2, wait_ms=1000, fs=other)
    held.release()
    type(held._lock).acquire(held.path, launch=2, wait_ms=1000, fs=other)
