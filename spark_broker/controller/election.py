"""Elections: a member of the ISR leads, else an eligible leader replica (KIP-966), and no other broker.

Members of both sets have everything that was committed. Elections that may lose records are in `unclean.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.image import MetadataImage, PartitionRegistration, TopicState
from spark_broker.controller.log_ends import Key
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import PartitionChangeRecord
from spark_broker.model import NO_LEADER


@dataclass(frozen=True, slots=True)
class Election:
    """The winner (NO_LEADER if there is none) and the ISR that it leads."""

    leader: int
    isr: tuple[int, ...]


def elect(state: PartitionRegistration, electable: Callable[[int], bool], disks: Disks = ALL_WELL) -> Election:
    """The first electable member of the ISR, else of the ELR, in order of preference.

    An eligible replica leads alone, because no member of the ISR is electable. `electable`: see `Disks.electable`.
    Brokers without room come last in either set, but are not excluded: they can serve readers.
    """
    members = [broker for broker in state.replicas if broker in state.isr and electable(broker)]
    if members:
        return Election(min(members, key=disks.full.__contains__), state.isr)
    eligible = [broker for broker in state.replicas if broker in state.elr and electable(broker)]
    if eligible:
        winner = min(eligible, key=disks.full.__contains__)
        return Election(winner, (winner,))
    return Election(NO_LEADER, state.isr)


def awaits_a_better(image: MetadataImage, key: Key, state: PartitionRegistration, disks: Disks) -> bool:
    """Whether another replica would be elected if all brokers were back."""
    best = elect(state, lambda broker: not disks.is_offline(broker, key), disks)
    return elect(state, disks.electable(image, key), disks).leader != best.leader


def lead_again(
    image: MetadataImage, topic: TopicState, number: int, state: PartitionRegistration, disks: Disks = ALL_WELL
) -> tuple[PartitionChangeRecord, ...]:
    """The election of a partition that has no leader; no record where no replica is electable."""
    election = elect(state, disks.electable(image, (topic.topic_id, number)), disks)
    if election.leader == NO_LEADER:
        return ()
    record = change(topic, number, state, leader=election.leader, isr=election.isr)
    return () if record is None else (record,)
