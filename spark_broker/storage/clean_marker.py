"""How the last process in a log directory has ended: its clean marker, and the boot id that it has saved."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path

from spark_broker.errors import DamagedLogError
from spark_broker.storage.checkpoints import read_checkpoint_as, write_checkpoint
from spark_broker.storage.directory_meta import META_FILE, DirectoryMeta
from spark_broker.storage.files import is_refusal
from spark_broker.storage.filesystem import FileSystem
from spark_broker.storage.start_kind import StartKind

CLEAN_FILE = ".clean"

logger = logging.getLogger(__name__)


def write_clean_marker(fs: FileSystem, path: Path, meta: DirectoryMeta) -> None:
    """Raises OSError."""
    write_checkpoint(path / CLEAN_FILE, meta.directory_id, fs=fs)


def take_clean_marker(fs: FileSystem, path: Path, meta: DirectoryMeta) -> tuple[StartKind, DirectoryMeta]:
    """How the directory was left, and what it says of itself from now on. The marker is gone then. Raises OSError."""
    boot_id = fs.boot_id()
    start = StartKind.PROCESS_CRASH if meta.boot_id == boot_id else StartKind.MACHINE_CRASH
    if fs.exists(path / CLEAN_FILE):
        if _is_marked_clean(fs, path, meta):
            # Everything is synced. Only now may the marker of the last run be removed.
            start, meta = StartKind.CLEAN, _of_this_boot(fs, path, meta, boot_id)
        fs.unlink(path / CLEAN_FILE)
        fs.sync_directory(path)
    return start, meta


def _of_this_boot(fs: FileSystem, path: Path, meta: DirectoryMeta, boot_id: str) -> DirectoryMeta:
    """Save the boot id. A full disk keeps no broker from starting: with the old id, an end without a marker counts as a
    crash of the machine, which checks more.
    """
    if meta.boot_id == boot_id:
        return meta
    changed = replace(meta, boot_id=boot_id)
    try:
        write_checkpoint(path / META_FILE, asdict(changed), fs=fs)
    except OSError as error:
        if not is_refusal(error):
            raise
        logger.warning("%s: the boot id is not saved yet: %s", path, error)
        return meta
    return changed


def _is_marked_clean(fs: FileSystem, path: Path, meta: DirectoryMeta) -> bool:
    try:
        return read_checkpoint_as(path / CLEAN_FILE, str, fs=fs, dispensable=True) == meta.directory_id
    except DamagedLogError as error:
        logger.warning("%s: %s; recovery decides", path, error.message)  # An unclean start checks more.
        return False
