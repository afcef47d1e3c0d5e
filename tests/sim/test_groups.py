"""Schedules with consumer groups: members commit and resume, coordinators change, and nothing is forgotten."""

from __future__ import annotations

import dataclasses
import random

from spark_broker.model import CONSUMER_OFFSETS_TOPIC, NO_LEADER
from spark_broker.protocol.messages import ElectLeadersRequest
from spark_broker.testing.simulation.group_draw import SHARE, SHARE_OF_UNCLEAN, GroupDraw
from spark_broker.testing.simulation.group_member import SimGroupMember
from spark_broker.testing.simulation.machine import SimulatedMachine
from spark_broker.testing.simulation.schedule import run_schedule
from spark_broker.testing.simulation.shadow import Key
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.transaction_draw import TransactionDraw
from spark_broker.testing.simulation.unclean import FAULT
from spark_broker.testing.simulation.world import World
from tests.sim.test_findings import run_until

SEEDS = range(600)

PATIENT = GroupDraw(
    groups=1,
    commit_ms=10.0,
    life_ms=1e9,
    crash_share=1.0,
    restart_share=0.0,
    rest_ms=1.0,
    offsets_partitions=1,
    offsets_replicas=3,
    offsets_min_isr=1,
    clean_ms=0.0,
    strand_share=0.0,
)
"""A group whose member ends when the scene says so."""


def with_groups() -> list[int]:
    return [seed for seed in SEEDS if GroupDraw.draw(seed) is not None]


def test_a_share_of_the_schedules_has_groups() -> None:
    assert len(SEEDS) * SHARE * 0.5 < len(with_groups()) < len(SEEDS) * (SHARE + SHARE_OF_UNCLEAN / 10) * 1.3
    assert all(TransactionDraw.draw(seed) is None for seed in with_groups())


def test_a_story_with_groups_is_the_same_each_time() -> None:
    seed = with_groups()[0]
    first, second = (run_schedule(seed, 300, story=True)[0].digest for _ in range(2))
    assert first == second


class Scene:
    """Three brokers, one partition with two replicas, one group; no faults but the scene's."""

    def __init__(self, draw: GroupDraw = PATIENT) -> None:
        calm = dataclasses.replace(
            Swarm.draw(random.Random(1)),
            brokers=3,
            partitions=1,
            replication_factor=2,
            min_insync_replicas=1,
            producers=1,
            latency_ms=0.5,
            spike_rate=0.0,
            loss_rate=0.0,
            store_fault_rate=0.0,
            late_rate=0.0,
            fetch_pause_ms=0.0,
            restart_ms=20.0,
            plain_share=0.0,
            faults={FAULT: 1.0},  # the rules must know this fault; nothing starts it
        )
        self.world = World(1, swarm=calm, groups=draw)
        self.world.start()
        run_until(self.world, lambda: self.world.is_up)
        for producer in self.world.producers:
            producer.start()
        for consumer in self.world.consumers:
            consumer.start()

    @property
    def member(self) -> SimGroupMember:
        (member,) = self.world.consumers
        assert isinstance(member, SimGroupMember)
        return member

    def key(self, topic: str = "t") -> Key:
        return self.world.invariants.image.topic_ids[topic], 0

    def leader(self, topic: str = "t") -> SimulatedMachine | None:
        state = self.world.invariants.image.partition(*self.key(topic))
        return None if state is None else self.world.machine_of(state.leader)

    def committed(self) -> int:
        return max(self.member.kept_position(self.key()), 0)

    def replace_member(self) -> None:
        before = self.member
        before.quit("is killed")
        run_until(self.world, lambda: self.member is not before)

    def kill_leader(self, topic: str = "t", restart_ms: float = 60_000.0) -> SimulatedMachine:
        leader = self.leader(topic)
        assert leader is not None
        self.world.kill(leader, restart_ms=restart_ms)
        return leader


def test_a_successor_resumes_at_another_coordinator() -> None:
    scene = Scene()
    run_until(scene.world, lambda: scene.committed() > 20)
    for producer in scene.world.producers:
        producer.stopped = True
    run_until(scene.world, lambda: scene.committed() == scene.member.position(scene.key()) > 20)
    committed = scene.member.committed
    scene.kill_leader(CONSUMER_OFFSETS_TOPIC)
    scene.replace_member()
    run_until(scene.world, lambda: scene.member.position(scene.key()) >= 0)
    assert scene.member.committed == committed
    assert scene.world.trace.counts.get("positions resumed") == 1


def test_a_successor_is_told_that_what_its_group_has_read_is_gone() -> None:
    """Known bug 17: the last member ended before it could meet the next leader, whose log is another one."""
    scene = Scene()
    world, key = scene.world, scene.key()
    run_until(world, lambda: scene.committed() > 5)
    leader = scene.leader()
    for machine in world.machines:
        if machine is not leader:
            world.faults.pause_fetches(machine, 1e9)
    replicas = world.invariants.shadows

    def elsewhere() -> int:
        return max(shadow.end_offset for (number, k), shadow in replicas.items() if k == key and number != kept)

    kept = leader.number if leader is not None else -1
    run_until(world, lambda: scene.committed() > elsewhere() + 5)
    lost = scene.committed()
    scene.member.quit("is killed")
    scene.kill_leader()
    for machine in world.machines:
        world.faults.pause_fetches(machine, 0.0)

    def leaderless() -> bool:
        state = world.invariants.image.partition(*key)
        return state is not None and state.leader == NO_LEADER

    run_until(world, leaderless)
    world.call_controller(ElectLeadersRequest([("t", 0)], unclean=True), "elect uncleanly")
    run_until(world, lambda: scene.member.position(key) > lost)
    assert world.trace.counts.get("readers told of a cut") == 1
