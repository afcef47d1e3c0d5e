"""How far the replicas of partitions without a leader reach. Brokers report it in heartbeats."""

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
    """The newest report of each broker. While a partition has no leader, none of its logs changes. A report that names
    an older leader epoch or another incarnation of the broker does not count."""

    _said: dict[Key, dict[int, tuple[int, LogEnd]]] = field(default_factory=dict)

    def report(self, image: MetadataImage, broker_id: int, ends: Iterable[LogEnd]) -> list[Key]:
        """Take in a broker's report. Returns the reported partitions that have no leader."""
        told: list[Key] = []
        for end in ends:
            key = (end.topic_id, end.partition)
            state = image.partition(*key)
            if state is not None and state.leader == NO_LEADER and broker_id in state.replicas:
                self._said.setdefault(key, {})[broker_id] = (image.brokers[broker_id].epoch, end)
                told.append(key)
        return told

    def known(self, image: MetadataImage, key: Key, state: PartitionRegistration) -> dict[int, tuple[int, int]]:
        """(leader epoch of the last batch, log end) by live broker. The larger pair has more of what was committed.

        This holds where only ISR and ELR members were elected. Two logs with the same last epoch agree up to the
        smaller end. Other logs agree up to the start of the later epoch, whose leader had all that was committed.
        """
        ends: dict[int, tuple[int, int]] = {}
        for broker_id, (broker_epoch, end) in self._said.get(key, {}).items():
            broker = image.brokers.get(broker_id)
            current = broker is not None and broker.live and broker.epoch == broker_epoch
            if current and broker_id in state.replicas and end.leader_epoch == state.leader_epoch:
                ends[broker_id] = (end.last_epoch, end.log_end_offset)
        return ends

    def committed(self, image: MetadataImage, key: Key, state: PartitionRegistration) -> int:
        """What the live replicas that have reported know to be committed; -1: nothing.

        A replica that ends below it has lost records. It does not lead unless the loss is accepted.
        """
        known = self.known(image, key, state)
        marks = (end.high_watermark for broker_id, (_, end) in self._said.get(key, {}).items() if broker_id in known)
        return max(marks, default=-1)

    def forget_led(self, image: MetadataImage) -> None:
        """Drop the reports about partitions that have a leader again, or are gone."""
        for key in list(self._said):
            state = image.partition(*key)
            if state is None or state.leader != NO_LEADER:
                del self._said[key]


def is_asked_for(state: PartitionRegistration | None, broker_id: int) -> bool:
    """Whether the broker reports its log end: the partition has no leader, and the broker is in neither ISR nor ELR."""
    if state is None or state.leader != NO_LEADER:
        return False
    return broker_id in state.replicas and broker_id not in state.isr and broker_id not in state.elr


def most_complete(candidates: Sequence[int], ends: dict[int, tuple[int, int]], last: Iterable[int] = ()) -> int:
    """The candidate that reaches furthest, or the first of equals. Those in `last` come after all others."""
    unwanted = frozenset(last)
    unknown = (-1, -1)
    return max(candidates, key=lambda b: (b not in unwanted, ends.get(b, unknown), -candidates.index(b)))
