"""Claiming log directories: locks between real processes, identities, and how a directory was left."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from spark_broker.errors import (
    DamagedLogError,
    InconsistentClusterIdError,
    InconsistentTopicIdError,
    KafkaStorageError,
    LogDirectoryLockedError,
    ProcessLimitError,
)
from spark_broker.protocol.messages import MetadataSeen
from spark_broker.storage.checkpoints import write_checkpoint
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.directory_meta import read_meta
from spark_broker.storage.directory_names import PartitionName
from spark_broker.storage.filesystem import LocalFileSystem, process_start_time
from spark_broker.storage.lock import DirectoryLock, Holder, is_locked, read_holder
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import SimFileSystem

HOLD = """
import sys
from pathlib import Path
from spark_broker.storage.directory import LogDirectory
directory = LogDirectory.claim(Path(sys.argv[1]), cluster_id="c", launch=int(sys.argv[2]))
directory.mark_recovered()
print(directory.path, flush=True)
sys.stdin.read()
"""


def claim(base: Path, cluster_id: str = "c", launch: int = 2) -> LogDirectory:
    return LogDirectory.claim(base, cluster_id=cluster_id, launch=launch)


@contextmanager
def holding_process(base: Path, launch: int = 1) -> Iterator[subprocess.Popen[str]]:
    """Another process that has claimed a directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(base), str(launch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip(), "the other process claimed a directory"
        yield process
    finally:
        process.kill()
        process.wait(30)
        process.stdin.close()
        process.stdout.close()


def test_directories_that_are_held_are_passed_over(tmp_path: Path) -> None:
    with holding_process(tmp_path):
        mine = claim(tmp_path)
        assert mine.slot == 1
        assert mine.is_new
        assert mine.start_kind is StartKind.CLEAN


def test_a_directory_outlives_its_holder_and_keeps_its_identity(tmp_path: Path) -> None:
    first = claim(tmp_path)
    first.update(broker_id=7, port=4000)
    first.mark_clean()
    first.release()
    again = claim(tmp_path)
    assert again.path == first.path
    assert (again.meta.broker_id, again.meta.port) == (7, 4000)
    assert again.meta.directory_id == first.meta.directory_id
    assert not again.is_new


def test_a_killed_holder_leaves_a_process_crash(tmp_path: Path) -> None:
    with holding_process(tmp_path) as process:
        process.kill()
        process.wait(30)
        mine = claim(tmp_path)
        assert (mine.slot, mine.start_kind) == (0, StartKind.PROCESS_CRASH)


def test_a_superseded_holder_is_killed_even_when_it_is_stopped(tmp_path: Path) -> None:
    with holding_process(tmp_path, launch=1) as process:
        process.send_signal(signal.SIGSTOP)
        mine = LogDirectory.claim(tmp_path, cluster_id="c", launch=2, superseded=lambda holder: holder.launch < 2)
        assert mine.slot == 0
        assert process.wait(30) == -signal.SIGKILL
        assert read_holder(mine.path) == Holder(os.getpid(), process_start_time(os.getpid()) or 0, 2)


def test_a_pid_that_was_used_again_is_not_killed(tmp_path: Path) -> None:
    with holding_process(tmp_path) as process:
        lock_file = tmp_path / "broker-0" / ".lock"
        holder = json.loads(lock_file.read_bytes())
        lock_file.write_text(json.dumps({**holder, "start_time": holder["start_time"] - 1}))
        with pytest.raises(LogDirectoryLockedError):
            LogDirectory.claim(tmp_path, cluster_id="c", launch=2, superseded=lambda _: True, wait_ms=50)
        assert process.poll() is None


def test_a_claim_waits_for_a_holder_whose_pid_is_not_visible(tmp_path: Path) -> None:
    held = DirectoryLock.acquire(tmp_path, launch=1)
    with pytest.raises(LogDirectoryLockedError, match="held by"):
        DirectoryLock.acquire(tmp_path, launch=2, wait_ms=50)
    held.release()
    DirectoryLock.acquire(tmp_path, launch=2).release()


def test_a_lock_file_that_is_deleted_under_a_live_broker_frees_nothing(tmp_path: Path) -> None:
    """Two brokers would write to one directory: the second one made the file anew, and locked it."""
    with holding_process(tmp_path) as process:
        (tmp_path / "broker-0" / ".lock").unlink()
        other = LogDirectory.claim(tmp_path, cluster_id="c", launch=2)
        assert other.slot == 1
        other.release()
        assert is_locked(tmp_path / "broker-0")
        with pytest.raises(LogDirectoryLockedError, match=r"a process that its \.lock does not name"):
            DirectoryLock.acquire(tmp_path / "broker-0", launch=3)
        process.kill()
        process.wait(30)
        mine = LogDirectory.claim(tmp_path, cluster_id="c", launch=4)
        assert mine.slot == 0
        mine.release()


def test_a_file_system_that_locks_no_directories_has_the_lock_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        locked(fd, operation)

    locked = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    held = DirectoryLock.acquire(tmp_path, launch=1)
    with pytest.raises(LogDirectoryLockedError, match="launch=1"):
        DirectoryLock.acquire(tmp_path, launch=2)
    held.release()
    DirectoryLock.acquire(tmp_path, launch=2).release()


def test_a_child_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(tmp_path, launch=1)
    read_end, write_end = os.pipe()
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready_write, b"x")
        os.read(read_end, 1)  # The child lives on after the parent has released the lock.
        os._exit(0)
    try:
        os.read(ready_read, 1)
        lock.release()
        DirectoryLock.acquire(tmp_path, launch=2).release()
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)
        for fd in (read_end, write_end, ready_read, ready_write):
            os.close(fd)


