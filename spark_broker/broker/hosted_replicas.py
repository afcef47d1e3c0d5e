"""The replicas that this broker has, and look-ups of them, as the metadata says that was applied last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.topic import Topic
from spark_broker.controller.image import EMPTY_IMAGE
from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import (
    KafkaStorageError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)


@dataclass(frozen=True, slots=True)
class Outward:
    """The replicas' callbacks: for ISR proposals, a failed disk, our own bugs, and damage that was quarantined.

    `on_room`: the disk is full, or has room again; a replica is offline, or not any more. It is called under locks, so
    it must not wait. `on_work`: there is something to do for `ReplicaFiles.work`; None: the caller does it itself.
    """

    propose_isr: Callable[[PartitionKey, ProposeIsr], None]
    on_storage_failure: Callable[[PartitionKey | None, SparkBrokerError], None]  # None: the broker's own files
    on_bug: Callable[[BaseException], None]
    on_quarantine: Callable[[], None] = lambda: None
    on_room: Callable[[], None] = lambda: None
    on_work: Callable[[], None] | None = None


class HostedReplicas:
    """Look-ups are safe from any thread. Replicas are added and removed under `_lock`.

    Partitions' locks are taken within `_lock`, never the other way round.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Guarded by _lock: replaced, never changed in place, so that readers need no lock.
        self._partitions: dict[PartitionKey, Partition] = {}
        self._offline: dict[PartitionKey, SparkBrokerError] = {}  # why; in the order in which they are tried again
        self._topics: dict[str, Topic] = {}
        self._live: Mapping[int, int] = {}
        self._epochs: Mapping[int, int] = {}
        self._waiting: dict[Partition, None] = {}  # every partition in which an append waits, and perhaps others
        self.broker_id = -1
        self.broker_epoch = -1
        self.image = EMPTY_IMAGE

    def partition(self, topic_id: str, number: int) -> Partition:
        """The replica. Raises the error that says why it is not here."""
        partition = self._partitions.get((topic_id, number))
        if partition is not None:
            return partition
        failure = self._offline.get((topic_id, number))
        if failure is not None:
            why = f"broker {self.broker_id} cannot use its replica, and tries again: {failure.message}"
            raise KafkaStorageError(why, hint=failure.hint)
        topic = self.image.topics.get(topic_id)
        if topic is None:
            raise UnknownTopicIdError(f"no topic has the id {topic_id}")
        if number >= len(topic.partitions):
            raise UnknownTopicOrPartitionError(f"{topic.name} has {len(topic.partitions)} partitions, not {number + 1}")
        name = f"{topic.name}-{number}"
        if self.broker_id in topic.partitions[number].replicas:
            raise NotLeaderOrFollowerError(f"broker {self.broker_id} is opening its replica of {name}")
        raise NotLeaderOrFollowerError(f"broker {self.broker_id} has no replica of {name}")

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

    def registered(self, broker_id: int, broker_epoch: int) -> None:
        self.broker_id, self.broker_epoch = broker_id, broker_epoch

    def _belongs_here(self, key: PartitionKey) -> bool:
        state = self.image.partition(*key)
        return state is not None and self.broker_id in state.replicas
