"""The events that a replica may meet in each role, and the role that follows.

A request to a replica that does not lead is refused with a typed error. An answer to a request that the replica would
not send any more is ignored. Neither is an event. An event that the table does not have is a bug.
"""

from __future__ import annotations

from enum import Enum, auto


class Role(Enum):
    OFFLINE = "offline"  # Its log is open. The controller's assignment has not come.
    FOLLOWER = "follower"
    LEADER = "leader"
    STOPPED = "stopped"  # It stays stopped.

    __hash__ = object.__hash__  # as ReplicaEvent's


class ReplicaEvent(Enum):
    LEADS = auto()  # The assignment says: this broker leads, for the first time or again, in a new leader epoch.
    FOLLOWS = auto()  # The assignment says: another broker leads, or none, in a new leader epoch.
    REASSIGNED = auto()  # The assignment has another ISR or other replicas in the same leader epoch.
    APPENDED = auto()
    FOLLOWER_FETCHED = auto()
    ISR_REFUSED = auto()
    FETCHED = auto()
    FOLLOWER_APPENDED = auto()
    TRUNCATED = auto()
    RESTARTED = auto()
    LOG_START_ADVANCED = auto()
    COMPACTED = auto()
    STOPPED = auto()

    # Looked up at every event: Enum's own hash is a call of a Python function.
    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[Role, ReplicaEvent], Role] = {
    (Role.OFFLINE, ReplicaEvent.LEADS): Role.LEADER,
    (Role.OFFLINE, ReplicaEvent.FOLLOWS): Role.FOLLOWER,
    (Role.OFFLINE, ReplicaEvent.RESTARTED): Role.OFFLINE,
    (Role.OFFLINE, ReplicaEvent.STOPPED): Role.STOPPED,
    (Role.FOLLOWER, ReplicaEvent.LEADS): Role.LEADER,
    (Role.FOLLOWER, ReplicaEvent.FOLLOWS): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.REASSIGNED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.FETCHED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.FOLLOWER_APPENDED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.TRUNCATED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.RESTARTED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.LOG_START_ADVANCED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.COMPACTED): Role.FOLLOWER,
    (Role.FOLLOWER, ReplicaEvent.STOPPED): Role.STOPPED,
    (Role.LEADER, ReplicaEvent.LEADS): Role.LEADER,
    (Role.LEADER, ReplicaEvent.FOLLOWS): Role.FOLLOWER,
    (Role.LEADER, ReplicaEvent.REASSIGNED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.APPENDED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.FOLLOWER_FETCHED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.ISR_REFUSED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.LOG_START_ADVANCED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.COMPACTED): Role.LEADER,
    (Role.LEADER, ReplicaEvent.STOPPED): Role.STOPPED,
    # The broker, or a coordinator that uses the replica, may not know yet that it has stopped.
    (Role.STOPPED, ReplicaEvent.LOG_START_ADVANCED): Role.STOPPED,
    (Role.STOPPED, ReplicaEvent.STOPPED): Role.STOPPED,
}
