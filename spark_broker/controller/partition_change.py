"""Every change of a partition, with its consequences for the eligible leader replicas (KIP-966).

A decision names only the new leader, ISR or replicas, and the brokers that may have lost records. Which replicas are
eligible is computed here, in one place:

    the ISR has the minimum                       -> ELR and last known ELR are empty
    else, a replica left ISR or ELR with its log  -> ELR
    else, a replica left them without its log     -> last known ELR

The leader epoch rises with every election and with every replica that is removed. A removed replica may be added again
before its broker learns that it was removed. What that broker fetches until then, with a log that it is about to
delete, names the older epoch and no longer counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from spark_broker.controller.image import PartitionRegistration, TopicState
from spark_broker.controller.records import PartitionChangeRecord
from spark_broker.controller.topic_config import min_insync_replicas


def change(
    topic: TopicState,
    number: int,
    state: PartitionRegistration,
    *,
    leader: int | None = None,
    isr: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    adding: Sequence[int] | None = None,
    removing: Sequence[int] | None = None,
    lacking: int | None = None,
    lost: Collection[int] = (),
    damaged: Collection[int] = (),
    unclean: bool = False,
) -> PartitionChangeRecord | None:
    """The record that gives the partition these values (None: unchanged). None when nothing changes.

    `lost`: brokers whose replica may lack committed records; they leave the ISR and the ELR. `damaged`: those of them
    whose log was quarantined. `unclean`: the election accepts the loss, so only the new leader is eligible.
    """
    members = state.isr if isr is None else tuple(isr)
    target = PartitionRegistration(
        replicas=state.replicas if replicas is None else tuple(replicas),
        isr=tuple(broker for broker in members if broker not in lost),
        leader=state.leader if leader is None else leader,
        leader_epoch=state.leader_epoch,
        partition_epoch=state.partition_epoch,
        adding=state.adding if adding is None else tuple(adding),
        removing=state.removing if removing is None else tuple(removing),
        unclean_epoch=state.unclean_epoch,
        lacking=state.lacking if lacking is None else lacking,
    )
    if not unclean and len(target.isr) < min(min_insync_replicas(topic), len(target.replicas)):
        target = _with_eligible(state, target, lost, damaged)
    return _difference(topic, number, state, target, unclean=unclean)


def _with_eligible(
    before: PartitionRegistration, target: PartitionRegistration, lost: Collection[int], damaged: Collection[int]
) -> PartitionRegistration:
    left = {*before.isr, *before.elr} - set(target.isr)
    elr = tuple(b for b in target.replicas if b in left and b not in lost)
    last_known_elr = tuple(b for b in target.replicas if b in {*left, *before.last_known_elr} - {*elr, *target.isr})
    quarantined = tuple(b for b in last_known_elr if b in before.damaged or b in damaged)
    return replace(target, elr=elr, last_known_elr=last_known_elr, damaged=quarantined)


def _difference(
    topic: TopicState, number: int, before: PartitionRegistration, after: PartitionRegistration, *, unclean: bool
) -> PartitionChangeRecord | None:
    if before == after:
        return None

    def changed(name: str) -> list[int] | None:
        value: tuple[int, ...] = getattr(after, name)
        return None if value == getattr(before, name) else list(value)

    loses_replicas = not set(before.replicas) <= set(after.replicas)
    return PartitionChangeRecord(
        topic.topic_id,
        number,
        leader=after.leader if after.leader != before.leader or loses_replicas else None,
        isr=changed("isr"),
        replicas=changed("replicas"),
        adding=changed("adding"),
        removing=changed("removing"),
        damaged=changed("damaged"),
        elr=changed("elr"),
        last_known_elr=changed("last_known_elr"),
        unclean=unclean,
        lacking=None if after.lacking == before.lacking else after.lacking,
    )
