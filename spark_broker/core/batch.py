"""What replication and the producers' state need to know of a batch."""

from __future__ import annotations

from typing import NamedTuple

from spark_broker.protocol.frame import ABORT, CONTROL, TRANSACTIONAL, BatchHeader

NO_PRODUCER = -1


class BatchInfo(NamedTuple):
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
    attributes = header.attributes
    return BatchInfo(
        header.base_offset,
        header.base_offset + header.last_offset_delta + 1,
        header.leader_epoch,
        header.append_time_ms,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        transactional=bool(attributes & TRANSACTIONAL),
        control=bool(attributes & CONTROL),
        aborted=bool(attributes & ABORT),
    )
