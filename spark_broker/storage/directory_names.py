"""Names in a log directory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spark_broker.errors import DamagedLogError
from spark_broker.model import FILE_NAME_BYTES_MAX
from spark_broker.storage.checkpoints import read_checkpoint_as
from spark_broker.storage.files import TEMPORARY_SUFFIX
from spark_broker.storage.filesystem import LOCAL, FileSystem

PARTITION_FILE = "partition.json"


class PartitionName(NamedTuple):
    """A partition, by the names that its directory has."""

    topic: str
    number: int
    topic_id: str


@dataclass(frozen=True, slots=True)
class PartitionDirectory:
    """One partition's directory. `topic_id` tells a topic from a later one of the same name."""

    topic: str
    topic_id: str
    partition: int
    path: Path


def read_partition(path: Path, *, fs: FileSystem = LOCAL) -> PartitionDirectory | None:
    """Whose directory this is; None: it does not say. Raises DamagedLogError, OSError."""
    saved = read_checkpoint_as(path / PARTITION_FILE, tuple[str, str, int], fs=fs)
    return None if saved is None else PartitionDirectory(*saved, path)


def derived_name(name: str, suffix: str) -> str:
    """A file's name with a suffix. Where that is too long, a hash replaces the end of the name.

    Topics may have names that leave no room for a suffix. No topic has a "~" in its name, so none is taken for it.
    """
    if len(name) + len(suffix) <= FILE_NAME_BYTES_MAX:
        return name + suffix
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{name[: FILE_NAME_BYTES_MAX - len(suffix) - len(digest) - 1]}~{digest}{suffix}"


def check_fresh(fs: FileSystem, path: Path) -> None:
    """A directory without PARTITION_FILE must be empty: its creation was not finished. Else raises DamagedLogError."""
    held = [name for name in fs.list_directory(path) if not name.endswith(TEMPORARY_SUFFIX)]
    if held:
        raise DamagedLogError(f"{path} has lost its {PARTITION_FILE} and holds {held[0]}")
