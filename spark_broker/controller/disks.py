"""What the brokers' heartbeats say of their disks. The metadata log does not hold it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from spark_broker.controller.image import MetadataImage
from spark_broker.controller.log_ends import Key


@dataclass(frozen=True, slots=True)
class Disks:
    """`full`: brokers without room. `offline`: by broker, the replicas whose files it cannot use at present.

    Invariant: no broker has an empty set in `offline`.
    """

    full: frozenset[int] = frozenset()
    offline: Mapping[int, frozenset[Key]] = field(default_factory=dict)

    def heard(self, broker_id: int, *, full: bool, offline: Iterable[Key]) -> Disks:
        """What is known after a heartbeat of this broker."""
        known = self.without(broker_id)
        replicas = frozenset(offline)
        return Disks(
            known.full | {broker_id} if full else known.full,
            {**known.offline, broker_id: replicas} if replicas else known.offline,
        )

    def without(self, broker_id: int) -> Disks:
        """What is known once nothing that this broker has said counts any more."""
        return Disks(self.full - {broker_id}, {b: keys for b, keys in self.offline.items() if b != broker_id})

    def is_offline(self, broker_id: int, key: Key) -> bool:
        """Whether the broker has said that it cannot use its replica of this partition."""
        return key in self.offline.get(broker_id, ())

    def electable(self, image: MetadataImage, key: Key, *, without: Collection[int] = ()) -> Callable[[int], bool]:
        """Tells which brokers may lead this partition: they are live, their replica is not offline, and they are not
        in `without`."""

        def may_lead(broker_id: int) -> bool:
            return broker_id not in without and image.is_live(broker_id) and not self.is_offline(broker_id, key)

        return may_lead


ALL_WELL: Final = Disks()
