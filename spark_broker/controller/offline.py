"""Replicas that their broker cannot use: their files could not be made or opened, and the broker tries again.

The broker itself is live, and serves its other replicas. Heartbeats name the replicas; the metadata log does not. Such
a replica does not lead and is not elected. It leaves the ISR of a partition that has another leader, as the replicas of
a fenced broker do: it may have everything, but it fetches nothing.
"""

from __future__ import annotations

from spark_broker.controller.disks import Disks
from spark_broker.controller.election import Election, elect
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.log_ends import Key
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import PartitionChangeRecord
from spark_broker.model import NO_LEADER


def step_back(
    image: MetadataImage, broker_id: int, disks: Disks, *, shrink: bool = True
) -> list[PartitionChangeRecord]:
    """The elections and ISR changes that follow from the offline replicas of this broker.

    `shrink=False` (the whole cluster stops) keeps every ISR.
    """
    records: list[PartitionChangeRecord] = []
    for key in sorted(disks.offline.get(broker_id, ())):
        topic, state = image.topics.get(key[0]), image.partition(*key)
        if topic is None or state is None or broker_id not in (state.leader, *state.isr):
            continue
        election = Election(state.leader, state.isr)
        if state.leader in (broker_id, NO_LEADER):
            election = elect(state, disks.electable(image, key), disks)
        isr = election.isr
        if election.leader != NO_LEADER and shrink:
            isr = tuple(member for member in isr if member != broker_id)
        record = change(topic, key[1], state, leader=election.leader, isr=isr)
        records += [] if record is None else [record]
    return records


def is_offline(image: MetadataImage, broker_id: int, keys: frozenset[Key]) -> str:
    """The line for the log about replicas that are offline from now on; it names a few of them."""
    names = sorted(f"{image.topics[id_].name}-{number}" for id_, number in keys if id_ in image.topics)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    launch = image.brokers[broker_id].launch
    return (
        f"broker {broker_id} of launch {launch} cannot use its replicas of {', '.join(names[:3]) or 'removed topics'}"
        f"{more}: its log says why. It tries again, and others lead meanwhile where they can"
    )


def is_back(broker_id: int, count: int) -> str:
    """The line for the log."""
    replicas = "1 replica again that was" if count == 1 else f"{count} replicas again that were"
    return f"broker {broker_id} can use {replicas} offline"
