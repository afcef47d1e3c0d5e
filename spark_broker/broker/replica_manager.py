"""The partitions that this broker hosts: opened, assigned and dropped as the metadata says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.fetcher import ReplicaFetcherThread
from spark_broker.broker.file_jobs import Opening, Removal
from spark_broker.broker.follower_sessions import FollowerSessions
from spark_broker.broker.hosted_replicas import Outward
from spark_broker.broker.lease import Lease
from spark_broker.broker.log_opener import MapAll, one_by_one
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_fetchers import NewFetcher
from spark_broker.broker.replica_files import ReplicaFiles
from spark_broker.broker.topic import Topic
from spark_broker.config import ClusterSettings
from spark_broker.controller import lineage
from spark_broker.controller.delta import MetadataDelta
from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage, TopicState
from spark_broker.controller.lineage import NewestBatch
from spark_broker.controller.log_ends import is_asked_for
from spark_broker.errors import (
    DamagedLogError,
    NotLeaderOrFollowerError,
    OlderMetadataError,
    SparkBrokerError,
    StorageRefusedError,
    SyncFailedError,
    UnknownTopicOrPartitionError,
    invariant,
)
from spark_broker.protocol.messages import LogEnd, MetadataSeen, TopicSchema
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.directory_names import PartitionDirectory
from spark_broker.storage.start_kind import StartKind
from spark_broker.storage.strays import newest_batch

__all__ = ["Outward", "ReplicaManager"]

logger = logging.getLogger(__name__)


class ReplicaManager(ReplicaFiles):
    """`apply` belongs to the session's thread: it decides, and notes what is to be done with files."""

    def __init__(
        self,
        settings: ClusterSettings,
        directory: LogDirectory,
        lease: Lease,
        outward: Outward,
        *,
        clock: Clock = SYSTEM_CLOCK,
        new_fetcher: NewFetcher = ReplicaFetcherThread,
        map_all: MapAll = one_by_one,
    ) -> None:
        super().__init__(settings, directory, lease, outward, clock, new_fetcher, map_all)
        self._asked_for: frozenset[PartitionKey] = frozenset()  # replicas whose log end the controller wants to know
        self._started = False  # whether metadata was applied
        self.follower_sessions = FollowerSessions()
        self.applied_offset = EMPTY_IMAGE.next_offset
        """Metadata before this offset is applied. Every log that was here at the start is open, or known not to be."""

    @property
    def seen(self) -> MetadataSeen | None:
        """The newest metadata that this broker, or an earlier process in its directory, is known to have applied."""
        return lineage.seen(self.image) if self._started else self._seen.saved

    def log_ends(self) -> list[LogEnd]:
        """Log ends of replicas whose partition has no leader, and whose ISR and ELR do not include this broker.

        Nobody is elected before the metadata knows the schemas of what is stored: else it could not be read.
        """
        image, partitions = self.image, self._partitions
        if not self._seen.has_acceptance(image):
            return []
        keys = [key for key in sorted(self._asked_for) if key in partitions]
        return [partitions[key].log_end() for key in keys if not self._lost_schemas.lacks(image, key[0])]

    def lost_schemas(self) -> list[TopicSchema]:
        """Schemas that logs here have and the metadata lacks, or some of them: the controller is to hear of them."""
        return self._lost_schemas.to_tell(self.image)

    def apply(self, image: MetadataImage) -> None:
        """Make this broker's replicas what the image says. The first time, this opens every log, and takes its time.

        Raises OlderMetadataError, the first time, where a log has seen more than the metadata. It is not touched then.
        """
        with self._lock:
            applied_offset, next_offset = self.applied_offset, image.next_offset
            invariant(
                next_offset >= applied_offset, "metadata up to %d after metadata up to %d", next_offset, applied_offset
            )
            starts, self._started = not self._started, True
            self._apply(image)
        self._have_worked(starts=starts)
        older = [error for error in self._offline.values() if isinstance(error, OlderMetadataError)]
        if starts and older:
            raise older[0]
        self.applied_offset = next_offset

    def _apply(self, image: MetadataImage) -> None:
        delta = MetadataDelta(self.image, image)
        before, self.image = self.image, image
        self._live = {broker.id: broker.epoch for broker in image.brokers.values() if broker.live}
        self._epochs = {broker.id: broker.epoch for broker in image.brokers.values()}
        self._update_topics(delta)
        self._drop_strays()
        changed = set(delta.partitions_changed)
        if delta.brokers_changed:
            changed |= {key for key in self._partitions if image.partition(*key) is not None}
        for topic in delta.topics_changed:
            changed |= {(topic.topic_id, number) for number in range(len(topic.partitions))}
        self._drop_lost(before, delta.topics_removed, changed)
        self._jobs.add(Opening(key) for key in sorted(changed) if self._is_missing(key))
        for key in sorted(changed):
            self._apply_partition(key)
            self._damaged.follow(key, image.partition(*key), self.broker_id)
        asked = {key for key in changed if is_asked_for(image.partition(*key), self.broker_id)}
        self._asked_for = frozenset(asked | (self._asked_for - changed))
        self._follow_leaders()

    def _drop_strays(self) -> None:
        """Delete replicas whose topic was deleted, or that were moved away, while this broker was down. Once, and again
        when one is found in another's place.

        Those of which the metadata does not say so are set aside: it may be older than they are.
        """
        if self._compared and not self._found_in_place:
            return
        try:
            found = self._directory.list_partitions()
        except StorageRefusedError as error:
            self.refused(error)  # `retry` comes back to it.
            return
        except SparkBrokerError as error:
            self.storage_failed(error)
            return
        self._compared, self._found_in_place = True, False
        for key in self._damaged.keys:
            if self.image.partition(*key) is None:
                self._damaged.follow(key, None, self.broker_id)
        strays: list[Removal] = []
        for stray in found:
            key = (stray.topic_id, stray.partition)
            if not self._belongs_here(key) and not self._jobs.is_being_removed(key):
                reason = UnknownTopicOrPartitionError("the metadata has no such replica")
                strays.append(Removal(key, stray.topic, reason, aside=not self._may_be_deleted(stray)))
        self._jobs.add(strays)

    def _may_be_deleted(self, stray: PartitionDirectory) -> bool:
        fields = {"topic_partition": f"{stray.topic}-{stray.partition}"}
        if lineage.may_be_deleted(self.image, stray.topic_id, stray.partition, lambda: self._newest_batch(stray.path)):
            logger.info("%(topic_partition)s is no longer here and is deleted", fields)
            return True
        text = "%(topic_partition)s is set aside: the metadata neither has this replica nor says that it may go"
        logger.warning(text, fields)
        return False

    def _newest_batch(self, path: Path) -> NewestBatch | None:
        try:
            return newest_batch(path, fs=self._directory.fs)
        except (DamagedLogError, OSError) as error:
            logger.warning("%s: %s", path, error)
            return None

    def delete_old_strays(self, retention_ms: int) -> None:
        """Delete the replicas that were set aside this long ago, by a clock that was checked.

        While files are worked on, the next call does this: that may take long, and the caller has more to do.
        """
        if retention_ms < 0 or not self._lease.allows_expiry or not self._work_lock.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._doom_old_strays(retention_ms)
        except SyncFailedError as error:
            self.storage_failed(error)
        except SparkBrokerError as error:
            logger.warning("replicas that were set aside stay: %s", error)
        finally:
            self._work_lock.release()
        self._have_worked()

    def _doom_old_strays(self, retention_ms: int) -> None:
        for stray in self._directory.strays():
            if not stray.since_is_certain:
                name = self._directory.date_stray(stray, self._clock.wall_ms()).name
                logger.info("%s is %s from now on: nobody had checked its clock", stray.replica.path, name)
            elif self._clock.wall_ms() - stray.since_ms >= retention_ms:
                path = self._directory.unname_stray(stray)
                logger.warning("%s was set aside log.stray.retention.ms ago and is deleted", stray.replica.path)
                self._jobs.add_doomed(path)

    def _drop_lost(self, before: MetadataImage, removed: Iterable[TopicState], changed: Iterable[PartitionKey]) -> None:
        """Drop the replicas that this broker had before, and has no more.

        They are out of reach at once. One that is moved away and back must not go on with what it has.
        """
        lost: dict[PartitionKey, tuple[str, SparkBrokerError]] = {}
        for topic in removed:
            reason = UnknownTopicOrPartitionError(f"{topic.name} was deleted")
            for number, state in enumerate(topic.partitions):
                if self.broker_id in state.replicas:
                    lost[topic.topic_id, number] = (topic.name, reason)
        moved = NotLeaderOrFollowerError("the replica was moved to another broker")
        for key in sorted(changed):
            earlier = before.partition(*key)
            if earlier is not None and self.broker_id in earlier.replicas and not self._belongs_here(key):
                lost[key] = (before.topics[key[0]].name, moved)
        if lost:
            aside = not lineage.has(self.image, lineage.seen(before))  # It may be older: nothing was decided then.
            self._jobs.add(Removal(key, *why, self._partitions.get(key), aside) for key, why in lost.items())
            gone = [partition for key in lost if (partition := self._partitions.get(key)) is not None]
            self._partitions = {key: p for key, p in self._partitions.items() if key not in lost}
            for partition in gone:  # The job that stops it may come much later, and nobody is to wait for that.
                if partition.replica.pending:
                    partition.stop(lost[partition.key][1])
                else:
                    partition.wake_listeners()
            self._offline = {key: error for key, error in self._offline.items() if key not in lost}
            for key in lost:
                self._damaged.follow(key, None, self.broker_id)

    def damage_heard(self, newest: int) -> None:
        """The controller has decided on all damage up to this number: its replicas may begin with an empty log.

        In the session's thread, which must not wait for the disk.
        """
        if self._damaged.heard(newest):
            self._have_worked()

    def retry(self) -> None:
        """Try again what was refused, and what a start could not do."""
        with self._lock:
            if self._started:
                self._drop_strays()
        super().retry()

    def _update_topics(self, delta: MetadataDelta) -> None:
        topics = {topic_id: topic for topic_id, topic in self._topics.items() if topic_id in delta.new.topics}
        for state in delta.topics_changed:
            topics[state.topic_id] = Topic.of(state)
        self._topics = topics
        self._lost_schemas.forget(delta.new)

    def stop(self, *, clean: bool) -> None:
        """Stop replication, refuse appends that wait, and close every log. `clean`: sync the logs first.

        Raises StorageRefusedError or KafkaStorageError, once every log is closed: the end is not a clean one then.
        """
        with self._work_lock, self._lock:
            self._closed = True
            self._stop(clean=clean)

    def _stop(self, *, clean: bool) -> None:
        self._fetchers.stop()
        for partition in self.partitions():
            partition.stop(NotLeaderOrFollowerError("the broker is shutting down"))
        steps = [self._damaged.write_down, self._save_last_high_watermarks, self._check_recovered] if clean else []
        steps += [partial(partition.close, clean=clean) for partition in self.partitions()]
        failures = [failure for step in steps if (failure := _failure_of(step)) is not None]
        if failures:
            raise min(failures, key=lambda failure: isinstance(failure, StorageRefusedError))  # the worst

    def _save_last_high_watermarks(self) -> None:
        """On a full disk the older ones stay: they are lower, or `_check_recovered` tells of what a crash has left."""
        try:
            self.save_high_watermarks()
        except StorageRefusedError as error:
            logger.warning("the newest high watermarks are not saved: %s", error)

    def _check_recovered(self) -> None:
        """Raises StorageRefusedError where a log was not recovered from the last crash, or was closed half-way: that is
        left to the next process.
        """
        since_crash = self._directory.start_kind is not StartKind.CLEAN and not self._recovered
        if since_crash or self._has_unrecovered():
            raise StorageRefusedError("not every replica here was opened and closed in order")


def _failure_of(step: Callable[[], None]) -> SparkBrokerError | None:
    try:
        step()
    except SparkBrokerError as error:
        return error
    return None
