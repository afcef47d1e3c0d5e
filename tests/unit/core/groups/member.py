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
    no answer has confirmed in time that it has given up what it was told to. The coordinator may have told it any time
    after the last heartbeat that was answered before.
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
        self.said: frozenset[Partition] = frozenset()  # by the latest heartbeat that said all
        self.named_generation = -1  # by the latest heartbeat
        self.sent_ms = 0  # its latest heartbeat
        self.alive_ms = 0  # the latest heartbeat that was answered was sent then
        self.revokes_ms: int | None = None  # since when it may have to give up what no answer has confirmed
        self.frozen = False
        self.left = False

    @property
    def may_own(self) -> frozenset[Partition]:
        """What it reads, or may begin to read without another answer."""
        return frozenset(self.owned) | (self.pending or frozenset())

    def is_over(self, now_ms: int) -> bool:
        """Whether its session may be over."""
        late = self.revokes_ms is not None and now_ms - self.revokes_ms >= self.about.revocation_ms
        return late or now_ms - self.alive_ms >= self.about.session_timeout_ms

    def heartbeat(self, now_ms: int) -> Heartbeat:
        """The next heartbeat. Its answer may not have come to the last one: it gives that answer up."""
        self.sent_ms = now_ms
        says_all = self.says_all or not self.answered or self.epoch == JOIN_EPOCH
        self.sequence += 1
        self.answered = self.says_all = False
        self.named_generation = self.generation
        if says_all:
            self.said = self.may_own
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
        before_ms, self.answered, self.alive_ms = self.alive_ms, True, self.sent_ms
        heard = answer.generation == self.named_generation
        if answer.generation != self.generation or answer.member_epoch == JOIN_EPOCH:
            self.says_all = True
        self.generation, self.epoch = answer.generation, answer.member_epoch
        if answer.assignment is not None:
            self.pending = answer.assignment
        assigned = frozenset(self.owned) if self.pending is None else self.pending
        if not (self.said if heard else frozenset(self.owned)) <= assigned:
            self.revokes_ms = before_ms if self.revokes_ms is None else self.revokes_ms
        elif heard:
            self.revokes_ms = None

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
        self.owned, self.pending, self.revokes_ms = {}, None, None
        self.answered = self.says_all = True
