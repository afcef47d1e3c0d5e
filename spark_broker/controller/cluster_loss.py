"""The loss of every disk of a cluster: what is in Delta tables goes on, on other brokers.

A controller that starts knows which brokers had replicas. If none of them comes back, and others are live, these are a
new cluster over the old metadata. Partitions of which the topic's table has the history begin anew on them, at its end
(`Replica.begins_anew`); internal partitions begin empty. What was only on the disks is lost: committed offsets of
groups, and records that were not tiered yet. Fewer brokers than replicas are enough to begin with: partitions get the
replicas that they lack when further brokers come (`healing.fill_up`).

Topics without a history wait for an operator: with the disks, they would lose everything. So do those whose history was
not found in their table, until a tierer finds it there.
"""

from __future__ import annotations

from collections.abc import Collection

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.image import MetadataImage, TopicState
from spark_broker.controller.partition_change import change
from spark_broker.controller.placement import loads_of, place
from spark_broker.controller.records import MetadataRecord
from spark_broker.model import NO_LEADER


def hosts(image: MetadataImage) -> frozenset[int]:
    """The brokers that have replicas."""
    return frozenset(broker for _, _, state in image.partitions() for broker in state.replicas)


def begin_anew(
    image: MetadataImage, lost: Collection[int], replaced: Collection[int] = (), disks: Disks = ALL_WELL
) -> tuple[MetadataRecord, ...]:
    """New replicas for partitions all of whose replicas were on these brokers, as one decision.

    `replaced`: ids of `lost` that empty directories have taken over. These were in no ISR and no ELR then. A partition
    that has one there got it afterwards: its log is on the new brokers, and it waits for them.
    """
    live = [broker for broker in image.live_brokers() if broker.id not in disks.full] or image.live_brokers()
    if not lost or not live:
        return ()
    loads = loads_of(image)
    records: list[MetadataRecord] = []
    for topic, number, state in image.partitions():
        gone = state.leader == NO_LEADER and set(state.replicas) <= set(lost)
        complete = {*state.isr, *state.elr} or set(state.replicas)
        if not gone or not complete.isdisjoint(replaced) or not (topic.internal or _has_history(topic)):
            continue
        wanted = len(state.target_replicas) + state.lacking
        (replicas,) = place(live, loads, 1, min(len(live), wanted))
        record = change(
            topic,
            number,
            state,
            leader=replicas[0],
            isr=replicas[:1],
            replicas=replicas,
            adding=(),
            removing=(),
            lacking=wanted - len(replicas),
            unclean=True,
        )
        records += [] if record is None else [record]
    return tuple(records)


def _has_history(topic: TopicState) -> bool:
    history = topic.history
    return bool(topic.config.get("delta.path")) and history is not None and history.version >= 0 and not history.missing
