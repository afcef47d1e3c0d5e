"""The partitions that this broker hosts: opened, assigned and dropped as the metadata says."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.damaged import DamagedReplicas
from spark_broker.broker.fetch_session import FetcherSettings
from spark_broker.broker.fetcher import ReplicaFetcherThread
from spark_broker.broker.lease import Lease
from spark_broker.broker.log_opener import LogOpener, MapAll, OpenedLog, WantedLog, one_by_one
from spark_broker.broker.partition import Partition, PartitionKey
from spark_broker.broker.replica_fetcher import Fetcher
from spark_broker.broker.room import Room
from spark_broker.broker.topic import Topic
from spark_broker.config import ClusterSettings
from spark_broker.controller.delta import MetadataDelta
from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage
from spark_broker.controller.log_ends import is_asked_for
from spark_broker.core.effects import ProposeIsr
from spark_broker.core.replica import LeaderAndIsr, Replica
from spark_broker.errors import (
    DamagedLogError,
    KafkaStorageError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    StorageFullError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
    invariant,
)
from spark_broker.protocol.messages import LogEnd
from spark_broker.storage.directory import LogDirectory

logger = logging.getLogger(__name__)


NewFetcher = Callable[[str, int, FetcherSettings, Callable[[BaseException], None]], Fetcher]
"""Makes the fetcher that pulls from the broker at this host and port."""


@dataclass(frozen=True, slots=True)
class Outward:
    """The replicas' callbacks: for ISR proposals, a failed disk, our own bugs, and damage that was quarantined.

    `on_room`: the disk is full, or has room again. It is called under partitions' locks, so it must not wait.
    """

    propose_isr: Callable[[PartitionKey, ProposeIsr], None]
    on_storage_failure: Callable[[PartitionKey | None, SparkBrokerError], None]  # None: the broker's own files
    on_bug: Callable[[BaseException], None]
    on_quarantine: Callable[[], None] = lambda: None
    on_room: Callable[[], None] = lambda: None


class ReplicaManager:
    """`apply` belongs to the session's thread, `quarantine_damaged` to maintenance; look-ups are safe from any thread.

    Replicas are added and removed under `_lock`. Partitions' locks are taken within it, never the other way round.
    """

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
        self._clock = clock
        self._new_fetcher = new_fetcher
        self._settings = settings
        self._directory = directory
        self._lease = lease
        self._outward = outward
        room_bytes = settings.cluster.log_dir_room_bytes
        self.room = Room(directory.path, directory.fs, room_bytes, outward.on_room, clock)
        self._opener = LogOpener(directory, _last_high_watermarks(directory), map_all)
        self._lock = threading.RLock()
        # Guarded by _lock: replaced, never changed in place, so that readers need no lock.
        self._partitions: dict[PartitionKey, Partition] = {}
        self._offline: dict[PartitionKey, SparkBrokerError] = {}
        self._damaged = DamagedReplicas(directory)
        self._found_damaged: deque[Partition] = deque()  # each partition at most once
        self._asked_for: frozenset[PartitionKey] = frozenset()  # replicas whose log end the controller wants to know
        self._topics: dict[str, Topic] = {}
        self._live: Mapping[int, int] = {}
        self._epochs: Mapping[int, int] = {}
        self._fetchers: dict[int, Fetcher] = {}
        self._waiting: dict[Partition, None] = {}  # every partition in which an append waits, and perhaps others
        self._recovered = False
        self.broker_id = -1
        self.broker_epoch = -1
        self.image = EMPTY_IMAGE
        self.applied_offset = EMPTY_IMAGE.next_offset  # metadata before this offset is carried out: every log is open

    def partition(self, topic_id: str, number: int) -> Partition:
        """The replica. Raises the error that says why it is not here."""
        partition = self._partitions.get((topic_id, number))
        if partition is not None:
            return partition
        failure = self._offline.get((topic_id, number))
        if failure is not None:
            raise KafkaStorageError(f"broker {self.broker_id}: {failure.message}")
        topic = self.image.topics.get(topic_id)
        if topic is None:
            raise UnknownTopicIdError(f"no topic has the id {topic_id}")
        if number >= len(topic.partitions):
            raise UnknownTopicOrPartitionError(f"{topic.name} has {len(topic.partitions)} partitions, not {number + 1}")
        raise NotLeaderOrFollowerError(f"broker {self.broker_id} has no replica of {topic.name}-{number}")

    def find(self, topic_id: str, number: int) -> Partition | None:
        return self._partitions.get((topic_id, number))

    def partitions(self) -> Iterator[Partition]:
        return iter(self._partitions.values())

    def _note_waiting(self, partition: Partition) -> None:
        self._waiting[partition] = None

    def take_waiting(self) -> Iterator[Partition]:
        """Partitions in which appends wait. Those that come later, or wait on, are there again the next time."""
        for partition in list(self._waiting):
            # First removed, then looked at: an append that comes in between is noted again.
            del self._waiting[partition]
            if partition.replica.pending:
                self._waiting[partition] = None
                yield partition

    def topic(self, topic_id: str) -> Topic | None:
        return self._topics.get(topic_id)

    def live_broker_epochs(self) -> Mapping[int, int]:
        """Brokers that may join an ISR, with their epochs."""
        return self._live

    def broker_epochs(self) -> Mapping[int, int]:
        return self._epochs

    @property
    def damaged(self) -> list[PartitionKey]:
        """Replicas that were quarantined, and are not in sync again."""
        return self._damaged.keys

    @property
    def damage_reports(self) -> list[tuple[str, int, int]]:
        """The damaged replicas, each with the number of its damage."""
        return self._damaged.reports

    def log_ends(self) -> list[LogEnd]:
        """Log ends of replicas whose partition has no leader, and whose ISR and ELR do not include this broker."""
        partitions = self._partitions
        return [partitions[key].log_end() for key in sorted(self._asked_for) if key in partitions]

    def registered(self, broker_id: int, broker_epoch: int) -> None:
        self.broker_id, self.broker_epoch = broker_id, broker_epoch

    def apply(self, image: MetadataImage) -> None:
        """Make this broker's replicas what the image says."""
        with self._lock:
            applied_offset, next_offset = self.applied_offset, image.next_offset
            invariant(
                next_offset >= applied_offset, "metadata up to %d after metadata up to %d", next_offset, applied_offset
            )
            self._apply(image)
            self.applied_offset = next_offset

    def _apply(self, image: MetadataImage) -> None:
        delta = MetadataDelta(self.image, image)
        self.image = image
        self._live = {broker.id: broker.epoch for broker in image.brokers.values() if broker.live}
        self._epochs = {broker.id: broker.epoch for broker in image.brokers.values()}
        self._update_topics(delta)
        if not self._recovered:
            self._delete_strays(image)
        for topic in delta.topics_removed:
            for number in range(len(topic.partitions)):
                self._drop((topic.topic_id, number), UnknownTopicOrPartitionError(f"{topic.name} was deleted"))
        changed = set(delta.partitions_changed)
        if delta.brokers_changed:
            changed |= {key for key in self._partitions if image.partition(*key) is not None}
        for topic in delta.topics_changed:
            changed |= {(topic.topic_id, number) for number in range(len(topic.partitions))}
        self._open_missing(changed)
        for key in sorted(changed):
            self._apply_partition(key, image)
            self._damaged.follow(key, image.partition(*key), self.broker_id)
        asked = {key for key in changed if is_asked_for(image.partition(*key), self.broker_id)}
        self._asked_for = frozenset(asked | (self._asked_for - changed))
        self._update_fetchers()
        if not self._recovered and not self._offline:
            # If a log could not be opened, the next process must recover from the same crash again.
            self._directory.mark_recovered()
            self._recovered = True

    def _delete_strays(self, image: MetadataImage) -> None:
        """Delete replicas whose topic was deleted, or that were moved away, while this broker was down."""
        for key in self._damaged.keys:
            if image.partition(*key) is None:
                self._damaged.follow(key, None, self.broker_id)
        for stray in self._directory.list_partitions():
            state = image.partition(stray.topic_id, stray.partition)
            if state is None or self.broker_id not in state.replicas:
                fields = {"topic_partition": f"{stray.topic}-{stray.partition}"}
                logger.info("%(topic_partition)s is no longer here and is deleted", fields)
                self._directory.delete_partition(stray.topic, stray.partition)

    def _update_topics(self, delta: MetadataDelta) -> None:
        topics = {topic_id: topic for topic_id, topic in self._topics.items() if topic_id in delta.new.topics}
        for state in delta.topics_changed:
            topics[state.topic_id] = Topic.of(state)
        self._topics = topics

    def _apply_partition(self, key: PartitionKey, image: MetadataImage) -> None:
        state = image.partition(*key)
        if state is None or self.broker_id not in state.replicas:
            self._drop(key, NotLeaderOrFollowerError("the replica was moved to another broker"))
            return
        partition = self._partitions.get(key)
        if partition is not None:
            assignment = LeaderAndIsr(
                leader=state.leader,
                leader_epoch=state.leader_epoch,
                partition_epoch=state.partition_epoch,
                replicas=state.replicas,
                isr=state.isr,
            )
            partition.assign(assignment, self._topics[key[0]], self._epochs)

    def _open_missing(self, keys: Iterable[PartitionKey]) -> None:
        """Open or create the logs of these replicas, as far as they belong here and are not open."""
        missing = [key for key in sorted(keys) if self._is_missing(key)]
        opened = self._opener.open({key: self._wanted(key) for key in missing})
        partitions = {key: self._partition_of(key, log) for key, log in opened.items() if isinstance(log, OpenedLog)}
        twice = self._partitions.keys() & partitions.keys()
        invariant(not twice, "replicas are opened that are open: %s", twice)
        self._partitions = {**self._partitions, **partitions}
        for key, outcome in opened.items():
            if not isinstance(outcome, OpenedLog):
                self._cannot_open(key, outcome)

    def _wanted(self, key: PartitionKey) -> WantedLog:
        state = self.image.partition(*key)
        electable = state is not None and self.broker_id in (*state.isr, *state.elr)
        return WantedLog(self._topics[key[0]], key[1], electable)

    def _is_missing(self, key: PartitionKey) -> bool:
        if key in self._partitions or key in self._offline or self._damaged.is_unheard(key):
            return False
        state = self.image.partition(*key)
        return state is not None and self.broker_id in state.replicas

    def _cannot_open(self, key: PartitionKey, error: SparkBrokerError) -> None:
        if isinstance(error, DamagedLogError):
            name = self._topics[key[0]].name
            fields = {"topic_partition": f"{name}-{key[1]}", "why": str(error)}
            logger.error("%(topic_partition)s: is damaged and quarantined: %(why)s", fields)
            self._damaged.quarantine(key, name)
        elif isinstance(error, KafkaStorageError):
            self._take_offline(key, error)
        else:
            raise error

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
            self._outward.propose_isr,
            self._outward.on_storage_failure,
            self._clock,
            self._on_damage,
            self.room.refused,
            self._note_waiting,
        )
        partition.lines.opened(f"{self._directory.start_kind.value} start")
        return partition

    #
    # A damaged replica stops at once, is quarantined, and is reported by heartbeats. No log takes its place before the
    # controller has taken the replica out of ISR and ELR. Then it follows the leader with an empty log, and may be let
    # in again.

    def _on_damage(self, partition: Partition, error: DamagedLogError) -> None:
        """Damaged bytes were read. Called under the partition's lock."""
        partition.lines.quarantined(error)
        self._found_damaged.append(partition)

    def quarantine_damaged(self) -> None:
        """Quarantine what was found damaged since the last call. On a full disk this waits for the next call."""
        while self._found_damaged:
            partition = self._found_damaged[0]
            with self._lock:
                if self._partitions.get(partition.key) is partition:  # Else it was dropped meanwhile.
                    try:
                        self.check_directory()
                        self._damaged.quarantine(partition.key, partition.topic.name)
                    except StorageFullError as full:
                        self.room.refused(full)
                        return
                    except KafkaStorageError as failed:
                        self._take_offline(partition.key, failed)
                        return
                    self._partitions = {k: p for k, p in self._partitions.items() if p is not partition}
                    self._update_fetchers()
                    partition.close(clean=False)
            self._found_damaged.popleft()
            self._outward.on_quarantine()

    def damage_heard(self, newest: int) -> None:
        """The controller has decided on all damage up to this number: its replicas may begin with an empty log."""
        with self._lock:
            try:
                heard = self._damaged.heard(newest)
            except KafkaStorageError as error:
                for key in self._damaged.unmoved:
                    self._take_offline(key, error)
                return
            self._open_missing(heard)
            for key in heard:
                self._apply_partition(key, self.image)
                self._damaged.follow(key, self.image.partition(*key), self.broker_id)
            if heard:
                self._update_fetchers()

    def _take_offline(self, key: PartitionKey, error: SparkBrokerError) -> None:
        """An I/O error ends the broker (known bug 27). If it went on, it might lead partitions that it cannot serve."""
        topic = self._topics.get(key[0])
        fields = {"topic_partition": f"{topic.name if topic else key[0]}-{key[1]}", "why": str(error)}
        logger.error("%(topic_partition)s is offline: %(why)s", fields)
        self._offline = {**self._offline, key: error}
        self._outward.on_storage_failure(key, error)

    def _drop(self, key: PartitionKey, reason: SparkBrokerError) -> None:
        """Stop the replica and delete its files."""
        self._damaged.follow(key, None, self.broker_id)
        partition = self._partitions.get(key)
        self._offline = {k: v for k, v in self._offline.items() if k != key}
        if partition is None:
            return
        self._partitions = {k: v for k, v in self._partitions.items() if k != key}
        partition.stop(reason)
        partition.close(clean=False)
        self._directory.delete_partition(partition.topic.name, key[1])
        partition.lines.deleted(reason.message)

    def _update_fetchers(self) -> None:
        """Keep one fetcher for each broker that leads a partition which this broker follows."""
        wanted: dict[int, dict[PartitionKey, Partition]] = {}
        for key, partition in self._partitions.items():
            leader = partition.replica.assignment.leader
            if leader not in (-1, self.broker_id) and leader in self.image.brokers:
                wanted.setdefault(leader, {})[key] = partition
        for leader in set(self._fetchers) - set(wanted):
            self._fetchers.pop(leader).stop()
        for leader, partitions in wanted.items():
            self._fetcher(leader).follow(partitions, self._versions(partitions))

    def _versions(self, partitions: dict[PartitionKey, Partition]) -> dict[PartitionKey, int]:
        return {key: partition.replica.assignment.leader_epoch for key, partition in partitions.items()}

    def _fetcher(self, leader: int) -> Fetcher:
        broker = self.image.brokers[leader]
        fetcher = self._fetchers.get(leader)
        if fetcher and fetcher.address == (broker.host, broker.port) and fetcher.settings == self._fetcher_settings():
            return fetcher
        if fetcher:
            fetcher.stop()
        fetcher = self._new_fetcher(broker.host, broker.port, self._fetcher_settings(), self._outward.on_bug)
        self._fetchers[leader] = fetcher
        fetcher.start()
        return fetcher

    def _fetcher_settings(self) -> FetcherSettings:
        cluster = self._settings.cluster
        return FetcherSettings(
            broker_id=self.broker_id,
            broker_epoch=self.broker_epoch,
            max_wait_ms=cluster.replica_fetch_wait_max_ms,
            max_bytes=cluster.replica_fetch_response_max_bytes,
            request_timeout_ms=cluster.replica_fetch_wait_max_ms + 5_000,
        )

    def check_directory(self) -> None:
        """Raises KafkaStorageError where somebody has removed the broker's directory."""
        self._directory.check()

    def storage_failed(self, error: SparkBrokerError) -> None:
        """The broker's own files fail: it ends (known bug 27)."""
        self._outward.on_storage_failure(None, error)

    def save_high_watermarks(self) -> None:
        """Checkpoint every high watermark."""
        marks = {partition.key: partition.replica.high_watermark for partition in self.partitions()}
        self._directory.write_high_watermarks(marks)

    def stop(self, *, clean: bool) -> None:
        """Stop replication, refuse appends that wait, and close every log. `clean`: sync the logs first."""
        with self._lock:
            self._stop(clean=clean)

    def _stop(self, *, clean: bool) -> None:
        for fetcher in self._fetchers.values():
            fetcher.stop()
        for partition in self.partitions():
            partition.stop(NotLeaderOrFollowerError("the broker is shutting down"))
        if clean:
            self.save_high_watermarks()
        for partition in self.partitions():
            partition.close(clean=clean)


def _last_high_watermarks(directory: LogDirectory) -> dict[PartitionKey, int]:
    """High watermarks are only hints: a damaged file stops no replica, and the next checkpoint replaces it."""
    try:
        return directory.read_high_watermarks()
    except DamagedLogError as error:
        logger.warning("%s: %s; the high watermarks are learned anew", directory.path, error.message)
        return {}
