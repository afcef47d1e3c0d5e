"""Leaders for partitions without a replica that is known to have everything that was committed.

There are three such elections. Each is noted, raises the leader epoch and leaves the winner alone in the ISR. Consumers
that know the epoch of what they read notice that the log was truncated (KIP-320).

    recover          nothing more can be lost: every replica is back, none is quarantined, none has more than the winner
    elect_allowed    the topic's unclean.leader.election.enable; it waits for replicas that may soon be back
    elect_uncleanly  on demand (ElectLeadersRequest with `unclean`)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.image import MetadataImage, PartitionRegistration, TopicState
from spark_broker.controller.log_ends import Key, LogEnds, is_asked_for, most_complete
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import MetadataRecord
from spark_broker.controller.topic_config import allows_unclean_election
from spark_broker.errors import ElectionNotNeededError, EligibleLeadersNotAvailableError
from spark_broker.model import NO_LEADER


def awaits_comparison(state: PartitionRegistration) -> bool:
    """Whether no replica may lead before all of them were compared, or somebody accepts a loss."""
    return state.leader == NO_LEADER and not state.isr and not state.elr


def recover(image: MetadataImage, ends: LogEnds, keys: Iterable[Key]) -> tuple[MetadataRecord, ...]:
    """Elect the most complete replica of partitions that lost every complete copy, once all replicas can be compared.

    The comparison proves that the winner has whatever is left, even if the last replica's machine crashed (KIP-966).
    With one replica, or where every append was synced, waiting for an operator would save nothing.
    """
    records: list[MetadataRecord] = []
    for key in keys:
        state = image.partition(*key)
        if state is None or not awaits_comparison(state) or state.damaged:
            continue
        known_ends = ends.known(image, key, state)
        if set(known_ends) == set(state.replicas):
            best = most_complete(state.replicas, known_ends)
            if known_ends[best][1] >= ends.committed(image, key, state):  # Else a log was replaced by an older one.
                records += _lead(image.topics[key[0]], key[1], state, best)
    return tuple(records)


def elect_allowed(
    image: MetadataImage, ends: LogEnds, away: Collection[int], disks: Disks = ALL_WELL
) -> tuple[MetadataRecord, ...]:
    """Elections that topics allow. `away`: brokers that have been away for so long that they are not waited for.

    A replica that is offline is waited for: its broker tries again, and it may be the one that has everything. So is a
    live broker that is asked how far its replica reaches: it says so in one of its next heartbeats. Only a damaged
    replica is not waited for: it comes after all others.
    """
    records: list[MetadataRecord] = []
    for topic, number, state in image.partitions():
        if state.leader != NO_LEADER or not allows_unclean_election(topic):
            continue
        live = list(filter(disks.electable(image, (topic.topic_id, number)), state.replicas))
        known = ends.known(image, (topic.topic_id, number), state)
        asked = [broker for broker in live if is_asked_for(state, broker) and broker not in state.damaged]
        if not all(broker in known for broker in asked):
            continue
        if live and all(broker in live or broker in away for broker in state.replicas):
            records += _lead(topic, number, state, _choose(image, ends, topic, number, state, live))
    return tuple(records)


def elect_uncleanly(
    image: MetadataImage,
    ends: LogEnds,
    topic: TopicState,
    number: int,
    state: PartitionRegistration,
    disks: Disks = ALL_WELL,
) -> tuple[MetadataRecord, ...]:
    """The election on demand. Raises ElectionNotNeededError, EligibleLeadersNotAvailableError."""
    if state.leader != NO_LEADER:
        raise ElectionNotNeededError(f"broker {state.leader} leads {topic.name}-{number}")
    live = list(filter(disks.electable(image, (topic.topic_id, number)), state.replicas))
    if not live:
        raise EligibleLeadersNotAvailableError(f"no replica of {topic.name}-{number} is live: {list(state.replicas)}")
    return _lead(topic, number, state, _choose(image, ends, topic, number, state, live))


def _choose(
    image: MetadataImage, ends: LogEnds, topic: TopicState, number: int, state: PartitionRegistration, live: list[int]
) -> int:
    return most_complete(live, ends.known(image, (topic.topic_id, number), state), last=state.damaged)


def _lead(topic: TopicState, number: int, state: PartitionRegistration, leader: int) -> tuple[MetadataRecord, ...]:
    record = change(topic, number, state, leader=leader, isr=(leader,), unclean=True)
    return () if record is None else (record,)
