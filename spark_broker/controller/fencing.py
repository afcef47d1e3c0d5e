"""What becomes of the partitions of brokers that are no longer live."""

from __future__ import annotations

from collections.abc import Collection

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.election import Election, awaits_a_better, elect, lead_again
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import BrokerChangeRecord, MetadataRecord, PartitionChangeRecord
from spark_broker.model import NO_LEADER

OTHERS_COME_MS = 2_000
"""How long a partition waits for a replica that it prefers to those that are back. After a start of the controller, or
of all brokers, the first broker that is back would lead everything otherwise. Waiting costs little: the others are in
the ISR, so nothing is committed without them until they are dropped (`broker.session.timeout.ms`)."""


def fence(
    image: MetadataImage, gone: Collection[int], *, shrink: bool = True, disks: Disks = ALL_WELL
) -> tuple[MetadataRecord, ...]:
    """Fence these brokers, as one decision. They leave the ISRs of partitions that have a live leader without them.

    A partition that is left without a leader keeps its ISR and its ELR: each member has everything that was committed,
    so the first member that is back may lead. `shrink=False` (the whole cluster stops) keeps every ISR.
    """
    fenced = [
        BrokerChangeRecord(id_, image.brokers[id_].epoch, fenced=True)
        for id_ in sorted(gone)
        if id_ in image.brokers and not image.brokers[id_].fenced
    ]
    return (*fenced, *leave(image, gone, shrink=shrink, disks=disks))


def leave(
    image: MetadataImage,
    gone: Collection[int],
    *,
    shrink: bool = True,
    keep_last_leader: bool = False,
    disks: Disks = ALL_WELL,
) -> list[PartitionChangeRecord]:
    """Elections and ISR changes when these brokers stop being electable.

    `keep_last_leader`: a leader that no other replica can replace stays (controlled shutdown: it still serves).
    """
    gone = frozenset(gone)
    records = []
    for topic, number, state in image.partitions():
        if state.leader not in gone and gone.isdisjoint(state.isr):
            continue
        election = Election(state.leader, state.isr)
        if state.leader in gone or state.leader == NO_LEADER:
            election = elect(state, disks.electable(image, (topic.topic_id, number), without=gone), disks)
        if election.leader == NO_LEADER and keep_last_leader:
            continue
        isr = election.isr
        if election.leader != NO_LEADER and shrink:
            isr = tuple(broker for broker in isr if broker not in gone)
        record = change(topic, number, state, leader=election.leader, isr=isr)
        if record is not None:
            records.append(record)
    return records


def fence_all(image: MetadataImage) -> tuple[MetadataRecord, ...]:
    """A new controller has no sessions: each broker is fenced until it registers, and no ISR shrinks."""
    return fence(image, [id_ for id_, broker in image.brokers.items() if not broker.fenced], shrink=False)


def unfence(
    image: MetadataImage, broker_id: int, *, others_come: bool = False, disks: Disks = ALL_WELL
) -> tuple[MetadataRecord, ...]:
    """The broker is ready: it may lead partitions without a leader that have it in ISR or ELR. See `elect_leaders`."""
    record = BrokerChangeRecord(broker_id, image.brokers[broker_id].epoch, fenced=False)
    return (record, *elect_leaders(image.apply([record]), others_come=others_come, disks=disks))


def elect_leaders(
    image: MetadataImage, *, others_come: bool = False, disks: Disks = ALL_WELL
) -> tuple[MetadataRecord, ...]:
    """Elect live leaders for the partitions that have none.

    `others_come`: leave out partitions that wait for another replica; see `OTHERS_COME_MS`.
    """
    records: list[MetadataRecord] = []
    for topic, number, state in image.partitions():
        key = (topic.topic_id, number)
        if state.leader == NO_LEADER and not (others_come and awaits_a_better(image, key, state, disks)):
            records += lead_again(image, topic, number, state, disks)
    return tuple(records)


def drop_absent(image: MetadataImage, absent: Collection[int]) -> tuple[MetadataRecord, ...]:
    """Brokers that stay away leave the ISRs of partitions that have a leader. Other partitions still wait for them."""
    gone = frozenset(absent)
    records: list[MetadataRecord] = []
    for topic, number, state in image.partitions():
        if state.leader == NO_LEADER or state.leader in gone or gone.isdisjoint(state.isr):
            continue
        record = change(topic, number, state, isr=[broker for broker in state.isr if broker not in gone])
        records += [] if record is None else [record]
    return tuple(records)
