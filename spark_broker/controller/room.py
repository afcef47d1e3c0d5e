"""Brokers whose disks have no room: they hand leaderships over, and are elected only where no other replica can be.

Heartbeats say which brokers have no room; the metadata log does not. Such a broker stays in the ISRs as long as it
keeps up. It still leads partitions that no in-sync replica with room can lead: reads go on, and nothing gets worse.
"""

from __future__ import annotations

from dataclasses import replace

from spark_broker.controller.disks import Disks
from spark_broker.controller.election import elect
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import PartitionChangeRecord
from spark_broker.model import NO_LEADER


def resign(image: MetadataImage, broker_id: int, disks: Disks) -> list[PartitionChangeRecord]:
    """The broker's leaderships move to live members of their ISRs that have room; every ISR stays as it is."""
    records: list[PartitionChangeRecord] = []
    for topic, number, state in image.partitions():
        if state.leader != broker_id:
            continue
        # Without the ELR: a replica outside of the ISR would lead alone, although this broker is live and in sync.
        electable = disks.electable(image, (topic.topic_id, number), without=disks.full)
        election = elect(replace(state, elr=()), electable)
        if election.leader != NO_LEADER:
            record = change(topic, number, state, leader=election.leader)
            records += [] if record is None else [record]
    return records


def has_none(image: MetadataImage, broker_id: int, moved: int) -> str:
    """The line for the log; `image` is the one after the moves."""
    kept = sum(state.leader == broker_id for _, _, state in image.partitions())
    launch = image.brokers[broker_id].launch
    return (
        f"the disk of broker {broker_id} of launch {launch} is full: {moved} leaderships moved to brokers with room, "
        f"{kept} stay, as no other in-sync replica has room"
    )


def has_room(broker_id: int) -> str:
    """The line for the log."""
    return f"broker {broker_id} has room on its disk again"
