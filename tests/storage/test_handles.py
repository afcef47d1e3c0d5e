"""When a file cannot be opened, no handle of another file stays open."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from spark_broker.errors import ProcessLimitError
from spark_broker.storage.filesystem import LocalFileSystem
from spark_broker.storage.start_kind import StartKind
from tests.storage.logs import filled, open_log


class Counting(LocalFileSystem):
    """Knows its open handles."""

    def __init__(self) -> None:
        self.handles: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self.handles.add(fd)
        return fd

    def close(self, fd: int, /) -> None:
        self.handles.discard(fd)
        os.close(fd)


class WithoutIndexes(Counting):
    """`.index` files cannot be opened for writing."""

    def open(self, path: Path, flags: int) -> int:
        if path.suffix == ".index" and flags & os.O_RDWR:
            raise OSError(errno.EMFILE, "too many open files", str(path))
        return super().open(path, flags)


def test_a_segment_whose_index_cannot_be_opened_closes_its_messages(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, [False, False])
    log.close(clean=True)
    fs = WithoutIndexes()
    with pytest.raises(ProcessLimitError):
        open_log(tmp_path, StartKind.CLEAN, fs=fs)
    assert not fs.handles


class LastStepFails(Counting):
    """The second time that a directory is to be synced, it cannot be opened."""

    def __init__(self) -> None:
        super().__init__()
        self._synced = 0

    def sync_directory(self, path: Path) -> None:
        self._synced += 1
        if self._synced > 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))


def test_a_log_whose_recovery_fails_keeps_no_file_open(tmp_path: Path) -> None:
    """Story: a replica that is offline is tried again every second. Each try took two descriptors of its broker."""
    log, _ = filled(tmp_path, [False, False])
    log.close(clean=False)
    fs = LastStepFails()
    with pytest.raises(ProcessLimitError):
        open_log(tmp_path, StartKind.MACHINE_CRASH, fs=fs)
    assert not fs.handles
