"""What a partition suffers from, by what its leader and its replicas are."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Protocol

from spark_broker.model import NO_LEADER


class Trouble(StrEnum):
    """What a partition suffers from. It may be more than one of these."""

    OFFLINE = "offline"
    UNDER_REPLICATED = "under-replicated"
    UNDER_MIN_ISR = "under min.insync.replicas"


class Partition(Protocol):
    """What both a description and the metadata say of a partition."""

    @property
    def leader(self) -> int | None: ...
    @property
    def replicas(self) -> Collection[int]: ...
    @property
    def isr(self) -> Collection[int]: ...
    @property
    def adding(self) -> Collection[int]: ...


def troubles(partition: Partition, min_insync_replicas: int) -> set[Trouble]:
    """What such a partition suffers from. It refuses acks=all while the ISR is below the minimum, or below all replicas
    where these are fewer. A replica that a move adds need not be in the ISR before the move is over (as in Kafka).
    """
    replicas, isr = partition.replicas, partition.isr
    suffers = {
        Trouble.OFFLINE: partition.leader is None or partition.leader == NO_LEADER,
        Trouble.UNDER_REPLICATED: any(id_ not in isr and id_ not in partition.adding for id_ in replicas),
        Trouble.UNDER_MIN_ISR: len(isr) < min(min_insync_replicas, len(replicas)),
    }
    return {trouble for trouble, here in suffers.items() if here}
