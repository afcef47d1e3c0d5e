"""The machine under a log directory: its files, locks, processes and boot id, behind one protocol.

`LOCAL` is the real machine. The simulator replaces it (`testing/simulation/filesystem.py`). The operations are as small
as POSIX's: a crash may undo any of them, and the callers must be right then, too. `tests/storage/test_seam.py` keeps
every other module of `storage/` from bypassing the protocol.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import select
import shutil
import signal
import stat
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from spark_broker.storage.descriptors import DESCRIPTORS

PRIVATE_UMASK = 0o077
"""What is in a log or in the metadata is the user's own, whatever umask the process was started with."""

_POLL_S = 0.02
_NEVER_WAITING = os.O_CLOEXEC | os.O_NONBLOCK
"""Who opens a FIFO in the place of a file would wait for its other end, for ever. Files are opened as always."""
_START_TIME_FIELD = 19  # Of /proc/<pid>/stat after the command's closing parenthesis: starttime, in clock ticks.


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this boot. A later process with the same pid has another `start_time` (clock ticks since boot)."""

    pid: int
    start_time: int


class FsyncError(OSError):
    """An fsync failed, of a file or of a directory. Whatever its errno is, what was written may be lost."""


class ReadError(OSError):
    """What is stored could not be read, whatever the errno is. Nothing that was written is in doubt."""


class FileSystem(Protocol):
    """Operations raise OSError (FileNotFoundError, FileExistsError, ENOSPC, EIO, ...) as the system calls do.

    Writes, creations, renames and removals are visible to every process at once, and outlive the process. They outlive
    a crash of the machine once `fsync` (content) or `sync_directory` (names) has returned.
    """

    def open(self, path: Path, flags: int) -> int:
        """A handle, not inherited by children; `flags` are of `os.O_*`."""
        ...

    def open_beneath(self, directory: Path, relative: Path, flags: int) -> int:
        """The same for a file below a directory. No part of `relative` may be `..` or a symbolic link: then OSError."""
        ...

    def close(self, fd: int, /) -> None:
        """Give the handle up, and with it its lock."""
        ...

    def pread(self, fd: int, length: int, position: int, /) -> bytes:
        """Up to `length` bytes; fewer at the end of the file, and perhaps elsewhere."""
        ...

    def pread_into(self, fd: int, target: memoryview, position: int) -> int:
        """Read into the view; returns how many bytes: fewer at the end of the file, and perhaps elsewhere."""
        ...

    def pwritev(self, fd: int, views: Sequence[memoryview], position: int, /) -> int:
        """Write from this byte on; returns how many bytes were written, which may be fewer than given."""
        ...

    def ftruncate(self, fd: int, length: int, /) -> None:
        """Make the file this long."""
        ...

    def fsync(self, fd: int, /) -> None:
        """Make the file's content durable. Raises FsyncError; never repeat it then: the page cache may have dropped the
        data."""
        ...

    def size(self, fd: int) -> int:
        """Bytes of the open file."""
        ...

    def read_bytes(self, path: Path) -> bytes:
        """The whole content."""
        ...

    def size_of(self, path: Path) -> int:
        """Bytes of the file; -1 when there is none."""
        ...

    def file_id(self, path: Path) -> tuple[int, int]:
        """Device and inode of the file that has this name now."""
        ...

    def open_file_id(self, fd: int) -> tuple[int, int]:
        """Device and inode of the open file."""
        ...

    def is_regular_file(self, fd: int) -> bool:
        """Whether it is a file with content: no directory, FIFO, socket or device."""
        ...

    def truncate(self, path: Path, length: int) -> None:
        """Make the file this long."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Give the file or directory another name. It replaces a file that has that name."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        ...

    def mkdir(self, path: Path) -> None:
        """Make a directory in one that exists. Raises FileExistsError."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and what is in it."""
        ...

    def list_directory(self, path: Path) -> list[str]:
        """The names in a directory, sorted."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether there is such a file or directory."""
        ...

    def is_directory(self, path: Path) -> bool:
        """Whether there is such a directory."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make creations, renames and removals in the directory durable. Raises FsyncError."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written where the path is; 0 also where no file can be made (no inodes)."""
        ...

    def lock(self, fd: int, *, wait_ms: int) -> bool:
        """Lock the open file for this handle alone. False: another handle still has the lock after `wait_ms`."""
        ...

    def lock_directory(self, path: Path, *, wait_ms: int) -> int | None:
        """Open the directory and lock it for this handle alone. None: another handle still has it after `wait_ms`.

        Some network file systems lock no directories. There, the handle is there without a lock.
        """
        ...

    def boot_id(self) -> str:
        """Identifies this run of the machine."""
        ...

    def process(self) -> ProcessIdentity:
        """This process."""
        ...

    def kill(self, process: ProcessIdentity, *, wait_ms: int) -> bool:
        """Kill exactly this process. Returns False when there is no such process here, or it is our own.

        Raises TimeoutError when it is still there after `wait_ms`.
        """
        ...

    def unique_id(self) -> str:
        """A new id that nothing else has."""
        ...


