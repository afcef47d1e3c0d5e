"""Self-healing: the replicas of brokers that stay away, and those that a partition lacks, are built on live brokers."""

from __future__ import annotations

from collections.abc import Collection

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.controller.placement import Loads, loads_of, replacement
from spark_broker.controller.reassignment import move, moves_in_progress
from spark_broker.controller.records import MetadataRecord
from spark_broker.model import NO_LEADER


def heal(
    image: MetadataImage, gone: Collection[int], max_moves: int, disks: Disks = ALL_WELL
) -> tuple[MetadataRecord, ...]:
    """Start to move replicas off the brokers `gone`, at most `max_moves` partitions being moved at once.

    A partition stays as it is where it has no leader to copy from, or where no other live broker with room is left.
    """
    if not gone:
        return ()
    budget = max_moves - moves_in_progress(image, disks)
    loads = loads_of(image)
    records: list[MetadataRecord] = []
    for topic, number, state in image.partitions():
        if gone_targets := [b for b in state.target_replicas if b in gone]:
            if state.leader == NO_LEADER or (budget <= 0 and not state.reassigning):
                continue
            target = _healed(image, state, gone_targets, loads, disks)
            started = move(image, topic, number, state, target, disks)
            budget -= bool(started) and not state.reassigning
            records += started
    return tuple(records)


def fill_up(image: MetadataImage, max_moves: int, disks: Disks = ALL_WELL) -> tuple[MetadataRecord, ...]:
    """Begin to build the replicas that partitions lack, as far as there are live brokers with room for them, at most
    `max_moves` partitions at once.
    """
    live = {broker.id for broker in image.live_brokers()}
    with_room = live - disks.full
    lacking = [
        (topic, number, state)
        for topic, number, state in image.partitions()
        if state.lacking
        and state.leader != NO_LEADER
        and not state.reassigning
        and not with_room <= set(state.replicas)
    ]
    if not lacking:
        return ()
    loads = loads_of(image)
    share = -(-sum(loads.leaders[broker] for broker in live) // len(live))
    records: list[MetadataRecord] = []
    for topic, number, state in lacking[: max(max_moves - moves_in_progress(image, disks), 0)]:
        target = _filled_up(image, state, loads, share, disks)
        still_lacking = state.lacking + len(state.replicas) - len(target)
        records += move(image, topic, number, state, target, disks, lacking=still_lacking)
    return tuple(records)


def _filled_up(image: MetadataImage, state: PartitionRegistration, loads: Loads, share: int, disks: Disks) -> list[int]:
    """The replicas with those that it lacks. A new one is to lead where its broker leads less than its `share`, and the
    other one more.
    """
    target = list(state.replicas)
    for _ in range(state.lacking):
        new_broker = replacement(image, target, (), loads, leads=False, disks=disks)
        if new_broker is None:
            break
        loads.replicas[new_broker] += 1
        if loads.leaders[new_broker] < share < loads.leaders[target[0]]:
            loads.leaders[target[0]] -= 1
            loads.leaders[new_broker] += 1
            target.insert(0, new_broker)
        else:
            target.append(new_broker)
    return target


def _healed(
    image: MetadataImage, state: PartitionRegistration, gone: Collection[int], loads: Loads, disks: Disks
) -> list[int]:
    """The target replicas. Each one that is gone is replaced at its position, so preferred leaders stay spread."""
    target = list(state.target_replicas)
    for position, broker in enumerate(target):
        if broker in gone:
            keep = [other for other in target if other not in gone]
            new_broker = replacement(image, keep, target, loads, leads=position == 0, disks=disks)
            if new_broker is not None:
                target[position] = new_broker
                loads.replicas[new_broker] += 1
                loads.leaders[new_broker] += position == 0
    return target
