"""What a sender's machine asks of its shell."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.client.leader_channel import LeaderChannel
from spark_broker.client.outgoing import Outcome, OutgoingBatch


@dataclass(frozen=True, slots=True)
class CompleteBatch:
    """The batch has its outcome, which is its last."""

    batch: OutgoingBatch
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class BatchDivided:
    """The batch has no outcome of its own any more: it is completed by its pieces, which have its place."""

    batch: OutgoingBatch
    pieces: list[OutgoingBatch]


@dataclass(frozen=True, slots=True)
class SendAppends:
    """Open the channel's stream if there is none yet, and send what `next_append` gives until it gives nothing."""

    channel: LeaderChannel


@dataclass(frozen=True, slots=True)
class CloseChannel:
    """Close the channel's stream. No answer on it counts any more. `suspect`: ask its broker last."""

    channel: LeaderChannel
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class RefreshMetadata:
    """Ask a broker for metadata, and report `metadata_refreshed` or `refresh_failed`."""


@dataclass(frozen=True, slots=True)
class RequestProducerIds:
    """Ask for this many new producer ids, and report `producer_ids_came` or `refresh_failed`."""

    count: int


SenderEffect = BatchDivided | CompleteBatch | SendAppends | CloseChannel | RefreshMetadata | RequestProducerIds
