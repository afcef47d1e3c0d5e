"""What a shard knows of live members only while it leads: their latest heartbeats, and their deadlines.

None of it is in the log. When a shard is loaded, all deadlines begin anew, and what members own is not known until they
name it again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from spark_broker.core.groups.records import Partition

NEVER = 2**63


@dataclass(slots=True)
class Session:
    """A member's session.

    `sequence`: of the latest heartbeat; older ones that come late change nothing. `named`: what the member owns or may
    begin to own, by that heartbeat; None: not known. `named_epoch`: its epoch. `rebalance_deadline_ms`: until when the
    member must have given up what it was told to.
    """

    sequence: int = -1
    named: frozenset[Partition] | None = None
    named_epoch: int = 0
    deadline_ms: int = NEVER
    rebalance_deadline_ms: int = NEVER
    scheduled_ms: int = NEVER  # the earliest entry of the session in the heap

    @property
    def due_ms(self) -> int:
        return min(self.deadline_ms, self.rebalance_deadline_ms)


class Sessions:
    """The sessions of a shard. A heartbeat costs no work on the heap: an entry that comes too early is put back."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], Session] = {}
        self._heap: list[tuple[int, str, str]] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, group_id: str, member_id: str) -> Session:
        """The member's session, a new one if it has none."""
        session = self._sessions.get((group_id, member_id))
        if session is None:
            session = self._sessions[group_id, member_id] = Session()
        return session

    def end(self, group_id: str, member_id: str) -> None:
        self._sessions.pop((group_id, member_id), None)

    def schedule(self, group_id: str, member_id: str) -> None:
        """A deadline of the session has changed."""
        session = self._sessions[group_id, member_id]
        if session.due_ms < session.scheduled_ms:
            session.scheduled_ms = session.due_ms
            heapq.heappush(self._heap, (session.due_ms, group_id, member_id))

    @property
    def next_due_ms(self) -> int:
        """No deadline passes before this time; one may pass later."""
        return self._heap[0][0] if self._heap else NEVER

    def due(self, now_ms: int) -> Iterator[tuple[str, str, Session]]:
        """Sessions with a deadline that has passed: group id, member id, session. The caller ends them."""
        while self._heap and self._heap[0][0] <= now_ms:
            scheduled_ms, group_id, member_id = heapq.heappop(self._heap)
            session = self._sessions.get((group_id, member_id))
            if session is None or session.scheduled_ms != scheduled_ms:
                continue
            session.scheduled_ms = NEVER
            if session.due_ms <= now_ms:
                yield group_id, member_id, session
            else:
                self.schedule(group_id, member_id)
