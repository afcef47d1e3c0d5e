"""The damaged replicas of a broker, from the moment they are quarantined until they are in sync again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from spark_broker.controller.image import PartitionRegistration
from spark_broker.errors import DamagedLogError, SparkBrokerError, SyncFailedError
from spark_broker.storage.directory import DAMAGED_SUFFIX, DIVERGED_SUFFIX, LogDirectory
from spark_broker.storage.files import storage_error
from spark_broker.storage.quarantine import Quarantine, read_quarantine, write_quarantine

logger = logging.getLogger(__name__)

PartitionKey = tuple[str, int]

BEFORE_THIS_PROCESS = 0
"""The number of damage that an earlier process found. The broker is not live before the controller knows of it."""


class Find(NamedTuple):
    """A damaged replica, with its topic's name. `diverged`: it is whole, and the leader's is not what it was."""

    key: PartitionKey
    topic: str
    diverged: bool = False


class DamagedReplicas:
    """The damaged replicas that heartbeats report.

    A replica stays on the list until the controller has taken it out of the ISR and the ELR, and let it in again. The
    list outlives the process: otherwise the next process would find an empty log, and no damage. Damage that this
    process finds is numbered from 1 on, so that a replica that is damaged twice is taken out twice.

    `follow` and `heard` belong to the thread that keeps the lease, so they only note what is to be done. `settle`,
    `write_down` and `quarantine` use the disk: one thread at a time calls them. All others are safe from any thread.
    """

    def __init__(self, directory: LogDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # for moments; never around work on files
        # As the list on disk says. They are replaced, never changed in place: heartbeats read them in their own thread.
        quarantine, self._is_unreadable = _list_of(directory)
        self._numbers: Mapping[PartitionKey, int] = dict.fromkeys(quarantine.replicas, BEFORE_THIS_PROCESS)
        self._unmoved: Mapping[PartitionKey, str] = quarantine.unmoved  # they may still be in their place
        self._newest = BEFORE_THIS_PROCESS
        # Guarded by _lock.
        self._heard = BEFORE_THIS_PROCESS - 1  # the newest damage that the controller has decided on
        self._taken_out: set[PartitionKey] = set()
        self._leaving: set[PartitionKey] = set()  # in sync again, or moved away, and the list on disk still has them
        self._suffixes: dict[PartitionKey, str] = {}  # of this process's finds: what their directories are called
        self._move()

    @property
    def keys(self) -> list[PartitionKey]:
        with self._lock:
            return sorted(key for key in self._numbers if key not in self._leaving)

    @property
    def unmoved(self) -> list[PartitionKey]:
        """The replicas whose damaged directory may still be in its place."""
        return sorted(self._unmoved)

    @property
    def reports(self) -> list[tuple[str, int, int]]:
        """Topic id, partition, and the number of the damage."""
        with self._lock:
            return sorted((*key, number) for key, number in self._numbers.items() if key not in self._leaving)

    def is_unheard(self, key: PartitionKey) -> bool:
        """Whether the controller may still count on a log that this process has quarantined.

        Meanwhile no new log may take its place: this broker is live, so it might be elected with the empty log, and all
        other replicas would truncate to it. Nor may it while the list calls the directory unmoved: the next process
        would quarantine the new log.
        """
        return key in self._unmoved or (
            self._numbers.get(key, BEFORE_THIS_PROCESS) > BEFORE_THIS_PROCESS
            and key not in self._taken_out
            and key not in self._leaving
        )

    def quarantine(self, key: PartitionKey, topic: str, *, diverged: bool = False) -> None:
        """Move the damaged log away. Raises as `quarantine_all` does."""
        self.quarantine_all([Find(key, topic, diverged)])

    def quarantine_all(self, found: Sequence[Find]) -> None:
        """Move the damaged logs away, with as few writes as for one.

        Raises KafkaStorageError, or StorageRefusedError (nothing has changed).
        """
        numbers = {find.key: self._newest + at for at, find in enumerate(found, start=1)}
        for find in found:
            self._suffixes[find.key] = DIVERGED_SUFFIX if find.diverged else DAMAGED_SUFFIX
        topics = {find.key: find.topic for find in found}
        self._write({**self._numbers, **numbers}, {**self._unmoved, **topics}, settled=numbers.keys())
        self._newest += len(found)
        self._move()

    def heard(self, newest: int) -> bool:
        """The controller knows of all damage up to this number, and this broker has its decisions. Returns whether
        `settle` has something to do."""
        with self._lock:
            self._heard = max(self._heard, newest)
        return bool(self._leaving or self._unmoved or self._waiting())

    def follow(self, key: PartitionKey, state: PartitionRegistration | None, broker_id: int) -> None:
        """Follow the controller's state of a partition: a replica that is let in again, or moved away, is forgotten.

        A replica that is in the ISR or ELR and was never seen outside stays on the list: the controller may not know of
        the damage yet.
        """
        with self._lock:
            if key not in self._numbers or key in self._leaving:
                return
            if state is None or broker_id not in state.replicas:
                self._leaving.add(key)
            elif self.is_unheard(key):
                return  # In or out, this state is older than the controller's answer.
            elif broker_id not in state.isr and broker_id not in state.elr:
                self._taken_out.add(key)
            elif key in self._taken_out:
                self._leaving.add(key)

    def settle(self) -> list[PartitionKey]:
        """Write down what was forgotten, and move what is unmoved. Returns the replicas that may begin anew.

        What the disk refuses is tried again by the next call. Raises SyncFailedError.
        """
        # Of what an earlier process found, the controller knows before this broker is live.
        early = [key for key in self._unmoved if self._numbers[key] == BEFORE_THIS_PROCESS or key in self._leaving]
        waiting = dict.fromkeys([*self._waiting(), *early])
        self.write_down()
        self._move()
        free = [key for key in waiting if key not in self._unmoved]
        with self._lock:
            self._taken_out.update(key for key in free if key in self._numbers)
        return free

    def _waiting(self) -> list[PartitionKey]:
        """Those that the controller has heard of, and that may not have begun anew yet."""
        return [
            key
            for key, number in sorted(self._numbers.items())
            if number <= self._heard and key not in self._leaving and self.is_unheard(key)
        ]

    def replace_unreadable(self) -> None:
        """Once the controller has heard that the directory has lost its list (`LogDirectory.begin_incarnation`). Raises
        KafkaStorageError, StorageRefusedError."""
        if self._is_unreadable:
            self._write(self._numbers, self._unmoved)
            self._is_unreadable = False

    def write_down(self) -> None:
        """Take what was forgotten off the list, all at once. Where that is refused, the next process would report
        replicas that are whole, and they would leave the ISR. Raises SyncFailedError.
        """
        with self._lock:
            leaving = frozenset(self._leaving)
        if leaving:
            numbers = {key: number for key, number in self._numbers.items() if key not in leaving}
            with _or_later("replicas that were damaged stay on the list for now"):
                self._write(numbers, self._unmoved, settled=leaving)

    def _move(self) -> None:
        """Move the directories that are still in their place, each by itself: one that fails keeps no other there."""
        moved: set[PartitionKey] = set()
        for key, topic in self._unmoved.items():
            with _or_later("no new replica takes the place of a damaged one yet"):
                self._directory.quarantine(topic, key[1], self._suffixes.get(key, DAMAGED_SUFFIX), sync=False)
                moved.add(key)
        if moved:
            with _or_later("no new replicas take the place of damaged ones yet"):
                self._directory.sync_names()
                unmoved = {key: topic for key, topic in self._unmoved.items() if key not in moved}
                self._write(self._numbers, unmoved)

    def _write(
        self,
        numbers: Mapping[PartitionKey, int],
        unmoved: Mapping[PartitionKey, str],
        settled: Collection[PartitionKey] = (),
    ) -> None:
        """Change the list. `settled`: what was noted of these is done, or is about damage before the present one."""
        unmoved = {key: topic for key, topic in unmoved.items() if key in numbers}
        try:
            write_quarantine(self._directory.path, numbers, unmoved, fs=self._directory.fs)
        except OSError as error:
            raise storage_error(error, str(self._directory.path)) from error
        with self._lock:
            self._numbers, self._unmoved = numbers, unmoved
            self._taken_out.difference_update(settled)
            self._leaving.difference_update(settled)


def _list_of(directory: LogDirectory) -> tuple[Quarantine, bool]:
    """The list in the directory, and whether it cannot be read: `LogDirectory.begin_incarnation` tells of that."""
    try:
        return read_quarantine(directory.path, fs=directory.fs), False
    except DamagedLogError:
        return Quarantine(frozenset(), {}), True


@contextmanager
def _or_later(what: str) -> Iterator[None]:
    """What the disk refuses is tried again. Raises SyncFailedError."""
    try:
        yield
    except SyncFailedError:
        raise
    except SparkBrokerError as error:
        logger.warning("%s: %s", what, error)
