"""Damage to files of replicas while their brokers run, on a minority of a partition's replicas (known bug 28): bits
flip, and reads fail.

Nothing damaged is served or "cleaned up", and in the end all replicas agree. The promise does not cover damage of the
only complete replica. A bit therefore flips only where another, intact replica is in sync, and where at least two
replicas commit every record: min.insync.replicas is 2 in such a schedule, and stays so.
"""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from spark_broker.broker.partition import Partition
from spark_broker.controller.image import PartitionRegistration
from spark_broker.core.replica import Role
from spark_broker.errors import SparkBrokerError
from spark_broker.storage.directory_names import PARTITION_FILE
from spark_broker.testing.simulation.controller import CONTROLLER_HOST
from spark_broker.testing.simulation.shadow import Key
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.trace import TraceKind

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World

SHARE = 0.12
"""Share of the schedules that have bit flips."""

READ_SOON = 0.5
"""Share of the flips that are soon met by a read, also in a follower, which reads its files when it truncates."""

HEARD_LATE = 0.4
"""Share of those that the controller learns of only after the leader is gone and another one is elected."""

LOG_FILES = (".arrow", ".index")


def with_bit_flips(seed: int, swarm: Swarm) -> Swarm:
    """The draw of a seed, with bit flips if it has them. A generator of its own leaves the other seeds as they are."""
    rng = random.Random(f"{seed}/bit flips draw")
    if rng.random() >= SHARE:
        return swarm
    faults = {name: weight for name, weight in swarm.faults.items() if name != "change minimum"}
    usual = sum(faults.values()) or 1.0
    topic = replace(swarm.settings.topic, segment_bytes=2048)
    return replace(
        swarm,
        min_insync_replicas=2,
        replication_factor=max(swarm.replication_factor, 2),
        faults={**faults, "bit flip": usual * rng.choice([0.3, 1.0])},
        settings=replace(swarm.settings, topic=topic),
    )


