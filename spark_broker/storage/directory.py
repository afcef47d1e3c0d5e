"""A broker's log directory: whose it is, how it was left, and the partitions in it.

Under `log.dirs` each broker has one slot, `broker-<n>`. A broker's id belongs to the directory and not to the slot or
the Spark task: `meta.json` names the cluster, the broker's id, the directory's own id, the machine's boot id at the
last start that finished recovery, and the port to use again.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spark_broker.errors import (
    DamagedLogError,
    InconsistentClusterIdError,
    InconsistentTopicIdError,
    KafkaStorageError,
    LogDirectoryLockedError,
)
from spark_broker.model import TopicPartition
from spark_broker.storage.checkpoints import read_high_watermarks, write_high_watermarks
from spark_broker.storage.files import TEMPORARY_SUFFIX, sync_directory, write_atomically
from spark_broker.storage.lock import DirectoryLock, Holder, is_locked, kill_holder, read_holder
from spark_broker.storage.start_kind import StartKind

META_FILE = "meta.json"
PARTITION_FILE = "partition.json"
CLEAN_FILE = ".clean"
DELETED_SUFFIX = ".deleted"
DAMAGED_SUFFIX = ".damaged"
SLOT_PREFIX = "broker-"
MAX_SLOTS = 1000
NO_BROKER_ID = -1


@dataclass(frozen=True, slots=True)
class DirectoryMeta:
    """What a log directory says of itself. `broker_id` and `port` are -1 and 0 until the broker has them."""

    cluster_id: str
    directory_id: str
    boot_id: str
    broker_id: int = NO_BROKER_ID
    port: int = 0


@dataclass(frozen=True, slots=True)
class PartitionDirectory:
    """One partition's directory. `topic_id` tells a topic from a later one of the same name."""

    topic: str
    topic_id: str
    partition: int
    path: Path


