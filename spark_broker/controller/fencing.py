"""What becomes of the partitions of brokers that are no longer live."""

from __future__ import annotations

from collections.abc import Collection

from spark_broker.controller.election import Election, awaits_a_better, elect, lead_again
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import BrokerChangeRecord, MetadataRecord, PartitionChangeRecord
from spark_broker.model import NO_LEADER

OTHERS_COME_MS = 2_000
"""After a start of the controller, or of all brokers, the first that is back would lead everything: for so long, a
partition waits for whoever leads it rather. It loses little: the others are in its ISR, so nothing is committed without
them for as long as they are not dropped (`broker.session.timeout.ms`)."""


def fence(
    image: MetadataImage, gone: Collection[int], *, shrink: bool = True, full: Collection[int] = ()
) -> tuple[MetadataRecord, ...]:
    """Fence these brokers, as one decision: they leave the ISRs that have a live leader without them.

    A partition that is left without a leader keeps its ISR and its ELR: each member has everything that was committed,
    so whoever of them is back first may lead. `shrink=False` (the whole cluster stops) keeps every ISR. `full`: see
    `elect`.
    """
    fenced = [
        BrokerChangeRecord(id_, image.brokers[id_].epoch, fenced=True)
        for id_ in sorted(gone)
        if id_ in image.brokers and not image.brokers[id_].fenced
    ]
    return (*fenced, *leave(image, gone, shrink=shrink, full=full))


def leave(
    image: MetadataImage,
    gone: Collection[int],
    *,
    shrink: bool = True,
    keep_last_leader: bool = False,
    full: Collection[int] = (),
) -> list[PartitionChangeRecord]:
    """Elections and ISR changes when these brokers stop being electable.

    `keep_last_leader`: a leader that nobody can follow stays (controlled shutdown: it still serves).
    """
    gone = frozenset(gone)
    records = []
    for topic, number, state in image.partitions():
        if state.leader not in gone and gone.isdisjoint(state.isr):
            continue
        election = Election(state.leader, state.isr)
        if state.leader in gone or state.leader == NO_LEADER:
            election = elect(state, lambda broker: broker not in gone and image.is_live(broker), full)
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
    """A new controller knows of no session: everyone is fenced until it registers, and no ISR shrinks."""
    return fence(image, [id_ for id_, broker in image.brokers.items() if not broker.fenced], shrink=False)


def unfence(
    image: MetadataImage, broker_id: int, *, others_come: bool = False, full: Collection[int] = ()
) -> tuple[MetadataRecord, ...]:
    """The broker is ready: it leads what has no leader and has it in its ISR or ELR. Rest: `elect_leaders`."""
    record = BrokerChangeRecord(broker_id, image.brokers[broker_id].epoch, fenced=False)
    return (record, *elect_leaders(image.apply([record]), others_come=others_come, full=full))


def elect_leaders(
    image: MetadataImage, *, others_come: bool = False, full: Collection[int] = ()
) -> tuple[MetadataRecord, ...]:
    """Whoever is live leads what has no leader.

    `full`: see `elect`. `others_come`: not what somebody leads rather who is not back yet. See `OTHERS_COME_MS`.
    """
    records: list[MetadataRecord] = []
    for topic, number, state in image.partitions():
        if state.leader == NO_LEADER and not (others_come and awaits_a_better(state, image.is_live, full)):
            records += lead_again(topic, number, state, image.is_live, full)
    return tuple(records)


def drop_absent(image: MetadataImage, absent: Collection[int]) -> tuple[MetadataRecord, ...]:
    """Brokers that stay away leave the ISRs of the partitions that have a leader; the others keep waiting for them."""
    gone = frozenset(absent)
    records: list[MetadataRecord] = []
    for topic, number, state in image.partitions():
        if state.leader == NO_LEADER or state.leader in gone or gone.isdisjoint(state.isr):
            continue
        record = change(topic, number, state, isr=[broker for broker in state.isr if broker not in gone])
        records += [] if record is None else [record]
    return tuple(records)
