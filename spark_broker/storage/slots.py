"""The directories under `log.dirs`: one for each broker, `broker-<n>`, and which of them a broker may claim."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from spark_broker.errors import DamagedLogError
from spark_broker.storage.directory_meta import META_FILE, check_cluster
from spark_broker.storage.directory_names import PARTITION_FILE
from spark_broker.storage.filesystem import FileSystem

SLOT_PREFIX = "broker-"

logger = logging.getLogger(__name__)


def usable_slots(fs: FileSystem, base_directory: Path, cluster_id: str) -> list[Path]:
    """Those that say whose they are, or are new, by number, without copies of one before.

    Raises InconsistentClusterIdError when any of them belongs to another cluster, and OSError.
    """
    usable: list[Path] = []
    owners: dict[str, Path] = {}  # by directory id
    for path in sorted(_slots(fs, base_directory), key=_slot_number):
        try:
            meta = check_cluster(fs, path, cluster_id)
            if meta is None:
                check_new(fs, path)
        except DamagedLogError as error:
            logger.error(
                "%s is passed over, and its replicas are not served: %s. Put the file back from a copy of this "
                "directory, and start its broker again",
                path,
                error.message,
            )
            continue
        if meta is not None and (owner := owners.setdefault(meta.directory_id, path)) != path:
            logger.error("%s is passed over: it is a copy of %s. Move one of them out of log.dirs", path, owner)
            continue
        usable.append(path)
    return usable


def check_new(fs: FileSystem, path: Path) -> None:
    """A directory without META_FILE must not have replicas. Else raises DamagedLogError."""
    if any(fs.exists(path / name / PARTITION_FILE) for name in fs.list_directory(path)):
        raise DamagedLogError(f"{path} holds partitions and has lost its {META_FILE}")


def _slots(fs: FileSystem, base_directory: Path) -> Iterator[Path]:
    for name in fs.list_directory(base_directory):
        number = name.removeprefix(SLOT_PREFIX)
        if number != name and number.isdecimal() and fs.is_directory(base_directory / name):
            yield base_directory / name


def _slot_number(path: Path) -> int:
    return int(path.name.removeprefix(SLOT_PREFIX))
