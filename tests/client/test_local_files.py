"""A reader opens the files that a leader names. They may be anything."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from spark_broker.client.local_files import LocalFiles, UnusableExtentError
from spark_broker.protocol.messages import FileExtent


def extent(path: Path) -> FileExtent:
    status = path.stat()
    return FileExtent(path=str(path), device=status.st_dev, inode=status.st_ino, position=0, length=8)


def test_a_fifo_does_not_hold_the_reader_up(tmp_path: Path) -> None:
    """Story: the reader waited for a writer, for ever."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(UnusableExtentError, match="is no regular file"):
        LocalFiles().frames(b"", [extent(fifo)])


def test_a_directory_a_device_and_a_socket_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path, Path("/dev/zero"), tmp_path / "socket"):
            with pytest.raises(UnusableExtentError):
                LocalFiles().frames(b"", [extent(path)])
