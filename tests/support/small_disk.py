"""A disk of a test's own, which it can fill."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size_mb: int, kind: str = "tmpfs") -> Iterator[Path]:
    """A file system at this path: a tmpfs, or ext4 in a file beside it. Skips the test where that is not allowed."""
    path.mkdir()
    if kind == "tmpfs":
        _run("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(path))
    else:
        image = path.with_name(f"{path.name}.{kind}")
        image.write_bytes(b"")
        os.truncate(image, size_mb << 20)
        _run(f"mkfs.{kind}", "-q", "-F", str(image))
        _run("mount", "-o", "loop", str(image), str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} is not allowed: {done.stderr.strip()}")


def fill_disk(disk: Path) -> Path:
    """Use up what is free; returns the file that takes it."""
    filler = disk / "filler"
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with suppress(OSError):
        while os.write(fd, bytes(4096)):
            pass
    os.close(fd)
    return filler
