"""What replication and the producers' state need to know of a batch."""

from __future__ import annotations

from dataclasses import dataclass

NO_PRODUCER = -1


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """A batch of the log as the state machine sees it. `next_offset` is exclusive.

    `control`: a marker that ends the producer's transaction, as committed or `aborted`; it has no sequence number.
    """

    base_offset: int
    next_offset: int
    leader_epoch: int
    append_time_ms: int
    producer_id: int = NO_PRODUCER
    producer_epoch: int = -1
    sequence: int = -1
    transactional: bool = False
    control: bool = False
    aborted: bool = False
