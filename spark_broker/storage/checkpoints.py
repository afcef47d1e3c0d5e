"""Small files that are replaced whole: a CRC, then JSON."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from spark_broker.errors import DamagedLogError
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.storage.files import read_whole, write_atomically
from spark_broker.storage.filesystem import LOCAL, FileSystem, ReadError

LEADER_EPOCHS_FILE = "leader-epochs.json"
HIGH_WATERMARKS_FILE = "high-watermarks.json"

_BAD_SECTOR = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""What a disk, or its file system, answers for bytes that it no longer has. Others may pass, or say who may read."""

T = TypeVar("T")


def write_checkpoint(path: Path, value: object, *, fs: FileSystem = LOCAL) -> None:
    """Replace the checkpoint, durably. Raises OSError."""
    text = json.dumps(value, separators=(",", ":")).encode()
    write_atomically(fs, path, b"%08x\n%s\n" % (crc32c(text), text))


def read_checkpoint(path: Path, *, fs: FileSystem = LOCAL, dispensable: bool = False) -> object | None:
    """The value; None when there is no such file. Raises DamagedLogError when its CRC is wrong, it is no file or
    it is too large.

    `dispensable`: the caller can do without, and replaces it. A bad sector under it is damage, too: the next file lies
    elsewhere on the disk.
    """
    try:
        data = read_whole(fs, path)
    except FileNotFoundError:
        return None
    except ReadError as error:
        if error.errno == errno.EISDIR:
            raise DamagedLogError(f"{path.name} is a directory") from error
        if not dispensable or error.errno not in _BAD_SECTOR:
            raise
        raise DamagedLogError(f"{path.name} cannot be read: {error.strerror}") from error
    crc, _, text = data.removesuffix(b"\n").partition(b"\n")
    if crc != b"%08x" % crc32c(text):
        raise DamagedLogError(f"{path.name} fails its CRC")
    try:
        value: object = json.loads(text)
    except UNDECODABLE as error:
        raise DamagedLogError(f"{path.name} has its CRC and is not JSON: {error}") from None
    return value


def read_checkpoint_as(path: Path, kind: type[T], *, fs: FileSystem = LOCAL, dispensable: bool = False) -> T | None:
    """The value as a `kind`; None when there is no file. Raises DamagedLogError, also for a value of another type.

    `dispensable`: as for `read_checkpoint`.
    """
    value = read_checkpoint(path, fs=fs, dispensable=dispensable)
    try:
        return None if value is None else msgspec.convert(value, kind, strict=True)
    except UNDECODABLE as error:
        raise DamagedLogError(f"{path.name}: {error}") from None


def read_leader_epochs(directory: Path, *, fs: FileSystem = LOCAL) -> list[tuple[int, int]]:
    """(leader epoch, start offset) pairs of a partition, in order; empty when none were written."""
    return read_checkpoint_as(directory / LEADER_EPOCHS_FILE, list[tuple[int, int]], fs=fs) or []


def write_leader_epochs(directory: Path, epochs: Sequence[tuple[int, int]], *, fs: FileSystem = LOCAL) -> None:
    """Save the leader-epoch history of a partition. Raises OSError."""
    write_checkpoint(directory / LEADER_EPOCHS_FILE, [list(entry) for entry in epochs], fs=fs)


def read_high_watermarks(log_directory: Path, *, fs: FileSystem = LOCAL) -> dict[tuple[str, int], int]:
    """The high watermarks of all partitions of a log directory, as last saved, by topic id and partition."""
    file = log_directory / HIGH_WATERMARKS_FILE
    saved = read_checkpoint_as(file, list[tuple[str, int, int]], fs=fs, dispensable=True) or []
    return {(topic_id, partition): offset for topic_id, partition, offset in saved}


def write_high_watermarks(
    log_directory: Path, high_watermarks: Mapping[tuple[str, int], int], *, fs: FileSystem = LOCAL
) -> None:
    """Save the high watermarks of all partitions. Raises OSError."""
    value = [[topic_id, partition, offset] for (topic_id, partition), offset in sorted(high_watermarks.items())]
    write_checkpoint(log_directory / HIGH_WATERMARKS_FILE, value, fs=fs)
