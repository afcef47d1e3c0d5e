"""Replicas that are set aside, under names that no partition has, and how one of them is brought back.

<topic>-<partition>.<time, UTC>.stray    whole: the metadata neither knows the replica nor says that it may go. The time
                                         ends with Z, or with U: nobody had checked the clock
<topic>-<partition>.<n>.damaged          it has damaged bytes, or ends below what it had committed
<topic>-<partition>.<n>.diverged         whole, and not what its leader has
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from spark_broker.controller.lineage import NewestBatch
from spark_broker.errors import CorruptMessageError, DamagedLogError, KafkaStorageError, LogDirectoryLockedError
from spark_broker.protocol.frame import ENTRY_BYTES, unpack_header
from spark_broker.storage.checkpoints import read_leader_epochs
from spark_broker.storage.directory_names import PartitionDirectory, read_partition
from spark_broker.storage.files import is_refusal, opened, read_fully
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.lock import is_locked
from spark_broker.storage.segment import ARROW_SUFFIX, INDEX_SUFFIX

logger = logging.getLogger(__name__)

STRAY, DAMAGED, DIVERGED = "stray", "damaged", "diverged"
_TIME = "%Y%m%dT%H%M%S%f"
_STRAY = re.compile(r"\.(\d{8}T\d{12})[ZU]\.stray$")
_UNCHECKED = f"U.{STRAY}"


@dataclass(frozen=True, slots=True)
class Stray:
    """A replica that was set aside, and since when, by its broker's clock (ms, UTC); -1: its name does not say."""

    replica: PartitionDirectory
    kind: str
    since_ms: int

    @property
    def since_is_certain(self) -> bool:
        """Whether the clock was checked when it was set aside."""
        return not self.replica.path.name.endswith(_UNCHECKED)


def stray_suffix(now_ms: int, *, certain: bool) -> str:
    """The end of the name of a directory that is set aside now. `certain`: the clock was checked."""
    at = datetime.fromtimestamp(now_ms / 1000, UTC)
    return f".{at.strftime(_TIME)}{'Z.' + STRAY if certain else _UNCHECKED}"


def set_aside_ms(name: str) -> int | None:
    """When the directory of this name was set aside; None for the name of any other directory."""
    found = _STRAY.search(name)
    if found is None:
        return None
    try:
        return round(datetime.strptime(f"{found[1]}+0000", f"{_TIME}%z").timestamp() * 1000)
    except ValueError:
        return None


def strays_in(log_directory: Path, *, fs: FileSystem = LOCAL) -> list[Stray]:
    """The strays in a log directory, the oldest first. Raises OSError."""
    return [replica for replica in set_aside_in(log_directory, fs=fs) if replica.kind == STRAY]


def set_aside_in(log_directory: Path, *, fs: FileSystem = LOCAL) -> list[Stray]:
    """All replicas that were set aside in a log directory, the oldest first. Raises OSError."""
    found: list[Stray] = []
    for name in fs.list_directory(log_directory):
        kind = name.rpartition(".")[2]
        since_ms = set_aside_ms(name) if kind == STRAY else None
        if kind not in (STRAY, DAMAGED, DIVERGED) or (kind == STRAY and since_ms is None):
            continue
        try:
            replica = read_partition(log_directory / name, fs=fs)
        except (DamagedLogError, OSError) as error:
            if isinstance(error, OSError) and is_refusal(error):
                raise  # Out of descriptors, say: the list would not be whole.
            logger.error("%s: %s", log_directory / name, error)
            continue
        if replica is not None:
            found.append(Stray(replica, kind, -1 if since_ms is None else since_ms))
    return sorted(found, key=lambda aside: (aside.since_ms, aside.replica.topic, aside.replica.partition))


def bring_back(stray: Stray, *, fs: FileSystem = LOCAL) -> Path:
    """Give the replica its name again, durably. Returns its path.

    The metadata must know it again: else the next start of the broker sets it aside anew. Raises
    LogDirectoryLockedError while a broker runs there, KafkaStorageError where the name is taken, and OSError.
    """
    replica = stray.replica
    directory = replica.path.parent
    if is_locked(directory, fs=fs):
        raise LogDirectoryLockedError(f"a broker runs in {directory}: stop the cluster first")
    target = directory / f"{replica.topic}-{replica.partition}"
    if fs.exists(target):
        raise KafkaStorageError(f"{target} exists: the broker has another replica of this name")
    fs.rename(replica.path, target)
    fs.sync_directory(directory)
    return target


def newest_batch(directory: Path, *, fs: FileSystem = LOCAL) -> NewestBatch:
    """Read from the files of a closed log. Raises DamagedLogError, OSError."""
    names = fs.list_directory(directory)
    data = [name for name in names if name.endswith(ARROW_SUFFIX) and fs.size_of(directory / name) > 0]
    saved = max((epoch for epoch, _ in read_leader_epochs(directory, fs=fs)), default=-1)
    for name in sorted((name for name in names if name.endswith(INDEX_SUFFIX)), reverse=True):
        count = fs.size_of(directory / name) // ENTRY_BYTES
        if count > 0:
            return NewestBatch(max(saved, _epoch_of_entry(fs, directory / name, count - 1)), is_empty=False)
    return NewestBatch(saved, is_empty=not data)


def _epoch_of_entry(fs: FileSystem, path: Path, at: int) -> int:
    with opened(fs, path, os.O_RDONLY) as fd:
        entry = read_fully(fs, fd, ENTRY_BYTES, at * ENTRY_BYTES)
    try:
        return unpack_header(entry).leader_epoch
    except CorruptMessageError as error:
        raise DamagedLogError(f"{path.name}: {error.message}") from None
