"""A consumer's membership of its group, as a state machine: what it says in heartbeats, and what it makes of answers.

    phase       what happens                                        next
    ----------------------------------------------------------------------------
    OUT         subscribe: also after a fatal error                 IN
    IN          an answer: another assignment                       IN
    IN          the group has removed it, or may have               LOST, or IN where it had nothing
    IN          leave                                               LEAVING
    LOST        the caller has given everything up (`told`)         IN, or OUT after a fatal error
    LOST        leave                                               OUT
    LEAVING     an answer, or nobody answers                        OUT

The rules for heartbeats are those of `core.groups.requests.Heartbeat`, and docs/adr/0020-what-a-group-member-says.md
says why. Times are milliseconds of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from spark_broker.client.retry import Backoff, Tries
from spark_broker.core.groups.records import revocation_ms
from spark_broker.core.groups.requests import held_at_most_ms
from spark_broker.core.groups.state import AWAY_EPOCH, JOIN_EPOCH, LEAVE_EPOCH
from spark_broker.errors import (
    FencedInstanceIdError,
    FencedMemberEpochError,
    SparkBrokerError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
    invariant,
)
from spark_broker.model import GroupMetadata
from spark_broker.protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    MemberAbout,
    TopicPartitions,
)

Key: TypeAlias = tuple[str, int]
"""Topic id and partition. A topic that is created again has another id."""

IN_FLIGHT_MAX = 2
"""Heartbeats at a time: one may be held back by the coordinator while there is something new to say."""

WAITING_INTERVAL_MS = 1000
"""Heartbeats while the caller has not carried out an assignment yet: there is nothing to say before it does."""

JOIN_WAIT_MS = 500
"""How long a member that leaves waits for the answer to its join. The coordinator may hold that back."""

REFUSED_PAUSE_MS = 1000
"""After an error that will not pass by itself. The caller hears of it, and may change something."""

NEVER_MS = float("inf")


class MemberPhase(Enum):
    OUT = "out"
    IN = "in"
    LOST = "lost"
    LEAVING = "leaving"


TRANSITIONS: Mapping[MemberPhase, frozenset[MemberPhase]] = {
    MemberPhase.OUT: frozenset({MemberPhase.IN}),
    MemberPhase.IN: frozenset({MemberPhase.LOST, MemberPhase.LEAVING}),
    MemberPhase.LOST: frozenset({MemberPhase.IN, MemberPhase.OUT}),
    MemberPhase.LEAVING: frozenset({MemberPhase.OUT}),
}


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Send this to the group's coordinator; then `answered` or `failed`, with this effect."""

    request: ConsumerGroupHeartbeatRequest
    timeout_ms: float


