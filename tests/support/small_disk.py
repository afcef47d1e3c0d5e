"""A disk of a test's own, which it can fill."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.chaos.disks import failing_ext4, mounted


@contextmanager
def small_disk(path: Path, size_mb: int, kind: str = "tmpfs") -> Iterator[Path]:
    """A file system at this path: a tmpfs, or ext4 in a file beside it. Skips the test where that is not allowed."""
    with (mounted if kind == "tmpfs" else failing_ext4)(path, size_mb) as disk:
        if isinstance(disk, str):
            pytest.skip(disk)
        yield path


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
