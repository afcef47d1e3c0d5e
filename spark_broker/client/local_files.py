"""Batches from the files of a leader on the same machine. The leader says where they are; their bytes do not pass
through its process or the network.

A sealed segment could be mapped. It is read instead. Reading costs about as much, and an error of the disk is then an
OSError and not a SIGBUS.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.crc32c import Buffer
from spark_broker.protocol.frame import Frame, decode_headers, verified_frames
from spark_broker.protocol.messages import FileExtent
from spark_broker.storage.filesystem import LOCAL, FileSystem


class UnusableExtentError(Exception):
    """The file is another one, cannot be read here, or does not hold the batches. The reader asks the leader."""


def this_boot_id() -> str:
    """Identifies this machine and its run. Empty where that is not known."""
    with suppress(OSError):
        return LOCAL.boot_id()
    return ""


class ForeignExtentError(UnusableExtentError):
    """What the leader names is no file of its log directory. No leader of ours does that."""


class LocalFiles:
    """The file that a reader has open: the one of its last extent. For one thread.

    `directory`: the leader's log directory, as the cluster's metadata names it. No file outside of it is opened.
    """

    def __init__(self, directory: str, fs: FileSystem = LOCAL) -> None:
        self._directory = Path(directory)
        self._fs = fs
        self._fd = -1
        self._file: tuple[str, int, int] | None = None

    def frames(self, headers: Buffer, extents: Sequence[FileExtent]) -> list[Frame]:
        """The batches of an answer, with checked CRCs. Raises UnusableExtentError."""
        at = 0
        try:
            messages = pa.allocate_buffer(sum(extent.length for extent in extents))
            view = memoryview(messages).cast("B")
            for extent in extents:
                self._open(extent)
                self._read(extent, view[at : at + extent.length])
                at += extent.length
            batches = decode_headers(headers)
            if sum(header.length for header in batches) != at:
                raise UnusableExtentError("the files' pieces and the batches' sizes differ")
            return verified_frames(batches, messages)
        except (OSError, ValueError, MemoryError, CorruptMessageError) as error:
            raise UnusableExtentError(str(error)) from error

    def _open(self, extent: FileExtent) -> None:
        """Known bug 28: a name alone may mean another file by now."""
        file = (extent.path, extent.device, extent.inode)
        if file == self._file:
            return
        self.close()
        # A leader names the file: it may be anything. To open a FIFO would wait for its writer.
        try:
            self._fd = self._fs.open_beneath(self._directory, self._within(extent), os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise ForeignExtentError(f"{extent.path} leads through a symbolic link") from error
            raise
        if not self._fs.is_regular_file(self._fd):
            raise ForeignExtentError(f"{extent.path} is no regular file")
        if self._fs.open_file_id(self._fd) != (extent.device, extent.inode):
            raise UnusableExtentError(f"{extent.path} is another file than the leader's")
        self._file = file

    def _within(self, extent: FileExtent) -> Path:
        path = Path(extent.path)
        if not path.is_relative_to(self._directory) or ".." in path.parts:
            raise ForeignExtentError(f"{extent.path} is not in the leader's log directory, {self._directory}")
        return path.relative_to(self._directory)

    def _read(self, extent: FileExtent, target: memoryview) -> None:
        position = extent.position
        while target:
            count = self._fs.pread_into(self._fd, target, position)
            if not count:
                raise UnusableExtentError(f"{extent.path} ends at byte {position}")
            target, position = target[count:], position + count

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            self._fs.close(self._fd)
        self._fd, self._file = -1, None
