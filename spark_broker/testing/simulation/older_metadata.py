"""The metadata store is replaced by an older copy of itself, as by somebody who restores the wrong backup.

The cluster is down meanwhile. Every broker has seen more than the copy, so none may register with it (*the trial*).
Then the operator puts the newest files back, or accepts the older metadata. Nothing may be deleted in either case.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_broker.controller import lineage
from spark_broker.controller.image import MetadataImage
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.errors import DamagedLogError
from spark_broker.protocol.messages import MetadataSeen
from spark_broker.storage.checkpoints import read_checkpoint_as
from spark_broker.storage.directory import SEEN_FILE
from spark_broker.storage.directory_names import read_partition
from spark_broker.storage.strays import strays_in
from spark_broker.testing.simulation.aside import is_aside
from spark_broker.testing.simulation.shadow import Key
from spark_broker.testing.simulation.store import SimStore
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.trace import TraceKind
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World

BACKUP_MS = 600.0
DECISION_MS = 200.0
"""How long the operator thinks about the first broker that was refused."""

FAULT = "older metadata"

SHARE = 0.08
"""Share of schedules in which this happens."""


def with_older_metadata(seed: int, swarm: Swarm) -> Swarm:
    """The draw of a seed, with this fault if it has it. A generator of its own leaves the other seeds as they are."""
    rng = random.Random(f"{seed}/older metadata draw")
    if rng.random() >= SHARE:
        return swarm
    usual = sum(swarm.faults.values()) or 1.0
    faults = {**swarm.faults, FAULT: usual * rng.choice([0.3, 1.0])}
    return replace(swarm, faults={**faults, "aside topic": faults.get("aside topic", usual * 0.2)})


class OlderMetadata:
    """Copies of the store's files, and the trial of one. `on_trial`: the store is a copy that no broker may accept."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._copies: list[Mapping[str, bytes]] = []
        self._newest: Mapping[str, bytes] = {}
        self._accepts = False  # whether the operator will accept the copy
        self._accepted = False  # whether the next controller is told so
        self._decides = False  # whether the operator has seen a refusal
        self._unknown: list[tuple[SimulatedMachine, Key]] = []  # replicas that the accepted metadata does not know
        self.on_trial = False

    def back_up(self, rng: random.Random) -> None:
        """Copy the store now and then."""
        world = self._world
        if not world.faults.over:
            world.scheduler.after(BACKUP_MS * (0.5 + rng.random()), world.operator, "backup", lambda: self.back_up(rng))
        if not self.on_trial:
            self._copies.append(world.store.copy())

    def strike(self, rng: random.Random) -> str:
        """End the application, and replace the store. Empty where no copy would be noticed by every broker."""
        controller = self._world.controller
        decided = controller is not None and controller.alive and not (self.on_trial or self._accepted or self._decides)
        if not decided or not self._copies:
            return ""
        copy = rng.choice(self._copies[: (len(self._copies) + 1) // 2])
        image = self._image(copy)
        if any(self._is_contained(machine, image) for machine in self._world.machines):
            return ""
        self._accepts = rng.random() < 0.5 and self._may_accept(image)
        self._newest = self._end_all()
        self._world.store.replace(copy)
        self.on_trial, self._decides, self._copies = True, False, []
        self._world.start_controller_soon(rng.random() * DECISION_MS)
        return f"the cluster is down, and its metadata is that of offset {image.next_offset}"

    def _image(self, copy: Mapping[str, bytes]) -> MetadataImage:
        store = SimStore(random.Random(0), 0.0, lambda: 0.0)
        store.replace(copy)
        return MetadataLog(store, writer="0" * 32).image

    @staticmethod
    def _is_contained(machine: SimulatedMachine, image: MetadataImage) -> bool:
        """Whether the broker of this machine might register. One that is off may have lost what it had saved."""
        seen = _saved(machine)
        return not machine.powered or machine.restored or seen is None or lineage.has(image, seen)

    def _may_accept(self, image: MetadataImage) -> bool:
        """Whether the copy loses nothing that is in use: it has the partitions, each with a replica that has all."""
        newest = self._world.invariants.image
        if self._world.tiering is not None or "bit flip" in self._world.swarm.faults:
            return False
        if {t.topic_id for t in newest.topics.values() if not is_aside(t.name)} != {
            t.topic_id for t in image.topics.values() if not is_aside(t.name)
        }:
            return False
        for topic, number, state in newest.partitions():
            older = image.partition(topic.topic_id, number)
            if older is None and not is_aside(topic.name):
                return False
            members = {*state.isr, *state.elr} & set(older.replicas if older is not None else state.replicas)
            machines = [self._world.machine_of(broker) for broker in members]
            if not any(m is not None and not m.incomplete for m in machines):
                return False
        return True

    def _end_all(self) -> Mapping[str, bytes]:
        """End the controllers and every broker; returns the store's files."""
        world = self._world
        world.end_controllers()
        for machine in world.machines:
            if machine.running:
                world.kill(machine)
        return world.store.copy()

    def refused(self) -> None:
        """A broker was refused. The operator decides once, or again if a controller was killed too early."""
        world = self._world
        if not self._decides:
            self._decides = True
            world.scheduler.after(DECISION_MS, world.operator, "decide", self._decide)

    def registered(self, who: str) -> None:
        """A broker was let in."""
        if self.on_trial:
            raise ViolationError("nobody registers with older metadata", f"{who} has seen newer metadata")

    def _decide(self) -> None:
        world = self._world
        self._decides = False
        if not self.on_trial or self._accepts:
            self._accept()
        else:
            world.note("operator", TraceKind.METADATA, "puts the newest metadata back")
            world.trace.count("newest metadata put back")
            self._end_all()
            world.store.replace(self._newest)
            self.on_trial = False
            world.start_controller_soon(1.0)

    def _accept(self) -> None:
        world = self._world
        world.note("operator", TraceKind.METADATA, "accepts the older metadata")
        world.trace.count("older metadata accepted")
        copy = self._end_all()
        image = self._image(copy)
        if self.on_trial:
            self._note_unknown(image)
        self.on_trial, self._accepted = False, True
        world.invariants.metadata_replaced(image)
        world.start_controller_soon(1.0)

    def accepted(self) -> bool:
        """Whether the controller that starts now is told to accept what it finds. Asked once."""
        accepted, self._accepted = self._accepted, False
        return accepted

    def _note_unknown(self, image: MetadataImage) -> None:
        for machine in self._world.machines:
            for key in _replicas_of(machine):
                if image.partition(*key) is None and key[0] not in image.tombstones:
                    self._unknown.append((machine, key))
                    self._world.trace.count("replicas that older metadata does not know")

    def lost_disk(self, machine: SimulatedMachine) -> None:
        """The machine got another disk."""
        self._unknown = [(m, key) for m, key in self._unknown if m is not machine]

    def missing(self) -> str:
        """A replica that the accepted metadata did not know, and that still has its name. Empty when none has.

        A broker sets it aside once it has applied the metadata, or later if its disk refuses.
        """
        for machine, key in self._unknown:
            if key in _replicas_of(machine):
                return f"{machine} has not set {key} aside"
        return ""

    def check(self) -> None:
        """At the end, when nothing is `missing`: whatever the accepted metadata did not know is set aside."""
        for machine, key in self._unknown:
            process = machine.process
            if process is None:
                continue
            strays = strays_in(process.directory.path, fs=machine.fs)
            found = {(stray.replica.topic_id, stray.replica.partition) for stray in strays}
            if key not in found:
                raise ViolationError("what metadata does not know is kept", f"{machine} has deleted {key}")


def _saved(machine: SimulatedMachine) -> MetadataSeen | None:
    process, fs = machine.process, machine.fs.another_process()
    if process is None:
        return None
    with fs.undisturbed():
        try:
            return read_checkpoint_as(process.directory.path / SEEN_FILE, MetadataSeen, fs=fs)
        except DamagedLogError:
            return None


def _replicas_of(machine: SimulatedMachine) -> list[Key]:
    process, fs = machine.process, machine.fs.another_process()
    if process is None:
        return []
    with fs.undisturbed():
        found = [
            read_partition(process.directory.path / name, fs=fs) for name in fs.list_directory(process.directory.path)
        ]
    return [(r.topic_id, r.partition) for r in found if r is not None and r.path.name == f"{r.topic}-{r.partition}"]
