"""What a producer sends to one leader: the partitions that have a batch for it, and the batches that it has not
answered yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from spark_broker.client.outgoing import OutgoingBatch
from spark_broker.client.settings import Address

if TYPE_CHECKING:
    from spark_broker.client.partition_queue import PartitionQueue


class InFlight(NamedTuple):
    """A batch that waits for its answer."""

    queue: PartitionQueue
    batch: OutgoingBatch
    sent_at_ms: int


@dataclass(slots=True, eq=False)
class LeaderChannel:
    """One append stream, as its sender's machine knows it.

    Invariant: once `broken`, `line` and `in_flight` are empty, and the machine forgets the channel.
    """

    broker_id: int
    address: Address
    line: deque[PartitionQueue] = field(default_factory=deque)
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    broken: bool = False

    def age_ms(self, now_ms: int) -> int:
        """The deadline for the leader's answer to the oldest append in flight."""
        oldest = next(iter(self.in_flight.values()), None)
        return 0 if oldest is None else now_ms - oldest.sent_at_ms
