"""Where a cluster's data lies: the brokers' log directories and the metadata log."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from spark_broker.config import ClusterConfig
from spark_broker.errors import DamagedLogError, InvalidConfigError, LogDirectoryNotUsableError
from spark_broker.storage.directory_meta import read_meta
from spark_broker.storage.files import is_refusal, storage_error
from spark_broker.storage.filesystem import current_user
from spark_broker.storage.slots import SLOT_PREFIX

logger = logging.getLogger(__name__)

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


@dataclass(frozen=True)
class Directories:
    """Absolute places. `temporary`: they were made for this application and are removed at its end."""

    log_dirs: str
    metadata_dir: str
    temporary: bool

    def remove_temporary(self) -> None:
        """Remove what was made for this application, on this machine."""
        if self.temporary:
            shutil.rmtree(self.log_dirs, ignore_errors=True)


def choose_directories(config: ClusterConfig, application: str) -> Directories:
    """`log.dirs` and `metadata.dir` as absolute places; a temporary directory where `log.dirs` is empty.

    Raises InvalidConfigError where `log.dirs` is not a local directory.
    """
    temporary = not config.log_dirs
    if temporary:
        log_dirs = tempfile.mkdtemp(prefix=f"spark-broker-{application}-")
        logger.warning("log.dirs is empty: the records lie in %s and are removed when the cluster stops", log_dirs)
    else:
        log_dirs = _log_dirs(config)
    return Directories(log_dirs, _metadata_dir(config.metadata_dir, log_dirs), temporary)


def lasting_metadata_dir(config: ClusterConfig) -> str | None:
    """`metadata.dir` as an absolute place, where it outlives an application; None for a temporary one."""
    if not (config.log_dirs or config.metadata_dir):
        return None
    return _metadata_dir(config.metadata_dir, _log_dirs(config) if config.log_dirs else "")


def cluster_ids_in(log_dirs: str) -> list[str]:
    """The clusters whose log directories lie there, as far as this machine sees them.

    Those that are damaged, or cannot be read, are left out: brokers pass them over. Raises LogDirectoryNotUsableError,
    StorageRefusedError.
    """
    ids = set()
    for path in Path(log_dirs).glob(f"{SLOT_PREFIX}*"):
        try:
            meta = read_meta(path)
        except DamagedLogError as error:
            logger.error("%s: %s", path, error.message)
            continue
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise LogDirectoryNotUsableError(f"log.dirs {log_dirs}: {error} for {current_user()}") from error
            if is_refusal(error):  # Out of descriptors, say: that is nothing of this directory's.
                raise storage_error(error, str(path)) from error
            if error.errno != errno.ENOTDIR:  # That is a file with the name of a directory.
                logger.error("%s: %s", path, error)  # Its disk fails: brokers pass it over, too.
            continue
        if meta is not None:
            ids.add(meta.cluster_id)
    return sorted(ids)


def _metadata_dir(given: str, log_dirs: str) -> str:
    if not given:
        return str(Path(log_dirs) / "metadata")
    return given if "://" in given else str(_local("metadata.dir", given).resolve())


def _local(name: str, given: str) -> Path:
    """A path as it is, or in Hadoop's form (`file:/srv`). Raises InvalidConfigError for what is neither."""
    path = given.removeprefix("file:")
    if _SCHEME.match(path) or (path != given and not path.startswith("/")):
        raise InvalidConfigError(f"{name} = {given!r} is neither a path nor a URL: a URL begins as in s3://bucket")
    return Path(os.path.abspath(Path(path).expanduser()))


def _log_dirs(config: ClusterConfig) -> str:
    """The place as brokers are to take it. Links stay: on their machines they may lead elsewhere.

    Where the metadata lies elsewhere, only brokers need it. It matters not then whether this user may make it here.
    """
    given = config.log_dirs
    if "://" in given or "," in given:
        raise InvalidConfigError(f"log.dirs = {given!r}: one local directory, under which each broker keeps its own")
    path = _local("log.dirs", given)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if not config.metadata_dir or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise InvalidConfigError(f"log.dirs = {given!r} cannot be made: {error}") from None
        logger.debug("log.dirs = %r cannot be made on this machine: %s", given, error)
    return str(path)
