"""What becomes of a replica when its disk refuses something, fails, or shows damage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from spark_broker.broker.partition_events import PartitionEvents, PartitionKey
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.state_lock import StateLock
from spark_broker.core.replica import Replica, Role
from spark_broker.errors import (
    DamagedLogError,
    KafkaStorageError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    StorageRefusedError,
    UnreadableLogError,
)

if TYPE_CHECKING:
    from spark_broker.broker.partition import Partition

T = TypeVar("T")


class GuardedStorage(ABC):
    """The part of a `Partition` through which it uses its log."""

    def __init__(self, key: PartitionKey, log: ReplicaLog, replica: Replica, events: PartitionEvents) -> None:
        self.key = key
        self.replica = replica
        self.lock = StateLock()
        self._log = log
        self._events = events
        self.is_unreadable = False
        """Whether bytes of this replica, which is the only copy, could not be read. It serves the rest."""

    @abstractmethod
    def stop(self, error: SparkBrokerError) -> None:
        """Take the replica offline; appends that wait are refused with `error`."""

    def guard_storage(self, act: Callable[[], T], *, reads: bool = False) -> T:
        """A failing disk takes the replica offline, and so does damage. A full disk only makes `act` fail; where that
        has left the log unusable, the replica is offline until its log is opened anew.

        `reads`: it changes nothing, and the log can do without what it reads.
        """
        try:
            return act()
        except StorageRefusedError as error:
            self._events.on_refused(error)
            self.give_up_if_unusable(error)
            raise
        except UnreadableLogError as error:
            raise self._unreadable(error, reads=reads) from error
        except (KafkaStorageError, DamagedLogError) as error:
            raise self._broken(error) from error

    def _learn(self, read: Callable[[], T]) -> T:
        """Read what the log has become. If that is refused, the replica would not know its own log: it stops."""
        try:
            return self.guard_storage(read)
        except StorageRefusedError as error:
            self._give_up(error)
            raise

    def give_up_if_unusable(self, error: StorageRefusedError) -> None:
        """Stop where what was refused has left the log unusable."""
        if self._log.is_unusable:
            self._give_up(error)

    def _unreadable(self, error: UnreadableLogError, *, reads: bool) -> SparkBrokerError:
        """What cannot be read is damage where another replica has it. The only copy serves what can be read; where it
        cannot do without the rest, its log is opened anew. Returns the error for the caller."""
        with self.lock:
            if self.replica.has_other_copy and self._events.on_damage is not None:
                return self._broken(DamagedLogError(error.message))
            if not reads or self._log.is_unusable:
                self._give_up(error)
            elif not self.is_unreadable and self.replica.role is not Role.STOPPED:
                self.is_unreadable = True
                cast("Partition", self).lines.unreadable(error)
        return KafkaStorageError(error.message, hint=error.hint)

    def _give_up(self, error: SparkBrokerError) -> None:
        """Stop until the log can be opened anew."""
        with self.lock:
            if self.replica.role is not Role.STOPPED:
                self.stop(KafkaStorageError(f"{self} is offline here: {error.message}"))
                self._events.on_unusable(cast("Partition", self), error)

    def _broken(self, error: SparkBrokerError) -> SparkBrokerError:
        """Stop for good and report it, once. Returns the error for the caller.

        After damage that is NotLeaderOrFollowerError, because another replica must lead.
        """
        told, tell = error, partial(self._events.on_storage_failure, self.key, error)
        if isinstance(error, DamagedLogError) and self._events.on_damage is not None:
            told = NotLeaderOrFollowerError(f"{self} is damaged here: {error.message}")
            tell = partial(self._events.on_damage, cast("Partition", self), error)
        with self.lock:
            if self.replica.role is not Role.STOPPED:
                self.stop(told)
                tell()
        return told
