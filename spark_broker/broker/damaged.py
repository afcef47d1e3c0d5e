"""The damaged replicas of a broker, from the moment they are set aside until they are in sync again."""

from __future__ import annotations

from spark_broker.controller.image import PartitionState
from spark_broker.errors import KafkaStorageError
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.set_aside import read_set_aside, write_set_aside

PartitionKey = tuple[str, int]


class DamagedReplicas:
    """What heartbeats name until the controller has taken the replica out of the ISR and the ELR, and let it in again.

    The list outlives the process: a new one would else find an empty log, and no damage.
    """

    def __init__(self, directory: LogDirectory) -> None:
        self._directory = directory
        # Replaced, never changed in place: heartbeats read it from their own thread.
        self._keys: frozenset[PartitionKey] = read_set_aside(directory.path, fs=directory.fs)
        self._taken_out: set[PartitionKey] = set()

    @property
    def keys(self) -> list[PartitionKey]:
        return sorted(self._keys)

    def set_aside(self, key: PartitionKey, topic: str) -> None:
        """Move the damaged log away. Raises KafkaStorageError."""
        self._replace(self._keys | {key})
        self._taken_out.discard(key)
        self._directory.set_aside(topic, key[1])

    def follow(self, key: PartitionKey, state: PartitionState | None, broker_id: int) -> None:
        """The controller's word of a partition: a replica that is let in again, or is not here any more, is forgotten.

        In sync before it was seen to be out, it is there only because the controller has not heard of the damage yet.
        """
        if key not in self._keys:
            return
        if state is None or broker_id not in state.replicas:
            self._forget(key)
        elif broker_id not in state.isr and broker_id not in state.elr:
            self._taken_out.add(key)
        elif key in self._taken_out:
            self._forget(key)

    def _forget(self, key: PartitionKey) -> None:
        self._taken_out.discard(key)
        self._replace(self._keys - {key})

    def _replace(self, keys: frozenset[PartitionKey]) -> None:
        try:
            write_set_aside(self._directory.path, keys, fs=self._directory.fs)
        except OSError as error:
            raise KafkaStorageError(f"{self._directory.path}: {error}") from error
        self._keys = keys
