"""Work on replicas' files: logs are opened or made, trimmed, set aside, and deleted.

Metadata is applied in the thread that reads the answers to heartbeats, and a disk must never delay that one. So it only
notes what is to be done (`file_jobs`), and another thread does it (`work`).

What fails concerns one replica. It is *offline*: heartbeats name it, so that it is not elected, and `retry` opens it
anew. Only a failed fsync, and failures of the broker's own files, end the broker (known bug 27).
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from spark_broker.broker.clock import Clock
from spark_broker.broker.damaged import DamagedReplicas, Find
from spark_broker.broker.file_jobs import FileJobs, Opening, Removal, Trim
from spark_broker.broker.high_watermarks import SavedHighWatermarks
from spark_broker.broker.hosted_replicas import HostedReplicas, Outward
from spark_broker.broker.lease import Lease
from spark_broker.broker.limits import Limits, is_news
from spark_broker.broker.log_opener import LogOpener, MapAll, OpenedLog, WantedLog
from spark_broker.broker.lost_schemas import LostSchemas
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionEvents, PartitionKey
from spark_broker.broker.replica_fetchers import NewFetcher, ReplicaFetchers
from spark_broker.broker.room import Room
from spark_broker.broker.seen_metadata import SeenMetadata
from spark_broker.broker.trimming import trim
from spark_broker.config import ClusterSettings
from spark_broker.core.replica import LeaderAndIsr, Replica, Role
from spark_broker.errors import (
    DamagedLogError,
    DivergedLogError,
    InconsistentTopicIdError,
    KafkaStorageError,
    SparkBrokerError,
    StorageFullError,
    StorageRefusedError,
    SyncFailedError,
    invariant,
)
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.start_kind import StartKind

logger = logging.getLogger(__name__)

ALL = 1 << 30
FOLLOW_MS = 1000
"""How long new replicas wait for others before they follow their leaders."""

WORK_AT_ONCE = 64
"""Replicas whose files are opened or deleted between two looks at what else there is to do."""

TRIMS_AT_ONCE = 4
"""The same for trims. Each takes several syncs, one after the other, and new replicas do not wait for many."""


class ReplicaFiles(HostedReplicas):
    """`work` is safe from any thread, `retry` and `quarantine_damaged` belong to maintenance.

    `_work_lock` is held around work on files; `_lock` is taken within it for moments.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        directory: LogDirectory,
        lease: Lease,
        outward: Outward,
        clock: Clock,
        new_fetcher: NewFetcher,
        map_all: MapAll,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._settings = settings
        self._directory = directory
        self._lease = lease
        self._outward = outward
        room_bytes = settings.cluster.log_dir_room_bytes
        self.room = Room(directory.path, directory.fs, room_bytes, outward.on_room, clock)
        self.limits = Limits(clock)
        self.high_watermarks = SavedHighWatermarks(directory)
        self._opener = LogOpener(directory, self.high_watermarks, map_all)
        self._fetchers = ReplicaFetchers(settings.cluster, new_fetcher, outward.on_bug)
        self._jobs = FileJobs(directory.unnamed())
        self._work_lock = threading.RLock()
        self._closed = False  # guarded by _work_lock; no file is touched any more
        self._damaged = DamagedReplicas(directory)
        # Replicas that have stopped, each at most once, until maintenance looks after them.
        self._found_damaged: deque[tuple[Partition, DamagedLogError]] = deque()
        self._found_refused: deque[tuple[Partition, SparkBrokerError]] = deque()
        self._unfollowed = False  # guarded by _lock; replicas were opened that the fetchers do not know yet
        self._followed_ms = 0  # when fetchers were last told what to follow
        self._compared = False  # whether the directory was compared with the metadata, once
        self._found_in_place = False  # a replica has another one's name, which that comparison may have missed
        self._recovered = False
        self._seen = SeenMetadata(directory)
        self._lost_schemas = LostSchemas()  # changed under _lock

    @property
    def damaged(self) -> list[PartitionKey]:
        """Replicas that were quarantined, and are not in sync again."""
        return self._damaged.keys

    @property
    def damage_reports(self) -> list[tuple[str, int, int]]:
        return self._damaged.reports

    @property
    def offline(self) -> dict[str, list[int]]:
        """By topic id: replicas whose files cannot be used at present."""
        keys = {
            *self._offline,
            *(partition.key for partition, _ in list(self._found_damaged)),
            *(partition.key for partition, _ in list(self._found_refused)),
        }
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for topic_id, number in sorted(keys):
            numbers[topic_id].append(number)
        return dict(numbers)

    def work(self, limit: int = WORK_AT_ONCE) -> bool:
        """Do some of what is to be done with files. Returns whether there is more."""
        with self._work_lock:
            if self._closed:
                return False  # Another broker may have the directory.
            self._quarantine_found()
            self._settle_damaged()
            jobs = self._jobs.take(limit)
            if not jobs:
                self._trim(min(limit, TRIMS_AT_ONCE))
                self._remove_doomed(limit)
            elif isinstance(jobs[0], Removal):
                self._remove([job for job in jobs if isinstance(job, Removal)])
            else:
                self._open([job.key for job in jobs])
            self._follow_opened()
            self._mark_recovered()
            self._remember_acceptance()
        return len(self._jobs) > 0

    def _have_worked(self, *, starts: bool = False) -> None:
        """Have someone do what is to be done. `starts`: every log is open before this returns."""
        if starts:
            while self._jobs.is_due and not self._closed:
                self.work(ALL)
        if self._outward.on_work is not None:
            self._outward.on_work()
        else:
            while self.work():
                pass

    def _open(self, keys: Sequence[PartitionKey]) -> None:
        """Open or create the logs of these replicas, as far as they belong here and are not open."""
        with self._lock:
            wanted = {key: self._wanted(key) for key in keys if self._is_missing(key, retried=True)}
        opened = self._opener.open(wanted)
        with self._lock:
            before = self._offline
            self._take_in(opened)
            for key in opened:
                self._apply_partition(key)
                self._damaged.follow(key, self.image.partition(*key), self.broker_id)
            self._unfollowed = self._unfollowed or bool(opened)
            changed = before.keys() != self._offline.keys()
            if changed and len(opened) == 1:  # One was tried again: what stood in its way may stand in none's.
                self._jobs.add(Opening(key) for key in before if key in self._offline)
        if changed:
            self._outward.on_room()

    def _take_in(self, opened: Mapping[PartitionKey, OpenedLog | SparkBrokerError]) -> None:
        partitions: dict[PartitionKey, Partition] = {}
        offline = dict(self._offline)
        for key, outcome in opened.items():
            gone = not self._belongs_here(key)
            if gone or self._jobs.is_being_removed(key):
                if isinstance(outcome, OpenedLog):
                    outcome.log.close(clean=False)
                if not gone:  # It was moved away and back: it begins anew once its old files are deleted.
                    offline[key] = KafkaStorageError("the files of an earlier replica are to be deleted first")
            elif isinstance(outcome, OpenedLog) and (unfit := outcome.unfit(self.broker_id, self.image, key)):
                outcome.log.close(clean=False)
                self._cannot_open(key, unfit, offline)
            elif isinstance(outcome, OpenedLog):
                offline.pop(key, None)
                self._lost_schemas.found(key[0], self._topics[key[0]].name, outcome.lost_schemas)
                partitions[key] = self._partition_of(key, outcome)
            else:
                self._cannot_open(key, outcome, offline)
        twice = self._partitions.keys() & partitions.keys()
        invariant(not twice, "replicas are opened that are open: %s", twice)
        self._partitions, self._offline = {**self._partitions, **partitions}, offline

    def _wanted(self, key: PartitionKey) -> WantedLog:
        state = self.image.partition(*key)
        electable = state is not None and self.broker_id in (*state.isr, *state.elr)
        return WantedLog(self._topics[key[0]], key[1], electable)

    def _is_missing(self, key: PartitionKey, *, retried: bool = False) -> bool:
        """Whether the replica belongs here and is not open. `retried`: also where it is offline."""
        if key in self._partitions or (key in self._offline and not retried) or self._damaged.is_unheard(key):
            return False
        return self._belongs_here(key)

    def _cannot_open(
        self, key: PartitionKey, error: SparkBrokerError, offline: dict[PartitionKey, SparkBrokerError]
    ) -> None:
        """Quarantine the replica, if it is damaged; else it is one of those `offline`."""
        name = f"{self._topics[key[0]].name}-{key[1]}"
        if isinstance(error, DamagedLogError):
            try:
                self._damaged.quarantine(key, self._topics[key[0]].name)
            except SparkBrokerError as unquarantined:
                error = unquarantined
            else:
                self.high_watermarks.forget(key)  # The next log begins empty.
                fields = {"topic_partition": name, "why": str(error)}
                logger.error("%(topic_partition)s: is damaged and quarantined: %(why)s", fields)
                offline.pop(key, None)
                return
        if isinstance(error, SyncFailedError):
            self._outward.on_storage_failure(key, error)
        elif isinstance(error, StorageRefusedError):
            self.refused(error)
        elif isinstance(error, InconsistentTopicIdError):
            self._found_in_place = True
        if is_news(offline.get(key), error):
            _log_offline(name, error)
        offline[key] = error

    def _partition_of(self, key: PartitionKey, opened: OpenedLog) -> Partition:
        topic = self._topics[key[0]]
        replica = Replica(
            self.broker_id,
            opened.state,
            min_insync_replicas=topic.config.min_insync_replicas,
            lag_max_ms=self._settings.cluster.replica_lag_time_max_ms,
            name=f"{topic.name}-{key[1]}",
        )
        partition = Partition(
            key,
            topic,
            opened.log,
            replica,
            self._lease,
            PartitionEvents(
                self._outward.propose_isr,
                self._outward.on_storage_failure,
                self._on_damage,
                self.refused,
                self._on_unusable,
                self._note_waiting,
                self.high_watermarks.lowering,
            ),
            self._clock,
        )
        partition.lines.opened(f"{self._directory.start_kind.value} start")
        return partition

    def _apply_partition(self, key: PartitionKey) -> None:
        state, partition = self.image.partition(*key), self._partitions.get(key)
        if partition is None or state is None or not self._belongs_here(key):
            return
        try:
            lead = (state.leader, state.leader_epoch, state.partition_epoch, state.replicas, state.isr)
            if partition.assign(LeaderAndIsr(*lead, state.unclean_epoch), self._topics[key[0]], self._epochs):
                self._jobs.add([Trim(key)])
        except SparkBrokerError as error:
            # A replica that has stopped has reported why. The others must hear of their assignments, too.
            if partition.replica.role is not Role.STOPPED:
                raise
            logger.info("%s has not taken its assignment: %s", partition, error.message)

    def _remove(self, removals: list[Removal]) -> None:
        """Stop the replicas and take their names from their directories."""
        for removal in removals:
            partition = removal.partition
            if partition is not None:
                partition.stop(removal.reason)
                partition.close(clean=False)
                partition.lines.deleted(removal.reason.message)
        names = dict.fromkeys(removal.name for removal in removals)  # A replica may have gone more than once.
        try:
            strays = list(dict.fromkeys(removal.name for removal in removals if removal.aside))
            now_ms, certain = self._clock.wall_ms(), self._lease.allows_expiry
            aside, kept_aside = self._directory.set_aside(strays, now_ms, certain=certain) if strays else ([], {})
            doomed, kept = self._directory.unname_partitions(name for name in names if name not in strays)
        except SyncFailedError as error:
            self.storage_failed(error)
            return
        for path in aside:
            logger.warning("%s is kept: `spark-broker log-dirs` tells how it can be brought back", path)
        kept = {**kept, **kept_aside}
        for name, why in kept.items():
            logger.warning("%s-%d stays until it can be moved away: %s", name.topic, name.number, why)
        for removal in removals:
            self.high_watermarks.forget(removal.key)
            self._opener.forget(removal.key)
        # One that is neither finished nor tried again would keep its replica from being opened, for ever.
        rest = [removal for removal in removals if removal.name in kept]
        self._jobs.removed([removal for removal in removals if removal.name not in kept], rest, doomed)

    @property
    def directory(self) -> LogDirectory:
        return self._directory

    def _trim(self, limit: int) -> None:
        for job in self._jobs.take_trims(limit):
            partition = self._partitions.get(job.key)
            if partition is not None:
                trim(partition, self._settings.cluster)

    def _remove_doomed(self, limit: int) -> None:
        for path in self._jobs.take_doomed(limit):
            try:
                self._directory.remove(path)
            except SparkBrokerError as error:
                logger.warning("what is left of %s stays until the next start: %s", path.name, error)

    def _mark_recovered(self) -> None:
        """Remember that every log that was here at the start is recovered.

        Where one could not be opened, the next process must recover it from the same crash again.
        """
        if self._recovered or not self._compared or self._jobs.is_due or self._has_unrecovered():
            return
        try:
            if self._directory.start_kind is StartKind.MACHINE_CRASH:
                self.save_high_watermarks()  # They may be above what the crash has left.
            self._damaged.replace_unreadable()
            self._directory.mark_recovered()
        except StorageRefusedError as error:
            self.refused(error)  # `retry` comes back to it.
        except SparkBrokerError as error:
            self.storage_failed(error)
        else:
            self._recovered = True

    def _remember_acceptance(self) -> None:
        if self._compared and not self._seen.has_acceptance(self.image):
            try:
                self.save_high_watermarks()
            except StorageRefusedError as error:
                self.refused(error)  # `retry` comes back to it.
            except KafkaStorageError as error:
                self.storage_failed(error)

    def _has_unrecovered(self) -> bool:
        topics = self.image.topics
        return any(
            id_ in topics and self._directory.may_have_partition(topics[id_].name, n) for id_, n in self._offline
        )

    def retry(self) -> None:
        """Try again what was refused. Call this from time to time.

        One replica that is offline is opened. If that succeeds, all others are tried, too.
        """
        with self._lock:
            while self._found_refused:
                partition, error = self._found_refused[0]
                self._let_go(partition, error)
                self._found_refused.popleft()
            first = next(iter(self._offline), None)
            if first is not None:
                self._offline = {**{k: e for k, e in self._offline.items() if k != first}, first: self._offline[first]}
                self._jobs.add([Opening(first)])
        kept = self._jobs.retry()
        done = self._recovered and self._seen.has_acceptance(self.image) and not self._unfollowed
        if first is not None or kept or not done:
            self._have_worked()

    def _let_go(self, partition: Partition, error: SparkBrokerError) -> None:
        """A replica's log refuses to go on until it is opened anew."""
        if self._partitions.get(partition.key) is partition:  # Else it was dropped meanwhile.
            self._partitions = {key: p for key, p in self._partitions.items() if p is not partition}
            self._follow_leaders()
            partition.close(clean=False)
            self.high_watermarks.remember(partition.key, partition.replica.high_watermark)
            self._set_offline(partition.key, error)

    def _set_offline(self, key: PartitionKey, error: SparkBrokerError) -> None:
        self._offline = {**self._offline, key: error}
        topic = self._topics.get(key[0])
        _log_offline(f"{topic.name if topic else key[0]}-{key[1]}", error)

    #
    # A damaged replica stops at once, is quarantined, and is reported by heartbeats. No log takes its place before the
    # controller has taken the replica out of ISR and ELR. Then it follows the leader with an empty log, and may be let
    # in again.

    def _on_damage(self, partition: Partition, error: DamagedLogError) -> None:
        """Damaged bytes were read. Called under the partition's lock."""
        partition.lines.quarantined(error)
        self._found_damaged.append((partition, error))

    def _on_unusable(self, partition: Partition, error: SparkBrokerError) -> None:
        """The log was refused something half-way: it must be opened anew. Called under the partition's lock."""
        self._found_refused.append((partition, error))
        self._outward.on_room()

    def refused(self, error: StorageRefusedError) -> None:
        """A write was refused. Also called under partitions' locks."""
        if isinstance(error, StorageFullError):
            self.room.refused(error)
        else:
            self.limits.refused(error)

    def quarantine_damaged(self) -> None:
        """Quarantine what was found damaged since the last call. What cannot be moved now waits for the next call.

        While files are worked on, `work` does this.
        """
        if self._found_damaged and self._work_lock.acquire(blocking=False):
            try:
                if not self._closed:
                    self._quarantine_found()
            finally:
                self._work_lock.release()

    def _quarantine_found(self) -> None:
        """Under `_work_lock`. Metadata is applied under `_lock`, so that one is not held while the disk works."""
        found = list(self._found_damaged)
        with self._lock:  # The others were dropped meanwhile.
            present = {p: error for p, error in found if self._partitions.get(p.key) is p}
        if present:
            finds = [Find(p.key, p.topic.name, isinstance(error, DivergedLogError)) for p, error in present.items()]
            try:
                self.check_directory()
                self._damaged.quarantine_all(finds)
            except StorageRefusedError as refused:
                self.refused(refused)
                return
            except KafkaStorageError as failed:
                self.storage_failed(failed)
                return
            with self._lock:
                self._partitions = {key: p for key, p in self._partitions.items() if p not in present}
                self._follow_leaders()
                for partition in present:
                    self._damaged.follow(partition.key, self.image.partition(*partition.key), self.broker_id)
                    partition.close(clean=False)
                    self.high_watermarks.forget(partition.key)
        for _ in found:
            self._found_damaged.popleft()
        if found:
            self._outward.on_quarantine()

    def _settle_damaged(self) -> None:
        """What is in sync again leaves the list, and what the controller has heard of begins with an empty log."""
        try:
            self._jobs.add([Opening(key) for key in self._damaged.settle()])
        except KafkaStorageError as error:
            self.storage_failed(error)

    def _follow_opened(self) -> None:
        """Follow the leaders of what was opened.

        Each time costs as much as all replicas together, so those that are opened one after the other share it.
        """
        with self._lock:
            shares = self._jobs.is_due and self._clock.boottime_ms() - self._followed_ms < FOLLOW_MS
            if self._unfollowed and not shares:
                self._follow_leaders()

    def _follow_leaders(self) -> None:
        """Keep one fetcher for each broker that leads a partition which this broker follows."""
        self._followed_ms = self._clock.boottime_ms()
        refused = self._fetchers.follow(self.broker_id, self.broker_epoch, self.image, self._partitions.items())
        self._unfollowed = refused is not None  # `retry` comes back to it.
        if refused is not None:
            self.limits.refused(refused)

    def check_directory(self) -> None:
        """Raises KafkaStorageError where somebody has removed the broker's directory."""
        self._directory.check()

    def save_high_watermarks(self) -> None:
        """Checkpoint every high watermark. Those of replicas that are not open stay as they were."""
        if not self._compared:
            return  # What belongs here is not known yet: what is saved is all that there is.
        self.high_watermarks.save(
            lambda: {key: partition.replica.high_watermark for key, partition in self._partitions.items()},
            lambda key: self._belongs_here(key) and not self._jobs.is_being_removed(key),
        )
        self._seen.save(self.image)

    def storage_failed(self, error: SparkBrokerError) -> None:
        """The broker's own files fail: it ends (known bug 27)."""
        self._outward.on_storage_failure(None, error)


def _log_offline(name: str, error: SparkBrokerError) -> None:
    fields = {"topic_partition": name, "why": str(error)}
    logger.error("%(topic_partition)s is offline, and tried again: %(why)s", fields)
