"""A reader opens the files that a leader names, in the leader's log directory and nowhere else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from spark_broker.client.local_files import ForeignExtentError, LocalFiles, UnusableExtentError
from spark_broker.protocol.messages import FileExtent


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A leader's log directory, with one partition."""
    path = tmp_path / "broker-0"
    (path / "t-0").mkdir(parents=True)
    return path


def extent(path: Path | str, length: int = 8) -> FileExtent:
    """What a leader would say of the file that is opened by this path."""
    status = os.stat(path) if os.path.exists(path) else os.stat("/")  # noqa: PTH110, PTH116 (as it is, with its dots)
    return FileExtent(path=str(path), device=status.st_dev, inode=status.st_ino, position=0, length=length)


def read(directory: Path, extent: FileExtent) -> None:
    LocalFiles(str(directory)).frames(b"", [extent])


def test_a_fifo_does_not_hold_the_reader_up(directory: Path) -> None:
    """Story: the reader waited for a writer, for ever."""
    fifo = directory / "t-0" / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ForeignExtentError, match="is no regular file"):
        read(directory, extent(fifo))


def test_a_directory_and_a_socket_are_refused(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "socket"))
        for path in (directory, directory / "t-0", directory / "socket"):
            with pytest.raises(UnusableExtentError):
                read(directory, extent(path))


def test_no_file_outside_of_the_leaders_log_directory_is_opened(directory: Path) -> None:
    """Story: a leader could have any file of the reader's user opened."""
    outside = directory.parent / "broker-00"
    outside.write_bytes(b"not yours")
    for path in ("/etc/passwd", "/dev/zero", outside, f"{directory}/../broker-00", f"{directory}/t-0/../../broker-00"):
        with pytest.raises(ForeignExtentError, match="is not in the leader's log directory"):
            read(directory, extent(path))


def test_no_symbolic_link_leads_out_of_the_log_directory(directory: Path) -> None:
    outside = directory.parent / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"not yours")
    (directory / "t-0" / "link").symlink_to(outside / "file")
    (directory / "t-1").symlink_to(outside)
    for path in (directory / "t-0" / "link", directory / "t-1" / "file"):
        with pytest.raises(ForeignExtentError, match="through a symbolic link"):
            read(directory, extent(path))


def test_the_log_directory_itself_may_be_reached_through_a_link(directory: Path) -> None:
    (directory / "t-0" / "file").write_bytes(b"12345678")
    linked = directory.parent / "linked"
    linked.symlink_to(directory)
    with pytest.raises(UnusableExtentError, match="sizes differ"):  # it was read: there are no headers for it
        read(linked, extent(linked / "t-0" / "file"))


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "", ".", "no such file"])
def test_a_name_that_is_none_is_unusable(directory: Path, name: str) -> None:
    with pytest.raises(UnusableExtentError):
        read(directory, FileExtent(f"{directory}/t-0/{name}", device=0, inode=0, position=0, length=8))


def test_extents_of_more_than_there_is_memory_for_are_unusable(directory: Path) -> None:
    file = directory / "t-0" / "file"
    file.write_bytes(b"12345678")
    with pytest.raises(UnusableExtentError):
        LocalFiles(str(directory)).frames(b"", [extent(file, 2**31 - 1)] * 100_000)
