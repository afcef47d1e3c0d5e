"""File primitives: whole writes, atomic replacement, and a handle that readers can share."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from spark_broker.errors import (
    DamagedLogError,
    KafkaStorageError,
    ProcessLimitError,
    SparkBrokerError,
    StorageFullError,
    SyncFailedError,
    UnreadableLogError,
)
from spark_broker.process_limits import NO_DESCRIPTOR
from spark_broker.protocol.crc32c import Buffer
from spark_broker.storage.filesystem import FileSystem, FsyncError, ReadError

T = TypeVar("T")

TEMPORARY_SUFFIX = ".tmp"

WHOLE_BYTES_MAX = 256 << 20
"""Files that are read whole are far smaller. Damage to a file system may give one a size beyond any memory."""

_MAX_BUFFERS = 512
_COPY_BYTES = 1 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_LIMITS = NO_DESCRIPTOR | {errno.ENOMEM, errno.EFBIG}


class HalfDoneError(OSError):
    """A change that the system has refused half-way: what is on the disk now is for a recovery to judge."""


@contextmanager
def half_done_if_refused() -> Iterator[None]:
    """For steps of which some may be done already when one is refused. Raises HalfDoneError then."""
    try:
        yield
    except OSError as error:
        if not is_refusal(error):
            raise
        raise HalfDoneError(error.errno, error.strerror, error.filename) from error


def is_full(error: OSError) -> bool:
    """Whether the error means that the disk (or a quota) is full, rather than broken. A failed fsync never does."""
    return error.errno in _FULL and not isinstance(error, FsyncError)


def is_refusal(error: OSError) -> bool:
    """Whether nothing is broken: the disk is full, or the process has reached a limit. It may work later."""
    return is_full(error) or (error.errno in _LIMITS and not isinstance(error, FsyncError))


def storage_error(error: OSError, what: str) -> SparkBrokerError:
    """The typed error for one of the file system; `what` was to be done. Every error of a disk is told apart here."""
    message = f"{what}: {error}"
    if isinstance(error, FsyncError):
        return SyncFailedError(message)
    if isinstance(error, ReadError):
        return UnreadableLogError(message)
    if is_full(error):
        return StorageFullError(message)
    if error.errno == errno.EFBIG:
        message += f"; {file_size_limit()}"
    return ProcessLimitError(message) if is_refusal(error) else KafkaStorageError(message)


def file_size_limit() -> str:
    """What bounds the files of this process, for an error."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    bound = "no bound" if allowed == resource.RLIM_INFINITY else f"{allowed:,} bytes"
    return f"RLIMIT_FSIZE (ulimit -f) allows {bound} a file"


