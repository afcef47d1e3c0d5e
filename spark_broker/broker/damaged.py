"""The damaged replicas of a broker, from the moment they are quarantined until they are in sync again."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from spark_broker.controller.image import PartitionRegistration
from spark_broker.errors import SparkBrokerError, SyncFailedError
from spark_broker.storage.directory import DAMAGED_SUFFIX, DIVERGED_SUFFIX, LogDirectory
from spark_broker.storage.files import storage_error
from spark_broker.storage.quarantine import read_quarantine, write_quarantine

logger = logging.getLogger(__name__)

PartitionKey = tuple[str, int]

BEFORE_THIS_PROCESS = 0
"""The number of damage that an earlier process found. The broker is not live before the controller knows of it."""


class DamagedReplicas:
    """The damaged replicas that heartbeats report.

    A replica stays on the list until the controller has taken it out of the ISR and the ELR, and let it in again. The
    list outlives the process: otherwise the next process would find an empty log, and no damage. Damage that this
    process finds is numbered from 1 on, so that a replica that is damaged twice is taken out twice.
    """

    def __init__(self, directory: LogDirectory) -> None:
        self._directory = directory
        # Replaced, never changed in place: heartbeats read it from their own thread.
        quarantine = read_quarantine(directory.path, fs=directory.fs)
        self._numbers: Mapping[PartitionKey, int] = dict.fromkeys(quarantine.replicas, BEFORE_THIS_PROCESS)
        self._newest = BEFORE_THIS_PROCESS
        self._taken_out: set[PartitionKey] = set()
        self._leaving: set[PartitionKey] = set()  # in sync again, or moved away, and the list on disk still has them
        self._suffixes: dict[PartitionKey, str] = {}  # of this process's finds: what their directories are called
        # As the list on disk says: their directories may still be in their place.
        self._unmoved: Mapping[PartitionKey, str] = quarantine.unmoved
        self._move()

    @property
    def keys(self) -> list[PartitionKey]:
        return sorted(self._numbers)

    @property
    def unmoved(self) -> list[PartitionKey]:
        """The replicas whose damaged directory may still be in its place."""
        return sorted(self._unmoved)

    @property
    def reports(self) -> list[tuple[str, int, int]]:
        """Topic id, partition, and the number of the damage."""
        return sorted((*key, number) for key, number in self._numbers.items())

    def is_unheard(self, key: PartitionKey) -> bool:
        """Whether the controller may still count on a log that this process has quarantined.

        Meanwhile no new log may take its place: this broker is live, so it might be elected with the empty log, and all
        other replicas would truncate to it. Nor may it while the list calls the directory unmoved: the next process
        would quarantine the new log.
        """
        return key in self._unmoved or (
            self._numbers.get(key, BEFORE_THIS_PROCESS) > BEFORE_THIS_PROCESS and key not in self._taken_out
        )

    def quarantine(self, key: PartitionKey, topic: str, *, diverged: bool = False) -> None:
        """Move the damaged log away; `diverged`: it is whole, and the leader's is not what it was.

        Raises KafkaStorageError, or StorageRefusedError (nothing has changed).
        """
        self._suffixes[key] = DIVERGED_SUFFIX if diverged else DAMAGED_SUFFIX
        self._replace({**self._numbers, key: self._newest + 1}, {**self._unmoved, key: topic})
        self._newest += 1
        self._taken_out.discard(key)
        self._leaving.discard(key)
        self._move()

    def _move(self) -> None:
        """Move the directories that are still in their place. If that fails, `heard` tries again."""
        if not self._unmoved:
            return
        try:
            for (topic_id, partition), topic in self._unmoved.items():
                suffix = self._suffixes.get((topic_id, partition), DAMAGED_SUFFIX)
                self._directory.quarantine(topic, partition, suffix)
            self._replace(self._numbers, {})
        except SparkBrokerError as error:
            if isinstance(error, SyncFailedError):
                raise
            logger.warning("no new replica takes the place of a damaged one yet: %s", error)

    def heard(self, newest: int) -> list[PartitionKey]:
        """The controller knows of all damage up to this number, and this broker has its decisions.

        Returns the replicas that may begin with an empty log. What the disk has refused is tried again. Raises
        SyncFailedError.
        """
        self._leave()
        heard = [key for key, number in sorted(self._numbers.items()) if number <= newest and self.is_unheard(key)]
        self._move()
        if self._unmoved:
            return []
        self._taken_out.update(heard)
        return heard

    def follow(self, key: PartitionKey, state: PartitionRegistration | None, broker_id: int) -> None:
        """Follow the controller's state of a partition: a replica that is let in again, or moved away, is forgotten.

        A replica that is in the ISR or ELR and was never seen outside stays on the list: the controller may not know of
        the damage yet.
        """
        if key not in self._numbers:
            return
        if state is None or broker_id not in state.replicas:
            self._forget(key)
        elif self.is_unheard(key):
            return  # In or out, this state is older than the controller's answer.
        elif broker_id not in state.isr and broker_id not in state.elr:
            self._taken_out.add(key)
        elif key in self._taken_out:
            self._forget(key)

    def _forget(self, key: PartitionKey) -> None:
        self._leaving.add(key)
        self._leave()

    def _leave(self) -> None:
        """Take these replicas off the list. If that fails, `heard` tries again: the next process would report a replica
        that is whole, and it would leave the ISR.
        """
        if not self._leaving:
            return
        try:
            self._replace({key: n for key, n in self._numbers.items() if key not in self._leaving}, self._unmoved)
        except SparkBrokerError as error:
            if isinstance(error, SyncFailedError):
                raise
            logger.warning("a replica that was damaged stays on the list for now: %s", error)
            return
        self._taken_out -= self._leaving
        self._leaving.clear()

    def _replace(self, numbers: Mapping[PartitionKey, int], unmoved: Mapping[PartitionKey, str]) -> None:
        unmoved = {key: topic for key, topic in unmoved.items() if key in numbers}
        try:
            write_quarantine(self._directory.path, numbers, unmoved, fs=self._directory.fs)
        except OSError as error:
            raise storage_error(error, str(self._directory.path)) from error
        self._numbers, self._unmoved = numbers, unmoved
