"""One partition of `__consumer_offsets`, as a pure state machine: the groups that its leader coordinates.

An event is decided against the state. Its records are applied before it returns. The shell appends them, and answers
once they are committed. When an append fails, or nobody knows what became of it, the shell drops the shard and loads
another one from the log: what was not committed never happened, and no answer has shown it.

A refused event raises a typed error, and has changed nothing. Its answer waits like others: the error, too, rests on
records that may not be committed yet.

While the log takes no appends, every event that would write a record is refused with CoordinatorNotAvailableError. What
writes none goes on: a settled member's heartbeat, say. Afterwards comes `writes_begin`.

    event                                        what it may lead to
    ----------------------------------------------------------------------------------------------------------------
    writes_begin                                 deadlines begin anew; unequal inputs: a new epoch, a target
    heartbeat, epoch 0 (join)                    a member; unequal inputs: a new epoch, a target; the member's step
    heartbeat                                    unequal inputs: a new epoch; the member's step to its target
    heartbeat, epoch -1 (leave)                  the member is gone, its partitions are free: a new epoch
    heartbeat, epoch -2 (a static member)        its partitions are free, and stay in its target
    resume                                       the member's step, for a heartbeat whose answer is held back
    commit                                       offsets of partitions that the member has
    topics_changed                               unequal inputs: a new epoch; offsets of deleted topics are gone
    target_ready                                 the target of the epoch, if its inputs are still the same
    clock                                        members whose time is over are gone; offsets of empty groups expire
    delete_group, delete_offsets                 what they say, while no member needs it

`TRANSITIONS` has the states of a group, and is checked with each event.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from spark_broker.core.groups.reconcile import next_assignment
from spark_broker.core.groups.records import (
    AssignmentKey,
    GroupKey,
    GroupRecord,
    MemberKey,
    MemberValue,
    OffsetKey,
    OffsetValue,
    OldCommit,
    OldOffsetKey,
    Partition,
    TargetEpochKey,
    TargetKey,
    take_old_commit,
    target_value,
)
from spark_broker.core.groups.requests import (
    METADATA_MAX,
    NO_MEMBER,
    Commit,
    CommitAnswer,
    CommitOffset,
    Decision,
    GroupDescription,
    GroupSettings,
    Heartbeat,
    HeartbeatAnswer,
    MemberDescription,
    Move,
    Now,
    TargetReady,
    check_names,
)
from spark_broker.core.groups.sessions import NEVER, Session, Sessions
from spark_broker.core.groups.state import (
    AWAY_EPOCH,
    LEAVE_EPOCH,
    Assignment,
    Group,
    GroupPhase,
    Groups,
    MemberKind,
)
from spark_broker.core.groups.step import Heirs, Step
from spark_broker.core.groups.topics import Topics
from spark_broker.core.machine import Machine, event
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupIdNotFoundError,
    GroupMaxSizeReachedError,
    GroupSubscribedToTopicError,
    InvalidRequestError,
    NonEmptyGroupError,
    OffsetMetadataTooLargeError,
    OffsetOutOfRangeError,
    SparkBrokerError,
    StaleMemberEpochError,
    UnknownMemberIdError,
    UnknownTopicIdError,
    UnreleasedInstanceIdError,
    UnstableOffsetCommitError,
    invariant,
)

A = TypeVar("A")

_DEAD, _EMPTY, _ASSIGNING = GroupPhase.DEAD, GroupPhase.EMPTY, GroupPhase.ASSIGNING
_RECONCILING, _STABLE = GroupPhase.RECONCILING, GroupPhase.STABLE
_IN_USE = frozenset({_ASSIGNING, _RECONCILING, _STABLE})
_UNUSED = frozenset({_DEAD, _EMPTY})
_ANY_USE: dict[GroupPhase, frozenset[GroupPhase]] = dict.fromkeys(_IN_USE, _IN_USE)

TRANSITIONS: Mapping[str, Mapping[GroupPhase, frozenset[GroupPhase]]] = {
    "loaded": {**{phase: frozenset({phase}) for phase in GroupPhase}, _DEAD: frozenset({_EMPTY})},
    "writes_begin": _ANY_USE,
    "heartbeat": {**dict.fromkeys(_IN_USE, _IN_USE | {_EMPTY}), _EMPTY: _IN_USE, _DEAD: _IN_USE},
    "resume": {_ASSIGNING: frozenset({_ASSIGNING}), _RECONCILING: frozenset({_RECONCILING, _STABLE})},
    "commit": {phase: frozenset({phase if phase is not _DEAD else _EMPTY}) for phase in GroupPhase},
    "topics_changed": {**_ANY_USE, _EMPTY: _UNUSED},
    "target_ready": {_ASSIGNING: frozenset({_RECONCILING, _STABLE})},
    "clock": {**dict.fromkeys(_IN_USE, _IN_USE | {_EMPTY}), _EMPTY: _UNUSED},
    "delete_group": {_EMPTY: frozenset({_DEAD})},
    "delete_offsets": {**{phase: frozenset({phase}) for phase in _IN_USE}, _EMPTY: _UNUSED},
}
"""By event: the states of a group that is written to, before and after."""

EXPIRED_MAX = 1000
"""So many offsets expire with one event of the clock. The next event goes on."""


class ShardStanding(NamedTuple):
    """Where a shard stands between two events."""

    written: int
    groups: int
    sessions: int

    def __str__(self) -> str:
        return f"{self.written} records written, {self.groups} groups, {self.sessions} sessions"


def no_transactions(group_id: str) -> bool:
    """No group has an open transaction."""
    del group_id
    return False


def takes_always() -> None:
    """The log takes every append."""


class GroupShard(Machine[ShardStanding]):
    """The shell replays the log, calls `loaded`, `writes_begin` once the log takes appends, and one event at a time. It
    drops the shard with the leadership.

    `check_takes` raises CoordinatorNotAvailableError while the log takes no appends. Each event calls it before its
    first record. After a refusal, the shell calls `writes_begin` again: nobody could be heard meanwhile.

    `generation` is another number for each load of the partition, here or elsewhere, and rises. A heartbeat that names
    it was sent after an answer of this shard. Only such a heartbeat says what its member owns: an older one may have
    been on its way since before the load.
    """

    remembered = Machine.remembered | {Heartbeat, Commit, Now}

    def __init__(
        self,
        settings: GroupSettings,
        generation: int,
        name: str = "a shard",
        check_takes: Callable[[], None] = takes_always,
    ) -> None:
        super().__init__(f"groups of {name}")
        self._check_takes = check_takes
        self.settings = settings
        self.generation = generation
        self.state = Groups()
        self.topics = Topics()
        self._sessions = Sessions()
        self._heirs = Heirs()
        self._old: dict[OldOffsetKey, OldCommit] = {}
        self._old_undecided: dict[int, list[OldCommit]] = {}  # by producer id
        self._written = 0
        self._expiry_due_ms = 0

    def check(self) -> ShardStanding:
        return ShardStanding(self._written, len(self.state.groups), len(self._sessions))

    def check_step(self, name: str, before: ShardStanding, after: ShardStanding) -> bool:
        """The shard moved if it wrote records."""
        invariant(after.written >= before.written, "%s takes the shard back from %s to %s", name, before, after)
        return after.written > before.written

    def describe_state(self) -> str:
        phases = {group_id: phase.value for group_id, phase in list(self.phases().items())[:10]}
        return f"{self.check()}; generation {self.generation}; {phases}"

    def replay(self, record: GroupRecord | OldCommit) -> None:
        """Take a committed record while the shard is being loaded, in the order of the log."""
        if isinstance(record, GroupRecord):
            self.state.apply(record)
        elif record.value is None:
            self._old.pop(record.key, None)
        else:
            self._old[record.key] = record

    def write_undecided(self, producer_id: int, records: Iterable[GroupRecord | OldCommit]) -> None:
        """A batch of a producer's transaction, of the log or at its end: it counts once it is committed."""
        for record in records:
            if isinstance(record, GroupRecord):
                self.state.undecided.write(producer_id, record)
            else:
                self._old_undecided.setdefault(producer_id, []).append(record)

    def decide(self, producer_id: int, *, committed: bool) -> None:
        """The marker that ends a producer's transaction, of the log or at its end."""
        for record in self.state.undecided.decide(producer_id, committed=committed):
            self.state.apply(record, decided=True)
        for old in self._old_undecided.pop(producer_id, ()):
            if committed:
                self._old[old.key] = old

    @event
    def loaded(self, topics: Topics, now: Now) -> Decision[None]:
        """Every record is replayed. Commits of an older version are taken over, or it is refused: without them, nobody
        may be answered.
        """
        self.state.loaded()
        self.topics = topics
        self._expiry_due_ms = now.clock_ms + self.settings.expiry_interval_ms
        step = self._step(now)
        self._take_old_commits(step)
        self._start_sessions(step)
        return self._decide("loaded", step, None)

    @event
    def writes_begin(self, now: Now) -> Decision[None]:
        """The log takes appends, after a load or again. Deadlines begin anew, because heartbeats that would have
        written were refused: their members may be alive, and may have given up what they were told to. What has changed
        meanwhile is taken into account.
        """
        step = self._step(now)
        step.check_takes()
        self._start_sessions(step)
        for group_id, group in sorted(self.state.groups.items()):
            if group.members:
                step.because(group_id, "topics had changed before this coordinator could write")
                if not step.refresh(group_id) and group.target_epoch < group.epoch:
                    step.aim(group_id)  # The last leader did not see it ready.
        return self._decide("writes_begin", step, None)

    def _start_sessions(self, step: Step) -> None:
        for group_id, group in self.state.groups.items():
            for member_id in group.members:
                self._start_session(step, group_id, member_id)

    def _take_old_commits(self, step: Step) -> None:
        """Commits by name count for the topics that have the names now, and are then gone: once."""
        for key, commit in sorted(self._old.items(), key=lambda item: msgspec.structs.astuple(item[0])):
            taken = take_old_commit(commit, self._topic_id, step.now.wall_ms)
            if taken is None:
                continue
            new_key = taken.key
            group = step.group(key.group_id)
            if isinstance(new_key, OffsetKey) and (new_key.topic_id, new_key.partition) not in group.offsets:
                step.write(new_key, taken.value)
            elif not step.records:
                step.check_takes()
            step.records.append(OldCommit(key, None))
        self._old.clear()

    def _topic_id(self, name: str) -> str | None:
        topic = self.topics.by_name.get(name)
        return None if topic is None else topic.topic_id

    @event
    def heartbeat(self, heartbeat: Heartbeat, now: Now) -> Decision[HeartbeatAnswer]:
        """A member joins, goes on or leaves. A heartbeat that was overtaken, or is repeated, only gets an answer.

        Raises UnknownMemberIdError, FencedMemberEpochError and FencedInstanceIdError: the member has lost what it
        owned. After the first one it joins again under another id, after the second one under its own. Also raises
        UnreleasedInstanceIdError, GroupMaxSizeReachedError, and what `Heartbeat.check` raises.
        """
        heartbeat.check(self.settings)
        step = self._step(now)
        if heartbeat.member_epoch in (LEAVE_EPOCH, AWAY_EPOCH):
            answer = self._leave(step, heartbeat)
        elif self._is_there(heartbeat.group_id, heartbeat.member_id, heartbeat.instance_id, joins=heartbeat.joins):
            answer = self._go_on(step, heartbeat)
        else:
            answer = self._join(step, heartbeat)
        return self._decide("heartbeat", step, answer, heartbeat.member_id)

    def _join(self, step: Step, heartbeat: Heartbeat) -> HeartbeatAnswer:
        group_id, member_id, about = heartbeat.group_id, heartbeat.member_id, heartbeat.described
        group = step.group(group_id)
        before = group.instances.get(heartbeat.instance_id) if heartbeat.instance_id else None
        if before is not None:
            self._check_released(group, before, heartbeat.instance_id)
            target = group.target(before)
            step.remove_member(group_id, before)
            self._sessions.end(group_id, before)
            step.write(MemberKey(group_id, member_id), about)
            if target:
                step.write(TargetKey(group_id, member_id), target_value(target))
        else:
            if len(group.members) >= self.settings.group_size_max:
                raise GroupMaxSizeReachedError(f"the group {group_id!r} has {len(group.members):,} members")
            step.write(MemberKey(group_id, member_id), about)
        step.because(group_id, _reason(member_id, "joined", heartbeat.reason))
        step.refresh(group_id)
        session = self._start_session(step, group_id, member_id)
        session.sequence, session.named = heartbeat.sequence, frozenset()
        self._advance(step, group_id, member_id, frozenset())
        return self._answer(step, group_id, member_id, heartbeat.sequence)

    def _check_released(self, group: Group, holder: str, instance_id: str) -> None:
        if group.kind(holder) is not MemberKind.AWAY:
            raise UnreleasedInstanceIdError(
                f"the instance id {instance_id!r} is of the member {holder}, which is there"
            )

    def _go_on(self, step: Step, heartbeat: Heartbeat) -> HeartbeatAnswer:
        group_id, member_id = heartbeat.group_id, heartbeat.member_id
        group, session = step.group(group_id), self._sessions.get(group_id, member_id)
        if heartbeat.sequence <= session.sequence:
            return self._repeat(step, group_id, member_id, heartbeat.sequence)
        self._check_member(group, heartbeat, session)
        session.deadline_ms = step.now.clock_ms + group.members[member_id].session_timeout_ms
        self._sessions.schedule(group_id, member_id)
        before = session.sequence, session.named, session.named_epoch
        try:
            self._take(step, heartbeat, session)
        except CoordinatorNotAvailableError:
            # A copy that comes late would be answered as if what this one said had been written.
            session.sequence, session.named, session.named_epoch = before
            raise
        return self._answer(step, group_id, member_id, heartbeat.sequence)

    def _take(self, step: Step, heartbeat: Heartbeat, session: Session) -> None:
        """What a member says that goes on."""
        group_id, member_id = heartbeat.group_id, heartbeat.member_id
        is_current = heartbeat.generation == self.generation
        session.sequence, session.named_epoch = heartbeat.sequence, heartbeat.member_epoch
        owned = frozenset[Partition]() if heartbeat.joins else heartbeat.owned
        session.named = (session.named if owned is None else owned) if is_current else None
        about = heartbeat.described
        if is_current and about is not None and about != step.group(group_id).members[member_id]:
            step.write(MemberKey(group_id, member_id), about)
            step.because(group_id, _reason(member_id, "changed its subscription", heartbeat.reason))
            step.refresh(group_id)
        self._advance(step, group_id, member_id, owned if is_current else None)

    def _repeat(self, step: Step, group_id: str, member_id: str, sequence: int) -> HeartbeatAnswer:
        """The answer to a heartbeat that was received before. It says nothing that the shard does not know."""
        if sequence == self._sessions.get(group_id, member_id).sequence:
            self._advance(step, group_id, member_id, None)
        return self._answer(step, group_id, member_id, sequence)

    def _check_member(self, group: Group, heartbeat: Heartbeat, session: Session) -> None:
        """An epoch is accepted from the one that the member named when it last advanced (KAFKA-19222, 19235)."""
        member_id, epoch = heartbeat.member_id, heartbeat.member_epoch
        if heartbeat.instance_id != group.members[member_id].instance_id:
            raise InvalidRequestError(f"the member {member_id} has another instance id than it joined with")
        if heartbeat.joins:
            return  # KAFKA-19233: whatever it is told to give up, it has.
        assignment = group.assignment(member_id)
        if not assignment.previous_epoch <= epoch <= assignment.epoch:
            raise FencedMemberEpochError(f"the member {member_id} has the epoch {assignment.epoch}, and names {epoch}")
        owned = session.named if heartbeat.owned is None else heartbeat.owned
        if owned is not None and not assignment.holds(owned):
            raise FencedMemberEpochError(f"the member {member_id} owns what the group did not give it")

    def _is_there(self, group_id: str, member_id: str, instance_id: str = "", *, joins: bool = False) -> bool:
        """Whether the group has the member. Raises UnknownMemberIdError or FencedInstanceIdError unless it may join.

        An id that has left does not come back: a heartbeat from before would bring it back, too.
        """
        group = self.state.group(group_id)
        if member_id in group.members:
            if group.kind(member_id) is MemberKind.AWAY:
                raise UnknownMemberIdError(f"the member {member_id} has left; whoever comes back has another member id")
            return True
        holder = group.instances.get(instance_id)
        if not joins and holder is not None:
            raise FencedInstanceIdError(f"the instance id {instance_id!r} is of the member {holder} now")
        if not joins:
            raise UnknownMemberIdError(f"the group {group_id!r} has no member {member_id}")
        return False

    def _leave(self, step: Step, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Whoever has left may say so again."""
        group_id, member_id = heartbeat.group_id, heartbeat.member_id
        group = step.group(group_id)
        answer = HeartbeatAnswer(heartbeat.sequence, self.generation, heartbeat.member_epoch)
        if member_id not in group.members:
            return answer
        session = self._sessions.get(group_id, member_id)
        if heartbeat.sequence <= session.sequence:
            return answer
        about = group.members[member_id]
        if heartbeat.member_epoch == AWAY_EPOCH and about.instance_id != heartbeat.instance_id:
            raise InvalidRequestError(f"the member {member_id} has another instance id than it joined with")
        if heartbeat.member_epoch == LEAVE_EPOCH:
            self._remove(step, group_id, member_id, _reason(member_id, "left", heartbeat.reason))
            step.refresh(group_id)
            return answer
        away = Assignment(AWAY_EPOCH, group.assignment(member_id).previous_epoch)
        step.write(AssignmentKey(group_id, member_id), away.value())
        session.sequence, session.named = heartbeat.sequence, frozenset()
        session.deadline_ms = step.now.clock_ms + about.session_timeout_ms
        session.rebalance_deadline_ms = NEVER
        self._sessions.schedule(group_id, member_id)
        return answer

    def _remove(self, step: Step, group_id: str, member_id: str, reason: str) -> None:
        step.remove_member(group_id, member_id)
        self._sessions.end(group_id, member_id)
        step.because(group_id, reason)

    def _start_session(self, step: Step, group_id: str, member_id: str) -> Session:
        group, session = step.group(group_id), self._sessions.get(group_id, member_id)
        about, clock_ms = group.members[member_id], step.now.clock_ms
        session.deadline_ms = clock_ms + about.session_timeout_ms
        if group.assignment(member_id).revoking:
            session.rebalance_deadline_ms = clock_ms + about.revocation_ms
        self._sessions.schedule(group_id, member_id)
        return session

    def _advance(self, step: Step, group_id: str, member_id: str, said: frozenset[Partition] | None) -> None:
        """The member's next step to its target. `said`: what it owns, if the heartbeat says so."""
        group, session = step.group(group_id), self._sessions.get(group_id, member_id)
        before = group.assignment(member_id)
        after = next_assignment(group, member_id, said, session.named_epoch)
        if after is before:
            return
        step.write(AssignmentKey(group_id, member_id), after.value())
        if not after.revoking:
            session.rebalance_deadline_ms = NEVER
        elif after.revoking != before.revoking:
            session.rebalance_deadline_ms = step.now.clock_ms + group.members[member_id].revocation_ms
            self._sessions.schedule(group_id, member_id)

    def _answer(self, step: Step, group_id: str, member_id: str, sequence: int) -> HeartbeatAnswer:
        """The assignment is in every answer until the latest heartbeat names it."""
        group, session = step.group(group_id), self._sessions.get(group_id, member_id)
        assignment, about = group.assignment(member_id), group.members[member_id]
        assigned = frozenset(assignment.assigned)
        has_it = sequence == session.sequence and session.named == assigned
        # An answer that is not settled is not held back: until its member's next heartbeat, nobody can wake the member.
        settled = has_it and session.named_epoch == assignment.epoch
        stable = group.kind(member_id) is MemberKind.STABLE and group.target_epoch == group.epoch
        at_rest = settled and stable
        interval_ms = self.settings.heartbeat_interval_ms if at_rest else self.settings.converging_interval_ms
        return HeartbeatAnswer(
            sequence,
            self.generation,
            assignment.epoch,
            None if has_it else assigned,
            min(interval_ms, about.session_timeout_ms // 3),
            settled,
        )

    @event
    def resume(self, group_id: str, member_id: str, sequence: int, now: Now) -> Decision[HeartbeatAnswer]:
        """Decide the heartbeat again whose answer is held back: something changed, or it was held back long enough.

        It is no sign of life. Raises UnknownMemberIdError for a member that was removed meanwhile.
        """
        step = self._step(now)
        self._is_there(group_id, member_id)
        latest = self._sessions.get(group_id, member_id).sequence
        invariant(sequence <= latest, "%s resumes what it has not asked", member_id)
        return self._decide("resume", step, self._repeat(step, group_id, member_id, sequence), member_id)

    @event
    def commit(self, commit: Commit, now: Now) -> Decision[CommitAnswer]:
        """Commit offsets. Raises UnknownMemberIdError, FencedInstanceIdError, FencedMemberEpochError.

        Refused for single partitions: StaleMemberEpochError (retry with the epoch of the next heartbeat),
        UnknownTopicIdError (the topic is gone), OffsetOutOfRangeError, OffsetMetadataTooLargeError.
        """
        step = self._step(now)
        refused = self.refused_offsets(commit)
        for key, value in self.offset_records(commit, now, refused):
            step.write(key, value)
        return self._decide("commit", step, CommitAnswer(refused))

    def offset_records(
        self, commit: Commit, now: Now, refused: Container[Partition] = ()
    ) -> Iterator[tuple[OffsetKey, OffsetValue]]:
        """Key and value of each offset that is not refused. Those of a transaction are appended by the shell."""
        for partition, offset in commit.offsets.items():
            if partition not in refused:
                topic = self.topics.by_id[partition[0]]
                value = OffsetValue(offset.offset, offset.leader_epoch, offset.metadata, now.wall_ms, topic.name)
                yield OffsetKey(commit.group_id, *partition), value

    def refused_offsets(self, commit: Commit) -> dict[Partition, SparkBrokerError]:
        """Why offsets of some partitions may not be committed. Raises what `commit` raises.

        A transaction's offsets are judged with it, too (KIP-447), and are then written elsewhere.
        """
        check_names(commit.group_id)
        group = self.state.group(commit.group_id)
        if commit.member_id == NO_MEMBER:
            if group.members:
                raise UnknownMemberIdError(f"the group {commit.group_id!r} has members; a commit names none of them")
        else:
            self._is_there(commit.group_id, commit.member_id, commit.instance_id)
            member_epoch = group.assignment(commit.member_id).epoch
            if commit.member_epoch > member_epoch:
                raise FencedMemberEpochError(
                    f"the member {commit.member_id} has the epoch {member_epoch}, and names {commit.member_epoch}"
                )
        refusals = (
            (partition, self._refusal(group, commit, partition, offset))
            for partition, offset in sorted(commit.offsets.items())
        )
        return {partition: refusal for partition, refusal in refusals if refusal is not None}

    def _refusal(
        self, group: Group, commit: Commit, partition: Partition, offset: CommitOffset
    ) -> SparkBrokerError | None:
        topic = self.topics.by_id.get(partition[0])
        if topic is None or not 0 <= partition[1] < topic.partitions:
            return UnknownTopicIdError(f"no topic has the id {partition[0]} and a partition {partition[1]}")
        if commit.member_id and not group.is_good_commit(commit.member_id, partition, commit.member_epoch):
            return StaleMemberEpochError(
                f"in epoch {commit.member_epoch}, {topic.name}-{partition[1]} is not of the member {commit.member_id}"
            )
        if offset.offset < 0:
            return OffsetOutOfRangeError(f"the offset {offset.offset} of {topic.name}-{partition[1]}")
        if len(offset.metadata) > METADATA_MAX:
            return OffsetMetadataTooLargeError(f"metadata of {len(offset.metadata):,} characters")
        return None

    @event
    def topics_changed(self, topics: Topics, deleted: Container[str], now: Now) -> Decision[None]:
        """Another image of the topics. An older one than the last is dropped.

        `deleted`: ids of topics that were deleted. An id that is only missing from the image proves nothing.
        """
        step = self._step(now)
        if topics.version < self.topics.version:
            return self._decide("topics_changed", step, None)
        changed = topics.changed_since(self.topics)
        step.topics = topics
        for group_id, group in sorted(self.state.groups.items()):
            gone = [partition for partition in sorted(group.offsets) if partition[0] in deleted]
            for partition in gone:
                step.write(OffsetKey(group_id, *partition), None)
            if any(_may_read(member, changed) for member in group.members.values()):
                step.because(group_id, "topics changed")
                step.refresh(group_id)
        self.topics = topics  # at the end: a refused change comes again
        return self._decide("topics_changed", step, None)

    @event
    def target_ready(self, ready: TargetReady, now: Now) -> Decision[None]:
        """A target that was computed elsewhere. It belongs to its inputs: when they have changed, it is dropped."""
        step = self._step(now)
        group = step.group(ready.group_id)
        awaited = group.target_epoch < group.epoch == ready.epoch
        if awaited and group.inputs_hash == ready.inputs_hash:
            step.install(ready.group_id, ready.target)
        return self._decide("target_ready", step, None)

    @event
    def clock(self, now: Now, open_transaction: Callable[[str], bool] = no_transactions) -> Decision[None]:
        """Deadlines, and at times the offsets of empty groups. `open_transaction`: whether one commits offsets of the
        group; nothing of the group expires then.
        """
        step = self._step(now)
        step.check_takes()  # Sessions that are due are taken out of their order.
        groups: dict[str, None] = {}
        for group_id, member_id, session in list(self._sessions.due(now.clock_ms)):
            over = session.deadline_ms <= now.clock_ms
            why = f"the session of {member_id} ended" if over else f"{member_id} did not give its partitions up in time"
            self._remove(step, group_id, member_id, why)
            groups[group_id] = None
        for group_id in groups:
            step.refresh(group_id)
        if self._expiry_due_ms <= now.clock_ms and not self._expire(step, open_transaction):
            self._expiry_due_ms = now.clock_ms + self.settings.expiry_interval_ms
        return self._decide("clock", step, None)

    @property
    def next_due_ms(self) -> int:
        """When `clock` next has something to do, at the earliest."""
        return min(self._sessions.next_due_ms, self._expiry_due_ms)

    def _expire(self, step: Step, open_transaction: Callable[[str], bool]) -> bool:
        """Whether there is more to do. Offsets age from the commit, or from when the group became empty if later."""
        expired_count = 0
        for group_id, group in sorted(self.state.groups.items()):
            just_emptied = group_id in step.phases
            if group.members or just_emptied or open_transaction(group_id):
                continue
            emptied_ms = group.rebalances[-1].time_ms if group.rebalances else -1
            before_ms = step.now.wall_ms - self.settings.offsets_retention_ms
            for partition, value in sorted(group.offsets.items()):
                if max(value.commit_ms, emptied_ms) <= before_ms:
                    step.write(OffsetKey(group_id, *partition), None)
                    expired_count += 1
            if not step.group(group_id).offsets:
                self._forget(step, group_id)
            if expired_count >= EXPIRED_MAX:
                return True
        return False

    def _forget(self, step: Step, group_id: str) -> None:
        """Nothing is left of a group without members and offsets."""
        group = step.group(group_id)
        if group.target_epoch:
            step.write(TargetEpochKey(group_id), None)
        if group.epoch:
            step.write(GroupKey(group_id), None)

    @event
    def delete_group(
        self, group_id: str, now: Now, open_transaction: Callable[[str], bool] = no_transactions
    ) -> Decision[None]:
        """Raises GroupIdNotFoundError, NonEmptyGroupError, and UnstableOffsetCommitError under an open transaction."""
        group = self._group_without_transaction(group_id, open_transaction)
        if group.members:
            raise NonEmptyGroupError(f"the group {group_id!r} has {len(group.members):,} members")
        step = self._step(now)
        for partition in sorted(group.offsets):
            step.write(OffsetKey(group_id, *partition), None)
        self._forget(step, group_id)
        return self._decide("delete_group", step, None)

    @event
    def delete_offsets(
        self,
        group_id: str,
        partitions: Iterable[Partition],
        now: Now,
        open_transaction: Callable[[str], bool] = no_transactions,
    ) -> Decision[None]:
        """Raises GroupIdNotFoundError, GroupSubscribedToTopicError, and UnstableOffsetCommitError."""
        group = self._group_without_transaction(group_id, open_transaction)
        known = sorted(partition for partition in set(partitions) if partition in group.offsets)
        read = {topic.topic_id for member in group.members.values() for topic in self.topics.subscribed(member)}
        for topic_id, _ in known:
            if topic_id in read:
                name = self.topics.by_id[topic_id].name
                raise GroupSubscribedToTopicError(f"members of the group {group_id!r} read {name}")
        step = self._step(now)
        for partition in known:
            step.write(OffsetKey(group_id, *partition), None)
        return self._decide("delete_offsets", step, None)

    def _group_without_transaction(self, group_id: str, open_transaction: Callable[[str], bool]) -> Group:
        group = self.state.groups.get(group_id)
        if group is None:
            raise GroupIdNotFoundError(f"there is no group {group_id!r}")
        if open_transaction(group_id):
            raise UnstableOffsetCommitError(f"an open transaction commits offsets of the group {group_id!r}")
        return group

    def offsets(
        self,
        group_id: str,
        partitions: Iterable[Partition] | None = None,
        member_id: str = NO_MEMBER,
        member_epoch: int = -1,
    ) -> dict[Partition, OffsetValue]:
        """What is committed, for these partitions or for all. Partitions without an offset are left out.

        With a member: raises UnknownMemberIdError, and StaleMemberEpochError, which is never "no offset", for an
        epoch that is not the member's.
        """
        group = self.state.group(group_id)
        if member_id:
            self._is_there(group_id, member_id)
            assignment = group.assignment(member_id)
            if not assignment.previous_epoch <= member_epoch <= assignment.epoch:
                raise StaleMemberEpochError(
                    f"the member {member_id} has the epoch {assignment.epoch}, and names {member_epoch}"
                )
        if partitions is None:
            return dict(sorted(group.offsets.items()))
        return {partition: group.offsets[partition] for partition in partitions if partition in group.offsets}

    def phases(self) -> dict[str, GroupPhase]:
        """Every group, with its state."""
        return {group_id: group.phase for group_id, group in sorted(self.state.groups.items())}

    def describe(self, group_id: str) -> GroupDescription:
        """The group, for people. One that is not there is Dead."""
        group = self.state.group(group_id)
        members = tuple(
            MemberDescription(
                member_id,
                group.kind(member_id),
                group.assignment(member_id).epoch,
                about,
                dict(group.assignment(member_id).held()),
                frozenset(group.assignment(member_id).revoking),
                group.target(member_id),
            )
            for member_id, about in sorted(group.members.items())
        )
        return GroupDescription(
            group_id,
            group.phase,
            group.epoch,
            group.target_epoch,
            group.assignor,
            members,
            group.rebalances,
            len(group.offsets),
        )

    def _step(self, now: Now) -> Step:
        return Step(self.state, self.topics, self.settings, now, self._heirs, self._check_takes)

    def _decide(self, name: str, step: Step, answer: A, acting: str = NO_MEMBER) -> Decision[A]:
        """The end of every event: states have moved as the table allows, invariants hold, and members are woken."""
        moves = []
        for group_id, before in step.phases.items():
            group = step.group(group_id)
            after = group.phase
            legal = after in TRANSITIONS[name].get(before, ())
            invariant(legal, "%s leads the group %s from %s to %s", name, group_id, before.value, after.value)
            if after is not before or group.epoch != step.epochs[group_id]:
                moves.append(Move(group_id, before, after, group.epoch, step.reason(group_id)))
        for group_id, member_id in step.moved:
            if member_id in (group := step.group(group_id)).assignments:
                group.check_member(member_id)
        step.wake(acting)
        self._written += len(step.records)
        return Decision(answer, tuple(step.records), tuple(step.effects), tuple(moves))


def _may_read(member: MemberValue, changed: frozenset[str]) -> bool:
    return bool(changed) and (bool(member.pattern) or not changed.isdisjoint(member.topics))


def _reason(member_id: str, what: str, said: str) -> str:
    """Why a member joined or left (KIP-800): `said` is its own text."""
    return f"{member_id} {what}: {said}" if said else f"{member_id} {what}"
