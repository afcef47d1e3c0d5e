"""What replication and the producers' state need to know of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.protocol.frame import ABORT, CONTROL, TRANSACTIONAL, BatchHeader

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


def batch_info(header: BatchHeader) -> BatchInfo:
    """What the header of a stored batch says."""
    return BatchInfo(
        base_offset=header.base_offset,
        next_offset=header.next_offset,
        leader_epoch=header.leader_epoch,
        append_time_ms=header.append_time_ms,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        sequence=header.base_sequence,
        transactional=bool(header.attributes & TRANSACTIONAL),
        control=bool(header.attributes & CONTROL),
        aborted=bool(header.attributes & ABORT),
    )
