"""A small disk for one broker's log directory: a tmpfs that can be filled up and emptied again."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_MB = 512
"""Twice what a run of some million small records leaves on one broker."""

BALLAST = "chaos-ballast"
PAGE_BYTES = 4096


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def full(self) -> Iterator[None]:
        """As long as the block lasts there is no room on the disk."""
        ballast = self.path / BALLAST
        try:
            with ballast.open("wb") as file:
                fill(file.fileno())
            yield
        finally:
            ballast.unlink(missing_ok=True)


def fill(descriptor: int) -> None:
    """Allocate until there is no room for a single page. Others may be writing meanwhile."""
    end, size = 0, DISK_MB << 20
    while size >= PAGE_BYTES:
        try:
            os.posix_fallocate(descriptor, end, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            size //= 2
        else:
            end += size


@contextmanager
def mounted(path: Path, size_mb: int = DISK_MB, files_max: int = 0) -> Iterator[SmallDisk | str]:
    """A small disk mounted at `path`, or why this machine mounts none. `files_max` 0: no bound."""
    path.mkdir(parents=True, exist_ok=True)
    options = f"size={size_mb}m,nr_inodes={files_max}"
    command = ["mount", "-t", "tmpfs", "-o", options, "spark-broker-chaos", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        yield "no mount command"
        return
    if done.returncode:
        path.rmdir()
        yield done.stderr.strip() or "mount failed"
        return
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False, timeout=30)


class FailingDisk:
    """An ext4 file system that turns read-only at its first error, as most are mounted.

    An error is needed: the kernel refuses a read-only remount while a file is open for writing.
    """

    def __init__(self, path: Path, image: Path) -> None:
        self._path = path
        self._image = image

    def mount(self) -> str:
        """Mount it. Returns what went wrong; empty when nothing did."""
        return _run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self._path))

    def turn_read_only(self) -> None:
        device = subprocess.check_output(["findmnt", "-n", "-o", "SOURCE", str(self._path)], text=True).strip()
        Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("1")

    def mount_again(self) -> None:
        """Check it and make it writable again, once no process has a file open in it."""
        for command in (("umount", str(self._path)), ("e2fsck", "-fy", str(self._image))):
            _run(*command)
        why = self.mount()
        assert not why, why


def _run(*command: str) -> str:
    """What went wrong; empty when nothing did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        return f"no {command[0]} command"
    return "" if done.returncode == 0 else done.stderr.strip() or f"{command[0]} failed"


@contextmanager
def failing_ext4(path: Path, size_mb: int = DISK_MB) -> Iterator[FailingDisk | str]:
    """A file system mounted at `path`, or why this machine mounts none."""
    path.mkdir(parents=True, exist_ok=True)
    image = path.with_name(path.name + ".ext4")
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    disk = FailingDisk(path, image)
    why = _run("mkfs.ext4", "-q", "-F", str(image)) or disk.mount()
    if why:
        yield why
        return
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False, timeout=30)
        image.unlink()


@contextmanager
def away(directory: Path) -> Iterator[None]:
    """As long as the block lasts, the directory is not there; what is put in its place meanwhile is removed."""
    moved = directory.with_name(directory.name + "-moved-away")
    directory.rename(moved)
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        moved.rename(directory)
