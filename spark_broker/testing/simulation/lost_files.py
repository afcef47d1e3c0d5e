"""Files that are gone at a start, and log directories that were restored from an older copy.

Both strike only where another replica has everything: what is lost then is never the last copy. A copy is older than
the last registration of its broker, which is what the controller can notice.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from spark_broker.errors import DamagedLogError
from spark_broker.storage.checkpoints import read_high_watermarks
from spark_broker.testing.simulation.disk import Directory, copied

if TYPE_CHECKING:
    from spark_broker.broker.partition import Partition
    from spark_broker.testing.simulation.broker import BrokerProcess
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.shadow import Key
    from spark_broker.testing.simulation.world import World

BACKUP_MS = 400.0


class LostFiles:
    """Backups of machines' disks, and what was done to them."""

    def __init__(self, world: World) -> None:
        self._world = world
        # By machine: the newest incarnation that its directory knew, and the disk.
        self._backups: dict[int, tuple[str, Directory]] = {}
        self._shortened: set[tuple[int, Key]] = set()

    def back_up(self, rng: random.Random) -> None:
        """Copy a disk now and then, as a snapshot of the volume would."""
        world = self._world
        if not world.faults.over:
            world.scheduler.after(BACKUP_MS * (0.5 + rng.random()), world.operator, "backup", lambda: self.back_up(rng))
        machine = rng.choice(world.machines)
        if machine.running and machine.process is not None and machine.process.registered:
            self._backups[machine.number] = (self._recorded(machine), copied(machine.fs.root))

    def restore(self, machine: SimulatedMachine) -> str:
        """Kill the broker, and start it on the copy. Empty where no copy is older than its registration."""
        process = machine.process
        who, disk = self._backups.get(machine.number, ("", None))
        if process is None or disk is None or not process.registered or who == self._recorded(machine):
            return ""
        self._world.kill(machine, restart_ms=None)
        machine.fs.replace_disk(copied(disk))
        machine.incomplete = machine.restored = True
        self._world.older_metadata.lost_disk(machine)
        self._world.invariants.forget_all(machine)
        return f"{machine} gets the disk that it had under {who}"

    def _recorded(self, machine: SimulatedMachine) -> str:
        """The newest incarnation that the directory knows, as the controller has it."""
        broker = self._world.invariants.image.brokers.get(machine.broker_id)
        return "" if broker is None else broker.recorded

    def shorten(self, machine: SimulatedMachine, partition: Partition, rng: random.Random) -> str:
        """Kill the broker, and delete the newest segments of a replica: it then ends below what it has committed."""
        process = machine.process
        if process is None:
            return ""
        directory = Path(partition.log.directory)
        with machine.fs.undisturbed():
            mark = self._saved_mark(machine, process, partition.key)
            names = machine.fs.list_directory(directory)
            bases = sorted(int(name.split(".")[0]) for name in names if name.endswith(".arrow"))
        log_start = partition.replica.log_start_offset  # An empty log would begin, and end, there.
        below = [base for base in bases if max(base, log_start) < mark]
        if not below:
            return ""
        first = rng.choice(below)
        self._world.kill(machine, restart_ms=None)
        operator = machine.fs.another_process()
        with operator.undisturbed():
            for base in bases:
                for suffix in (".arrow", ".index") if base >= first else ():
                    operator.unlink(directory / f"{base:020d}{suffix}")
        self._shortened.add((machine.number, partition.key))
        self._world.bit_flips.latent[machine.number, partition.key] = "lost segments"
        return f"{partition} on {machine} has lost its segments from {first} on; {mark} was committed"

    @staticmethod
    def _saved_mark(machine: SimulatedMachine, process: BrokerProcess, key: Key) -> int:
        try:
            return read_high_watermarks(process.directory.path, fs=machine.fs).get(key, 0)
        except DamagedLogError:
            return 0

    def was_shortened(self, machine: SimulatedMachine, key: Key) -> bool:
        """Whether the replica may be found damaged, or have less than the process before had."""
        return (machine.number, key) in self._shortened
