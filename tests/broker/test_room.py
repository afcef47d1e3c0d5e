"""A broker reports that its disk is full: in one log line, however much it stops, and in its heartbeats."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from spark_broker.broker.clock import SystemClock
from spark_broker.broker.lease import Lease
from spark_broker.broker.maintenance import Maintenance
from spark_broker.broker.membership import Membership, SessionEvents
from spark_broker.broker.replica_manager import Outward, ReplicaManager
from spark_broker.broker.room import QUIET_MS, Room
from spark_broker.config import load_cluster_settings
from spark_broker.errors import StorageFullError
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.filesystem import LOCAL
from spark_broker.testing.simulation.filesystem import SimFileSystem

PATH = Path("/log/broker-0")
REFUSED = StorageFullError("append in t-0: No space left on device")
ROOM_BYTES = 1000


class SteppedClock(SystemClock):
    """Boot time passes only when a test changes it."""

    now_ms = 1_000

    def boottime_ms(self) -> int:
        return self.now_ms


class Disk:
    """A `Room` on a simulated disk; `changes` are its reports in order."""

    def __init__(self, free_bytes: int | None = None) -> None:
        self.fs = SimFileSystem()
        self.fs.capacity_bytes = free_bytes
        self.clock = SteppedClock()
        self.changes: list[bool] = []
        self.room = Room(PATH, self.fs, ROOM_BYTES, lambda: self.changes.append(self.room.full), self.clock)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_refused_writes_make_one_line_and_room_again_makes_another(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    disk.fs.capacity_bytes = 0
    for _ in range(100):
        disk.room.refused(REFUSED)
        disk.room.look()
    disk.fs.capacity_bytes = 5 * ROOM_BYTES
    disk.clock.now_ms += QUIET_MS
    for _ in range(100):
        disk.room.look()
    assert disk.changes == [True, False]
    full, again = warnings(caplog)
    assert all(part in full for part in (str(PATH), "is full, 0 bytes are free", REFUSED.message, "log.dir.room.bytes"))
    assert again == f"{PATH} has room again: 5000 bytes are free; this broker may lead again"


def test_a_little_room_is_none() -> None:
    disk = Disk()
    disk.fs.capacity_bytes = ROOM_BYTES - 1
    disk.room.refused(REFUSED)
    disk.clock.now_ms += QUIET_MS
    disk.room.look()
    assert disk.room.full
    disk.fs.capacity_bytes = ROOM_BYTES
    disk.room.look()
    assert not disk.room.full


def test_a_quota_that_does_not_show_does_not_make_it_flap() -> None:
    """Every write is refused, although the file system reports that it has room."""
    disk = Disk()
    for _ in range(60):
        disk.room.refused(REFUSED)
        disk.clock.now_ms += 1000
        disk.room.look()
    assert disk.changes == [True]


def test_a_process_that_begins_without_room_says_so_from_the_first_heartbeat_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Disk(free_bytes=ROOM_BYTES - 1).room.full
    assert len(warnings(caplog)) == 1
    assert not Disk(free_bytes=ROOM_BYTES).room.full


def test_a_disk_that_does_not_say_what_is_free_stays_as_it_is() -> None:
    disk = Disk()
    disk.room.refused(REFUSED)
    disk.clock.now_ms += QUIET_MS
    disk.fs.fail_next("free_bytes", errno.EIO)
    disk.room.look()
    assert disk.room.full
    disk.room.look()
    assert not disk.room.full


def test_the_machine_says_what_is_free(tmp_path: Path) -> None:
    assert LOCAL.free_bytes(tmp_path) > 0
    with pytest.raises(FileNotFoundError):
        LOCAL.free_bytes(tmp_path / "nothing")


class Broker:
    """The part of a broker that has a disk and a heartbeat."""

    def __init__(self) -> None:
        self.fs = SimFileSystem()
        self.clock = SteppedClock()
        self.beats = 0
        self.bugs: list[BaseException] = []
        settings = load_cluster_settings({"replica.high.watermark.checkpoint.interval.ms": 1000})
        directory = LogDirectory.claim(Path("/log"), cluster_id="c", launch=1, fs=self.fs)
        lease = Lease(self.clock)
        outward = Outward(lambda *_: None, lambda *_: None, self.bugs.append, on_room=self._beat)
        self.manager = ReplicaManager(settings, directory, lease, outward, clock=self.clock)
        events = SessionEvents(lambda _: None, lambda _: None, lambda _: None, self.bugs.append)
        self.membership = Membership(self.manager, lease, events, self.clock)
        self.maintenance = Maintenance(self.manager, settings.cluster, self.bugs.append)
        self.maintenance.begin(0.0)
        self.now_s = 0.0

    def _beat(self) -> None:
        self.beats += 1

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self.clock.now_ms += 1000
            self.maintenance.run_due(self.now_s)


def test_heartbeats_say_that_the_disk_is_full_and_that_it_has_room(caplog: pytest.LogCaptureFixture) -> None:
    """Each change sends a heartbeat at once."""
    broker = Broker()
    assert not broker.membership.heartbeat().full
    broker.fs.capacity_bytes = broker.fs.used_bytes
    broker.pass_time(10)  # no checkpoint of high watermarks fits
    assert (broker.membership.heartbeat().full, broker.beats) == (True, 1)
    broker.fs.capacity_bytes = None
    broker.pass_time(10)
    assert (broker.membership.heartbeat().full, broker.beats) == (False, 2)
    assert len(warnings(caplog)) == 2
    assert not broker.bugs
