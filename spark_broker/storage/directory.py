"""A broker's log directory: its owner, how its last process ended, and the partitions in it.

Under `log.dirs` each broker has one slot, `broker-<n>`. A broker's id belongs to the directory and not to the slot or
the Spark task: `meta.json` names the cluster, the broker's id, the directory's own id, the machine's boot id at the
last start that finished recovery, and the port to use again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from spark_broker.errors import (
    DamagedLogError,
    InconsistentTopicIdError,
    KafkaStorageError,
    LogDirectoryLockedError,
    SparkBrokerError,
    StorageRefusedError,
)
from spark_broker.protocol.messages import ANY_INCARNATION, NO_INCARNATION, UNRECORDED, MetadataSeen
from spark_broker.storage.checkpoints import (
    HIGH_WATERMARKS_FILE,
    read_checkpoint,
    read_checkpoint_as,
    read_high_watermarks,
    write_checkpoint,
    write_high_watermarks,
)
from spark_broker.storage.clean_marker import take_clean_marker, write_clean_marker
from spark_broker.storage.directory_meta import META_FILE, DirectoryMeta, check_cluster
from spark_broker.storage.directory_names import (
    PARTITION_FILE,
    PartitionDirectory,
    PartitionName,
    check_fresh,
    derived_name,
    read_partition,
)
from spark_broker.storage.files import make_directories, remove_leftovers, storage_error
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.lock import DirectoryLock, Holder, is_locked, kill_holder, read_holder
from spark_broker.storage.quarantine import QUARANTINE_FILE, read_quarantine
from spark_broker.storage.slots import SLOT_PREFIX, FailedSlots, check_new, usable, usable_slots
from spark_broker.storage.start_kind import StartKind
from spark_broker.storage.strays import DAMAGED, DIVERGED, Stray, set_aside_in, stray_suffix, strays_in

SEEN_FILE = "metadata-seen.json"
DELETED_SUFFIX = ".deleted"
DAMAGED_SUFFIX = f".{DAMAGED}"
DIVERGED_SUFFIX = f".{DIVERGED}"
MAX_SLOTS = 1000
INCARNATIONS_MAX = 1000
"""Processes that ended before they heard of their registration. Beyond, the directory knows nothing of its past."""

logger = logging.getLogger(__name__)


class LogDirectory:
    """A claimed log directory. It is locked by this process until `release`, or until the process ends."""

    def __init__(
        self,
        fs: FileSystem,
        path: Path,
        lock: DirectoryLock,
        meta: DirectoryMeta,
        start_kind: StartKind,
        *,
        is_new: bool,
    ) -> None:
        self.fs = fs
        self.path = path
        self.start_kind = start_kind
        self.is_new = is_new
        self._lock = lock
        self._meta = meta
        self._names_unsynced = False
        self._doomed: list[Path] = []  # renamed, and their new names are not synced
        self._aside: list[Path] = []

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
        fs: FileSystem = LOCAL,
    ) -> LogDirectory:
        """Claim a directory under `log.dirs`: a free one, else one whose holder is superseded, else a new one.

        A superseded holder is killed first. If its pid is not visible, this waits up to `wait_ms` for its end. Raises
        InconsistentClusterIdError when any of the directories belongs to another cluster (nothing is changed then),
        LogDirectoryNotUsableError, LogDirectoryLockedError and KafkaStorageError. A directory that does not say whose
        it is, or that is a copy of another one, is passed over and stays as it is: it concerns no other broker. So is
        one whose disk fails, but no new directory is made then: see `FailedSlots`.
        """
        with _storage_errors(base_directory), usable(base_directory):
            make_directories(fs, base_directory)
            failed = FailedSlots()
            slots = usable_slots(fs, base_directory, cluster_id, failed)
            for path in slots:
                with failed.passed_over(path):
                    claimed = _try_claim(fs, path, cluster_id, launch)
                    if claimed is not None:
                        return claimed
            for path in slots:
                with failed.passed_over(path):
                    holder = read_holder(path, fs=fs)
                    if holder is not None and superseded(holder):
                        return take_over(fs, path, holder, cluster_id=cluster_id, launch=launch, wait_ms=wait_ms)
            failed.check(slots)
            return _claim_new(fs, base_directory, cluster_id, launch)

    def update(self, *, broker_id: int | None = None, port: int | None = None) -> None:
        """Remember the broker's id or port, for the next process."""
        changed = self._meta
        if broker_id is not None:
            changed = replace(changed, broker_id=broker_id)
        if port is not None:
            changed = replace(changed, port=port)
        self._remember(changed)

    def _remember(self, changed: DirectoryMeta) -> None:
        """Where this is refused, the process goes on: the controller knows the broker by its directory's id."""
        try:
            self._write_meta(changed)
        except StorageRefusedError as error:
            logger.warning("broker id %s and port %s are not remembered: %s", changed.broker_id, changed.port, error)

    def begin_incarnation(self, incarnation: str) -> tuple[str, list[str]]:
        """Save that this process is about to register. Returns the incarnation to register with, and earlier ones.

        The controller compares them with the incarnation that it knows. A directory that was replaced by an older copy
        of itself does not know that one. One that has lost its high watermarks, or its list of damaged replicas, counts
        as such a copy: it is not known what its logs had committed, or which of them have lost some of it.
        """
        earlier = self._meta.incarnations or (() if self.is_new else (ANY_INCARNATION,))
        known = earlier if len(earlier) < INCARNATIONS_MAX else (ANY_INCARNATION,)
        try:
            self._write_meta(replace(self._meta, incarnations=(*known, incarnation)))
        except StorageRefusedError as error:
            logger.warning("this process is not recorded: %s", error)
            incarnation = UNRECORDED + incarnation
        if lost := self._lost_file():
            unknown = "it is not known what its logs have committed, and kept"
            logger.error("%s has lost its %s: %s. They do not lead before they were compared", self.path, lost, unknown)
            return incarnation, [NO_INCARNATION]
        return incarnation, list(earlier)

    def _lost_file(self) -> str:
        """The file that is gone or damaged; empty: none is. SEEN_FILE is written after the high watermarks."""
        try:
            marks = read_checkpoint(self.path / HIGH_WATERMARKS_FILE, fs=self.fs, dispensable=True)
        except DamagedLogError:
            return HIGH_WATERMARKS_FILE
        try:
            read_quarantine(self.path, fs=self.fs)
        except DamagedLogError:
            return QUARANTINE_FILE
        return HIGH_WATERMARKS_FILE if marks is None and self.fs.exists(self.path / SEEN_FILE) else ""

    def registered(self, broker_id: int, incarnation: str) -> None:
        """The controller knows this process by now: earlier ones are of no interest any more."""
        known = self._meta.incarnations if incarnation.startswith(UNRECORDED) else (incarnation,)
        self._remember(replace(self._meta, broker_id=broker_id, incarnations=known))

    def mark_recovered(self) -> None:
        """Save the boot id, once every log is open and the broker has registered.

        From then on, an end without the clean marker counts as a process crash. The boot id is not saved earlier: if a
        process dies while it recovers from a machine crash, the next one must recover from the machine crash again.
        """
        self._write_meta(replace(self._meta, boot_id=self.fs.boot_id()))

    def mark_clean(self) -> None:
        """Write the clean marker. Every log has been closed clean, so the next start need not recover anything.

        Where this is refused, the next start counts as one after a crash, and checks more.
        """
        try:
            with self._errors_at(self.path):
                write_clean_marker(self.fs, self.path, self._meta)
        except StorageRefusedError as error:
            logger.warning("this end in order leaves no marker: %s", error)

    def check(self) -> None:
        """Raises KafkaStorageError when the directory was removed, or its path leads to another one: it was moved, or
        something was mounted over it. Writes to its open files may succeed even then.
        """
        with _storage_errors(self.path):
            if not self.fs.exists(self.path / META_FILE):
                raise KafkaStorageError(f"{self.path} was removed under the live broker: its {META_FILE} is gone")
            if not self._lock.is_at(self.path):
                raise KafkaStorageError(f"{self.path} is another directory than the live broker's own")

    @contextmanager
    def _errors_at(self, path: Path) -> Iterator[None]:
        """As `_storage_errors`, and as `check`: nothing is written into a directory that is not ours."""
        self.check()
        try:
            with _storage_errors(path):
                yield
        except KafkaStorageError:
            self.check()
            raise

    def release(self) -> None:
        self._lock.release()

    def _write_meta(self, meta: DirectoryMeta) -> None:
        if meta != self._meta:
            with self._errors_at(self.path):
                write_checkpoint(self.path / META_FILE, asdict(meta), fs=self.fs)
            self._meta = meta

    def read_high_watermarks(self) -> dict[tuple[str, int], int]:
        """The high watermarks as last saved, by topic id and partition. Raises DamagedLogError."""
        with self._errors_at(self.path):
            return read_high_watermarks(self.path, fs=self.fs)

    def write_high_watermarks(self, high_watermarks: Mapping[tuple[str, int], int]) -> None:
        with self._errors_at(self.path):
            write_high_watermarks(self.path, high_watermarks, fs=self.fs)

    def partition_directory(self, topic: str, topic_id: str, partition: int, *, sync: bool = True) -> Path:
        """The directory of a partition, created if it is missing.

        Raises InconsistentTopicIdError when it belongs to an older topic of this name, and DamagedLogError when it has
        files but does not say whose it is. Without `sync`, the caller calls `sync_names` before the directory is used.
        Several threads may call this at the same time for different partitions.
        """
        path = self.path / f"{topic}-{partition}"
        with self._errors_at(path):
            existing = read_partition(path, fs=self.fs)
            if existing is None:
                self._names_unsynced = True
                if not self.fs.is_directory(path):
                    self.fs.mkdir(path)
                check_fresh(self.fs, path)
                write_checkpoint(path / PARTITION_FILE, [topic, topic_id, partition], fs=self.fs)
            elif (existing.topic, existing.topic_id, existing.partition) != (topic, topic_id, partition):
                raise InconsistentTopicIdError(f"{path} belongs to {existing.topic} with id {existing.topic_id}")
        if sync:
            self.sync_names()
        return path

    def sync_names(self) -> None:
        """Sync the names of the directories that were made, or quarantined, since the last call."""
        if self._names_unsynced:
            with self._errors_at(self.path):
                self.fs.sync_directory(self.path)
            self._names_unsynced = False

    def has_partition(self, topic: str, partition: int) -> bool:
        """Raises OSError."""
        return self.fs.is_directory(self.path / f"{topic}-{partition}")

    def may_have_partition(self, topic: str, partition: int) -> bool:
        """As `has_partition`; also where the disk does not say."""
        try:
            return self.has_partition(topic, partition)
        except OSError:
            return True

    def list_partitions(self) -> list[PartitionDirectory]:
        """The partitions here, sorted by topic and number, without deleted, quarantined and unreadable ones."""
        with self._errors_at(self.path):
            partitions = [self._readable(path) for path in _entries(self.fs, self.path)]
        present = (p for p in partitions if p is not None and p.path.name == f"{p.topic}-{p.partition}")
        return sorted(present, key=lambda p: (p.topic, p.partition))

    def _readable(self, path: Path) -> PartitionDirectory | None:
        try:
            is_ours = path.name[-1].isdecimal() and self.fs.is_directory(path)  # not `lost+found`
            return read_partition(path, fs=self.fs) if is_ours else None
        except (DamagedLogError, OSError) as error:
            failure = error if isinstance(error, DamagedLogError) else storage_error(error, str(path))
            if isinstance(failure, StorageRefusedError):  # Out of descriptors, say: the list would not be whole.
                raise failure from error
            # Only this one is left out. `partition_directory` raises the error to a broker that wants to use it.
            logger.error("%s: %s", path, failure.message)
            return None

    def unname_partitions(
        self, partitions: Iterable[PartitionName]
    ) -> tuple[list[Path], dict[PartitionName, SparkBrokerError]]:
        """Give the directories of these partitions, as far as there are any, names that no partition has; durably.

        Their logs must be closed. A directory that belongs to another topic of the name by now is left alone. Returns
        the new paths, for `remove` (a start finds those that were not removed), and why partitions have kept their
        names. Raises SyncFailedError.
        """
        return self._rename(partitions, lambda: f".{self.fs.unique_id()}{DELETED_SUFFIX}", self._doomed)

    def set_aside(
        self, partitions: Iterable[PartitionName], now_ms: int, *, certain: bool
    ) -> tuple[list[Path], dict[PartitionName, SparkBrokerError]]:
        """As `unname_partitions`, but nothing finds the directories and removes them: they are strays from now on."""
        return self._rename(partitions, lambda: stray_suffix(now_ms, certain=certain), self._aside)

    def _rename(
        self, partitions: Iterable[PartitionName], suffix: Callable[[], str], renamed: list[Path]
    ) -> tuple[list[Path], dict[PartitionName, SparkBrokerError]]:
        """`renamed`: where the new paths are kept until they are durable."""
        partitions = list(partitions)
        kept: dict[PartitionName, SparkBrokerError] = {}
        for partition in partitions:
            path = self.path / f"{partition.topic}-{partition.number}"
            try:
                if self.fs.is_directory(path) and self._belongs_to(path, partition.topic_id):
                    target = path.with_name(derived_name(path.name, suffix()))
                    self.fs.rename(path, target)
                    renamed.append(target)
            except OSError as error:
                kept[partition] = storage_error(error, str(path))
        if renamed:
            try:
                with self._errors_at(self.path):
                    self.fs.sync_directory(self.path)
            except StorageRefusedError as error:  # Nothing of them is removed before their new names are durable.
                return [], dict.fromkeys(partitions, error)
        done = renamed[:]
        renamed.clear()
        return done, kept

    def _belongs_to(self, path: Path, topic_id: str) -> bool:
        """Whether the directory is of this topic, or of none: its making was not finished."""
        try:
            owner = read_partition(path, fs=self.fs)
        except DamagedLogError as error:
            logger.error("%s stays: %s", path, error.message)  # `partition_directory` quarantines it, if it is needed.
            return False
        return owner is None or owner.topic_id == topic_id

    def unnamed(self) -> list[Path]:
        """What `unname_partitions` has left behind."""
        with self._errors_at(self.path):
            return [path for path in _entries(self.fs, self.path) if path.name.endswith(DELETED_SUFFIX)]

    def strays(self) -> list[Stray]:
        """The replicas that were set aside here, the oldest first. Raises KafkaStorageError, StorageRefusedError."""
        with self._errors_at(self.path):
            return strays_in(self.path, fs=self.fs)

    def all_set_aside(self) -> list[Stray]:
        """As `strays`, with damaged and diverged replicas."""
        with self._errors_at(self.path):
            return set_aside_in(self.path, fs=self.fs)

    def unname_stray(self, stray: Stray) -> Path:
        """Give a replica that was set aside the name of a deleted one, durably. Returns its path, for `remove`."""
        return self._rename_stray(stray, stray.replica.path.name, f".{self.fs.unique_id()}{DELETED_SUFFIX}")

    def date_stray(self, stray: Stray, now_ms: int) -> Path:
        """Its time was not certain. It counts as set aside now, by a clock that was checked. Returns its new path."""
        of = stray.replica
        return self._rename_stray(stray, f"{of.topic}-{of.partition}", stray_suffix(now_ms, certain=True))

    def _rename_stray(self, stray: Stray, name: str, suffix: str) -> Path:
        target = stray.replica.path.with_name(derived_name(name, suffix))
        with self._errors_at(target):
            self.fs.rename(stray.replica.path, target)
            self.fs.sync_directory(self.path)
        return target

    def read_seen(self) -> MetadataSeen | None:
        """The newest metadata that this directory is known to have had; None: none is."""
        try:
            with self._errors_at(self.path):
                return read_checkpoint_as(self.path / SEEN_FILE, MetadataSeen, fs=self.fs, dispensable=True)
        except DamagedLogError as error:
            logger.warning("%s: %s; it is not known which metadata was seen", self.path, error.message)
            return None

    def write_seen(self, seen: MetadataSeen) -> None:
        """Remember the newest metadata that was applied."""
        with self._errors_at(self.path):
            write_checkpoint(self.path / SEEN_FILE, msgspec.to_builtins(seen), fs=self.fs)

    def remove(self, doomed: Path) -> None:
        """Remove a directory that `unname_partitions` has renamed, if it is still there."""
        with self._errors_at(self.path):
            if self.fs.is_directory(doomed):
                self.fs.remove_tree(doomed)

    def quarantine(self, topic: str, partition: int, suffix: str = DAMAGED_SUFFIX, *, sync: bool = True) -> Path:
        """Rename a damaged replica's directory to `<name>.<n><suffix>`, for inspection. Returns the new path.

        The name is that of `derived_name`. If the directory itself was removed, nothing is renamed. Without `sync`, the
        caller calls `sync_names`.
        """
        path = self.path / f"{topic}-{partition}"
        number = 0
        with self._errors_at(path):
            while self.fs.exists(target := path.with_name(derived_name(path.name, f".{number}{suffix}"))):
                number += 1
            if self.fs.is_directory(path):
                self.fs.rename(path, target)
            self._names_unsynced = True  # An earlier process may have renamed it, and died before it synced that.
        if sync:
            self.sync_names()
        return target


