"""The directories under `log.dirs`: one for each broker, `broker-<n>`, and which of them a broker may claim."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from spark_broker.errors import DamagedLogError, KafkaStorageError, LogDirectoryNotUsableError
from spark_broker.storage.directory_meta import META_FILE, check_cluster
from spark_broker.storage.directory_names import PARTITION_FILE
from spark_broker.storage.files import is_refusal
from spark_broker.storage.filesystem import FileSystem, current_user

SLOT_PREFIX = "broker-"
NOT_USABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})
"""Errors that an operator is to mend before any broker starts here."""

logger = logging.getLogger(__name__)


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Raise an error that names the user without rights, and the path. The start fails until the rights are granted."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_USABLE:
            raise
        where = path if error.filename is None else error.filename
        raise LogDirectoryNotUsableError(f"log.dirs {path}: {where}: {error.strerror} for {current_user()}") from error


class FailedSlots:
    """The slots whose disk, or whose inode, fails: the other brokers of the machine must not stay down for them.

    Nothing is wrong with what they hold, and they may be back in a moment. So no new directory is made meanwhile: it
    would be that of a new broker without any replica.
    """

    def __init__(self) -> None:
        self._errors: dict[Path, OSError] = {}

    @contextmanager
    def passed_over(self, path: Path) -> Iterator[None]:
        """The block tries to use this slot. Raises errors of rights and limits: they concern the other slots, too.

        A file system that a failing disk has made read-only concerns this slot alone.
        """
        try:
            yield
        except OSError as error:
            if (error.errno in NOT_USABLE and error.errno != errno.EROFS) or is_refusal(error):
                raise
            self._errors.setdefault(path, error)
            logger.error("%s is passed over, and its replicas are not served: %s", path, error)

    def check(self, slots: Sequence[Path]) -> None:
        """Raises the error of the first of them, if there is any. Where one of the `slots` has not failed, that is an
        error of one disk, and the start of the broker is tried again.
        """
        if not self._errors:
            return
        path, error = next(iter(self._errors.items()))
        if self._errors.keys() >= set(slots):
            raise error
        raise KafkaStorageError(f"{path}: {error}") from error


def usable_slots(fs: FileSystem, base_directory: Path, cluster_id: str, failed: FailedSlots) -> list[Path]:
    """Those that say whose they are, or are new, by number, without copies of one before, and without the `failed`.

    Raises InconsistentClusterIdError when any of them belongs to another cluster, and OSError.
    """
    usable: list[Path] = []
    owners: dict[str, Path] = {}  # by directory id
    for path in sorted(_slots(fs, base_directory), key=_slot_number):
        with failed.passed_over(path):
            if not fs.exists(path):
                raise FileNotFoundError(errno.ENOENT, "a link to a disk that is not mounted", str(path))
            if fs.is_directory(path) and _says_whose_it_is(fs, path, cluster_id, owners):
                usable.append(path)
    return usable


def _says_whose_it_is(fs: FileSystem, path: Path, cluster_id: str, owners: dict[str, Path]) -> bool:
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
        return False
    if meta is not None and (owner := owners.setdefault(meta.directory_id, path)) != path:
        logger.error("%s is passed over: it is a copy of %s. Move one of them out of log.dirs", path, owner)
        return False
    return True


def check_new(fs: FileSystem, path: Path) -> None:
    """A directory without META_FILE must not have replicas. Else raises DamagedLogError.

    What may not be looked into is none of ours: `lost+found` of a disk of its own.
    """
    for name in fs.list_directory(path):
        with suppress(PermissionError):
            if fs.exists(path / name / PARTITION_FILE):
                raise DamagedLogError(f"{path} holds partitions and has lost its {META_FILE}")


def _slots(fs: FileSystem, base_directory: Path) -> Iterator[Path]:
    for name in fs.list_directory(base_directory):
        number = name.removeprefix(SLOT_PREFIX)
        if number != name and number.isdecimal():
            yield base_directory / name


def _slot_number(path: Path) -> int:
    return int(path.name.removeprefix(SLOT_PREFIX))
