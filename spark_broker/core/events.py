"""Events of a partition replica: the controller's assignment, the recovered log, written batches, a leader's answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spark_broker.core.divergence import Diverging, FetchPosition
from spark_broker.core.epochs import UNDEFINED_EPOCH, EpochHistory
from spark_broker.core.producers import ProducerStates


@dataclass(frozen=True, slots=True)
class LeaderAndIsr:
    """The controller's state of the partition. `leader` -1: there is none.

    `unclean_epoch`: the newest leader epoch that began with an election that may have lost records; -1: there was none.
    """

    leader: int
    leader_epoch: int
    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    unclean_epoch: int = -1


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """What was found on disk when the replica was opened. `purge_offset`: see `core.compaction.Cleaned`."""

    log_start_offset: int
    log_end_offset: int
    high_watermark: int
    epochs: EpochHistory
    producers: ProducerStates
    purge_offset: int = 0


class AppendGrant(NamedTuple):
    """The place of the leader's next batch."""

    base_offset: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class AwaitTransaction:
    """The transactional batch may be appended once the coordinator has confirmed that its transaction is open.

    The coordinator adds the partition to the transaction before it confirms. The partition then gets the transaction's
    marker (KIP-890).
    """


@dataclass(frozen=True, slots=True)
class Beginning:
    """The topic has given a partition's offsets below `offset` already: they are in its table, or deleted.

    `history_end`: where the table ends, after a record of the leader epoch `history_epoch` (-1: not known).
    """

    offset: int
    history_end: int = -1
    history_epoch: int = UNDEFINED_EPOCH


@dataclass(frozen=True, slots=True)
class Fetched:
    """A leader's answer to a follower that asked from `position` on: batches, which the shell has, or a divergence.

    `purge_offset`: deletions below it may be missing from the leader's log.
    """

    position: FetchPosition
    leader_epoch: int
    high_watermark: int
    log_start_offset: int
    diverging: Diverging | None = None
    purge_offset: int = 0
