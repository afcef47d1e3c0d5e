"""What the simulator found, each as the shortest scene that shows it."""

from __future__ import annotations

import dataclasses
import errno
import random
from collections.abc import Callable
from functools import partial

import pytest

from spark_broker.core.replica import Role
from spark_broker.protocol.messages import ElectLeadersRequest, ReassignPartitionRequest
from spark_broker.storage.strays import strays_in
from spark_broker.testing.simulation.controller import CONTROLLER_HOST
from spark_broker.testing.simulation.ending import end
from spark_broker.testing.simulation.filesystem import Fault, Operation
from spark_broker.testing.simulation.machine import SimulatedMachine
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.violation import ViolationError
from spark_broker.testing.simulation.world import World

EVENTS_MAX = 20_000


def run_until(world: World, condition: Callable[[], bool]) -> None:
    for _ in range(EVENTS_MAX):
        if condition():
            return
        world.step()
    raise AssertionError("it did not happen")


def cluster(lag_max_ms: int = 1000, replicas: int = 3) -> World:
    """A running cluster of three with a topic that has all its replicas, and no faults but the scene's."""
    drawn = Swarm.draw(random.Random(1))
    timed = dataclasses.replace(
        drawn.settings.cluster,
        replica_lag_time_max_ms=lag_max_ms,
        replica_fetch_max_bytes=4_194_304,
        replica_fetch_response_max_bytes=16_777_216,
    )
    settings = dataclasses.replace(drawn.settings, cluster=timed)
    calm = dataclasses.replace(
        drawn,
        settings=settings,
        brokers=3,
        partitions=1,
        replication_factor=replicas,
        latency_ms=0.5,
        spike_rate=0.0,
        loss_rate=0.0,
        store_fault_rate=0.0,
        late_rate=0.0,
        restart_ms=20.0,
        plain_share=0.0,
        fetch_pause_ms=0.0,
        consumers=0,
    )
    world = World(1, swarm=calm)
    world.start()
    run_until(world, lambda: sum(m.running and hosts_something(m) for m in world.machines) == replicas)
    return world


def hosts_something(machine: SimulatedMachine) -> bool:
    return machine.process is not None and any(True for _ in machine.process.manager.partitions())


def test_a_recovery_that_failed_is_made_again_after_the_next_start() -> None:
    """A machine crash, a log that cannot be opened: the next process must not take it for a process crash."""
    world = cluster()
    machine = world.machines[0]
    world.lose_machine(machine, down_ms=10)
    run_until(world, lambda: machine.running)
    machine.fs.on_operation = cannot_read_the_topic
    run_until(world, lambda: is_offline(machine))
    world.kill(machine, restart_ms=1)
    machine.fs.on_operation = None
    run_until(world, lambda: machine.running and hosts_something(machine))
    assert world.trace.counts["machine_crash starts"] == 2
    assert "process_crash starts" not in world.trace.counts


def cannot_read_the_topic(operation: Operation) -> Fault | None:
    return Fault(errno.EIO) if operation.path.startswith("/log/broker-0/t-") else None


def is_offline(machine: SimulatedMachine) -> bool:
    return machine.process is not None and bool(machine.process.manager.offline)


def test_a_replica_that_cannot_be_opened_is_not_elected_and_comes_back() -> None:
    """Its broker goes on: it stays in the ISR until it is named, and is not elected for what it cannot serve."""
    world = cluster()
    machine = leader_of(world)
    world.kill(machine, restart_ms=1)
    run_until(world, lambda: machine.running)
    process = machine.process
    machine.fs.on_operation = cannot_read_the_topic
    run_until(world, lambda: is_offline(machine))
    run_until(world, lambda: leader_of(world) is not machine and world.invariants.image.is_live(machine.broker_id))
    for _ in range(20):
        elect_preferred(world)
        assert leader_of(world) is not machine
    machine.fs.on_operation = None
    run_until(world, lambda: hosts_something(machine))
    run_until(world, lambda: machine.broker_id in isr_of(world))
    assert machine.process is process
    end(world)


def isr_of(world: World) -> tuple[int, ...]:
    ((_, _, state),) = [partition for partition in world.invariants.image.partitions() if not partition[0].internal]
    return state.isr


def test_a_full_disk_ends_no_broker() -> None:
    """The checkpoint of high watermarks does not fit: the one before it stays."""
    world = cluster()
    machine = world.machines[0]
    process = machine.process
    machine.fs.capacity_bytes = machine.fs.used_bytes
    checkpoint_ms = world.settings.cluster.replica_high_watermark_checkpoint_interval_ms
    until_ms = world.scheduler.now_ms + 2 * checkpoint_ms + 500
    run_until(world, lambda: world.scheduler.now_ms > until_ms)
    assert machine.process is process
    assert machine.running


