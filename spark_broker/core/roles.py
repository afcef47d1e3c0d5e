"""What may happen to a replica in which role, and which role it has then.

A request to a replica that does not lead is refused with a typed error. An answer that is not to the replica as it is
now is ignored. Neither is an event. What the table does not have is a bug of ours.
"""

from __future__ import annotations

from enum import Enum, auto


class Role(Enum):
    OFFLINE = "offline"  # its log is open; the controller's word has not come
    FOLLOWER = "follower"
    LEADER = "leader"
    STOPPED = "stopped"  # for good

    __hash__ = object.__hash__  # as ReplicaEvent's


class ReplicaEvent(Enum):
    LEADS = auto()  # assigned: this broker leads, in a new leader epoch or again
    FOLLOWS = auto()  # assigned: another broker leads, or nobody, in a new leader epoch
    REASSIGNED = auto()  # assigned: another ISR or other replicas in the same leader epoch
    APPENDED = auto()
    FOLLOWER_FETCHED = auto()
    ISR_REFUSED = auto()
    FETCHED = auto()
    FOLLOWER_APPENDED = auto()
    TRUNCATED = auto()
    RESTARTED = auto()
    LOG_START_ADVANCED = auto()
    STOPPED = auto()

    # Looked up at every event: Enum's own hash is a call of a Python function.
    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[Role, ReplicaEvent], Role] = {
    (Role.OFFLINE, ReplicaEvent.LEADS): Role.LEADER,
    (Role.OFFLINE, ReplicaEvent.FOLLOWS): Role.FOLLOWER,
    (Role.OFFLINE, ReplicaEvent.STOPPED): Role.STOPPED,
    (Role.FOLLOWER, ReplicaEvent.LEADS): Role.LEADER,
    (Role.FOLLOWER, ReplicaEvent.FOLLOWS): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.REASSIGNED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.FETCHED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.FOLLOWER_APPENDED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.TRUNCATED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.RESTARTED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.LOG_START_ADVANCED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.STOPPED): Role.STOPPED,
    (Role.LEADER, ReplicaEvent.LEADS): Role.LEADER,
    (Role.LEADER, ReplicaEvent.FOLLOWS): Role.FOLLOWER,
    (Role.LEADER, ReplicaEvent.REASSIGNED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.APPENDED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.FOLLOWER_FETCHED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.ISR_REFUSED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.LOG_START_ADVANCED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.STOPPED): Role.STOPPED,
    # Its broker, or the coordinator that uses it, may not have heard of the end yet.
    (Role.STOPPED, ReplicaEvent.LOG_START_ADVANCED): Role.STOPPED,
    (Role.STOPPED, ReplicaEvent.STOPPED): Role.STOPPED,
}
