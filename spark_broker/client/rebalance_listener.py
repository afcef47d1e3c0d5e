"""What a member of a group is told when partitions come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition


class Listens(Protocol):
    """What a consumer takes as a listener: a RebalanceListener, or any object with these methods."""

    def on_assigned(self, partitions: list[TopicPartition], /) -> object: ...
    def on_revoked(self, partitions: list[TopicPartition], /) -> object: ...
    def on_lost(self, partitions: list[TopicPartition], /) -> object: ...


class RebalanceListener:
    """Subclass it, and override what you need. `poll` (or the iteration) calls it, between two records.

    A method may call the consumer: `commit`, `seek`, `position`, `pause`. It may not poll. An exception that it raises
    is raised by `poll`; the partitions have come or gone all the same.
    """

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """The consumer reads these from now on. They are in `assignment()`, so a `seek` is possible."""

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """The consumer gives these up: another member gets them once this returns.

        With enable.auto.commit their positions are committed already. Otherwise this is the moment to do so.
        """

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """The group went on without this consumer, and other members may read these already. A commit would be refused.

        Calls `on_revoked` unless it is overridden.
        """
        self.on_revoked(partitions)


class _Adapted(RebalanceListener):
    """An object that has some of the methods."""

    def __init__(self, told: object) -> None:
        self.told = told

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        getattr(self.told, "on_assigned", super().on_assigned)(partitions)

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        getattr(self.told, "on_revoked", super().on_revoked)(partitions)

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        getattr(self.told, "on_lost", super().on_lost)(partitions)


def listener_of(value: object) -> RebalanceListener:
    """What a caller hands in. Raises InvalidDataError for an object with none of the methods."""
    if isinstance(value, RebalanceListener):
        return value
    names = ("on_assigned", "on_revoked", "on_lost")
    if isinstance(value, type) or not any(callable(getattr(value, name, None)) for name in names):
        raise InvalidDataError(f"listener is {type(value).__name__}; it must have one of {', '.join(names)}")
    return _Adapted(value)
