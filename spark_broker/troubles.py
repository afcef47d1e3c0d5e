"""What a partition suffers from, by what its leader and its replicas are."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from spark_broker.model import NO_LEADER


class Trouble(StrEnum):
    """What a partition suffers from. It may be more than one of these."""

    OFFLINE = "offline"
    UNDER_REPLICATED = "under-replicated"
    UNDER_MIN_ISR = "under min.insync.replicas"


def troubles(
    leader: int | None, replicas: Collection[int], isr: Collection[int], min_insync_replicas: int
) -> set[Trouble]:
    """What such a partition suffers from. It refuses acks=all while the ISR is below the minimum, or below all replicas
    where these are fewer.
    """
    suffers = {
        Trouble.OFFLINE: leader is None or leader == NO_LEADER,
        Trouble.UNDER_REPLICATED: len(isr) < len(replicas),
        Trouble.UNDER_MIN_ISR: len(isr) < min(min_insync_replicas, len(replicas)),
    }
    return {trouble for trouble, here in suffers.items() if here}
