"""What a partition replica asks its shell to do, in the order in which it asks."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.core.epochs import EpochHistory
from spark_broker.errors import SparkBrokerError


@dataclass(frozen=True, slots=True)
class SaveEpochs:
    """Save the leader-epoch history before any later effect is carried out.

    The shell may save it later where the log itself gives the same history after a crash.
    """

    history: EpochHistory


@dataclass(frozen=True, slots=True)
class TruncateLog:
    """Cut the log so that it ends at `offset` (exclusive)."""

    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestartLog:
    """Drop everything; fetch the state of the leader's replica, install it and go on from its log start."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """The leader lacks what this replica has committed: keep this log aside, and begin anew with an empty one."""

    reason: str


@dataclass(frozen=True, slots=True)
class AdvanceLogStart:
    """Records below `offset` are no longer part of the log."""

    offset: int


@dataclass(frozen=True, slots=True)
class HighWatermarkAdvanced:
    """Records below `offset` are committed: wake the reads that wait for them."""

    offset: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The append behind `token` is stored as its acks ask."""

    token: object
    base_offset: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The append behind `token` failed."""

    token: object
    error: SparkBrokerError


@dataclass(frozen=True, slots=True)
class ProposeIsr:
    """Ask the controller to make this the ISR: pairs of broker id and broker epoch (KIP-903).

    `lacking`: replicas that leave the ISR because they report that they lack committed records. `reason`: a text for
    the log.
    """

    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]
    lacking: tuple[int, ...] = ()
    reason: str = ""


Effect = (
    SaveEpochs
    | TruncateLog
    | RestartLog
    | SetAside
    | AdvanceLogStart
    | HighWatermarkAdvanced
    | Acknowledge
    | Refuse
    | ProposeIsr
)
