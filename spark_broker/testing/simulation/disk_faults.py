"""Faults of disks: without room, without descriptors, restored from older copies, or with files that are gone."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_broker.testing.simulation.filesystem import Fault, Operation
from spark_broker.testing.simulation.swarm import Swarm

if TYPE_CHECKING:
    from spark_broker.testing.simulation.faults import Faults
    from spark_broker.testing.simulation.world import World


SHARE = 0.35
"""Share of schedules that have faults of these kinds."""

NAMES_REFUSED_SHARE = 0.3
"""Share of full disks that refuse names, too: the blocks of a directory are full (ext4), or a quota is reached."""

KINDS = ("aside topic", "full disks, new topic", "out of descriptors", "older copy", "lost segments")
"""`aside topic` is administration: what becomes of the directories of topics that come and go is the point."""


def with_disk_faults(seed: int, swarm: Swarm) -> Swarm:
    """The draw of a seed, with these faults if it has them. A generator of its own leaves other seeds as they are."""
    rng = random.Random(f"{seed}/disk faults draw")
    if rng.random() >= SHARE:
        return swarm
    usual = sum(swarm.faults.values()) or 1.0
    chosen = {kind: usual * rng.choice([0.05, 0.15, 0.5]) for kind in KINDS if rng.random() < 0.5}
    if "lost segments" in chosen:  # Another replica must have everything.
        swarm = replace(swarm, min_insync_replicas=2, replication_factor=max(swarm.replication_factor, 2))
    return replace(swarm, faults={**swarm.faults, **chosen})


class DiskFaults:
    """Each kind of fault is a method, drawn by `Faults`."""

    def __init__(self, world: World, rng: random.Random, faults: Faults) -> None:
        self._world = world
        self._rng = rng
        self._faults = faults

    def _disk_full(self) -> str:
        machine = self._faults.any_running()
        if machine is None or machine.fs.capacity_bytes is not None:
            return ""
        fs = machine.fs
        fs.capacity_bytes = fs.used_bytes + self._rng.choice([0, 50, 500, 2000])
        for_ms = self._faults.for_a_while()
        names = random.Random(f"names {for_ms}")  # A generator of its own leaves other seeds as they are.
        refuses_names = fs.on_operation is None and names.random() < NAMES_REFUSED_SHARE

        def refuse_a_name(operation: Operation) -> Fault | None:
            refused = operation.kind in ("create", "rename", "unlink") and names.random() < 0.5
            return Fault(errno.EDQUOT) if refused else None

        def free() -> None:
            fs.capacity_bytes = None
            if fs.on_operation is refuse_a_name:
                fs.on_operation = None

        if refuses_names:
            fs.on_operation = refuse_a_name
        self._world.scheduler.after(for_ms, self._world.operator, "disk has room", free)
        return f"the disk of {machine} is full{' also for names' * refuses_names} for {for_ms:.0f} ms"

    def _full_disks_new_topic(self) -> str:
        """No disk has room, or only one has, when a topic is created."""
        world = self._world
        spared = self._rng.choice([None, None, self._rng.choice(world.machines)])
        full = [m for m in world.machines if m is not spared and m.fs.capacity_bytes is None]

        def free() -> None:
            for machine in full:
                machine.fs.capacity_bytes = None

        for machine in full:
            machine.fs.capacity_bytes = machine.fs.used_bytes
        for_ms = self._faults.for_a_while()
        world.scheduler.after(for_ms, world.operator, "disks have room", free)
        world.call_controller(world.aside.request(), "create a topic")
        return f"{len(full)} disks are full for {for_ms:.0f} ms, and a topic is created"

    def _out_of_descriptors(self) -> str:
        """The process of a broker may open so many files and no more, for a while."""
        machine = self._faults.any_running()
        if machine is None or machine.fs.on_operation is not None:
            return ""
        left, fs = self._rng.choice([0, 0, 1, 3]), machine.fs

        def hook(operation: Operation) -> Fault | None:
            nonlocal left
            if operation.kind not in ("open", "create", "read_bytes", "list_directory"):
                return None
            left -= 1
            return Fault(errno.EMFILE) if left < 0 else None

        def end() -> None:
            if fs.on_operation is hook:
                fs.on_operation = None

        fs.on_operation = hook
        for_ms = self._faults.for_a_while()
        self._world.scheduler.after(for_ms, self._world.operator, "descriptors are free again", end)
        return f"{machine} can open no more files for {for_ms:.0f} ms"

    def _older_copy(self) -> str:
        machine = self._faults.any_running()
        if machine is None or not self._faults.may_lose(machine):
            return ""
        return self._world.lost_files.restore(machine)

    def _lost_segments(self) -> str:
        world = self._world
        replicas = [(m, p) for m in self._faults.running() if m.process for p in m.process.manager.partitions()]
        self._rng.shuffle(replicas)
        for machine, partition in replicas:
            if self._faults.may_lose(machine) and world.bit_flips.may_rot(machine, partition):
                told = world.lost_files.shorten(machine, partition, self._rng)
                if told:
                    return told
        return ""