def test_another_clusters_directory_is_refused_and_not_touched(tmp_path: Path) -> None:
    claim(tmp_path).release()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(InconsistentClusterIdError):
        claim(tmp_path, cluster_id="other")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def _boot_elsewhere(path: Path) -> None:
    meta = read_meta(path)
    assert meta is not None
    write_checkpoint(path / "meta.json", asdict(replace(meta, boot_id="another boot")))


def test_an_unmarked_end_under_another_boot_is_a_machine_crash_until_recovery_is_done(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    directory.release()
    _boot_elsewhere(directory.path)
    for _ in range(2):  # The first of these starts dies while it recovers.
        again = claim(tmp_path)
        assert again.start_kind is StartKind.MACHINE_CRASH
        again.release()
    again = claim(tmp_path)
    again.mark_recovered()
    again.release()
    assert claim(tmp_path).start_kind is StartKind.PROCESS_CRASH


def test_a_clean_stop_is_clean_once_and_also_after_a_reboot(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    directory.mark_clean()
    directory.release()
    _boot_elsewhere(directory.path)
    again = claim(tmp_path)
    assert again.start_kind is StartKind.CLEAN
    again.release()
    assert claim(tmp_path).start_kind is StartKind.PROCESS_CRASH


def emptied(meta: Path) -> None:
    meta.write_bytes(b"")


def made_a_directory(meta: Path) -> None:
    meta.unlink()
    meta.mkdir()


def made_a_fifo(meta: Path) -> None:
    meta.unlink()
    os.mkfifo(meta)


def made_huge(meta: Path) -> None:
    os.truncate(meta, 1 << 43)


@pytest.mark.parametrize("damage", [Path.unlink, emptied, made_a_directory, made_a_fifo, made_huge])
def test_a_directory_that_does_not_say_whose_it_is_is_passed_over_and_stays(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Story: the brokers of a machine share `log.dirs`. One damaged file in it ended all of them, at each start."""
    first = claim(tmp_path)
    second = claim(tmp_path)
    for directory in (first, second):
        directory.partition_directory("t", "id", 0)
        directory.release()
    damage(first.path / "meta.json")
    assert claim(tmp_path).path == second.path
    assert claim(tmp_path).path.name == "broker-2"
    assert f"{first.path} is passed over, and its replicas are not served" in caplog.text
    assert (first.path / "t-0" / "partition.json").exists()


@pytest.mark.parametrize("act", ["check", "marks", "port", "seen", "partition", "quarantine", "clean"])
def test_nothing_is_written_into_another_directory_that_the_path_leads_to(tmp_path: Path, act: str) -> None:
    """Story: the volume of an earlier broker was mounted over the directory of a live one, which wrote on in there.
    What it had acknowledged was foreign at the next start, and was deleted.
    """
    earlier = claim(tmp_path)
    earlier.write_high_watermarks({("t", 0): 300})
    earlier.release()
    earlier.path.rename(tmp_path / "volume")
    live = claim(tmp_path)
    live.path.rename(tmp_path / "hidden")
    (tmp_path / "volume").rename(live.path)
    before = {path: path.read_bytes() for path in live.path.iterdir()}
    actions: dict[str, Callable[[], object]] = {
        "check": live.check,
        "marks": lambda: live.write_high_watermarks({}),
        "port": lambda: live.update(port=4711),
        "seen": lambda: live.write_seen(MetadataSeen(1, 1, "w", 0, 0, 0)),
        "partition": lambda: live.partition_directory("t", "id", 0),
        "quarantine": lambda: live.quarantine("t", 0),
        "clean": live.mark_clean,
    }
    with pytest.raises(KafkaStorageError, match="is another directory than the live broker's own"):
        actions[act]()
    assert {path: path.read_bytes() for path in live.path.iterdir()} == before
    live.release()
    assert claim(tmp_path).read_high_watermarks() == {("t", 0): 300}


def test_a_copy_of_another_directory_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Story: two processes of one broker ended each other by turns."""
    first = claim(tmp_path)
    copy = shutil.copytree(first.path, tmp_path / "broker-1")
    assert claim(tmp_path).path.name == "broker-2"
    assert f"{copy} is passed over: it is a copy of {first.path}" in caplog.text


def test_partitions_are_listed_deleted_and_quarantined(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    for topic, partition in (("b-1", 0), ("a", 10), ("a", 2), ("gone", 0), ("bad", 0), ("bad", 1)):
        directory.partition_directory(topic, f"id of {topic}", partition)
    doomed, kept = directory.unname_partitions(
        [PartitionName(topic, 0, f"id of {topic}") for topic in ("gone", "never")]
    )
    assert len(doomed) == 1
    assert kept == {}
    assert directory.quarantine("bad", 0).name == "bad-0.0.damaged"
    directory.partition_directory("bad", "id of bad", 0)
    assert directory.quarantine("bad", 0).name == "bad-0.1.damaged"
    listed = [(p.topic, p.partition, p.topic_id) for p in directory.list_partitions()]
    assert listed == [("a", 2, "id of a"), ("a", 10, "id of a"), ("b-1", 0, "id of b-1"), ("bad", 1, "id of bad")]


def test_the_directory_of_an_older_topic_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    path = directory.partition_directory("t", "first", 0)
    assert directory.partition_directory("t", "first", 0) == path
    with pytest.raises(InconsistentTopicIdError):
        directory.partition_directory("t", "second", 0)


def test_a_start_finds_a_deletion_that_was_cut_short(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    path = directory.partition_directory("t", "id", 0)
    path.rename(path.with_name("t-0.0123.deleted"))
    directory.release()
    again = claim(tmp_path)
    assert again.list_partitions() == []
    for doomed in again.unnamed():
        again.remove(doomed)
        again.remove(doomed)  # It may be gone by then.
    assert not list(again.path.glob("*.deleted"))


def test_a_partition_that_was_moved_to_another_disk_is_removed_there(tmp_path: Path) -> None:
    """Story: a full disk was relieved by a link. What was deleted of it later stayed on the other disk for good."""
    directory = claim(tmp_path / "logs")
    path = directory.partition_directory("t", "id", 0)
    moved = path.rename(tmp_path / "moved")
    path.symlink_to(moved)
    (doomed,), _ = directory.unname_partitions([PartitionName("t", 0, "id")])
    directory.remove(doomed)
    assert not moved.exists()
    assert [name for name in directory.path.iterdir() if name.name.startswith("t-")] == []


def test_one_directory_that_keeps_its_name_does_not_keep_others(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    for number in range(3):
        directory.partition_directory("t", "id", number)
    rename = directory.fs.rename

    class Stubborn(LocalFileSystem):
        def rename(self, source: Path, target: Path) -> None:
            if source.name == "t-1":
                raise OSError(errno.EIO, "Input/output error", str(source))
            rename(source, target)

    directory.fs = Stubborn()
    doomed, kept = directory.unname_partitions([PartitionName("t", number, "id") for number in range(3)])
    assert len(doomed) == 2
    assert list(kept) == [PartitionName("t", 1, "id")]
    assert [p.partition for p in directory.list_partitions()] == [1]


def test_high_watermarks_survive_and_damage_to_them_is_noticed(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    assert directory.read_high_watermarks() == {}
    marks = {("id", 0): 5, ("id-1", 1): 2**40}
    directory.write_high_watermarks(marks)
    assert directory.read_high_watermarks() == marks
    path = directory.path / "high-watermarks.json"
    path.write_bytes(path.read_bytes().replace(b"5", b"6", 1))
    with pytest.raises(DamagedLogError):
        directory.read_high_watermarks()


def test_a_deletion_that_comes_late_leaves_a_newer_topic_of_the_name_alone(tmp_path: Path) -> None:
    directory = claim(tmp_path)
    directory.partition_directory("t", "new", 0)
    assert directory.unname_partitions([PartitionName("t", 0, "old")]) == ([], {})
    assert [p.topic_id for p in directory.list_partitions()] == ["new"]
    (directory.path / "t-1").mkdir()  # Its making was cut short.
    doomed, kept = directory.unname_partitions([PartitionName("t", 1, "old")])
    assert len(doomed) == 1
    assert kept == {}


class Failing(LocalFileSystem):
    """Whatever has `bad` in its path lies behind an inode, or a link to a disk, that fails with this error."""

    bad = "no path has this"
    error = errno.EIO

    def _check(self, path: Path) -> None:
        if self.bad in f"{path}/":
            raise OSError(self.error, os.strerror(self.error), str(path))

    def is_directory(self, path: Path) -> bool:
        self._check(path)  # as pathlib does: `is_dir` hides only errors that say that there is no directory
        return super().is_directory(path)

    def exists(self, path: Path) -> bool:
        self._check(path)
        return super().exists(path)

    def open(self, path: Path, flags: int) -> int:
        self._check(path)
        return super().open(path, flags)


FAILURES = [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EUCLEAN, errno.EROFS]


@pytest.mark.parametrize("error", FAILURES)
def test_one_replica_that_cannot_be_looked_at_is_left_out(tmp_path: Path, error: int) -> None:
    fs = Failing()
    fs.error = error
    directory = LogDirectory.claim(tmp_path, cluster_id="c", launch=1, fs=fs)
    for name in ("bad", "good"):
        directory.partition_directory(name, f"id of {name}", 0)
    fs.bad = "/bad-0/"
    assert [p.topic for p in directory.list_partitions()] == ["good"]
    assert directory.may_have_partition("bad", 0)
    fs.error = errno.EMFILE
    with pytest.raises(ProcessLimitError):  # nothing of it is broken, and the list would not be whole
        directory.list_partitions()


@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize("file", ["/", "/meta.json/", "/.lock/"])
def test_a_directory_whose_disk_fails_keeps_no_other_broker_of_the_machine_from_starting(
    tmp_path: Path, error: int, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    fs = Failing()
    fs.error = error
    first = LogDirectory.claim(tmp_path, cluster_id="c", launch=1, fs=fs)
    second = LogDirectory.claim(tmp_path, cluster_id="c", launch=1, fs=fs)
    first.release()
    second.release()
    fs.bad = f"{first.path}{file}"
    again = LogDirectory.claim(tmp_path, cluster_id="c", launch=2, fs=fs)
    assert again.path == second.path
    assert f"{first.path} is passed over, and its replicas are not served" in caplog.text
    with pytest.raises(KafkaStorageError):  # Nor is a new broker made for the one that cannot start.
        LogDirectory.claim(tmp_path, cluster_id="c", launch=2, fs=fs)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["broker-0", "broker-1"]
    fs.bad = "mended"
    assert LogDirectory.claim(tmp_path, cluster_id="c", launch=2, fs=fs).path == first.path


def test_a_link_to_a_disk_that_is_not_mounted_makes_no_new_broker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, base = tmp_path / "disk", tmp_path / "logs"
    base.mkdir()
    disk.mkdir()
    (base / "broker-0").symlink_to(disk)
    first, second = claim(base), claim(base)
    first.release()
    second.release()
    disk.rename(tmp_path / "not mounted")
    assert claim(base).path == second.path
    assert f"{first.path} is passed over, and its replicas are not served" in caplog.text
    with pytest.raises(KafkaStorageError, match="a disk that is not mounted"):
        claim(base)
    (tmp_path / "not mounted").rename(disk)
    assert claim(base).meta.directory_id == first.meta.directory_id


def test_what_a_new_disk_has_of_its_own_is_no_replica(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Story: `lost+found` is root's. No broker of the machine started on a disk that was mounted as `broker-0`."""
    (tmp_path / "broker-0" / "lost+found").mkdir(parents=True)
    fs = Failing()
    fs.error = errno.EACCES
    fs.bad = "/lost+found/partition.json/"
    directory = LogDirectory.claim(tmp_path, cluster_id="c", launch=1, fs=fs)
    assert directory.path.name == "broker-0"
    directory.partition_directory("t", "id", 0)
    assert [p.topic for p in directory.list_partitions()] == ["t"]
    assert caplog.messages == []


def test_a_limit_of_the_process_is_no_reason_to_pass_over_a_directory(tmp_path: Path) -> None:
    fs = Failing()
    for directory in [LogDirectory.claim(tmp_path, cluster_id="c", launch=1, fs=fs) for _ in range(2)]:
        directory.release()
    fs.bad, fs.error = "/broker-0/", errno.EMFILE
    with pytest.raises(ProcessLimitError):
        LogDirectory.claim(tmp_path, cluster_id="c", launch=2, fs=fs)


def sim_claim(fs: SimFileSystem) -> LogDirectory:
    return LogDirectory.claim(Path("/log"), cluster_id="c", launch=1, fs=fs)


def ended(*, clean: bool) -> SimFileSystem:
    """The disk that a broker has left, with some records since."""
    fs = SimFileSystem()
    directory = sim_claim(fs)
    directory.update(broker_id=4, port=1234)
    directory.mark_recovered()
    if clean:
        directory.mark_clean()
    return fs


@pytest.mark.parametrize("clean", [True, False])
def test_a_broker_starts_on_a_disk_that_is_full(clean: bool) -> None:
    fs = ended(clean=clean).crash_process()
    fs.capacity_bytes = 0
    directory = sim_claim(fs)
    assert directory.start_kind is (StartKind.CLEAN if clean else StartKind.PROCESS_CRASH)
    assert not fs.exists(directory.path / ".clean")


def test_a_successor_knows_whom_to_kill_on_a_full_disk() -> None:
    """Simulator, seed 561: a holder without a name was not superseded, and its successor made another directory."""
    fs = SimFileSystem()
    sim_claim(fs).update(broker_id=4)
    fs.capacity_bytes = 0
    for launch in (10, 200_000):
        fs = fs.another_process()
        directory = LogDirectory.claim(Path("/log"), cluster_id="c", launch=launch, superseded=lambda _: True, fs=fs)
        assert (directory.slot, directory.meta.broker_id) == (0, 4)
        assert read_holder(directory.path, fs=fs) == Holder(fs.process().pid, fs.process().start_time, launch)


def test_a_clean_end_is_one_on_a_disk_that_is_full_after_a_reboot_and_later_ends_check_more() -> None:
    fs = ended(clean=True).crash_machine(random.Random(1))
    fs.capacity_bytes = fs.used_bytes
    assert sim_claim(fs).start_kind is StartKind.CLEAN
    fs = fs.crash_process()
    assert sim_claim(fs).start_kind is StartKind.MACHINE_CRASH, "its boot id was not saved"
    fs = ended(clean=True).crash_machine(random.Random(1))
    fs.capacity_bytes = fs.used_bytes
    directory = sim_claim(fs)
    fs.capacity_bytes = None
    directory.mark_recovered()
    assert sim_claim(fs.crash_process()).start_kind is StartKind.PROCESS_CRASH


def test_a_broker_that_cannot_leave_a_marker_on_a_full_disk_ends_and_counts_as_crashed() -> None:
    fs = SimFileSystem()
    directory = sim_claim(fs)
    fs.capacity_bytes = fs.used_bytes
    directory.mark_clean()
    fs = fs.crash_process()
    assert sim_claim(fs).start_kind is StartKind.PROCESS_CRASH
