"""How far the replicas of partitions without a leader reach, as their brokers say with their heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.model import NO_LEADER
from spark_broker.protocol.messages import LogEnd

Key = tuple[str, int]
"""Topic id and partition number."""


@dataclass
class LogEnds:
    """The newest word of each broker. While a partition has no leader, no log of it changes; a word that names an
    older leader epoch or another incarnation of the broker is void."""

    _said: dict[Key, dict[int, tuple[int, LogEnd]]] = field(default_factory=dict)

    def report(self, image: MetadataImage, broker_id: int, ends: Iterable[LogEnd]) -> list[Key]:
        """Take note; returns the partitions that this is about and that have no leader."""
        told: list[Key] = []
        for end in ends:
            key = (end.topic_id, end.partition)
            state = image.partition(*key)
            if state is not None and state.leader == NO_LEADER and broker_id in state.replicas:
                self._said.setdefault(key, {})[broker_id] = (image.brokers[broker_id].epoch, end)
                told.append(key)
        return told

    def known(self, image: MetadataImage, key: Key, state: PartitionRegistration) -> dict[int, tuple[int, int]]:
        """(leader epoch of the last batch, log end) by live broker; the larger one has more of what was committed.

        Logs that were led by elections of ISR and ELR members agree up to the end of the smaller one, where the last
        epochs are the same, and else up to where the later epoch began, which then had all that was committed.
        """
        ends: dict[int, tuple[int, int]] = {}
        for broker_id, (broker_epoch, end) in self._said.get(key, {}).items():
            broker = image.brokers.get(broker_id)
            current = broker is not None and broker.live and broker.epoch == broker_epoch
            if current and broker_id in state.replicas and end.leader_epoch == state.leader_epoch:
                ends[broker_id] = (end.last_epoch, end.log_end_offset)
        return ends

    def forget_led(self, image: MetadataImage) -> None:
        """Drop what is said of partitions that have a leader again, or are gone."""
        for key in list(self._said):
            state = image.partition(*key)
            if state is None or state.leader != NO_LEADER:
                del self._said[key]


def is_asked_for(state: PartitionRegistration | None, broker_id: int) -> bool:
    """Whether the broker is to say how far its replica reaches: nobody leads, and it does not lead by itself."""
    if state is None or state.leader != NO_LEADER:
        return False
    return broker_id in state.replicas and broker_id not in state.isr and broker_id not in state.elr


def most_complete(candidates: Sequence[int], ends: dict[int, tuple[int, int]], last: Iterable[int] = ()) -> int:
    """The candidate that reaches furthest, the first of equals; those in `last` only where there are no others."""
    unwanted = frozenset(last)
    unknown = (-1, -1)
    return max(candidates, key=lambda b: (b not in unwanted, ends.get(b, unknown), -candidates.index(b)))
