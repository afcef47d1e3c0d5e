"""Every change of a partition, with what it means for the eligible leader replicas (KIP-966).

Whoever decides on a leader, an ISR or replicas says only that, and who may have lost records; who is eligible
follows here, in one place:

    the ISR has the minimum            -> no ELR, and nothing to remember
    else, left ISR or ELR with its log -> ELR
    else, left ISR or ELR without it   -> last known ELR

and so does the leader epoch, which rises with every word on the leader and with every replica that leaves: it may come
back before its broker hears that it was gone. What that broker has fetched until then, with a log that it is about to
delete, names the older epoch and counts no more.
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
    lost: Collection[int] = (),
    damaged: Collection[int] = (),
    unclean: bool = False,
) -> PartitionChangeRecord | None:
    """The record that makes these values the partition's (None: as they are); None when nothing changes.

    `lost`: brokers whose replica may lack committed records; they leave the ISR and the ELR. `damaged`: those of them
    whose log was quarantined. `unclean`: the election accepts the loss, so nobody is eligible but the new leader.
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
    )
    if not unclean and len(target.isr) < min(min_insync_replicas(topic), len(target.replicas)):
        target = _with_eligible(state, target, lost, damaged)
    return _difference(topic, number, state, target, unclean=unclean)


def _with_eligible(
    before: PartitionRegistration, target: PartitionRegistration, lost: Collection[int], damaged: Collection[int]
) -> PartitionRegistration:
    left = {*before.isr, *before.elr} - set(target.isr)
    elr = tuple(b for b in target.replicas if b in left and b not in lost)
    known = tuple(b for b in target.replicas if b in {*left, *before.last_known_elr} - {*elr, *target.isr})
    quarantined = tuple(b for b in known if b in before.damaged or b in damaged)
    return replace(target, elr=elr, last_known_elr=known, damaged=quarantined)


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
    )