class Membership:
    """`owned`: what the caller may read. `pending`: the assignment that it has not carried out yet.

    Invariants: a member that is out owns nothing; every heartbeat has a higher sequence than the one before; at most
    `IN_FLIGHT_MAX` are in flight.
    """

    def __init__(
        self, group_id: str, instance_id: str, new_id: Callable[[], str], backoff: Backoff, about: MemberAbout
    ) -> None:
        """`about`: who the member is; its subscription comes with `subscribe`."""
        self.group_id = group_id
        self.instance_id = instance_id
        self.phase = MemberPhase.OUT
        self.member_id = ""
        self.epoch = JOIN_EPOCH
        self.owned: frozenset[Key] = frozenset()
        self.pending: frozenset[Key] | None = None
        self.topics: dict[str, str] = {}  # names of topics by their ids, of everything that was ever assigned
        self.failure: SparkBrokerError | None = None  # the caller has not heard of it yet
        self.why_lost = ""
        self.life = 0  # how often it has joined
        self.assigned = False  # whether any assignment of this membership was carried out
        self._new_id = new_id
        self._about = about
        self._reason = ""
        self.is_fatal = False
        self._farewell: ConsumerGroupHeartbeatRequest | None = None  # of a member id that is given up
        self._sequence = 0
        self._generation = -1
        self._in_flight: dict[int, str] = {}  # member id by sequence
        self._answered = True  # the latest heartbeat is
        self._news = False  # there is something to say at once
        self._says_all = True  # the next heartbeat does
        self._said: frozenset[Key] = frozenset()  # by the latest heartbeat that said all
        self._in_poll = False
        self._sent_ms = self._alive_ms = 0.0
        self._revokes_since_ms = NEVER_MS  # it has to give something up, and no answer has confirmed that it did
        self._due_ms = self._joins_since_ms = self._leaves_since_ms = 0.0
        self._poll_deadline_ms = NEVER_MS
        self._tries = Tries(backoff)

    # What the caller does.

    def subscribe(self, topics: Iterable[str], pattern: str, now_ms: float) -> None:
        """Read these topics, or those that match, from now on. One who is out begins anew, whatever kept it out."""
        self._about = msgspec.structs.replace(self._about, topics=sorted(set(topics)), pattern=pattern)
        self._say_all()
        if self.phase is MemberPhase.OUT:
            # A member that is in, and raises why it is fenced, would hold partitions that nobody reads.
            self.forget_failure()
            self._join(now_ms)

    def forget_failure(self) -> None:
        """Why the group has refused it does not concern a caller any more who has left, or joins anew."""
        if self.phase in (MemberPhase.OUT, MemberPhase.LEAVING):
            self.failure, self.is_fatal = None, False

    def polling(self, now_ms: float) -> None:
        """The caller waits for records: what it got before it has done with. `polled` ends that.

        A process that stood still has lost everything before it hands out what it had fetched.
        """
        self._check_time(now_ms)
        self._in_poll, self._poll_deadline_ms = True, NEVER_MS

    def polled(self, now_ms: float) -> None:
        """The caller has got records, or none. It polls again within max.poll.interval.ms, or loses its partitions."""
        self._in_poll, self._poll_deadline_ms = False, now_ms + self._about.rebalance_timeout_ms

    def released(self, partitions: frozenset[Key]) -> None:
        """The caller has given these up."""
        # Where the group has given some of them back meanwhile, the caller takes them as new ones.
        self.owned -= partitions
        self._say_all()
        self._settle()

    def took(self, partitions: frozenset[Key]) -> None:
        """The caller reads these now, which are in the assignment."""
        invariant(self.pending is not None and partitions <= self.pending, "not assigned: %s", partitions)
        self.owned |= partitions
        self._say_all()
        self._settle()

    def _say_all(self) -> None:
        self._news = self._says_all = True

    def _settle(self) -> None:
        if self.owned == self.pending:
            self.pending, self.assigned = None, True

    def told(self, now_ms: float) -> None:
        """The caller has given up everything that was lost."""
        self.owned, self.pending = frozenset(), None
        if self.is_fatal:
            self._go(MemberPhase.OUT)
        else:
            self._join(now_ms)

    def leave(self, now_ms: float, reason: str = "") -> None:
        """Leave; a static member will come back. The caller has stopped reading."""
        self.owned, self.pending, self._poll_deadline_ms = frozenset(), None, NEVER_MS
        if self.phase is MemberPhase.LOST:
            self._go(MemberPhase.OUT)
        elif self.phase is MemberPhase.IN:
            self._go(MemberPhase.LEAVING)
            self._leaves_since_ms = now_ms
            self._farewell = self._goodbye(AWAY_EPOCH if self.instance_id else LEAVE_EPOCH, reason)

    @property
    def is_between(self) -> bool:
        """Whether the coordinator may know this member already, or still, and has not told it. A commit that names
        nobody would be refused, and there is no epoch to name yet.
        """
        return self.phase is MemberPhase.LEAVING or (self.phase is MemberPhase.IN and self.epoch == JOIN_EPOCH)

    def identity(self, life: int | None = None) -> GroupMetadata:
        """Who asks the coordinator, as of now. Raises UnknownMemberIdError while what was read is lost, and for what
        was read in an earlier `life`.
        """
        if self.phase is MemberPhase.LOST or life not in (None, self.life):
            raise UnknownMemberIdError(f"the group {self.group_id!r} goes on without this member: {self.why_lost}")
        if self.phase is MemberPhase.IN and self.epoch > JOIN_EPOCH:
            return GroupMetadata(self.group_id, self.member_id, self.epoch, self.instance_id)
        return GroupMetadata(self.group_id)

    @property
    def is_leaving(self) -> bool:
        """Whether nobody has answered yet that it leaves."""
        return self.phase is MemberPhase.LEAVING

    def abandon(self) -> None:
        """Nobody has answered that it leaves: its session will end."""
        if self.is_leaving:
            self._farewell = None
            self._go(MemberPhase.OUT)

    # Heartbeats.

    def heartbeats(self, now_ms: float) -> list[SendHeartbeat]:
        """What to send now."""
        self._check_time(now_ms)
        sent = []
        while (heartbeat := self._next(now_ms)) is not None:
            sent.append(heartbeat)
        return sent

    def _next(self, now_ms: float) -> SendHeartbeat | None:
        if len(self._in_flight) >= IN_FLIGHT_MAX or now_ms < self._tries.next_ms:
            return None
        if self._farewell is not None:
            if now_ms < self._farewell_ms():
                return None
            farewell, self._farewell = self._farewell, None
            return self._send(farewell, now_ms)
        if self.phase is not MemberPhase.IN:
            return None
        if not self._news and (self._sequence in self._in_flight or now_ms < self._due_ms):
            return None
        return self._send(self._heartbeat(), now_ms)

    def wake_ms(self) -> float:
        """When to ask for the next heartbeat at the latest."""
        if self._farewell is not None:
            return NEVER_MS if len(self._in_flight) >= IN_FLIGHT_MAX else max(self._tries.next_ms, self._farewell_ms())
        if self.phase is not MemberPhase.IN:
            return NEVER_MS
        next_ms = NEVER_MS
        if len(self._in_flight) < IN_FLIGHT_MAX:
            if self._news:
                next_ms = self._tries.next_ms
            elif self._sequence not in self._in_flight:
                next_ms = max(self._due_ms, self._tries.next_ms)
        return min(next_ms, self._poll_deadline_ms, *self._ends_ms())

    def _farewell_ms(self) -> float:
        """When to say goodbye. A join that is under way would overtake it, and the member would be there again."""
        joins = self.phase is MemberPhase.LEAVING and self.epoch == JOIN_EPOCH and bool(self._in_flight)
        return self._leaves_since_ms + JOIN_WAIT_MS if joins else 0.0

    def _heartbeat(self) -> ConsumerGroupHeartbeatRequest:
        says_all = self._says_all or not self._answered or self.epoch == JOIN_EPOCH
        self._sequence += 1
        self._answered = self._news = self._says_all = False
        if says_all:
            self._said = self.owned | (self.pending or frozenset())
        return ConsumerGroupHeartbeatRequest(
            self.group_id,
            self.member_id,
            self.epoch,
            self._sequence,
            self._generation,
            self._grouped(self._said) if says_all else None,
            self._about if says_all else None,
            self.instance_id,
            self._reason if self.epoch == JOIN_EPOCH else "",
        )

    def _goodbye(self, epoch: int, reason: str) -> ConsumerGroupHeartbeatRequest:
        self._sequence += 1
        return ConsumerGroupHeartbeatRequest(
            self.group_id,
            self.member_id,
            epoch,
            self._sequence,
            self._generation,
            instance_id=self.instance_id,
            reason=reason,
        )

    def _send(self, request: ConsumerGroupHeartbeatRequest, now_ms: float) -> SendHeartbeat:
        self._in_flight[request.sequence] = request.member_id
        session_ms = self._about.session_timeout_ms
        held_ms = 0 if request.member_epoch < JOIN_EPOCH else held_at_most_ms(session_ms)
        if request.sequence == self._sequence:
            self._sent_ms = now_ms
        return SendHeartbeat(request, held_ms + min(max(session_ms / 6, 500), 2000))

    def _grouped(self, partitions: Iterable[Key]) -> list[TopicPartitions]:
        numbers: dict[str, list[int]] = {}
        for topic_id, number in sorted(partitions):
            numbers.setdefault(topic_id, []).append(number)
        return [TopicPartitions(topic_id, each) for topic_id, each in numbers.items()]

    def answered(self, sent: SendHeartbeat, answer: ConsumerGroupHeartbeatResponse, now_ms: float) -> None:
        """The coordinator has answered. Only the answer to the latest heartbeat counts, and only in time."""
        self._in_flight.pop(sent.request.sequence, None)
        self._tries.ended(now_ms, recovered=True)
        if self._has_said_goodbye(sent) or not self._counts(sent):
            return
        if now_ms - self._sent_ms >= self._about.session_timeout_ms:
            return
        before_ms, self._answered, self._alive_ms = self._alive_ms, True, self._sent_ms
        if answer.generation != self._generation or answer.member_epoch == JOIN_EPOCH:
            self._says_all = True
        self._generation, self.epoch = answer.generation, answer.member_epoch
        interval_ms: float = answer.heartbeat_interval_ms
        if answer.assignment is not None:
            self._take(answer.assignment)
        self._note_revocation(heard=sent.request.generation == answer.generation, before_ms=before_ms)
        self.assigned = self.assigned or (self.pending is None and self.epoch > JOIN_EPOCH)
        if self.pending is not None:
            interval_ms = max(interval_ms, min(WAITING_INTERVAL_MS, self._about.session_timeout_ms / 3))
        self._due_ms = self._sent_ms + interval_ms

    def _take(self, assignment: Iterable[TopicPartitions]) -> None:
        self.topics.update((topic.topic_id, topic.topic) for topic in assignment if topic.topic)
        assigned = frozenset((topic.topic_id, number) for topic in assignment for number in topic.partitions)
        if assigned == self.owned:
            self._says_all = self._says_all or self.pending is not None
            self.pending, self.assigned = None, True
        else:
            self.pending = assigned

    def _note_revocation(self, *, heard: bool, before_ms: float) -> None:
        """`heard`: the coordinator has taken what the latest heartbeat says. Then it waits only for what the heartbeat
        names, and the assignment does not have. It may have decided any time after `before_ms`, when the last heartbeat
        was sent that was answered before.
        """
        assigned = self.owned if self.pending is None else self.pending
        if not (self._said if heard else self.owned) <= assigned:
            self._revokes_since_ms = min(self._revokes_since_ms, before_ms)
        elif heard:
            self._revokes_since_ms = NEVER_MS

    def failed(self, sent: SendHeartbeat, error: SparkBrokerError, now_ms: float) -> None:
        """The coordinator has refused, or nobody has answered."""
        self._in_flight.pop(sent.request.sequence, None)
        if self.phase is MemberPhase.LEAVING and sent.request.sequence == self._sequence and error.retriable:
            self._farewell = sent.request
            self._tries.ended(now_ms, recovered=False)
            return
        if self._has_said_goodbye(sent) or not self._counts(sent):
            return
        match error:
            case UnknownMemberIdError():
                self._lose(error.message, now_ms, new_id=True)
            case FencedMemberEpochError():
                self._lose(error.message, now_ms, new_id=False)
            case FencedInstanceIdError():
                self.failure, self.is_fatal = error, True
                self._lose(error.message, now_ms, new_id=True)
            case _ if error.retriable or self._may_be_released(error, now_ms):
                self._tries.ended(now_ms, recovered=False)
            case _:
                self.failure = error
                self._tries.next_ms = now_ms + REFUSED_PAUSE_MS

    def _may_be_released(self, error: SparkBrokerError, now_ms: float) -> bool:
        """Whether the instance id is perhaps only held by a member that is dead: an earlier process, or this one before
        its session ended.
        """
        joins_for_ms = now_ms - self._joins_since_ms
        return isinstance(error, UnreleasedInstanceIdError) and joins_for_ms < 2 * self._about.session_timeout_ms

    def _has_said_goodbye(self, sent: SendHeartbeat) -> bool:
        if sent.request.member_epoch >= JOIN_EPOCH:
            return False
        if self.phase is MemberPhase.LEAVING and sent.request.sequence == self._sequence:
            self._go(MemberPhase.OUT)
        return True

    def _counts(self, sent: SendHeartbeat) -> bool:
        """Whether it is the latest heartbeat of this member id, and was not answered yet."""
        request = sent.request
        is_latest = request.sequence == self._sequence and request.member_id == self.member_id
        return is_latest and not self._answered and self.phase is MemberPhase.IN

    # The end of a membership.

    def is_over(self, now_ms: float) -> bool:
        """Whether the group may have removed this member, though nobody has told it."""
        return self.phase is not MemberPhase.IN or now_ms >= min(self._poll_deadline_ms, *self._ends_ms())

    def _ends_ms(self) -> tuple[float, float]:
        """When the session may be over, and when the coordinator must have heard that partitions are given up. A member
        that only joins has nothing to lose.
        """
        about = self._about
        late_ms = self._revokes_since_ms + revocation_ms(about.session_timeout_ms, about.rebalance_timeout_ms)
        over_ms = self._alive_ms + about.session_timeout_ms
        return over_ms if self.epoch > JOIN_EPOCH else NEVER_MS, late_ms

    def _check_time(self, now_ms: float) -> None:
        if self.phase is not MemberPhase.IN:
            return
        session_ends_ms, late_ms = self._ends_ms()
        if now_ms >= min(self._poll_deadline_ms, late_ms):
            interval_ms = self._about.rebalance_timeout_ms
            why = f"poll was not called within max.poll.interval.ms = {interval_ms}"
            self._farewell = self._goodbye(LEAVE_EPOCH, why)
            self._lose(why, now_ms, new_id=True, wait=True)
        elif now_ms >= session_ends_ms:
            session_ms = self._about.session_timeout_ms
            if self.instance_id:
                self._farewell = self._goodbye(AWAY_EPOCH, "its session is over")
            self._lose(f"no coordinator has answered within session.timeout.ms = {session_ms}", now_ms, new_id=True)

    def _lose(self, why: str, now_ms: float, *, new_id: bool, wait: bool = False) -> None:
        """The group has removed the member, or may have. `wait`: for the caller, also where it has nothing."""
        self.why_lost = why
        has_something = bool(self.owned) or self.is_fatal or wait
        self.pending = None
        if new_id:
            self.member_id = ""
        self._go(MemberPhase.LOST)
        if not has_something:
            self.told(now_ms)

    def _join(self, now_ms: float) -> None:
        self._go(MemberPhase.IN)
        self.life += 1
        self._reason = self.why_lost and f"joined again: {self.why_lost}"
        if not self.member_id:
            self.member_id, self._generation = self._new_id(), -1
        self.epoch, self._news, self._answered = JOIN_EPOCH, True, True
        self._alive_ms = self._due_ms = self._joins_since_ms = now_ms
        self._revokes_since_ms = NEVER_MS
        self._poll_deadline_ms = NEVER_MS if self._in_poll else now_ms + self._about.rebalance_timeout_ms

    def _go(self, phase: MemberPhase) -> None:
        invariant(phase in TRANSITIONS[self.phase], "a member goes from %s to %s", self.phase, phase)
        self.phase = phase
        if phase is MemberPhase.OUT:
            self.member_id, self.epoch = "", JOIN_EPOCH
