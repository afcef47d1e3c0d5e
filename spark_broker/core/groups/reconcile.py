"""How a member gets to its target: one step at a time, without waiting for anybody who has nothing that it needs.

    next   = owned ∩ target
    revoke = owned − target
    add    = target − owned − what somebody else still holds

A member first revokes, and stays in its epoch meanwhile. Once it names what it owns without the revoked partitions, it
advances to the target's epoch and gets what is free. What others still hold it gets later, in the same epoch.
"""

from __future__ import annotations

from spark_broker.core.groups.records import Partition
from spark_broker.core.groups.state import AWAY_EPOCH, Assignment, Group


def next_assignment(group: Group, member_id: str, said: frozenset[Partition] | None, named_epoch: int) -> Assignment:
    """The member's next assignment; the present one when there is no step to make.

    `said`: every partition that the member owns, or may begin to own without another answer, as the heartbeat says that
    makes the step; None: it does not say, so the member may own all that it holds. `named_epoch`: the epoch of the
    member's latest heartbeat. The member has it, so it stays acceptable until the member names a later one: however
    many answers are lost, nobody is fenced.
    """
    now = group.assignment(member_id)
    if now.epoch == AWAY_EPOCH or is_still_revoking(now, said):
        return now
    target = group.target(member_id)
    kept = {partition: since for partition, since in now.assigned.items() if partition in target}
    if len(kept) < len(now.assigned):
        given_up = {partition: since for partition, since in now.assigned.items() if partition not in target}
        revoking = given_up if said is None else {p: since for p, since in given_up.items() if p in said}
        if revoking:
            return Assignment(now.epoch, now.previous_epoch, kept, revoking)
    epoch = group.target_epoch
    added = {
        partition: epoch
        for partition in target
        if partition not in kept and group.owners.get(partition, (member_id, 0))[0] == member_id
    }
    if not added and not now.revoking and len(kept) == len(now.assigned) and epoch == now.epoch:
        return now
    previous_epoch = now.previous_epoch if epoch == now.epoch else named_epoch
    return Assignment(epoch, previous_epoch, kept | added, {})


def is_still_revoking(assignment: Assignment, said: frozenset[Partition] | None) -> bool:
    """Whether the member has been told to give partitions up, and has not said that it did."""
    revoking = assignment.revoking
    return bool(revoking) and (said is None or not said.isdisjoint(revoking))
