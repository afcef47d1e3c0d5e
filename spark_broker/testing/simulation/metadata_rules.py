"""What must hold of each change of the metadata alone, whatever the replicas hold (docs/known-bugs.md)."""

from __future__ import annotations

from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.model import NO_LEADER
from spark_broker.testing.simulation.shadow import Key
from spark_broker.testing.simulation.violation import ViolationError


def check_metadata_grows(before: MetadataImage, image: MetadataImage) -> None:
    """Known bug 18: the controller epoch and the metadata log only grow."""
    if image.controller_epoch < before.controller_epoch or image.next_offset <= before.next_offset:
        raise ViolationError(
            "metadata grows",
            f"controller epoch {before.controller_epoch} -> {image.controller_epoch}, "
            f"offset {before.next_offset} -> {image.next_offset}",
        )


def check_joined(name: str, key: Key, before: MetadataImage, image: MetadataImage) -> None:
    """Known bug 7: a fenced replica never rejoins the ISR by itself. `name`: of the partition."""
    was, state = before.partition(*key), image.partition(*key)
    if was is None or state is None or state.leader_epoch != was.leader_epoch:
        return  # a broker that was elected did not join by itself, and may be fenced again in the same commit
    joined = set(state.isr) - set(was.isr)
    if not all(before.is_live(broker_id) or image.is_live(broker_id) for broker_id in joined):
        raise ViolationError("who joins the ISR is live", f"{was} -> {state}", name)


def check_epochs(name: str, before: PartitionRegistration, state: PartitionRegistration) -> None:
    """Every election raises the leader epoch, every change the partition epoch."""
    if (
        state.partition_epoch <= before.partition_epoch
        or state.leader_epoch < before.leader_epoch
        or (state.leader not in (before.leader, NO_LEADER) and state.leader_epoch == before.leader_epoch)
    ):
        raise ViolationError("epochs rise", f"{before} -> {state}", name)


def check_sets(name: str, state: PartitionRegistration) -> None:
    """Known bug 12: ISR and ELR never overlap; only an ISR member that is not damaged leads."""
    if set(state.isr) & set(state.elr):
        raise ViolationError("ISR and ELR are disjoint", f"ISR {state.isr}, ELR {state.elr}", name)
    if state.leader != NO_LEADER and (state.leader not in state.isr or state.leader in state.damaged):
        raise ViolationError("the leader is in sync", f"leader {state.leader}, ISR {state.isr}", name)


def described(state: PartitionRegistration) -> str:
    """A partition's state in a trace."""
    leader = "nobody" if state.leader == NO_LEADER else f"broker {state.leader}"
    elr = f", ELR {list(state.elr)}" if state.elr else ""
    moving = f", adding {list(state.adding)}, removing {list(state.removing)}" if state.reassigning else ""
    return (
        f"{leader} leads in epoch {state.leader_epoch}, ISR {list(state.isr)} of {list(state.replicas)}{elr}{moving} "
        f"(partition epoch {state.partition_epoch})"
    )
