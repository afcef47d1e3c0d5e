"""Makes what was written to a table outlive a crash of the machine.

Neither Hadoop nor Parquet nor Delta syncs what it writes to a local directory: a commit lies in the page cache. Brokers
delete records that are recorded to be in the table, and sync that.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from spark_broker.errors import TieringStoppedError

_LOCAL = ("file://", "file:")


def make_lasting(path: str) -> None:
    """Sync the file system of a table in a local directory. Others, object stores for one, keep what they have taken.

    Raises TieringStoppedError.
    """
    directory = local_directory(path)
    if directory is None:
        return
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync_file_system(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise TieringStoppedError(f"the table {path} cannot be synced: {error}") from error


def local_directory(path: str) -> Path | None:
    """Where the table is on this machine; None where it is elsewhere."""
    scheme = next((scheme for scheme in _LOCAL if path.startswith(scheme)), "")
    directory = Path(path.removeprefix(scheme))
    return directory if directory.is_absolute() and directory.is_dir() else None


def sync_file_system(fd: int) -> None:
    """syncfs(2), which Python lacks; all file systems where the system lacks it. Raises OSError."""
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        os.sync()
    elif syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