class BitFlips:
    """`latent`: damage that no broker has found yet. Only a replica that was ever damaged may be quarantined."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"{world.seed}/bit flips")
        self.latent: dict[tuple[int, Key], str] = {}
        self._ever: set[tuple[int, Key]] = set()
        self._nobodys: set[tuple[int, str]] = set()  # directories that may not say any more whose they are
        self._seen: set[tuple[str, Key, int]] = set()

    def strike(self, rng: random.Random) -> str:
        """Flip one bit of one replica; returns what was done, empty if nothing."""
        running = [(m, m.process) for m in self._world.machines if m.running and not m.incomplete]
        candidates = [(m, p) for m, process in running if process for p in process.manager.partitions()]
        candidates = [(machine, partition) for machine, partition in candidates if self.may_rot(machine, partition)]
        if not candidates:
            return ""
        machine, partition = rng.choice(candidates)
        with machine.fs.undisturbed():
            paths = self._files(machine, partition, rng)
        if not paths:
            return ""
        path = rng.choice(paths)
        byte = rng.randrange(machine.fs.size_of(path))
        machine.fs.flip_bit(path, byte, rng.randrange(8))
        self.damages(machine, partition.key, path.name)
        if path.name == PARTITION_FILE:
            self._nobodys.add((machine.number, path.parent.name))
        if machine.process is not None and rng.random() < READ_SOON:
            read = _Reading(self, machine.process, partition.key, final=False)
            delay_ms = rng.choice([0, 5, 50, 500])
            if self._rng.random() < HEARD_LATE:
                hush = partial(self._hush, machine, partition.key)
                self._world.scheduler.after(delay_ms, self._world.operator, "hush", hush)
            self._world.scheduler.after(delay_ms, machine.process, "read everything", read)
        return f"a bit in byte {byte} of {partition}/{path.name} on {machine}"

    def damages(self, machine: SimulatedMachine, key: Key, what: str) -> None:
        """From now on this replica is damaged, or cannot be read."""
        self._ever.add((machine.number, key))
        self.latent[machine.number, key] = what

    def may_damage(self, machine: SimulatedMachine) -> None:
        """The next read of any replica here fails. By then, it may have another copy, and be set aside."""
        if machine.process is not None:
            self._ever.update((machine.number, partition.key) for partition in machine.process.manager.partitions())

    def unreadable(self, machine: SimulatedMachine) -> str:
        """The next read of a leader's batches fails, and so does its repetition. Returns whose; empty: of none.

        Its followers read soon: a fault that waits for long would keep other faults away.
        """
        hosted = list(machine.process.manager.partitions()) if machine.process is not None else []
        led = (partition for partition in hosted if partition.replica.role is Role.LEADER)
        partition = next((partition for partition in led if self.may_rot(machine, partition)), None)
        if partition is None:
            return ""
        for _ in range(2):
            machine.fs.fail_next("pread", errno.EIO, path=f"/{partition}/")
        self.damages(machine, partition.key, "pread")
        return str(partition)

    def _hush(self, machine: SimulatedMachine, key: Key) -> None:
        """Kill the leader, and delay this broker's report of its damage until the controller has elected another."""
        world = self._world
        state = world.invariants.image.partition(*key)
        leader = world.machine_of(state.leader) if state is not None else None
        if world.faults.over or leader is None or leader is machine or not leader.running:
            return
        world.network.clog(machine.host, CONTROLLER_HOST, 100 + 500 * self._rng.random())
        kill = partial(world.kill, leader)
        world.scheduler.after(self._rng.choice([1, 10, 50]), world.operator, "lose the leader", kill)

    def may_rot(self, machine: SimulatedMachine, partition: Partition) -> bool:
        """Whether no replica of the partition is damaged, and another one is in sync."""
        world, replica = self._world, partition.replica
        state = world.invariants.image.partition(*partition.key)
        if state is None or replica.role is Role.STOPPED or replica.effective_min_isr < 2 or state.reassigning:
            return False
        replicas = [m for broker in state.replicas if (m := world.machine_of(broker)) is not None]
        if any(m.incomplete or self.is_affected(m, partition.key) for m in replicas):
            return False
        return any(broker != machine.broker_id for broker in state.isr)

    def _files(self, machine: SimulatedMachine, partition: Partition, rng: random.Random) -> list[Path]:
        """Segments that are sealed, synced and committed; or else snapshots and checkpoints."""
        directory = Path("/", *_directory_of(machine), str(partition))
        names = machine.fs.list_directory(directory)
        bound = min(partition.log.recovery_point, partition.replica.high_watermark)
        bases = sorted(int(name.split(".")[0]) for name in names if name.endswith(".arrow"))
        sealed = {base for base, after in pairwise(bases) if after <= bound}
        logs = [n for n in names if n.endswith(LOG_FILES) and int(n.split(".")[0]) in sealed]
        others = [n for n in names if n.endswith((".json", ".snapshot"))]
        chosen = logs if rng.random() < 0.8 else others
        return [directory / name for name in chosen if machine.fs.size_of(directory / name) > 0]

    def is_affected(self, machine: SimulatedMachine, key: Key) -> bool:
        """Whether the replica cannot be relied on: it is damaged, or was quarantined and is not in sync again."""
        return (machine.number, key) in self.latent or self.is_quarantined(machine, key)

    def forbids_loss(self, machine: SimulatedMachine, key: Key, state: PartitionRegistration) -> bool:
        """Whether another replica of the partition is damaged: the promise does not cover the loss of both."""
        if machine.broker_id not in state.replicas:
            return False
        others = [self._world.machine_of(broker) for broker in state.replicas if broker != machine.broker_id]
        return any(other is not None and self.is_affected(other, key) for other in others)

    def is_quarantined(self, machine: SimulatedMachine, key: Key) -> bool:
        """Whether the machine's broker reports the replica to the controller as damaged."""
        return machine.process is not None and key in machine.process.manager.damaged

    def was_damaged(self, machine: SimulatedMachine, key: Key) -> bool:
        """A deleted topic's directory that does not say whose it is stays. The next topic of its name finds it."""
        topic = self._world.invariants.image.topics.get(key[0])
        in_the_way = topic is not None and (machine.number, f"{topic.name}-{key[1]}") in self._nobodys
        return in_the_way or (machine.number, key) in self._ever

    def look(self, process: BrokerProcess) -> list[Key]:
        """Replicas that this process has quarantined since the last look, or has found on its list of damaged ones."""
        if not process.manager.damaged:
            return []
        quarantined = []
        for topic_id, number, damage in process.manager.damage_reports:
            key = (topic_id, number)
            if (process.name, key, damage) in self._seen:
                continue
            self._seen.add((process.name, key, damage))
            self.latent.pop((process.machine.number, key), None)
            self._world.trace.count("replicas quarantined")
            self._world.note(process.name, TraceKind.REPLICA, f"has set a replica of {number} aside (damage {damage})")
            quarantined.append(key)
        return quarantined

    def missing(self) -> str:
        """What is not healed yet at the end, once everything else is in its place; empty when all is healed."""
        aside = [machine for machine in self._world.machines if machine.process and machine.process.manager.damaged]
        if self.latent:
            self._read_everything()
        return f"to be read: {sorted(self.latent)}, quarantined on {aside}" if self.latent or aside else ""

    def _read_everything(self) -> None:
        """Read the damaged replicas whose damage no read has met: as in Kafka, nothing scrubs the logs."""
        for number, key in list(self.latent):
            machine = self._world.machines[number]
            if machine.process is not None and machine.running:
                read = _Reading(self, machine.process, key, final=True)
                self._world.scheduler.after(0, machine.process, "read everything", read)


class _Reading:
    """Reads a replica from its start to its end, as followers would. `final`: damage that it misses is harmless."""

    def __init__(self, flips: BitFlips, process: BrokerProcess, key: Key, *, final: bool) -> None:
        self._flips = flips
        self._process = process
        self._key = key
        self._final = final

    def __call__(self) -> None:
        partition = self._process.manager.find(*self._key)
        if partition is not None and not self._is_intact(partition):
            return
        if self._final and not self._flips.is_quarantined(self._process.machine, self._key):
            self._flips.latent.pop((self._process.machine.number, self._key), None)

    @staticmethod
    def _is_intact(partition: Partition) -> bool:
        for segment in partition.log._log._segments:
            segment.unload()  # An index that was loaded before its file was damaged would be read from memory.
        offset, end_offset = partition.replica.log_start_offset, partition.replica.log_end_offset
        try:
            while offset < end_offset:
                frames = partition.read_log(offset, 1 << 20, end_offset)
                offset = frames[-1].header.next_offset if frames else end_offset
        except SparkBrokerError:
            return False
        return True


def _directory_of(machine: SimulatedMachine) -> tuple[str, ...]:
    return machine.process.directory.path.parts[1:] if machine.process is not None else ()
