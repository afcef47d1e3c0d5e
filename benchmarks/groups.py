"""How many rebalances a core makes for the pure machine of consumer groups: no network, no log, no clients.

A rebalance begins with a member that leaves, or with one that joins, and ends when every member has named its target.
All of them send a heartbeat in each round, as they do when they are woken.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

import msgspec

from benchmarks.figures import Figure
from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import MemberValue, encode_record
from spark_broker.core.groups.requests import GroupSettings, Heartbeat, Now
from spark_broker.core.groups.state import LEAVE_EPOCH, GroupPhase
from spark_broker.core.groups.topics import Topic, Topics

GROUP, GENERATION = "group", 1
ABOUT = MemberValue(("topic",))
NOW = Now(0, 0)
WARM_UP_S = 0.5
RUNS = 5


class GroupFigures(msgspec.Struct, frozen=True):
    """`rebalances_per_s`: of one core, in each run. `heartbeats` and `record_bytes`: of one rebalance, on average."""

    members: int
    partitions: int
    rebalances_per_s: list[float]
    heartbeats: float
    record_bytes: float


class Rebalancing:
    """One group, whose members do all that they are told at once."""

    def __init__(self, members: int, partitions: int) -> None:
        self.shard = GroupShard(GroupSettings(inline_size_max=members * partitions), GENERATION)
        self.shard.loaded(Topics([Topic("0" * 32, "topic", partitions)]), NOW)
        self.epochs: dict[str, int] = {}
        self.sequence = self.rebalances = self.heartbeats = self.record_bytes = 0
        self.order: deque[str] = deque()
        for number in range(members):
            self.join(f"member-{number:06}")
        self.joined = members

    def send(self, member_id: str, epoch: int, owned: frozenset[tuple[str, int]] | None) -> bool:
        """A heartbeat, and again while its answer says something new. Returns whether there was anything new."""
        rounds = 0
        while True:
            self.sequence += 1
            self.heartbeats += 1
            about = ABOUT if epoch == 0 else None
            heartbeat = Heartbeat(GROUP, member_id, epoch, self.sequence, GENERATION, owned, about)
            decision = self.shard.heartbeat(heartbeat, NOW)
            self.record_bytes += sum(sum(map(len, filter(None, encode_record(r)))) for r in decision.records)
            answer = decision.answer
            if epoch == LEAVE_EPOCH or answer.settled:
                return rounds > 0
            rounds += 1
            self.epochs[member_id] = epoch = answer.member_epoch
            owned = answer.assignment

    def settle(self) -> None:
        news = [True]
        while any(news):
            news = [self.send(member_id, epoch, None) for member_id, epoch in self.epochs.items()]
        self.rebalances += 1

    def join(self, member_id: str) -> None:
        self.order.append(member_id)
        self.epochs[member_id] = 0
        self.settle()

    def leave(self, member_id: str) -> None:
        del self.epochs[member_id]
        self.send(member_id, LEAVE_EPOCH, None)
        self.settle()

    def run(self, seconds: float) -> float:
        """The oldest member leaves and a new one joins, again and again. Returns rebalances a second of processor."""
        self.rebalances = self.heartbeats = self.record_bytes = 0
        began = time.process_time()
        while self.rebalances < 2 or time.process_time() - began < seconds:
            self.leave(self.order.popleft())
            self.join(f"member-{self.joined:06}")
            self.joined += 1
        return self.rebalances / (time.process_time() - began)


def measure_groups(members: int = 20, partitions: int = 200, run_s: float = 2.0) -> GroupFigures:
    """Measure on this core."""
    group = Rebalancing(members, partitions)
    group.run(min(WARM_UP_S, run_s))
    speeds = [round(group.run(run_s), 1) for _ in range(RUNS)]
    per_rebalance = 1 / group.rebalances
    if group.shard.describe(GROUP).phase is not GroupPhase.STABLE:
        raise RuntimeError("the group did not settle")
    return GroupFigures(
        members,
        partitions,
        speeds,
        round(group.heartbeats * per_rebalance, 1),
        round(group.record_bytes * per_rebalance),
    )


def figures(found: GroupFigures) -> list[Figure]:
    """The lines of the table."""
    speeds = found.rebalances_per_s
    return [
        Figure(
            f"rebalances of a group of {found.members} members and {found.partitions} partitions, the core alone",
            f"median {statistics.median(speeds):,.0f} a second and core, {min(speeds):,.0f} to {max(speeds):,.0f} over "
            f"{len(speeds)}; each {found.heartbeats:,.0f} heartbeats and {found.record_bytes:,.0f} bytes of records",
        )
    ]