class LogDirectory:
    """A claimed log directory: locked by this process until `release` or its end."""

    def __init__(
        self, path: Path, lock: DirectoryLock, meta: DirectoryMeta, start_kind: StartKind, *, is_new: bool
    ) -> None:
        self.path = path
        self.start_kind = start_kind
        self.is_new = is_new
        self._lock = lock
        self._meta = meta

    @property
    def meta(self) -> DirectoryMeta:
        return self._meta

    @property
    def slot(self) -> int:
        return int(self.path.name.removeprefix(SLOT_PREFIX))

    @staticmethod
    def claim(
        base_directory: Path,
        *,
        cluster_id: str,
        launch: int,
        superseded: Callable[[Holder], bool] = lambda _: False,
        wait_ms: int = 10_000,
    ) -> LogDirectory:
        """Claim a directory under `log.dirs`: one that nobody holds, one whose holder is superseded, or a new one.

        A superseded holder is killed first; where its pid is not visible, its end is awaited for up to `wait_ms`.
        Raises InconsistentClusterIdError when any of the directories is another cluster's (nothing is touched then),
        LogDirectoryLockedError and KafkaStorageError.
        """
        with _storage_errors(base_directory):
            base_directory.mkdir(parents=True, exist_ok=True)
            slots = sorted(_slots(base_directory), key=_slot_number)
            for path in slots:
                _check_cluster(path, cluster_id)
            for path in slots:
                claimed = _try_claim(path, cluster_id, launch)
                if claimed is not None:
                    return claimed
            for path in slots:
                holder = read_holder(path)
                if holder is not None and superseded(holder):
                    return take_over(path, holder, cluster_id=cluster_id, launch=launch, wait_ms=wait_ms)
            return _claim_new(base_directory, cluster_id, launch)

    def update(self, *, broker_id: int | None = None, port: int | None = None) -> None:
        """Remember the broker's id or port."""
        changed = self._meta
        if broker_id is not None:
            changed = replace(changed, broker_id=broker_id)
        if port is not None:
            changed = replace(changed, port=port)
        self._write_meta(changed)

    def mark_recovered(self) -> None:
        """Every log is open and the broker has registered: from now on an unmarked end is a process crash.

        Not before: a process that dies in the middle of recovering from a machine crash must recover from that again.
        """
        self._write_meta(replace(self._meta, boot_id=machine_boot_id()))

    def mark_clean(self) -> None:
        """Every log has been closed clean: the next start need not recover anything."""
        with _storage_errors(self.path):
            _write_json(self.path / CLEAN_FILE, {"directory_id": self._meta.directory_id})

    def release(self) -> None:
        """Unlock the directory."""
        self._lock.release()

    def _write_meta(self, meta: DirectoryMeta) -> None:
        if meta != self._meta:
            with _storage_errors(self.path):
                _write_json(self.path / META_FILE, asdict(meta))
            self._meta = meta

    def read_high_watermarks(self) -> dict[TopicPartition, int]:
        """The high watermarks as last saved. Raises DamagedLogError."""
        with _storage_errors(self.path):
            return read_high_watermarks(self.path)

    def write_high_watermarks(self, high_watermarks: Mapping[TopicPartition, int]) -> None:
        """Save the high watermarks of all partitions."""
        with _storage_errors(self.path):
            write_high_watermarks(self.path, high_watermarks)

    # ---- partitions ----

    def partition_directory(self, topic: str, topic_id: str, partition: int) -> Path:
        """The directory of a partition, made if need be. Raises InconsistentTopicIdError for an older topic's."""
        path = self.path / f"{topic}-{partition}"
        with _storage_errors(path):
            existing = _read_partition(path)
            if existing is None:
                path.mkdir(exist_ok=True)
                _write_json(path / PARTITION_FILE, {"topic": topic, "topic_id": topic_id, "partition": partition})
                sync_directory(self.path)
            elif (existing.topic, existing.topic_id, existing.partition) != (topic, topic_id, partition):
                raise InconsistentTopicIdError(f"{path} belongs to {existing.topic} with id {existing.topic_id}")
        return path

    def list_partitions(self) -> list[PartitionDirectory]:
        """The partitions that are here, by topic and number; deleted and damaged ones are not."""
        with _storage_errors(self.path):
            found = [_read_partition(path) for path in self.path.iterdir() if path.is_dir()]
        present = (p for p in found if p is not None and p.path.name == f"{p.topic}-{p.partition}")
        return sorted(present, key=lambda p: (p.topic, p.partition))

    def delete_partition(self, topic: str, partition: int) -> None:
        """Delete a partition's directory; its log must be closed. Nothing when there is none."""
        path = self.path / f"{topic}-{partition}"
        with _storage_errors(path):
            if path.is_dir():
                doomed = path.with_name(f"{path.name}.{uuid.uuid4().hex}{DELETED_SUFFIX}")
                path.rename(doomed)
                sync_directory(self.path)
                shutil.rmtree(doomed)

    def set_aside(self, topic: str, partition: int) -> Path:
        """Rename a damaged replica's directory to `<name>.<n>.damaged`, to be looked at; returns the new path."""
        path = self.path / f"{topic}-{partition}"
        number = 0
        with _storage_errors(path):
            while (target := path.with_name(f"{path.name}.{number}{DAMAGED_SUFFIX}")).exists():
                number += 1
            path.rename(target)
            sync_directory(self.path)
        return target


def take_over(path: Path, holder: Holder, *, cluster_id: str, launch: int, wait_ms: int) -> LogDirectory:
    """Kill the superseded holder of a directory and claim it. Raises LogDirectoryLockedError after `wait_ms`."""
    if is_locked(path):
        kill_holder(holder, wait_ms=wait_ms)
    lock = DirectoryLock.acquire(path, launch=launch, wait_ms=wait_ms)
    return _open(path, lock, cluster_id)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KafkaStorageError(f"{path}: {error}") from error


