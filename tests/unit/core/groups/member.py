"""A member as a client is to be one: what it says, which answers it takes, and when it gives partitions up."""

from __future__ import annotations

import msgspec

from spark_broker.core.groups.records import MemberValue, Partition
from spark_broker.core.groups.requests import Heartbeat, HeartbeatAnswer
from spark_broker.core.groups.state import AWAY_EPOCH, JOIN_EPOCH, LEAVE_EPOCH


class Member:
    """It takes only the answer to its latest heartbeat. It says everything after an answer that is missing, and after
    one of another generation. What it may begin to read it says, too.

    It has lost what it owned when its session may be over: no heartbeat that it sent within that time was answered, or
    it has not given up in time what it was told to.
    """

    def __init__(self, group_id: str, member_id: str, about: MemberValue) -> None:
        self.group_id = group_id
        self.member_id = member_id
        self.about = about
        self.epoch = JOIN_EPOCH
        self.sequence = 0
        self.generation = -1
        self.owned: dict[Partition, int] = {}  # with the number of the lease
        self.pending: frozenset[Partition] | None = None  # an assignment that it has not carried out yet
        self.answered = True
        self.says_all = True
        self.sent_ms = 0  # its latest heartbeat
        self.alive_ms = 0  # the latest heartbeat that was answered was sent then
        self.pending_ms = 0  # it was given the assignment that it has not carried out
        self.frozen = False
        self.left = False

    @property
    def may_own(self) -> frozenset[Partition]:
        """What it reads, or may begin to read without another answer."""
        return frozenset(self.owned) | (self.pending or frozenset())

    def is_over(self, now_ms: int) -> bool:
        """Whether its session may be over."""
        late = self.pending is not None and now_ms - self.pending_ms >= self.about.rebalance_timeout_ms
        return late or now_ms - self.alive_ms >= self.about.session_timeout_ms

    def heartbeat(self, now_ms: int) -> Heartbeat:
        """The next heartbeat. Its answer may not have come to the last one: it gives that answer up."""
        self.sent_ms = now_ms
        says_all = self.says_all or not self.answered or self.epoch == JOIN_EPOCH
        self.sequence += 1
        self.answered = self.says_all = False
        return Heartbeat(
            self.group_id,
            self.member_id,
            self.epoch,
            self.sequence,
            self.generation,
            self.may_own if says_all else None,
            self.about if says_all else None,
            self.about.instance_id,
        )

    def leave(self, *, for_now: bool = False) -> Heartbeat:
        """It stops reading before it leaves."""
        self.sequence += 1
        self.left = True
        self.lose()
        epoch = AWAY_EPOCH if for_now else LEAVE_EPOCH
        return Heartbeat(
            self.group_id, self.member_id, epoch, self.sequence, self.generation, instance_id=self.about.instance_id
        )

    def subscribe(self, topics: tuple[str, ...], pattern: str) -> None:
        self.about = msgspec.structs.replace(self.about, topics=topics, pattern=pattern)
        self.says_all = True

    def takes(self, sequence: int, now_ms: int) -> bool:
        """Whether this answer counts: answers that are late or out of order move no member back (KAFKA-14422)."""
        in_time = now_ms - self.sent_ms < self.about.session_timeout_ms
        return sequence == self.sequence and not self.answered and not self.left and not self.frozen and in_time

    def take(self, answer: HeartbeatAnswer, now_ms: int) -> None:
        self.answered = True
        self.alive_ms = self.sent_ms
        if answer.generation != self.generation or answer.member_epoch == JOIN_EPOCH:
            self.says_all = True
        self.generation, self.epoch = answer.generation, answer.member_epoch
        if answer.assignment is not None and answer.assignment != self.pending:
            self.pending, self.pending_ms = answer.assignment, now_ms

    def carry_out(self, lease: int) -> None:
        """Give up what is not in the assignment, take up what is new."""
        if self.pending is not None:
            if self.pending != self.owned.keys():
                self.says_all = True
            self.owned = {partition: self.owned.get(partition, lease) for partition in self.pending}
            self.pending = None
            self.says_all = True

    def lose(self) -> None:
        """It is fenced: it owns nothing, and joins again."""
        self.epoch = JOIN_EPOCH
        self.owned, self.pending = {}, None
        self.answered = self.says_all = True
