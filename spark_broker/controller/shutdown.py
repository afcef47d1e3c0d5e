"""Controlled shutdown: a broker hands its partitions over before it stops."""

from __future__ import annotations

from collections.abc import Iterable

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.fencing import leave
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import BrokerChangeRecord, MetadataRecord


def begin_shutdown(image: MetadataImage, broker_id: int, disks: Disks = ALL_WELL) -> tuple[MetadataRecord, ...]:
    """The broker's leaderships move to other ISR members, and it leaves the ISRs where others remain.

    Until it stops, it still leads partitions that no other broker can lead. Empty when it is shutting down already.
    """
    broker = image.brokers[broker_id]
    if broker.in_controlled_shutdown:
        return ()
    record = BrokerChangeRecord(broker_id, broker.epoch, in_controlled_shutdown=True)
    return (record, *leave(image, [broker_id], keep_last_leader=True, disks=disks))


def begin_cluster_shutdown(image: MetadataImage, broker_ids: Iterable[int]) -> tuple[MetadataRecord, ...]:
    """All brokers stop: none is left to take over, so no leader moves and no ISR shrinks.

    If they stopped in turn, each ISR would shrink to its last member, and a restart would depend on that one directory.
    """
    brokers = [image.brokers[id_] for id_ in sorted(broker_ids) if id_ in image.brokers]
    return tuple(
        BrokerChangeRecord(broker.id, broker.epoch, in_controlled_shutdown=True)
        for broker in brokers
        if not broker.in_controlled_shutdown
    )
