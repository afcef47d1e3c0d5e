"""The metadata log on real files: one writer wins each number, and no record is lost or invented."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from spark_broker.controller.image import EMPTY_IMAGE
from spark_broker.controller.records import (
    ClusterRecord,
    ControllerEpochRecord,
    LaunchRecord,
    MetadataRecord,
    ProducerIdsRecord,
)
from spark_broker.driver.metadata_file import MetadataFile, decode_file, encode_file, file_name
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.driver.metadata_store import LocalStore, ObjectStore, check_exclusive, open_store
from spark_broker.errors import InconsistentClusterIdError, MetadataStoreError, StaleControllerEpochError

BEGIN: list[MetadataRecord] = [ClusterRecord("c"), ControllerEpochRecord(0, "w")]


def begun(path: Path, **options: int) -> MetadataLog:
    """A log whose controller has taken over."""
    log = MetadataLog.open(str(path), **options)
    records: list[MetadataRecord] = [] if log.image.cluster_id else [ClusterRecord("c")]
    log.append([*records, ControllerEpochRecord(log.image.controller_epoch + 1, log.writer)])
    return log


def log_files(path: Path) -> list[int]:
    return sorted(int(p.stem) for p in path.glob("*.log"))


class MemoryStore:
    """A store in memory whose calls can be made to fail after, or before, they take effect."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fail: Callable[[str, str], bool | None] = lambda call, name: None

    def _maybe_fail(self, call: str, name: str, when: bool) -> None:
        if self.fail(call, name) is when:
            raise OSError("the network broke")

    def create(self, name: str, data: bytes) -> bool:
        self._maybe_fail("create", name, False)
        if name in self.files:
            return False
        self.files[name] = data
        self._maybe_fail("create", name, True)
        return True

    def read(self, name: str) -> bytes | None:
        self._maybe_fail("read", name, False)
        return self.files.get(name)

    def names(self) -> list[str]:
        return sorted(self.files)

    def delete(self, name: str) -> None:
        self._maybe_fail("delete", name, False)
        self.files.pop(name, None)


def test_an_empty_directory_is_an_empty_log(tmp_path: Path) -> None:
    log = MetadataLog.open(str(tmp_path / "metadata"))
    assert log.empty
    assert log.image == EMPTY_IMAGE


def test_what_was_appended_is_replayed(tmp_path: Path) -> None:
    log = begun(tmp_path)
    assert log.append([LaunchRecord(1), LaunchRecord(2)]) == 2
    assert log.append([ProducerIdsRecord(1000)]) == 4
    again = MetadataLog.open(str(tmp_path))
    assert again.image == log.image
    assert again.image.next_offset == 5
    assert (again.number, again.writer != log.writer) == (2, True)


def test_a_url_and_a_path_name_the_same_log(tmp_path: Path) -> None:
    directory = tmp_path / "with space"
    log = begun(directory)
    assert MetadataLog.open(directory.as_uri()).image == log.image


def test_a_second_controller_deposes_the_first(tmp_path: Path) -> None:
    first = begun(tmp_path)
    second = begun(tmp_path)
    assert second.image.controller_epoch == first.image.controller_epoch + 1
    for _ in range(2):
        with pytest.raises(StaleControllerEpochError):
            first.append([LaunchRecord(1)])
    second.append([LaunchRecord(1)])


def test_a_controller_that_writes_nothing_finds_out_that_it_is_deposed(tmp_path: Path) -> None:
    first = begun(tmp_path)
    first.check_current()
    first.ensure_current()
    second = begun(tmp_path)
    second.check_current()
    second.ensure_current()
    for look in (first.ensure_current, first.check_current, lambda: first.append([LaunchRecord(1)])):
        with pytest.raises(StaleControllerEpochError):
            look()
    second.append([LaunchRecord(1)])


def test_a_controller_that_slept_through_a_snapshot_finds_out_that_it_is_deposed(tmp_path: Path) -> None:
    first = begun(tmp_path)
    other = begun(tmp_path, records_between_snapshots=2, snapshots_kept=1)
    for launch in range(4):
        other.append([LaunchRecord(launch)])
    assert first.number not in log_files(tmp_path)
    with pytest.raises(StaleControllerEpochError):
        first.check_current()


def test_a_store_that_does_not_answer_deposes_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = begun(tmp_path)

    def fail(name: str) -> bytes | None:
        raise OSError(f"no answer about {name}")

    with monkeypatch.context() as patch:
        patch.setattr(log._store, "read", fail)
        log.check_current()
    log.append([LaunchRecord(1)])