def _open_beneath(directory: Path, relative: Path, flags: int) -> int:
    """One part after the other, each from the directory that is open: nobody can put a link there in between."""
    *parts, name = relative.parts or ("",)
    if relative.is_absolute() or ".." in relative.parts:
        raise OSError(errno.EINVAL, f"a path that leads out of {directory}", str(relative))
    to_directory = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    at = os.open(directory, to_directory)
    try:
        for part in parts:
            above, at = at, os.open(part, to_directory | os.O_NOFOLLOW, dir_fd=at)
            os.close(above)
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=at)
    finally:
        os.close(at)


NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""What flock says of a directory where the file system cannot lock one. NFS wants a descriptor that can be written."""


class LocalFileSystem:
    """The real machine. It has no state: one instance, `LOCAL`, serves every thread."""

    # The system calls themselves, without a Python frame around them: every append and read uses them.
    close = staticmethod(os.close)
    pread = staticmethod(os.pread)
    pwritev = staticmethod(os.pwritev)
    ftruncate = staticmethod(os.ftruncate)

    def fsync(self, fd: int, /) -> None:
        _fsync(fd)

    def open(self, path: Path, flags: int) -> int:
        return DESCRIPTORS.spared(lambda: os.open(path, flags | _NEVER_WAITING, 0o644))

    def open_beneath(self, directory: Path, relative: Path, flags: int) -> int:
        return DESCRIPTORS.spared(lambda: _open_beneath(directory, relative, flags | _NEVER_WAITING))

    def pread_into(self, fd: int, target: memoryview, position: int) -> int:
        return os.preadv(fd, [target], position)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read_bytes(self, path: Path) -> bytes:
        with open(path, "rb", buffering=0, opener=lambda _, flags: self.open(path, flags)) as file:
            return file.read() or b""

    def size_of(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return -1

    def file_id(self, path: Path) -> tuple[int, int]:
        status = path.stat()
        return status.st_dev, status.st_ino

    def open_file_id(self, fd: int) -> tuple[int, int]:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino

    def is_regular_file(self, fd: int) -> bool:
        return stat.S_ISREG(os.fstat(fd).st_mode)

    def truncate(self, path: Path, length: int) -> None:
        os.truncate(path, length)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def remove_tree(self, path: Path) -> None:
        if path.is_symlink():  # Somebody has moved it to another disk: what is there goes, too.
            self.remove_tree(path.resolve(strict=True))
            path.unlink()
        else:
            DESCRIPTORS.spared(lambda: shutil.rmtree(path))  # It may have removed a part of it the first time.

    def list_directory(self, path: Path) -> list[str]:
        return sorted(DESCRIPTORS.spared(lambda: os.listdir(path)))

    def exists(self, path: Path) -> bool:
        return path.exists()

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def sync_directory(self, path: Path) -> None:
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        state = os.statvfs(path)
        if state.f_files and not state.f_favail:
            return 0
        # A file system that does not count its blocks says that it has none.
        return state.f_bavail * state.f_frsize if state.f_blocks else sys.maxsize

    def lock(self, fd: int, *, wait_ms: int) -> bool:
        deadline = time.monotonic() + wait_ms / 1000
        pause = threading.Event()  # Never set. flock has no time-out, so the lock is polled.
        while not _try_lock(fd):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            pause.wait(min(_POLL_S, remaining_s))
        return True

    def lock_directory(self, path: Path, *, wait_ms: int) -> int | None:
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        locked = False
        try:
            locked = self.lock(fd, wait_ms=wait_ms)
        except OSError as error:
            locked = error.errno in NO_LOCKS
            if not locked:
                raise
        finally:
            if not locked:
                os.close(fd)
        return fd if locked else None

    def boot_id(self) -> str:
        return _boot_id()

    def process(self) -> ProcessIdentity:
        return ProcessIdentity(os.getpid(), process_start_time(os.getpid()) or 0)

    def kill(self, process: ProcessIdentity, *, wait_ms: int) -> bool:
        if process.pid == os.getpid():
            return False
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        try:
            # The pidfd pins the process. So this check makes sure that no later process with the pid is signalled.
            if process_start_time(process.pid) != process.start_time:
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(wait_ms):
                raise TimeoutError(f"process {process.pid} did not end within {wait_ms} ms of SIGKILL")
            return True
        finally:
            os.close(pidfd)

    def unique_id(self) -> str:
        return str(uuid.uuid4())


LOCAL: Final[FileSystem] = LocalFileSystem()


def current_user() -> str:
    """The user whose rights this process has, as a text for people."""
    uid = os.geteuid()
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:  # Containers may run as users that have no name.
        return f"uid {uid}"


def read_proc(path: Path) -> str:
    """What the kernel says there. Raises OSError."""
    return DESCRIPTORS.spared(lambda: path.read_text(encoding="ascii", errors="replace"))


@cache
def _boot_id() -> str:
    """Of this process, which needs it again when it may have no descriptor left."""
    return read_proc(Path("/proc/sys/kernel/random/boot_id")).strip()


def process_start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is no such process here."""
    try:
        fields = read_proc(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command may contain spaces and parentheses: count fields after its last parenthesis.
    return int(fields.rpartition(")")[2].split()[_START_TIME_FIELD])


def _fsync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise FsyncError(error.errno, error.strerror) from error


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
