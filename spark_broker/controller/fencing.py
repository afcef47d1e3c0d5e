"""What becomes of the partitions of brokers that are no longer live."""

from __future__ import annotations

from collections.abc import Collection

from spark_broker.controller.election import change, elect
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import BrokerChangeRecord, MetadataRecord, PartitionChangeRecord
from spark_broker.model import NO_LEADER


def fence(image: MetadataImage, gone: Collection[int], *, shrink: bool = True) -> tuple[MetadataRecord, ...]:
    """Fence these brokers, as one decision: they leave the ISRs that have a live leader without them.

    A partition that is left without a leader keeps its whole ISR: each member has everything that was committed, so
    whoever of them is back first may lead. `shrink=False` (the whole cluster stops) keeps every ISR.
    """
    fenced = [
        BrokerChangeRecord(id_, image.brokers[id_].epoch, fenced=True)
        for id_ in sorted(gone)
        if id_ in image.brokers and not image.brokers[id_].fenced
    ]
    return (*fenced, *leave(image, gone, shrink=shrink))


def leave(
    image: MetadataImage, gone: Collection[int], *, shrink: bool = True, keep_last_leader: bool = False
) -> list[PartitionChangeRecord]:
    """Elections and ISR changes when these brokers stop being electable.

    `keep_last_leader`: a leader that nobody can follow stays (controlled shutdown: it still serves).
    """
    gone = frozenset(gone)
    records = []
    for topic, number, state in image.partitions():
        if state.leader not in gone and gone.isdisjoint(state.isr):
            continue
        leader = state.leader
        if leader in gone or leader == NO_LEADER:
            leader = elect(state, lambda broker: broker not in gone and image.is_live(broker))
        if leader == NO_LEADER and keep_last_leader:
            continue
        isr = state.isr
        if leader != NO_LEADER and shrink:
            isr = tuple(broker for broker in isr if broker not in gone)
        record = change(topic.topic_id, number, state, leader=leader, isr=isr)
        if record is not None:
            records.append(record)
    return records


def fence_all(image: MetadataImage) -> tuple[MetadataRecord, ...]:
    """A new controller knows of no session: everyone is fenced until it registers, and no ISR shrinks."""
    return fence(image, [id_ for id_, broker in image.brokers.items() if not broker.fenced], shrink=False)


def unfence(image: MetadataImage, broker_id: int) -> tuple[MetadataRecord, ...]:
    """The broker is ready: it leads the partitions without a leader in whose ISR it is."""
    broker = image.brokers[broker_id]
    records: list[MetadataRecord] = [BrokerChangeRecord(broker_id, broker.epoch, fenced=False)]
    for topic, number, state in image.partitions():
        if state.leader == NO_LEADER and broker_id in state.isr and broker_id not in state.damaged:
            records.append(PartitionChangeRecord(topic.topic_id, number, leader=broker_id))
    return tuple(records)


def drop_absent(image: MetadataImage, absent: Collection[int]) -> tuple[MetadataRecord, ...]:
    """Brokers that stay away leave the ISRs of the partitions that have a leader; the others keep waiting for them."""
    gone = frozenset(absent)
    records = []
    for topic, number, state in image.partitions():
        if state.leader == NO_LEADER or state.leader in gone or gone.isdisjoint(state.isr):
            continue
        isr = tuple(broker for broker in state.isr if broker not in gone)
        records.append(PartitionChangeRecord(topic.topic_id, number, isr=list(isr)))
    return tuple(records)
