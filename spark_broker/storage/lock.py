"""The lock of a log directory: the directory itself is locked, and a file in it, with the holder's identity.

The file says who holds the directory. It may be deleted under a live broker; the lock of the directory cannot.

A broker's process may outlive its executor and keep its directory locked (a zombie). When its launch is superseded, the
replacement kills it. Both the pid *and* the start time must be the recorded ones, because another process may have the
pid by now.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from spark_broker.errors import DamagedLogError, LogDirectoryLockedError
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.storage.files import opened, read_whole, write_fully
from spark_broker.storage.filesystem import LOCAL, FileSystem, ProcessIdentity

LOCK_FILE = ".lock"
HOLDER_BYTES = 128
"""Longer than any holder is."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds (or last held) a directory. `start_time` is in clock ticks since boot."""

    pid: int
    start_time: int
    launch: int


class DirectoryLock:
    """An exclusive lock on a directory, held while the object is open and its process alive."""

    def __init__(self, fs: FileSystem, directory: Path, handles: Iterable[int]) -> None:
        self.directory = directory
        self._fs = fs
        self._handles = [*handles]
        _held.add(self)

    @classmethod
    def acquire(cls, directory: Path, *, launch: int, wait_ms: int = 0, fs: FileSystem = LOCAL) -> DirectoryLock:
        """Take the lock. Wait up to `wait_ms` for its holder to release it. Raises LogDirectoryLockedError."""
        # Handles are not inherited: a child must not keep the directory locked after this process has ended.
        with ExitStack() as handles:
            whole = fs.lock_directory(directory, wait_ms=wait_ms)
            if whole is None:
                raise _held_by(directory, fs)
            handles.callback(fs.close, whole)
            fd = fs.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT)
            handles.callback(fs.close, fd)
            if not fs.lock(fd, wait_ms=wait_ms):
                raise _held_by(directory, fs)
            process = fs.process()
            _write_holder(fs, fd, Holder(process.pid, process.start_time, launch))
            handles.pop_all()
        return cls(fs, directory, (fd, whole))

    def is_at(self, path: Path) -> bool:
        """Whether the path leads to the directory that is locked, and not to another one. Raises OSError."""
        return not self._handles or self._fs.open_file_id(self._handles[-1]) == self._fs.file_id(path)

    def release(self) -> None:
        """Give the lock up."""
        while self._handles:
            self._fs.close(self._handles.pop(0))

    def forget(self) -> None:
        """In a forked child: close the inherited handles, which leaves the parent's lock in place."""
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
        value = json.loads(read_whole(fs, directory / LOCK_FILE))
        return Holder(int(value["pid"]), int(value["start_time"]), int(value["launch"]))
    except (FileNotFoundError, DamagedLogError, KeyError, TypeError, *UNDECODABLE):
        return None


def is_locked(directory: Path, *, fs: FileSystem = LOCAL) -> bool:
    """Whether a live process holds the directory at this moment."""
    whole = fs.lock_directory(directory, wait_ms=0)
    if whole is None:
        return True
    try:
        with opened(fs, directory / LOCK_FILE, os.O_RDWR) as fd:
            return not fs.lock(fd, wait_ms=0)
    except FileNotFoundError:
        return False
    finally:
        fs.close(whole)


def kill_holder(holder: Holder, *, wait_ms: int, fs: FileSystem = LOCAL) -> bool:
    """SIGKILL exactly this process and wait for its end.

    Returns False when it is our own process, or is not visible here (a pid namespace). Raises LogDirectoryLockedError
    when it is still there after `wait_ms`.
    """
    try:
        return fs.kill(ProcessIdentity(holder.pid, holder.start_time), wait_ms=wait_ms)
    except TimeoutError as error:
        raise LogDirectoryLockedError(str(error)) from error


def _held_by(directory: Path, fs: FileSystem) -> LogDirectoryLockedError:
    holder = read_holder(directory, fs=fs)
    return LogDirectoryLockedError(f"{directory} is held by {holder or 'a process that its .lock does not name'}")


def _write_holder(fs: FileSystem, fd: int, holder: Holder) -> None:
    """In place, and as long as before: a full disk keeps no broker from its directory. Nor may it keep a holder's name
    from the file, because then its successor would not know whom to kill, and make another directory.
    """
    write_fully(fs, fd, [json.dumps(asdict(holder)).encode().ljust(HOLDER_BYTES)], 0)
    fs.ftruncate(fd, HOLDER_BYTES)
