"""A shell around `GroupShard` without a broker: a log in memory, a clock that the test moves, members that do right."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from random import Random
from typing import Any

from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import MemberValue, OldCommit, Partition
from spark_broker.core.groups.requests import (
    Commit,
    CommitOffset,
    ComputeTarget,
    Decision,
    GroupSettings,
    Heartbeat,
    HeartbeatAnswer,
    Now,
    Wake,
)
from spark_broker.core.groups.state import GroupPhase
from spark_broker.core.groups.topics import Topic, Topics
from spark_broker.errors import SparkBrokerError
from tests.unit.core.compacted_logs import compacted
from tests.unit.core.groups.member import Member
from tests.unit.core.groups.shard_log import Record, loaded, stored

GROUP = "g"
SESSION_MS = 10_000
REBALANCE_MS = 30_000
RETENTION_MS = 1_000_000
ORDERS, CLICKS = "a" * 32, "b" * 32
BORN_MS = 5_000_000
"""The wall clock shows another time than the clock of the deadlines."""


def topic(topic_id: str = ORDERS, partitions: int = 4, name: str = "") -> Topic:
    return Topic(topic_id, name or {ORDERS: "orders", CLICKS: "clicks"}.get(topic_id, "orders"), partitions)


def partitions(topic_id: str = ORDERS, count: int = 4) -> frozenset[Partition]:
    return frozenset((topic_id, number) for number in range(count))


class Shell:
    def __init__(self, *topics: Topic, settings: GroupSettings | None = None, log: Iterable[Record] = ()) -> None:
        self.settings = settings or GroupSettings(offsets_retention_ms=RETENTION_MS, expiry_interval_ms=1000)
        self.topics = list(topics or [topic()])
        self.version = 0
        self.clock_ms = 0
        self.log: list[Record] = list(log)
        self.woken: list[str] = []
        self.moves: list[str] = []
        self.computing: list[ComputeTarget] = []
        self.generation = 0
        self.load()

    @property
    def now(self) -> Now:
        return Now(self.clock_ms, BORN_MS + self.clock_ms)

    @property
    def phase(self) -> GroupPhase:
        return self.shard.describe(GROUP).phase

    @property
    def epoch(self) -> int:
        return self.shard.describe(GROUP).epoch

    def load(self, random: Random | None = None) -> None:
        """Drop the shard, and load another one; with `random`, after compaction."""
        if random is not None:
            self.log = compacted(self.log, random)
        self.generation += 1
        self.shard = GroupShard(self.settings, self.generation)
        for record in self.log:
            self.shard.replay(record)
        self.computing.clear()
        self.carry_out(self.shard.loaded(Topics(self.topics, self.version), self.now))
        self.carry_out(self.shard.writes_begin(self.now))

    def carry_out(self, decision: Decision[Any]) -> tuple[Record, ...]:
        """Append the records. After each decision, the log gives the live state."""
        self.log += [stored(record) for record in decision.records]
        assert loaded(self.log) == self.shard.state.groups
        self.moves += map(str, decision.moves)
        for effect in decision.effects:
            match effect:
                case Wake(_, member_ids):
                    self.woken += member_ids
                case ComputeTarget():
                    self.computing.append(effect)
        return decision.records

    def member(
        self,
        member_id: str,
        *topics: str,
        instance_id: str = "",
        pattern: str = "",
        assignor: str = "",
        rack: str = "",
    ) -> Member:
        """A member that has not joined yet."""
        names = topics or (() if pattern else ("orders",))
        about = MemberValue(
            names,
            pattern,
            instance_id,
            rack,
            "client",
            "host",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            assignor=assignor,
        )
        return Member(GROUP, member_id, about)

    def send(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """The answer, which the member may not get."""
        decision = self.shard.heartbeat(heartbeat, self.now)
        self.carry_out(decision)
        return decision.answer

    def beat(self, member: Member) -> HeartbeatAnswer:
        """The member takes the answer, and does not carry it out yet."""
        answer = self.send(member.heartbeat(self.clock_ms))
        member.take(answer, self.clock_ms)
        return answer

    def step(self, member: Member) -> HeartbeatAnswer:
        """The member carries out what it was told, and says so."""
        member.carry_out(0)
        return self.beat(member)

    def settle(self, *members: Member, rounds_max: int = 5) -> int:
        """How many rounds of heartbeats it took until the group is stable, and every member has its target."""
        for rounds in range(1, rounds_max + 1):
            answers = [self.step(member) for member in members]
            for member in members:
                member.carry_out(0)
            if self.phase is GroupPhase.STABLE and all(answer.settled for answer in answers):
                return rounds
        raise AssertionError(f"not settled after {rounds_max} rounds: {self.shard.describe(GROUP)}")

    def joined(self, *member_ids: str) -> list[Member]:
        """A stable group of these members."""
        members = [self.member(member_id) for member_id in member_ids]
        self.settle(*members)
        return members

    def leave(self, member: Member, *, for_now: bool = False) -> HeartbeatAnswer:
        return self.send(member.leave(for_now=for_now))

    def commit(
        self, offsets: dict[Partition, int], member: Member | None = None, epoch: int | None = None
    ) -> dict[Partition, SparkBrokerError]:
        """What is refused."""
        given = {partition: CommitOffset(offset) for partition, offset in offsets.items()}
        commit = Commit(GROUP, given)
        if member is not None:
            commit = Commit(GROUP, given, member.member_id, member.epoch if epoch is None else epoch)
        decision = self.shard.commit(commit, self.now)
        self.carry_out(decision)
        return dict(decision.answer.refused)

    def offsets(self) -> dict[Partition, int]:
        return {partition: value.offset for partition, value in self.shard.offsets(GROUP).items()}

    def change_topics(self, *topics: Topic, deleted: Collection[str] = ()) -> None:
        self.topics, self.version = list(topics), self.version + 1
        self.carry_out(self.shard.topics_changed(Topics(topics, self.version), deleted, self.now))

    def pass_time(self, ms: int, open_transactions: Collection[str] = ()) -> tuple[Record, ...]:
        self.clock_ms += ms
        return self.carry_out(self.shard.clock(self.now, open_transactions.__contains__))

    def compute(self) -> None:
        """Every target that is being computed is ready."""
        while self.computing:
            self.carry_out(self.shard.target_ready(self.computing.pop(0).compute(), self.now))

    def old_tombstones(self) -> list[OldCommit]:
        return [record for record in self.log if isinstance(record, OldCommit) and record.value is None]
