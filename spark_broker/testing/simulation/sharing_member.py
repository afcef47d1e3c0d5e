"""A simulated member of a group that shares partitions: the production machines, with events for their threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.client.consumer_effects import CommitOffsets, Effect, FetchCommitted
from spark_broker.client.group_offsets import from_messages, to_messages
from spark_broker.client.group_reading import Change, ChangeKind, GroupReading
from spark_broker.client.membership import Key, MemberPhase, Membership, SendHeartbeat
from spark_broker.client.retry import Backoff
from spark_broker.errors import SparkBrokerError, StaleMemberEpochError, UnreleasedInstanceIdError, broken
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import (
    ConsumerGroupHeartbeatResponse,
    EmptyResponse,
    MemberAbout,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from spark_broker.testing.history import Assigned, Gone, OffsetsCommitted, Revoked
from spark_broker.testing.simulation.consumer import CONFIG, SimConsumer
from spark_broker.testing.simulation.group_member import ask_coordinator, error_of
from spark_broker.testing.simulation.trace import TraceKind
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.sharing import Sharing

ANY_TOPIC = "t.*|aside.*"
"""A pattern. Topics that it matches come and go, also under their old names."""

ATTEMPTS_MAX = 4
"""How often a commit is sent that nobody answers. In production, its deadline ends the attempts."""

RETRY_MS = 60.0
LEAVE_MS = 1500.0
"""How long a member waits for the answer that it has left."""


class SimSharingMember(SimConsumer):
    """One life of a member."""

    def __init__(self, sharing: Sharing, group: str, number: int, life: int) -> None:
        draw, rng, world = sharing.draw, sharing.rng, sharing.world
        self.name_in_group = f"{group}.{number}#{life}"
        instance_id = f"i{number}" if number < draw.members * draw.static_share else ""
        config = replace(CONFIG, group_id=group, group_instance_id=instance_id)
        assignor = rng.choice(["", "", "range"])
        about = MemberAbout([], "", "", f"c{number}", "", draw.session_ms, draw.poll_interval_ms, assignor)
        backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms, rng=world.client_rng)
        ids = iter(range(1_000_000))
        self.membership = Membership(group, instance_id, lambda: f"{self.name_in_group}-{next(ids)}", backoff, about)
        super().__init__(world, self.name_in_group, config, self.membership)
        self.group, self.number = group, number
        self._sharing = sharing
        self._commits = 0
        self._pattern = ANY_TOPIC if rng.random() < draw.pattern_share else ""
        self._names: list[str] = []
        self.reading.has_listener = rng.random() < draw.listener_share
        self._owned: frozenset[Key] = frozenset()  # as the history has it
        self._leaving = False  # it polls no more
        self._has_left = False
        self._commit_failed = False  # the last one

    keeps_its_place = False  # A partition may come back, and then it begins at the group's place.

    @property
    def reading(self) -> GroupReading:
        return self.machine.group or broken("a member without a group")

    def start(self) -> None:
        """Subscribe, and go at some time."""
        draw = self._sharing.draw
        self.world.history.opened(self.name, group=self.group)
        self._subscribe()
        self._poll_later()
        self._commit_later()
        self._later(draw.life_ms, "go", self._go)
        if draw.subscribe_ms:
            self._later(draw.subscribe_ms, "subscribe otherwise", self._subscribe_otherwise)

    def _later(self, mean_ms: float, label: str, action: object) -> None:
        delay_ms = mean_ms * (0.5 + self._sharing.rng.random())
        self.world.scheduler.after(delay_ms, self, label, action)  # type: ignore[arg-type]

    def subscribes_to(self, topic: str) -> bool:
        """Whether the group gives out partitions of the topic to this member."""
        return topic in self._names or bool(self._pattern)

    def _subscribe(self) -> None:
        names = self._sharing.names() or [self.world.first_topic]
        if not self._sharing.stopped and self._sharing.rng.random() < 0.3:
            names = names[:1]
        self._names = [] if self._pattern and self._sharing.rng.random() < 0.5 else names
        self.machine.subscribe(self._names, self._pattern, now_ms=self.now_ms)
        self.advance()

    def _subscribe_otherwise(self) -> None:
        if self._sharing.stopped or self._leaving:
            return
        self._subscribe()
        self._later(self._sharing.draw.subscribe_ms, "subscribe otherwise", self._subscribe_otherwise)

    def learn_topics(self) -> None:
        """New topics do not change what a member of a group subscribes to, until the end."""
        if self._sharing.stopped and not self._leaving and self._names != self._sharing.names():
            self._subscribe()

    # What its threads do.

    def advance(self) -> None:
        super().advance()
        self._note_taken()

    def subscribe_again(self) -> None:
        self.learn_topics()

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case SendHeartbeat(request, timeout_ms):
                answered = partial(self._heartbeat_answered, effect)
                ask_coordinator(self, self.group, request, answered, timeout_ms)
            case FetchCommitted(generations):
                self._fetch_committed(effect, generations)
            case CommitOffsets():
                self._commits += 1
                self._send_commit(effect, self._commits, 1)
            case _:
                super().carry_out(effect)

    def _heartbeat_answered(self, sent: SendHeartbeat, answer: object) -> None:
        if isinstance(answer, ConsumerGroupHeartbeatResponse):
            self.membership.answered(sent, answer, self.now_ms)
        else:
            error = error_of(answer)
            self.machine.leaders.refresh_wanted = self.machine.leaders.refresh_wanted or error.refresh_metadata
            self.membership.failed(sent, error, self.now_ms)
        if self._has_left and not self.membership.is_leaving:
            self._end("has left")
        else:
            self.advance()

    def _fetch_committed(self, effect: FetchCommitted, generations: Mapping[TopicPartition, int]) -> None:
        try:
            member = self.machine.identity()
        except SparkBrokerError as error:
            self.world.scheduler.after(RETRY_MS, self, "is lost", partial(self.round_failed, error))
            return
        partitions = [(tp.topic, tp.partition) for tp in generations]
        request = OffsetFetchRequest(
            self.group, partitions, require_stable=True, member_id=member.member_id, member_epoch=member.member_epoch
        )
        ask_coordinator(self, self.group, request, partial(self._committed_came, effect))

    def _committed_came(self, asked: FetchCommitted, answer: object) -> None:
        if not isinstance(answer, OffsetFetchResponse):
            self.round_failed(error_of(answer))
            return
        ids = {tp: position.topic_id for tp, position in self.machine.partitions.items()}
        committed = from_messages(
            offset
            for offset in answer.offsets
            if offset.topic_id == ids.get(TopicPartition(offset.topic, offset.partition))
        )
        for tp in [tp for tp in asked.generations if tp in ids]:
            offset = committed.get(tp)
            self.world.history.offsets_fetched(self.group, tp, None if offset is None else offset.offset)
        self.machine.committed_came(asked, committed, self.now_ms)
        self.positioned(asked.generations)
        self.advance()

    def _send_commit(self, commit: CommitOffsets, sequence: int, attempt: int) -> None:
        try:
            member = self.machine.identity(commit.life)
        except SparkBrokerError as error:
            self._commit_ended(commit, error)
            return
        request = OffsetCommitRequest(
            self.group,
            to_messages(commit.offsets, commit.topic_ids),
            member.member_id,
            member.member_epoch,
            member.instance_id,
            committer=self.name,
            sequence=sequence,
        )
        began = self.world.history.count
        ask_coordinator(self, self.group, request, partial(self._commit_answered, commit, sequence, attempt, began))

    def _commit_answered(self, commit: CommitOffsets, sequence: int, attempt: int, began: int, answer: object) -> None:
        if isinstance(answer, EmptyResponse):
            self.world.trace.count("offsets committed by members")
            for tp, offset in commit.offsets.items():
                self.world.history.add(OffsetsCommitted(self.group, tp, offset.offset, None, self.name, began))
            self._commit_ended(commit, None)
            return
        error = error_of(answer)
        if error.retriable and not isinstance(error, StaleMemberEpochError) and attempt < ATTEMPTS_MAX:
            self.machine.leaders.refresh_wanted = True
            again = partial(self._send_commit, commit, sequence, attempt + 1)
            self.world.scheduler.after(RETRY_MS, self, "commit again", again)
        else:
            self._commit_ended(commit, error)

    def _commit_ended(self, commit: CommitOffsets, error: SparkBrokerError | None) -> None:
        self._commit_failed = error is not None
        self.machine.commit_ended(commit, error)
        self.advance()

    def _commit_later(self) -> None:
        self._later(self._sharing.draw.commit_ms, "commit", self._commit)

    def _commit(self) -> None:
        if not self.reading.is_changing:
            self.machine.commit_later(self.machine.positions_to_commit(), self.now_ms + 1000)
        self.advance()
        self._commit_later()

    # What its caller does.

    def _poll(self) -> None:
        self.machine.polling(self.now_ms)
        self.learn_topics()
        if self._leaving or not self._rebalance():
            self._poll_later()
        else:
            self._poll_records()
        self.machine.polled(self.now_ms)
        self.advance()

    def _poll_records(self) -> None:
        try:
            super()._poll()
        except UnreleasedInstanceIdError:
            self.world.trace.count("instance ids in use")
            self._poll_later()

    def _rebalance(self) -> bool:
        """Carry out what the group has decided. False: a commit is not answered yet."""
        while (change := self.reading.next_change()) is not None:
            if change.kind is ChangeKind.REVOKED and not self._prepared(change):
                return False
            self._note_given_up(change)
            self.reading.carried_out(change, self.now_ms)
            self.machine.reading_changed()
            self.advance()
        return True

    def _prepared(self, change: Change) -> bool:
        is_prepared = self.machine.prepare(change, self.now_ms + 1000)
        self.advance()
        return is_prepared

    def _note_taken(self) -> None:
        """Partitions that were taken up since the last look."""
        taken = self.membership.owned - self._owned
        for key in sorted(taken):
            self._sharing.check_took(self, key)
        if taken:
            names = self.membership.topics  # a coordinator names no topic that is deleted
            partitions = tuple(TopicPartition(names[id_], number) for id_, number in sorted(taken) if id_ in names)
            self.world.history.add(Assigned(self.name, partitions, self.membership.epoch))
        self._owned |= taken

    def _check_given_up(self, change: Change) -> None:
        """A clean hand-over: where a coordinator answers, the next member begins where this one ends."""
        uncommitted = self.machine.uncommitted_positions().keys() & set(change.partitions)
        if uncommitted and not self._commit_failed:
            raise ViolationError("positions are committed before they are given up", f"{self}: {uncommitted}")

    def _polled(self, tp: TopicPartition, base_offset: int, values: tuple[bytes, ...]) -> None:
        if self.membership.is_over(self.now_ms):
            raise ViolationError("who may be removed reads no more", f"{self} reads {base_offset} of {tp}")
        super()._polled(tp, base_offset, values)

    def _note_given_up(self, change: Change) -> None:
        if change.kind is ChangeKind.REVOKED:
            self._check_given_up(change)
        if change.kind is not ChangeKind.ASSIGNED and change.partitions:
            self.world.history.add(Revoked(self.name, change.partitions, lost=change.kind is ChangeKind.LOST))
            self._owned -= change.keys

    def _go(self) -> None:
        """Die, stand still, or leave."""
        if self._sharing.stopped or self._leaving:
            return
        draw, chance = self._sharing.draw, self._sharing.rng.random()
        if chance < draw.crash_share:
            self._end("is killed", gone=True)
        elif chance < draw.crash_share + draw.freeze_share:
            for_ms = (draw.session_ms + draw.poll_interval_ms) * self._sharing.rng.choice([0.2, 1.0, 1.5])
            self.paused = True
            self.world.note(self.name, TraceKind.CLIENT, f"stands still for {for_ms:.0f} ms")
            self.world.scheduler.after(for_ms, self.world.operator, "SIGCONT", self._wake)
            self._later(draw.life_ms, "go", self._go)
        else:
            self._leaving = True
            self._leave()

    def _wake(self) -> None:
        if self.alive and self.paused:
            self.world.scheduler.resume(self)

    def _leave(self) -> None:
        if self.membership.phase is MemberPhase.LOST:
            self._note_given_up(self.reading.next_change() or broken("lost, and nothing to tell"))
        else:
            change = self.reading.everything()
            if not self._prepared(change):
                self.world.scheduler.after(5, self, "leave", self._leave)
                return
            self._note_given_up(change)
        self.reading.left(self.now_ms, "it leaves")
        self._has_left = True
        self.advance()
        if self.membership.is_leaving:
            self.world.scheduler.after(LEAVE_MS, self, "nobody answers", partial(self._end, "leaves unheard"))
        else:
            self._end("has left")

    def _end(self, how: str, *, gone: bool = False) -> None:
        if not self.alive:
            return
        if gone:
            self.world.history.add(Gone(self.name))
        self.world.note(self.name, TraceKind.CLIENT, f"{how}, having committed {self.machine.committed}")
        self.world.end_client(self)
        self._sharing.replace(self)

    def missing(self) -> str:
        """What is not in its place at the end; empty when everything is."""
        if not self.alive:
            return f"{self} is gone"
        if self.paused or self.reading.is_changing or self.membership.phase is not MemberPhase.IN:
            return f"{self} is not at rest: {self.membership.phase}, {self.membership.pending}"
        uncommitted = self.machine.uncommitted_positions()
        if uncommitted:
            return f"{self} has not committed {uncommitted}"
        for tp, position in self.machine.partitions.items():
            end = self._end_of(position.topic_id, tp.partition)
            if position.position != end:
                return f"{self} is at {position.position} of {tp}, which ends at {end}"
        return ""

    def _end_of(self, topic_id: str, number: int) -> int:
        state = self.world.invariants.image.partition(topic_id, number)
        machine = None if state is None else self.world.machine_of(state.leader)
        if machine is None or machine.process is None or not machine.process.alive:
            return -1
        partition = machine.process.manager.find(topic_id, number)
        return -1 if partition is None else partition.replica.high_watermark
