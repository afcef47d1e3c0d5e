"""What a broker's log directory says of itself: `meta.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spark_broker.errors import InconsistentClusterIdError
from spark_broker.storage.checkpoints import read_checkpoint_as
from spark_broker.storage.filesystem import LOCAL, FileSystem

META_FILE = "meta.json"
NO_BROKER_ID = -1


@dataclass(frozen=True, slots=True)
class DirectoryMeta:
    """The content of `meta.json`. `broker_id` is -1 and `port` is 0 until the broker has them."""

    cluster_id: str
    directory_id: str
    boot_id: str
    broker_id: int = NO_BROKER_ID
    port: int = 0
    incarnations: tuple[str, ...] = ()
    """The last process that is known to have registered, and all later ones. Empty: an earlier version wrote none."""


def check_cluster(fs: FileSystem, path: Path, cluster_id: str) -> DirectoryMeta | None:
    meta = read_meta(path, fs=fs)
    if meta is not None and meta.cluster_id != cluster_id:
        raise InconsistentClusterIdError(f"{path} belongs to cluster {meta.cluster_id}, not {cluster_id}")
    return meta


def read_meta(path: Path, *, fs: FileSystem = LOCAL) -> DirectoryMeta | None:
    """The directory's own description; None when it has none yet. Raises DamagedLogError."""
    return read_checkpoint_as(path / META_FILE, DirectoryMeta, fs=fs)