def test_a_store_that_does_not_answer_is_asked_until_it_is_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, tries = begun(tmp_path), itertools.count()
    read = log._store.read

    def fail_twice(name: str) -> bytes | None:
        if next(tries) < 2:
            raise OSError(f"no answer about {name}")
        return read(name)

    monkeypatch.setattr(log._store, "read", fail_twice)
    log.ensure_current()
    assert next(tries) > 2
    tries = itertools.count()
    with pytest.raises(MetadataStoreError, match="not known whether another controller has taken over"):
        log.ensure_current(patience_s=0)


def test_of_threads_that_race_for_a_number_exactly_one_wins(tmp_path: Path) -> None:
    begun(tmp_path)
    for _ in range(10):
        logs = [MetadataLog.open(str(tmp_path)) for _ in range(4)]
        barrier = threading.Barrier(len(logs))
        won: list[str] = []

        def race(log: MetadataLog, barrier: threading.Barrier = barrier, won: list[str] = won) -> None:
            barrier.wait()
            try:
                log.append([LaunchRecord(log.image.last_launch + 1)])
            except StaleControllerEpochError:
                return
            won.append(log.writer)

        threads = [threading.Thread(target=race, args=(log,)) for log in logs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        newest = file_name(max(log_files(tmp_path)))
        assert decode_file(newest, (tmp_path / newest).read_bytes()).writer == won[0]
    assert MetadataLog.open(str(tmp_path)).image.last_launch == 10


RACER = """
import sys
from spark_broker.controller.records import LaunchRecord
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.errors import StaleControllerEpochError
won = []
sys.stdin.readline()
for _ in range(60):
    log = MetadataLog.open(sys.argv[1])
    try:
        log.append([LaunchRecord(log.image.last_launch + 1)])
    except StaleControllerEpochError:
        continue
    won.append(log.number)
print(*won)
"""


@pytest.mark.slow
def test_of_processes_that_race_exactly_one_wins_each_number(tmp_path: Path) -> None:
    begun(tmp_path)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [int(number) for racer in racers for number in racer.communicate(timeout=60)[0].split()]
    assert all(racer.returncode == 0 for racer in racers)
    assert sorted(won) == log_files(tmp_path)[1:]
    assert MetadataLog.open(str(tmp_path)).image.last_launch == len(won)


def test_an_unclear_result_that_was_a_success_is_found_out() -> None:
    store = MemoryStore()
    log = MetadataLog(store)
    failures = iter([True])
    store.fail = lambda call, name: next(failures, None) if call == "create" else None
    log.append(BEGIN)
    assert MetadataLog(store).image == log.image
    assert len(store.files) == 1


def test_an_unclear_result_that_was_a_failure_is_tried_again() -> None:
    store = MemoryStore()
    log = MetadataLog(store)
    failures = iter([False, False])
    store.fail = lambda call, name: next(failures, None) if call == "create" else None
    log.append(BEGIN)
    assert MetadataLog(store).image == log.image


def test_a_store_that_fails_for_long_is_tried_until_it_works(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    waits: list[float] = []
    log = MetadataLog(store, wait=waits.append)
    log.append(BEGIN)
    store.fail = lambda call, name: False if len(waits) < 100 else None

    log.append([LaunchRecord(1)])

    assert MetadataLog(store).image == log.image
    assert (log.health.trouble, max(waits)) == ("", 1.0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    assert "the network broke" in told[0]
    assert "works again" in told[1]


def test_a_look_at_a_store_that_fails_says_nothing_of_another_controller() -> None:
    store = MemoryStore()
    log = MetadataLog(store)
    log.append(BEGIN)
    store.fail = lambda call, name: False
    log.check_current()
    assert log.health.trouble
    store.fail = lambda call, name: None
    log.check_current()
    assert not log.health.trouble


def test_another_controller_that_wrote_while_the_store_failed_deposes_this_one() -> None:
    store = MemoryStore()
    MetadataLog(store).append(BEGIN)
    log, other = MetadataLog(store, wait=lambda _: other.append([LaunchRecord(7)])), MetadataLog(store)
    failures = iter([False])
    store.fail = lambda call, name: next(failures, None) if call == "create" else None

    with pytest.raises(StaleControllerEpochError):
        log.append([LaunchRecord(1)])


def test_an_append_that_waits_for_its_store_can_be_given_up() -> None:
    store = MemoryStore()
    log = MetadataLog(store, wait=lambda _: log.give_up())
    store.fail = lambda call, name: False
    with pytest.raises(MetadataStoreError, match="the network broke"):
        log.append(BEGIN)


def put_back(moved: Path, path: Path) -> None:
    """Move the directory back, in place of whatever is there now."""
    if path.exists():
        shutil.rmtree(path)
    moved.rename(path)


@pytest.mark.parametrize("in_its_place", ["nothing", "an empty directory"])
def test_a_directory_that_is_away_for_a_while_deposes_nobody(tmp_path: Path, in_its_place: str) -> None:
    """A lost mount leaves an empty directory."""
    path, moved = tmp_path / "metadata", tmp_path / "moved"
    tries: list[float] = []

    def wait(seconds: float) -> None:
        tries.append(seconds)
        if len(tries) == 3:
            put_back(moved, path)

    log = MetadataLog(open_store(str(path)), wait=wait)
    log.append(BEGIN)
    path.rename(moved)
    if in_its_place != "nothing":
        path.mkdir()

    log.check_current()
    log.append([LaunchRecord(1)])

    assert len(tries) == 3
    assert MetadataLog.open(str(path)).image == log.image


def test_an_unclear_result_behind_which_another_wrote_is_a_deposition() -> None:
    store = MemoryStore()
    MetadataLog(store).append(BEGIN)
    log, other = MetadataLog(store), MetadataLog(store)

    def other_is_quicker(call: str, name: str) -> bool | None:
        if call != "create":
            return None
        store.fail = lambda call, name: None
        other.append([ControllerEpochRecord(1, other.writer)])
        return False

    store.fail = other_is_quicker
    with pytest.raises(StaleControllerEpochError):
        log.append([LaunchRecord(1)])


def test_a_writer_that_cannot_find_out_acts_on_nothing_any_more() -> None:
    store = MemoryStore()
    log = MetadataLog(store)
    log.append(BEGIN)
    before = log.image
    store.fail = lambda call, name: False
    with pytest.raises(MetadataStoreError):
        log.append([LaunchRecord(1)], patience_s=0)
    store.fail = lambda call, name: None
    with pytest.raises(MetadataStoreError):
        log.append([LaunchRecord(1)])
    assert log.image == before


def test_a_writer_that_slept_through_a_clean_up_is_deposed(tmp_path: Path) -> None:
    sleeper = begun(tmp_path)
    other = begun(tmp_path, records_between_snapshots=2, snapshots_kept=1)
    for launch in range(1, 12):
        other.append([LaunchRecord(launch)])
    assert sleeper.number + 1 not in log_files(tmp_path)
    with pytest.raises(StaleControllerEpochError):
        sleeper.append([LaunchRecord(99)])
    assert MetadataLog.open(str(tmp_path)).image == other.image


def test_of_two_writers_that_slept_neither_builds_on_what_the_other_leaves(tmp_path: Path) -> None:
    """Simulator, seed 453544: another deposed writer takes the number before its own again."""
    log = begun(tmp_path, records_between_snapshots=5, snapshots_kept=1)
    sleepers = [MetadataLog.open(str(tmp_path))]
    log.append([LaunchRecord(1)])
    sleepers.append(MetadataLog.open(str(tmp_path)))
    for launch in range(2, 20):
        log.append([LaunchRecord(launch)])
    for sleeper in sleepers:
        with pytest.raises(StaleControllerEpochError):
            sleeper.append([ControllerEpochRecord(1, sleeper.writer)])
    assert MetadataLog.open(str(tmp_path)).image == log.image


def test_snapshots_replace_files_but_never_the_newest(tmp_path: Path) -> None:
    log = begun(tmp_path, records_between_snapshots=5, snapshots_kept=2)
    for launch in range(1, 41):
        log.append([LaunchRecord(launch)])
        files = log_files(tmp_path)
        assert files == list(range(files[0], log.number + 1))
    assert len(list(tmp_path.glob("*.snapshot"))) == 2
    assert len(log_files(tmp_path)) <= 11
    assert MetadataLog.open(str(tmp_path)).image == log.image


def test_a_crash_between_any_two_steps_loses_nothing() -> None:
    """After every prefix of a log's calls, with snapshots, the store replays to the committed image."""
    total = _calls_until_crash(10_000)[1]
    for crash_at in range(1, total + 1):
        store, _, committed, begun_append = _run_until_crash(crash_at)
        image = MetadataLog(store).image
        assert image in (committed, begun_append)


def _calls_until_crash(crash_at: int) -> tuple[MemoryStore, int]:
    store, calls, _, _ = _run_until_crash(crash_at)
    return store, calls


class _Crash(BaseException):
    """The process has ended: no handler catches it."""


def _run_until_crash(crash_at: int) -> tuple[MemoryStore, int, object, object]:
    store = MemoryStore()
    calls = 0

    def count(call: str, name: str) -> bool | None:
        nonlocal calls
        calls += 1
        if calls == crash_at:
            raise _Crash
        return None

    log = MetadataLog(store, records_between_snapshots=3, snapshots_kept=1)
    committed: object = log.image
    attempted: object = log.image
    appends: list[list[MetadataRecord]] = [BEGIN]
    appends += [[LaunchRecord(launch)] for launch in range(1, 9)]
    store.fail = count
    try:
        for records in appends:
            attempted = log.image.apply(records)
            log.append(records)
            committed = log.image
    except _Crash:
        pass
    store.fail = lambda call, name: None
    return store, calls, committed, attempted


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_a_damaged_file_is_never_passed_over(tmp_path: Path, damage: str) -> None:
    log = begun(tmp_path)
    for launch in range(1, 4):
        log.append([LaunchRecord(launch)])
    victim = tmp_path / file_name(2)
    data = victim.read_bytes()
    other = (tmp_path / file_name(1)).read_bytes()
    changed = {"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "empty": b"", "swap": other}[damage]
    victim.write_bytes(changed)
    with pytest.raises(MetadataStoreError, match=victim.name):
        MetadataLog.open(str(tmp_path))


def test_every_flipped_bit_of_a_file_is_noticed() -> None:
    file = MetadataFile(7, 3, 40, "a" * 32, (LaunchRecord(5), ProducerIdsRecord(1000)))
    data = encode_file(file)
    assert decode_file(file.name, data) == file
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(MetadataStoreError):
            decode_file(file.name, bytes(changed))


def test_a_missing_file_is_never_passed_over(tmp_path: Path) -> None:
    log = begun(tmp_path)
    for launch in range(1, 4):
        log.append([LaunchRecord(launch)])
    (tmp_path / file_name(2)).unlink()
    with pytest.raises(MetadataStoreError, match="missing"):
        MetadataLog.open(str(tmp_path))


@pytest.mark.parametrize("huge", [False, True])
def test_a_damaged_snapshot_falls_back_on_the_one_before(tmp_path: Path, huge: bool) -> None:
    log = begun(tmp_path, records_between_snapshots=5, snapshots_kept=2)
    for launch in range(1, 21):
        log.append([LaunchRecord(launch)])
    newest = max(tmp_path.glob("*.snapshot"))
    if huge:
        os.truncate(newest, 1 << 43)  # more than any memory
    else:
        newest.write_bytes(newest.read_bytes()[:-1])
    assert MetadataLog.open(str(tmp_path)).image == log.image


def test_a_snapshot_that_cannot_be_read_falls_back_on_the_one_before() -> None:
    """Story: flipped bytes in the newest snapshot were passed over, and a bad sector under it kept the cluster from
    starting, for good.
    """
    store = MemoryStore()
    log = MetadataLog(store, records_between_snapshots=5, snapshots_kept=2)
    log.append(BEGIN)
    for launch in range(1, 21):
        log.append([LaunchRecord(launch)])
    older, newest = sorted(name for name in store.files if name.endswith(".snapshot"))
    unreadable = {newest}
    store.fail = lambda call, name: False if call == "read" and name in unreadable else None
    again = MetadataLog(store)
    assert again.image == log.image
    again.append([ControllerEpochRecord(1, again.writer)])
    unreadable.add(older)
    with pytest.raises(MetadataStoreError, match="cannot be read: the network broke"):
        MetadataLog(store)


def test_a_log_file_that_cannot_be_read_is_not_passed_over() -> None:
    """Without it, decisions would be missing."""
    store = MemoryStore()
    log = MetadataLog(store, records_between_snapshots=5, snapshots_kept=2)
    log.append(BEGIN)
    for launch in range(1, 21):
        log.append([LaunchRecord(launch)])
    newest = max(name for name in store.files if name.endswith(".log"))
    store.fail = lambda call, name: False if call == "read" and name == newest else None
    with pytest.raises(MetadataStoreError, match="cannot be read"):
        MetadataLog(store)


def test_left_overs_of_a_crashed_writer_are_ignored_and_old_ones_removed(tmp_path: Path) -> None:
    log = begun(tmp_path)
    young, old = tmp_path / ".tmp-young", tmp_path / ".tmp-old"
    for path in (young, old):
        path.write_bytes(b"half a file")
    os.utime(old, (0, 0))
    assert MetadataLog.open(str(tmp_path)).image == log.image
    assert young.exists()
    assert not old.exists()


def test_a_new_cluster_is_never_made_over_the_data_of_another(tmp_path: Path) -> None:
    empty = MetadataLog.open(str(tmp_path / "empty"))
    empty.check_cluster_id([])
    with pytest.raises(MetadataStoreError, match="old-cluster"):
        empty.check_cluster_id(["old-cluster"])
    log = begun(tmp_path / "log")
    log.check_cluster_id(["c", ""])
    with pytest.raises(InconsistentClusterIdError, match="old-cluster"):
        log.check_cluster_id(["c", "old-cluster"])


def test_a_store_that_accepts_a_second_create_is_refused() -> None:
    class Overwriting(MemoryStore):
        def create(self, name: str, data: bytes) -> bool:
            self.files[name] = data
            return True

    with pytest.raises(MetadataStoreError):
        check_exclusive(Overwriting())
    check_exclusive(MemoryStore())


def test_a_store_that_only_checks_and_then_writes_is_refused() -> None:
    with pytest.raises(MetadataStoreError, match="memory"):
        open_store("memory://metadata")


def test_a_directory_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MetadataStoreError):
        open_store(str(tmp_path / "file" / "below"))
    with pytest.raises(MetadataStoreError):
        open_store("no-such-protocol://x")


def test_the_local_store_leaves_no_trace_of_a_refused_create(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    assert (store.read("a"), store.names()) == (b"1", ["a"])
    store.delete("a")
    store.delete("a")
    assert store.read("a") is None


def test_the_object_store_asks_for_a_conditional_put() -> None:
    filesystem = fsspec.filesystem("memory", skip_instance_cache=True)
    store = ObjectStore(filesystem, "/metadata-log-test")
    assert store.names() == []
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    assert (store.read("a"), store.names(), store.read("b")) == (b"1", ["a"], None)
    store.delete("a")
    store.delete("a")
    assert store.names() == []


class ClientError(Exception):
    """What botocore, Azure's client or aiohttp raises while an endpoint cannot be reached: no OSError."""


class UnreachableFileSystem:
    """A file system of fsspec whose next call of an operation fails."""

    def __init__(self) -> None:
        self._filesystem = fsspec.filesystem("memory", skip_instance_cache=True)
        self.fails: BaseException | None = None

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object, **options: object) -> object:
            failure, self.fails = self.fails, None
            if failure is not None:
                raise failure
            return getattr(self._filesystem, name)(*arguments, **options)

        return call


def test_an_object_store_that_cannot_be_reached_for_a_moment_ends_nothing() -> None:
    """Story: the adapters raise other errors than OSError. One look at the store ended the controller, and with it the
    whole cluster.
    """
    filesystem = UnreachableFileSystem()
    store = ObjectStore(filesystem, f"/unreachable-{uuid.uuid4().hex}")
    calls: list[Callable[[], object]] = [
        lambda: store.create("2", b"b"),
        lambda: store.put("claim", b"c"),
        lambda: store.read("1"),
        store.names,
        lambda: store.delete("1"),
    ]
    for call in calls:
        filesystem.fails = ClientError("Could not connect to the endpoint URL")
        with pytest.raises(OSError, match="ClientError: Could not connect"):
            call()
        filesystem.fails = MemoryError()
        with pytest.raises(MemoryError):
            call()
    log = MetadataLog(store, wait=lambda _: None)
    for epoch in range(3):
        filesystem.fails = ClientError("Could not connect to the endpoint URL")
        log.append([*([] if epoch else [ClusterRecord("c")]), ControllerEpochRecord(epoch, "w" * 32, "h", 1, 1)])
        filesystem.fails = ClientError("Could not connect to the endpoint URL")
        log.check_current()


def test_nothing_is_read_from_or_written_into_another_directory_that_the_path_leads_to(tmp_path: Path) -> None:
    """An older copy that is put in the place of a live controller's directory would get records that follow no other
    in it. The controller waits, as it does for any store that fails, and goes on where its directory is back.
    """
    path, ours = tmp_path / "metadata", tmp_path / "ours"
    store = LocalStore(str(path))
    assert store.create("1", b"a")
    shutil.copytree(path, tmp_path / "older")
    path.rename(ours)
    (tmp_path / "older").rename(path)
    before = sorted(file.name for file in path.iterdir())
    calls: list[Callable[[], object]] = [
        lambda: store.create("2", b"b"),
        lambda: store.put("claim", b"c"),
        lambda: store.read("1"),
        store.names,
        lambda: store.delete("1"),
    ]
    for call in calls:
        with pytest.raises(OSError, match="another directory than the one that is in use"):
            call()
    assert sorted(file.name for file in path.iterdir()) == before
    path.rename(tmp_path / "older")
    ours.rename(path)
    assert store.create("2", b"b")
