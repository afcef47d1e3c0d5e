"""A disk of a test's own, which it can fill."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.chaos.disks import failing_ext4, mounted


@contextmanager
def small_disk(path: Path, size_mb: int, kind: str = "tmpfs", files_max: int = 0) -> Iterator[Path]:
    """A file system at this path: a tmpfs, or ext4 in a file beside it. Skips the test where that is not allowed.

    `files_max`: how many files and directories the tmpfs can have; 0: no bound.
    """
    with mounted(path, size_mb, files_max) if kind == "tmpfs" else failing_ext4(path, size_mb) as disk:
        if isinstance(disk, str):
            pytest.skip(disk)
        yield path


def use_up_files(disk: Path) -> Path:
    """Make files until no more can be made; returns the directory that they are in."""
    filler = disk / "files"
    filler.mkdir()
    with suppress(OSError):
        for number in itertools.count():
            (filler / str(number)).touch()
    return filler


def fill_disk(disk: Path) -> Path:
    """Use up what is free; returns the file that takes it."""
    filler = disk / "filler"
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with suppress(OSError):
        while os.write(fd, bytes(4096)):
            pass
    os.close(fd)
    assert shutil.disk_usage(disk).free == 0
    return filler
