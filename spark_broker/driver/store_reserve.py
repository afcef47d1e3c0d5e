"""Room that a directory keeps for the time when its disk is full: files that then get other bytes and names.

Only the controller's records free a full disk: of a lower retention, of deleted records and topics, of what is tiered.
Such a file is a piece, and is written over in place: blocks that were given up would go to whoever fills the disk.
A name needs room, too, where the directory's block for it is full. Only then is a piece deleted: its name or one of its
blocks makes that room.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid

from spark_broker.storage.files import is_full

logger = logging.getLogger(__name__)

RESERVE_PREFIX = ".reserve-"
TEMPORARY_PREFIX = ".tmp-"
PIECES = 128
PIECE_BYTES = 16 * 1024
"""A file of the log has a few hundred bytes; one of a thousand partitions has more than a piece holds."""

_BLOCK_BYTES = 512  # The unit of st_blocks, on every file system.


class Reserve:
    """The pieces in one directory. Several processes may use them at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._may_lack = True
        self._used = False  # since it was full the last time

    def fill(self) -> None:
        """Make the pieces that are missing, as far as the disk has room. Nothing is synced: a piece holds nothing."""
        if not self._may_lack:
            return
        try:
            for _ in range(PIECES - len(self._pieces(PIECE_BYTES))):
                self._make()
        except OSError as error:
            level = logging.DEBUG if is_full(error) else logging.WARNING
            logger.log(level, "%s has a short reserve: %s", self._path, error)
            return
        if self._used:
            logger.warning("%s has room and its whole reserve again", self._path)
        self._may_lack = self._used = False

    def _make(self) -> None:
        temporary = new_path(self._path, TEMPORARY_PREFIX)
        try:
            with open(temporary, "xb", opener=private) as file:
                file.write(bytes(PIECE_BYTES))
            os.rename(temporary, new_path(self._path, RESERVE_PREFIX))  # Only now: another process may take it at once.
        except OSError:
            remove(temporary)
            raise

    def write(self, target: str, data: bytes) -> bool:
        """Make a piece this new, synced file. False: no piece is left that is big enough. Raises OSError."""
        pieces = self._pieces(len(data))
        if not self._used:
            text = "%s is on a full disk. Its reserve takes %d more files; free space before it is used up"
            logger.warning(text, self._path, len(pieces))
        self._may_lack = self._used = True
        for piece in pieces:
            try:
                os.rename(piece, target)
            except FileNotFoundError:
                continue  # Another process has taken it.
            except OSError as error:
                if not is_full(error):
                    raise
                remove(piece)
                continue
            with open(target, "r+b") as file:
                file.write(data)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
            return True
        return False

    def keep(self, path: str) -> None:
        """Make the file's blocks a piece, once its name goes to another file. Raises OSError."""
        try:
            os.link(path, new_path(self._path, RESERVE_PREFIX))
        except FileNotFoundError:
            return  # There was no such file.
        except OSError as error:
            if not is_full(error):
                raise  # On a full disk, the reserve has one piece less.

    def delete_one(self) -> bool:
        """Make room for a name. False: no piece is left."""
        self._may_lack = True
        for piece in self._pieces(0)[:1]:
            remove(piece)
            return True
        return False

    def _pieces(self, at_least_bytes: int) -> list[str]:
        """Paths of pieces with so many bytes on the disk. A file that still has another name is none yet (`keep`)."""
        pieces = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.startswith(RESERVE_PREFIX):
                    with contextlib.suppress(FileNotFoundError):  # Another process may just have taken it.
                        stat = entry.stat()
                        if stat.st_nlink == 1 and stat.st_blocks * _BLOCK_BYTES >= at_least_bytes:
                            pieces.append(entry.path)
        return pieces


def private(path: str, flags: int) -> int:
    """An opener of files that nobody else may read, whatever the process's umask is: the driver has its user's."""
    return os.open(path, flags, 0o600)


def new_path(directory: str, prefix: str) -> str:
    """A path that no other writer uses."""
    return os.path.join(directory, f"{prefix}{uuid.uuid4().hex}")


def remove(path: str) -> None:
    """Remove the file; one that does not exist is no error. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
