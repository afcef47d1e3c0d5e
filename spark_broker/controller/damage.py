"""Replicas whose log was found damaged and quarantined leave ISR and ELR, and never lead with what is left.

Such a replica may have been the last one that had everything. Elected with an empty log, it would make every other
replica truncate its records. The partition then has no leader until an unclean election accepts the loss.

The leader epoch rises in any case. The broker may be live: fetches that it made with the lost log, and ISR proposals
that rest on them, may still be under way. They name the older epoch and no longer count.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.election import Election, elect
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import MetadataRecord, PartitionChangeRecord
from spark_broker.model import NO_LEADER


def quarantine(
    image: MetadataImage, broker_id: int, partitions: Iterable[tuple[str, int]], disks: Disks = ALL_WELL
) -> tuple[MetadataRecord, ...]:
    """The broker leaves the ISRs and ELRs of these partitions."""
    records: list[MetadataRecord] = []
    for topic_id, number in dict.fromkeys(partitions):
        state = image.partition(topic_id, number)
        if state is None or broker_id not in state.replicas:
            continue
        election = Election(state.leader, state.isr)
        if state.leader in (broker_id, NO_LEADER):
            election = elect(state, disks.electable(image, (topic_id, number), without=(broker_id,)), disks)
        record = change(
            image.topics[topic_id],
            number,
            state,
            leader=election.leader,
            isr=election.isr,
            lost=(broker_id,),
            damaged=(broker_id,),
        )
        records.append(replace(record or PartitionChangeRecord(topic_id, number), leader=election.leader))
    return tuple(records)
