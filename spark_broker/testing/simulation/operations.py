"""What a process asks of a simulated disk, and the faults that may happen instead."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from spark_broker.model import FILE_NAME_BYTES_MAX
from spark_broker.storage.filesystem import FsyncError

CHANGING = frozenset(
    (
        "create",
        "pwritev",
        "ftruncate",
        "fsync",
        "truncate",
        "rename",
        "unlink",
        "mkdir",
        "remove_tree",
        "sync_directory",
    )
)
"""Kinds of operations that may change something; the others are "open", "pread", "read_bytes" and "list_directory"."""


class ProcessKilled(BaseException):
    """The simulated process died in the middle of what it was doing; what it had done stays."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its kind is the method's name, "create" for an open that makes or empties a file.

    `detail`: the bytes of a write, the length of a cut, the new path of a rename.
    """

    kind: str
    path: str
    position: int = 0
    detail: bytes | int | str | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens instead of an operation. `kept_bytes`: of a write, this many bytes are written first."""

    errno: int = 0
    kept_bytes: int = 0
    kills: bool = False


def system_error(number: int, path: str, *, sync: bool = False) -> OSError:
    """The error of a system call, of the class that belongs to its errno. `sync`: of an fsync."""
    return (FsyncError if sync else OSError)(number, os.strerror(number), path)


def place_of(path: str) -> tuple[str, str]:
    """The directory of a path, and the name in it. Raises OSError for a name that is too long."""
    parent, _, name = path.rpartition("/")
    if len(name) > FILE_NAME_BYTES_MAX:
        raise system_error(errno.ENAMETOOLONG, path)
    return parent or "/", name