def take_over(
    fs: FileSystem, path: Path, holder: Holder, *, cluster_id: str, launch: int, wait_ms: int
) -> LogDirectory:
    """Kill the superseded holder of a directory and claim it. Raises LogDirectoryLockedError after `wait_ms`."""
    if is_locked(path, fs=fs):
        kill_holder(holder, wait_ms=wait_ms, fs=fs)
    lock = DirectoryLock.acquire(path, launch=launch, wait_ms=wait_ms, fs=fs)
    return _open(fs, path, lock, cluster_id)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, str(path)) from error


def _sync_names(fs: FileSystem, path: Path) -> None:
    """Sync the name of a directory that is used for the first time: its maker may have died before it synced."""
    fs.sync_directory(path.parent)
    with contextlib.suppress(PermissionError):  # If the directory above is another user's, `log.dirs` is not new.
        fs.sync_directory(path.parent.parent)


def _entries(fs: FileSystem, directory: Path) -> list[Path]:
    return [directory / name for name in fs.list_directory(directory)]


def _try_claim(fs: FileSystem, path: Path, cluster_id: str, launch: int) -> LogDirectory | None:
    try:
        lock = DirectoryLock.acquire(path, launch=launch, fs=fs)
    except LogDirectoryLockedError:
        return None  # Another broker was quicker; there are more directories.
    return _open(fs, path, lock, cluster_id)