def raise_file_size_limit() -> None:
    """Raise the soft limit of a file's size as far as this process may."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def write_fully(fs: FileSystem, fd: int, parts: Sequence[Buffer], position: int) -> int:
    """Write the parts one after the other from this byte on; returns the position after them. Raises OSError.

    The file may hold some of the bytes when this raises.
    """
    for first in range(0, len(parts), _MAX_BUFFERS):
        views = [memoryview(part) for part in parts[first : first + _MAX_BUFFERS]]
        written = fs.pwritev(fd, views, position)
        position += written
        if written < sum(map(len, views)):
            position = _write_rest(fs, fd, views, written, position)
    return position


def _write_rest(fs: FileSystem, fd: int, views: list[memoryview], written: int, position: int) -> int:
    """Go on where `written` bytes of these were taken."""
    while True:
        while views and written >= len(views[0]):
            written -= len(views[0])
            views.pop(0)
        if not views:
            return position
        views[0] = views[0][written:]
        written = fs.pwritev(fd, views, position)
        position += written


def read_fully(fs: FileSystem, fd: int, length: int, position: int) -> bytes:
    """Up to `length` bytes from this position; fewer only at the end of the file."""
    data = fs.pread(fd, length, position)
    if len(data) == length or not data:
        return data
    parts = [data]
    while data and sum(map(len, parts)) < length:
        data = fs.pread(fd, length - sum(map(len, parts)), position + sum(map(len, parts)))
        parts.append(data)
    return b"".join(parts)


def reading(path: Path, read: Callable[[], T]) -> T:
    """Read from this file. Where that fails, it is repeated once: errors of a disk may pass.

    Raises ReadError when it fails again; FileNotFoundError and the error of a limit at once, as they are.
    """
    try:
        return read()
    except OSError as error:
        if not _is_failure(error):
            raise
    try:
        return read()
    except OSError as error:
        if not _is_failure(error):
            raise
        raise ReadError(error.errno, error.strerror, error.filename or str(path)) from error


def _is_failure(error: OSError) -> bool:
    return not isinstance(error, FileNotFoundError) and not is_refusal(error)


def read_whole(fs: FileSystem, path: Path, bytes_max: int = WHOLE_BYTES_MAX) -> bytes:
    """The whole content of a file. Raises DamagedLogError where it has more than `bytes_max`, and OSError."""

    def read() -> bytes:
        check_size(path, fs.size_of(path), bytes_max)
        return fs.read_bytes(path)

    return reading(path, read)


def check_size(path: Path, size: int, bytes_max: int = WHOLE_BYTES_MAX) -> None:
    """Call this before a file is read whole. Raises DamagedLogError where it cannot be one of ours."""
    if size > bytes_max:
        raise DamagedLogError(f"{path.name} has {size:,} bytes, and such a file has at most {bytes_max:,}")


@contextmanager
def opened(fs: FileSystem, path: Path, flags: int) -> Iterator[int]:
    """Open a file, and close it when the block ends."""
    fd = fs.open(path, flags)
    try:
        yield fd
    finally:
        fs.close(fd)


def read_range(fs: FileSystem, path: Path, length: int, position: int) -> bytes:
    """As `read_fully`, of a file that is not open. Raises as `reading` does."""

    def read() -> bytes:
        with opened(fs, path, os.O_RDONLY) as fd:
            return read_fully(fs, fd, length, position)

    return reading(path, read)


def write_atomically(fs: FileSystem, path: Path, data: bytes) -> None:
    """Replace the file with `data`, durably. After a crash it is wholly the old file or the new one. Raises OSError."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with opened(fs, temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            write_fully(fs, fd, [data], 0)
            fs.fsync(fd)
        fs.rename(temporary, path)
    except OSError:
        # On a full disk, the unfinished file would take room that the log needs.
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(temporary)
        raise
    fs.sync_directory(path.parent)


def copy_prefix(fs: FileSystem, source: Path, target: Path, length: int) -> None:
    """A new, synced file with the first `length` bytes of another."""
    with opened(fs, target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as target_fd:
        for position in range(0, length, _COPY_BYTES):
            data = read_range(fs, source, min(_COPY_BYTES, length - position), position)
            write_fully(fs, target_fd, [data], position)
        fs.fsync(target_fd)


class SharedFile:
    """An open file that is closed when its last user releases it.

    A reader pins it for one read. Otherwise the writer could close the file between a reader's look-up and its pread,
    and the handle's number could belong to another file by then.
    """

    def __init__(self, fs: FileSystem, path: Path, flags: int) -> None:
        self._fs = fs
        self._fd = fs.open(path, flags)
        self._lock = threading.Lock()
        self._users = 1

    @property
    def fd(self) -> int:
        """The handle. Only the owner may use it, and only before it calls `release`."""
        return self._fd

    @contextmanager
    def pinned(self) -> Iterator[int | None]:
        """The handle, which stays open until the block ends; None when the file is closed already."""
        fd = self._acquire()
        try:
            yield fd
        finally:
            if fd is not None:
                self.release()

    def _acquire(self) -> int | None:
        with self._lock:
            if self._users == 0:
                return None
            self._users += 1
            return self._fd

    def release(self) -> None:
        """Give up one use. The owner's own use counts from the start."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._fs.close(self._fd)


def remove_leftovers(fs: FileSystem, directory: Path) -> None:
    """Remove the temporary files that a process left behind in a directory. Raises OSError."""
    for name in fs.list_directory(directory):
        leftover = directory / name
        if name.endswith(TEMPORARY_SUFFIX) and not fs.is_directory(leftover):
            fs.unlink(leftover)


def make_directories(fs: FileSystem, path: Path) -> None:
    """Make a directory and its missing parents, durably."""
    if not fs.is_directory(path):
        make_directories(fs, path.parent)
        with contextlib.suppress(FileExistsError):  # Another broker was quicker.
            fs.mkdir(path)
        fs.sync_directory(path.parent)