def machine_boot_id() -> str:
    """Identifies this run of the machine's kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _slots(base_directory: Path) -> Iterator[Path]:
    for path in base_directory.glob(SLOT_PREFIX + "*"):
        if path.is_dir() and path.name.removeprefix(SLOT_PREFIX).isdecimal():
            yield path


def _slot_number(path: Path) -> int:
    return int(path.name.removeprefix(SLOT_PREFIX))


def _check_cluster(path: Path, cluster_id: str) -> DirectoryMeta | None:
    meta = read_meta(path)
    if meta is not None and meta.cluster_id != cluster_id:
        raise InconsistentClusterIdError(f"{path} belongs to cluster {meta.cluster_id}, not {cluster_id}")
    return meta


def read_meta(path: Path) -> DirectoryMeta | None:
    """The directory's own description; None when it has none yet. Raises DamagedLogError."""
    try:
        return DirectoryMeta(**json.loads((path / META_FILE).read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DamagedLogError(f"{path / META_FILE} cannot be read: {error}") from None


def _try_claim(path: Path, cluster_id: str, launch: int) -> LogDirectory | None:
    try:
        lock = DirectoryLock.acquire(path, launch=launch)
    except LogDirectoryLockedError:
        return None  # Another broker was quicker; there are more directories.
    return _open(path, lock, cluster_id)


def _claim_new(base_directory: Path, cluster_id: str, launch: int) -> LogDirectory:
    for number in range(MAX_SLOTS):
        path = base_directory / f"{SLOT_PREFIX}{number}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        sync_directory(base_directory)
        claimed = _try_claim(path, cluster_id, launch)
        if claimed is not None:
            return claimed
    raise LogDirectoryLockedError(f"{base_directory} has {MAX_SLOTS} directories, and all are held")


def _open(path: Path, lock: DirectoryLock, cluster_id: str) -> LogDirectory:
    """Determine how the directory was left, before anything in it is changed."""
    try:
        meta = _check_cluster(path, cluster_id)
        _remove_leftovers(path)
        if meta is None:
            if any(path.glob(f"*/{PARTITION_FILE}")):
                raise DamagedLogError(f"{path} holds partitions and has lost its {META_FILE}")
            meta = DirectoryMeta(cluster_id, str(uuid.uuid4()), machine_boot_id())
            _write_json(path / META_FILE, asdict(meta))
            return LogDirectory(path, lock, meta, StartKind.CLEAN, is_new=True)
        return _open_existing(path, lock, meta)
    except BaseException:
        lock.release()
        raise


def _open_existing(path: Path, lock: DirectoryLock, meta: DirectoryMeta) -> LogDirectory:
    boot_id = machine_boot_id()
    if (path / CLEAN_FILE).exists():
        # Everything is synced, so this run of the machine begins here; only then may the marker go.
        meta = replace(meta, boot_id=boot_id)
        _write_json(path / META_FILE, asdict(meta))
        (path / CLEAN_FILE).unlink()
        sync_directory(path)
        return LogDirectory(path, lock, meta, StartKind.CLEAN, is_new=False)
    start = StartKind.PROCESS_CRASH if meta.boot_id == boot_id else StartKind.MACHINE_CRASH
    return LogDirectory(path, lock, meta, start, is_new=False)


def _remove_leftovers(path: Path) -> None:
    for leftover in path.iterdir():
        if leftover.name.endswith(DELETED_SUFFIX) and leftover.is_dir():
            shutil.rmtree(leftover)
        elif leftover.name.endswith(TEMPORARY_SUFFIX) and leftover.is_file():
            leftover.unlink()


def _read_partition(path: Path) -> PartitionDirectory | None:
    try:
        value = json.loads((path / PARTITION_FILE).read_bytes())
        return PartitionDirectory(str(value["topic"]), str(value["topic_id"]), int(value["partition"]), path)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedLogError(f"{path / PARTITION_FILE} cannot be read: {error}") from None


def _write_json(path: Path, value: object) -> None:
    write_atomically(path, json.dumps(value, indent=1).encode())