def test_a_leader_that_cannot_read_its_log_leads_no_longer() -> None:
    """Otherwise its followers and readers wait for as long as no producer writes."""
    world = cluster()
    for producer in world.producers:
        producer.start()
    run_until(world, lambda: world.history.acknowledged_count > 0)
    machine, key = next(
        (machine, partition.key)
        for machine in world.machines
        if machine.process is not None
        for partition in machine.process.manager.partitions()
        if partition.replica.role is Role.LEADER and partition.replica.log_end_offset
    )
    process = machine.process

    def refuse(operation: Operation) -> Fault | None:
        return Fault(errno.EIO) if operation.kind == "pread" and "/t-0/" in operation.path else None

    machine.fs.on_operation = refuse
    world.bit_flips.damages(machine, key, "pread")
    run_until(world, lambda: process is not None and bool(process.manager.damaged))
    run_until(world, lambda: leads(world) not in (None, machine))
    assert machine.process is process, "its broker goes on"


def leads(world: World) -> SimulatedMachine | None:
    ((_, _, state),) = [partition for partition in world.invariants.image.partitions() if not partition[0].internal]
    return world.machine_of(state.leader)


def leader_of(world: World) -> SimulatedMachine:
    machine = leads(world)
    assert machine is not None
    return machine


def elect_preferred(world: World) -> None:
    """Request the election, and wait for its outcome."""
    world.call_controller(ElectLeadersRequest(None), "elect preferred leaders")
    until_ms = world.scheduler.now_ms + 100
    run_until(world, lambda: world.scheduler.now_ms > until_ms)


def test_a_leader_with_a_full_disk_hands_over_and_leads_again_when_it_has_room() -> None:
    """Its followers have room: appends go on within two seconds, not only after `replica.lag.time.max.ms`."""
    world = cluster(lag_max_ms=30_000)
    for producer in world.producers:
        producer.start()
    run_until(world, lambda: world.history.acknowledged_count > 20)
    full = leader_of(world)
    full.fs.capacity_bytes = full.fs.used_bytes
    filled_ms, acknowledged = world.scheduler.now_ms, world.history.acknowledged_count
    run_until(world, lambda: leader_of(world) is not full)
    run_until(world, lambda: world.history.acknowledged_count > acknowledged + 20)
    assert world.scheduler.now_ms - filled_ms < 2_000

    successor = leader_of(world)
    other = next(machine for machine in world.machines if machine not in (full, successor))
    prefers_full = ReassignPartitionRequest("t", 0, [full.broker_id, other.broker_id, successor.broker_id])
    world.call_controller(prefers_full, "prefer the full one")
    for _ in range(40):
        elect_preferred(world)
        assert leader_of(world) is not full

    full.fs.capacity_bytes = None
    for _ in range(100):
        elect_preferred(world)
        if leader_of(world) is full:
            break
    assert leader_of(world) is full
    end(world)


class Decided(random.Random):
    """The operator accepts the older metadata: the oldest copy."""

    def random(self) -> float:
        return 0.0


def test_a_schedule_ends_only_when_each_broker_has_looked_at_what_the_metadata_does_not_know() -> None:
    """The broker has no replica that any partition would miss. A replica that waits for it was called deleted."""
    world = cluster(replicas=2)
    ((_, _, state),) = world.invariants.image.partitions()
    spare = next(machine for machine in world.machines if machine.broker_id not in state.replicas)
    older, decided = world.older_metadata, Decided()
    older.back_up(decided)
    for _ in range(3):
        world.call_controller(world.aside.request(), "create a topic")
    run_until(world, lambda: hosts_something(spare))
    run_until(world, lambda: older.strike(decided) != "")
    run_until(world, lambda: "older metadata accepted" in world.trace.counts)

    world.network.part(spare.host, CONTROLLER_HOST)
    run_until(world, lambda: spare.running and set(isr_of(world)) == set(state.replicas))
    assert older.missing()
    end(world)
    assert spare.process is not None
    assert strays_in(spare.process.directory.path, fs=spare.fs)


def test_a_cluster_is_not_at_rest_while_a_broker_is_not_live() -> None:
    """Also where no partition misses it: whatever keeps it out is found."""
    world = cluster(replicas=2)
    ((_, _, state),) = world.invariants.image.partitions()
    spare = next(machine for machine in world.machines if machine.broker_id not in state.replicas)
    world.kill(spare, restart_ms=1)
    part = partial(world.network.part, spare.host, CONTROLLER_HOST)
    world.scheduler.after(0, world.operator, "the link never heals", part)
    with pytest.raises(ViolationError, match=f"{spare}#.* is not live"):
        end(world)
