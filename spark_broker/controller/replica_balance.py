"""A broker that joins gets its share: replicas move to it from the brokers that have the most."""

from __future__ import annotations

from collections.abc import Collection

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.controller.placement import Loads, conflicts, loads_of
from spark_broker.controller.reassignment import move, moves_in_progress
from spark_broker.controller.records import MetadataRecord
from spark_broker.model import NO_LEADER

_Candidate = tuple[str, int, PartitionRegistration]


def balance_replicas(
    image: MetadataImage, joined: Collection[int], max_moves: int, disks: Disks = ALL_WELL
) -> tuple[MetadataRecord, ...]:
    """Start to move replicas to the brokers that joined, at most `max_moves` partitions being moved at once.

    Stops when the spread is at most one replica. No move puts a partition's replicas on fewer failure domains.
    """
    budget = max_moves - moves_in_progress(image, disks)
    loads = loads_of(image)
    records: list[MetadataRecord] = []
    moved: set[tuple[str, int]] = set()
    while budget > 0:
        next_move = _next_move(image, [b for b in joined if image.is_live(b)], loads, moved)
        if next_move is None:
            break
        (topic_id, number, state), source, receiver = next_move
        target = [receiver if b == source else b for b in state.replicas]
        records += move(image, image.topics[topic_id], number, state, target, disks)
        moved.add((topic_id, number))
        _account(loads, state, source, receiver)
        budget -= 1
    return tuple(records)


def _account(loads: Loads, state: PartitionRegistration, source: int, receiver: int) -> None:
    loads.replicas[source] -= 1
    loads.replicas[receiver] += 1
    if state.replicas[0] == source:
        loads.leaders[source] -= 1
        loads.leaders[receiver] += 1


def _next_move(
    image: MetadataImage, joined: Collection[int], loads: Loads, moved: Collection[tuple[str, int]]
) -> tuple[_Candidate, int, int] | None:
    """The partition to move, its source and its receiver. None when no move makes the spread smaller."""
    if not joined:
        return None
    receiver = min(joined, key=lambda b: (loads.replicas[b], b))
    sources = sorted((b.id for b in image.live_brokers()), key=lambda b: (-loads.replicas[b], b))
    for source in sources:
        if loads.replicas[source] - loads.replicas[receiver] <= 1:
            return None
        wants_leader = loads.leaders[source] - loads.leaders[receiver] > 1
        candidates = [c for c in _movable(image, source, receiver) if (c[0], c[1]) not in moved]
        if candidates:
            best = min(candidates, key=lambda c: ((c[2].replicas[0] == source) != wants_leader, c[0], c[1]))
            return best, source, receiver
    return None


def _movable(image: MetadataImage, source: int, receiver: int) -> list[_Candidate]:
    moves = []
    for topic, number, state in image.partitions():
        if state.reassigning or state.leader == NO_LEADER or source not in state.replicas or receiver in state.replicas:
            continue
        others = [image.brokers[b] for b in state.replicas if b != source and b in image.brokers]
        if conflicts(image.brokers[receiver], others) <= conflicts(image.brokers[source], others):
            moves.append((topic.topic_id, number, state))
    return moves
