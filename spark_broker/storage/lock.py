"""The lock of a log directory: `flock`, with the holder's identity in the lock file.

A broker's process may outlive its executor (a zombie) and go on holding its directory. Its replacement, told that the
launch is superseded, kills exactly that process: the one with the recorded pid *and* start time, through a pidfd, so
that a pid that was used again is never signalled.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from spark_broker.errors import LogDirectoryLockedError

LOCK_FILE = ".lock"
_POLL_S = 0.02
_START_TIME_FIELD = 19  # Of /proc/<pid>/stat after the command's closing parenthesis: starttime, in clock ticks.


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds (or last held) a directory. `start_time` is in clock ticks since boot."""

    pid: int
    start_time: int
    launch: int


class DirectoryLock:
    """An exclusive lock on a directory, held while the object is open and its process alive."""

    def __init__(self, directory: Path, fd: int) -> None:
        self.directory = directory
        self._fd: int | None = fd
        _held.add(self)

    @classmethod
    def acquire(cls, directory: Path, *, launch: int, wait_ms: int = 0) -> DirectoryLock:
        """Take the lock, waiting up to `wait_ms` for its holder to go. Raises LogDirectoryLockedError."""
        # Not inheritable (O_CLOEXEC): a child must not keep the directory locked after we are gone.
        fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _wait_for_lock(fd, wait_ms):
                raise LogDirectoryLockedError(f"{directory} is held by {read_holder(directory)}")
            _write_holder(fd, Holder(os.getpid(), process_start_time(os.getpid()) or 0, launch))
        except BaseException:
            os.close(fd)
            raise
        return cls(directory, fd)

    def release(self) -> None:
        """Give the lock up."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def forget(self) -> None:
        """In a forked child: close the inherited descriptor, which leaves the parent's lock in place."""
        self.release()


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # flock belongs to the open file, which a fork shares: a child that lived on would keep a dead broker's directory.
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def read_holder(directory: Path) -> Holder | None:
    """Who wrote the lock file last; None when it does not say. Whether they still hold it, only the lock tells."""
    try:
        value = json.loads((directory / LOCK_FILE).read_bytes())
        return Holder(int(value["pid"]), int(value["start_time"]), int(value["launch"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def is_locked(directory: Path) -> bool:
    """Whether a live process holds the directory at this moment."""
    try:
        fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd)
    finally:
        os.close(fd)


def process_start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is no such process here."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command may contain spaces and parentheses: count fields after its last parenthesis.
    return int(stat.rpartition(")")[2].split()[_START_TIME_FIELD])


def kill_holder(holder: Holder, *, wait_ms: int) -> bool:
    """SIGKILL exactly this process and wait for its end. False when it is our own or not visible (a pid namespace).

    Raises LogDirectoryLockedError when it is still there after `wait_ms`.
    """
    if holder.pid == os.getpid():
        return False
    try:
        pidfd = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return False
    try:
        if process_start_time(holder.pid) != holder.start_time:
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(wait_ms):
            raise LogDirectoryLockedError(f"process {holder.pid} did not end within {wait_ms} ms of SIGKILL")
        return True
    finally:
        os.close(pidfd)


def _write_holder(fd: int, holder: Holder) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(asdict(holder)).encode(), 0)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(fd: int, wait_ms: int) -> bool:
    deadline = time.monotonic() + wait_ms / 1000
    pause = threading.Event()  # Never set: flock can only be polled when it must not wait without end.
    while not _try_lock(fd):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        pause.wait(min(_POLL_S, remaining_s))
    return True
