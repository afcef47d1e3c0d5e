"""Replicas whose log was found damaged and set aside: they leave the ISR, and never lead with what is left."""

from __future__ import annotations

from collections.abc import Iterable

from spark_broker.controller.election import elect
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import MetadataRecord, PartitionChangeRecord
from spark_broker.model import NO_LEADER


def set_aside(
    image: MetadataImage, broker_id: int, partitions: Iterable[tuple[str, int]]
) -> tuple[MetadataRecord, ...]:
    """The broker leaves the ISRs of these partitions; where it is the last member it stays, marked as not electable.

    Such a partition has no leader until somebody deletes its topic: electing the empty replica would make every other
    replica throw its records away.
    """
    records: list[MetadataRecord] = []
    for topic_id, number in dict.fromkeys(partitions):
        state = image.partition(topic_id, number)
        if state is None or broker_id not in state.isr or broker_id in state.damaged:
            continue
        rest = [member for member in state.isr if member != broker_id]
        leader = None
        if state.leader in (broker_id, NO_LEADER):
            leader = elect(state, lambda member: member != broker_id and image.is_live(member))
        records.append(
            PartitionChangeRecord(
                topic_id,
                number,
                leader=leader if leader != state.leader else None,
                isr=rest or None,
                damaged=None if rest else [*state.damaged, broker_id],
            )
        )
    return tuple(records)