def _claim_new(fs: FileSystem, base_directory: Path, cluster_id: str, launch: int) -> LogDirectory:
    for number in range(MAX_SLOTS):
        path = base_directory / f"{SLOT_PREFIX}{number}"
        try:
            fs.mkdir(path)
        except FileExistsError:
            continue
        fs.sync_directory(base_directory)
        claimed = _try_claim(fs, path, cluster_id, launch)
        if claimed is not None:
            return claimed
    raise LogDirectoryLockedError(f"{base_directory} has {MAX_SLOTS} directories, and all are held")


def _open(fs: FileSystem, path: Path, lock: DirectoryLock, cluster_id: str) -> LogDirectory:
    """Determine how the directory was left, before any of its partitions is opened."""
    try:
        meta = check_cluster(fs, path, cluster_id)
        remove_leftovers(fs, path)
        if meta is None:
            check_new(fs, path)
            meta = DirectoryMeta(cluster_id, fs.unique_id(), fs.boot_id())
            write_checkpoint(path / META_FILE, asdict(meta), fs=fs)
            _sync_names(fs, path)
            return LogDirectory(fs, path, lock, meta, StartKind.CLEAN, is_new=True)
        start, meta = take_clean_marker(fs, path, meta)
        return LogDirectory(fs, path, lock, meta, start, is_new=False)
    except BaseException:
        lock.release()
        raise
