"""The lock of a log directory: a locked file, with the holder's identity in it.

A broker's process may outlive its executor and keep its directory locked (a zombie). When its launch is superseded, the
replacement kills it. Both the pid *and* the start time must be the recorded ones, because another process may have the
pid by now.
"""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from spark_broker.errors import LogDirectoryLockedError
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.storage.files import opened, write_fully
from spark_broker.storage.filesystem import LOCAL, FileSystem, ProcessIdentity

LOCK_FILE = ".lock"


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds (or last held) a directory. `start_time` is in clock ticks since boot."""

    pid: int
    start_time: int
    launch: int


class DirectoryLock:
    """An exclusive lock on a directory, held while the object is open and its process alive."""

    def __init__(self, fs: FileSystem, directory: Path, fd: int) -> None:
        self.directory = directory
        self._fs = fs
        self._fd: int | None = fd
        _held.add(self)

    @classmethod
    def acquire(cls, directory: Path, *, launch: int, wait_ms: int = 0, fs: FileSystem = LOCAL) -> DirectoryLock:
        """Take the lock. Wait up to `wait_ms` for its holder to release it. Raises LogDirectoryLockedError."""
        # Handles are not inherited: a child must not keep the directory locked after this process has ended.
        fd = fs.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            if not fs.lock(fd, wait_ms=wait_ms):
                raise LogDirectoryLockedError(f"{directory} is held by {read_holder(directory, fs=fs)}")
            process = fs.process()
            _write_holder(fs, fd, Holder(process.pid, process.start_time, launch))
        except BaseException:
            fs.close(fd)
            raise
        return cls(fs, directory, fd)

    def release(self) -> None:
        """Give the lock up."""
        if self._fd is not None:
            self._fs.close(self._fd)
            self._fd = None

    def forget(self) -> None:
        """In a forked child: close the inherited handle, which leaves the parent's lock in place."""
        self.release()


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # flock belongs to the open file, which a fork shares: a child that outlives the broker would keep the lock.
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def read_holder(directory: Path, *, fs: FileSystem = LOCAL) -> Holder | None:
    """The process that wrote the lock file last; None when the file names none.

    It may have ended since: `is_locked` says whether the directory is still held.
    """
    try:
        value = json.loads(fs.read_bytes(directory / LOCK_FILE))
        return Holder(int(value["pid"]), int(value["start_time"]), int(value["launch"]))
    except (FileNotFoundError, KeyError, TypeError, *UNDECODABLE):
        return None


def is_locked(directory: Path, *, fs: FileSystem = LOCAL) -> bool:
    """Whether a live process holds the directory at this moment."""
    try:
        with opened(fs, directory / LOCK_FILE, os.O_RDWR) as fd:
            return not fs.lock(fd, wait_ms=0)
    except FileNotFoundError:
        return False


def kill_holder(holder: Holder, *, wait_ms: int, fs: FileSystem = LOCAL) -> bool:
    """SIGKILL exactly this process and wait for its end.

    Returns False when it is our own process, or is not visible here (a pid namespace). Raises LogDirectoryLockedError
    when it is still there after `wait_ms`.
    """
    try:
        return fs.kill(ProcessIdentity(holder.pid, holder.start_time), wait_ms=wait_ms)
    except TimeoutError as error:
        raise LogDirectoryLockedError(str(error)) from error


def _write_holder(fs: FileSystem, fd: int, holder: Holder) -> None:
    fs.ftruncate(fd, 0)
    write_fully(fs, fd, [json.dumps(asdict(holder)).encode()], 0)
