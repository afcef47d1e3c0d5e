"""Faults and administration, at random times, of the kinds that the seed has chosen."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import NetworkError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, NO_LEADER
from spark_broker.protocol.messages import ElectLeadersRequest, ReassignPartitionRequest
from spark_broker.testing.simulation.administration import Administration
from spark_broker.testing.simulation.clock_jumps import FAULT as CLOCK_JUMPS
from spark_broker.testing.simulation.clock_jumps import jump, set_right
from spark_broker.testing.simulation.disk_faults import DiskFaults
from spark_broker.testing.simulation.filesystem import Fault, Operation
from spark_broker.testing.simulation.groups import STRANDED_MS, Stranded
from spark_broker.testing.simulation.older_metadata import FAULT as OLDER_METADATA
from spark_broker.testing.simulation.shadow import Key
from spark_broker.testing.simulation.trace import TraceKind

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World


ELECT_AFTER_MS = 20
"""By then, the controller has made the successor the preferred leader."""


class Faults:
    """Draws the next fault; `heal` ends all of them for good."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._names = sorted(world.swarm.faults)
        self._weights = [world.swarm.faults[name] for name in self._names]
        self._pauses: dict[int, float] = {}
        self._administration = Administration(world, rng, self._leader)
        self._disks = DiskFaults(world, rng, self)
        self._waits_for_joining = False
        self.over = False

    def start(self) -> None:
        """The first fault comes after a while."""
        if "older copy" in self._names:
            self._world.lost_files.back_up(self._rng)
        if OLDER_METADATA in self._names:
            self._world.older_metadata.back_up(self._rng)
        if self._names:
            self._later()

    def _later(self) -> None:
        delay_ms = self._world.swarm.fault_interval_ms * (0.2 + 1.6 * self._rng.random())
        self._world.scheduler.after(delay_ms, self._world.operator, "fault", self._strike)

    def _strike(self) -> None:
        if self.over:
            return
        if self._world.older_metadata.on_trial:
            self._later()
            return
        name = self._rng.choices(self._names, self._weights)[0]
        told = self._method(name)()
        if told:
            self._world.trace.count(f"fault: {name}")
            self._world.note("fault", TraceKind.FAULT, f"{name}: {told}")
        self._later()

    def _method(self, name: str) -> Callable[[], str]:
        method = "_" + name.replace(", ", "_").replace(" ", "_")
        transactional = self._world.transactional
        owners = (None if transactional is None else transactional.faults, self, self._disks, self._administration)
        owner = next(candidate for candidate in owners if hasattr(candidate, method))
        fault: Callable[[], str] = getattr(owner, method)
        return fault

    def running(self) -> list[SimulatedMachine]:
        return [machine for machine in self._world.machines if machine.running]

    def any_running(self) -> SimulatedMachine | None:
        running = self.running()
        return self._rng.choice(running) if running else None

    def _leader(self) -> SimulatedMachine | None:
        """A leader according to the metadata log; mostly one with uncommitted records, whose end does the most harm."""
        image = self._world.invariants.image
        states = [(topic.topic_id, number, state) for topic, number, state in image.partitions()]
        leaders = [
            (m, (topic_id, n)) for topic_id, n, s in states if (m := self._world.machine_of(s.leader)) and m.running
        ]
        ahead = [machine for machine, key in leaders if self._is_ahead(machine, key)]
        machines = ahead if ahead and self._rng.random() < 0.8 else [machine for machine, _ in leaders]
        return self._rng.choice(machines) if machines else None

    @staticmethod
    def _is_ahead(machine: SimulatedMachine, key: Key) -> bool:
        partition = machine.process.manager.find(*key) if machine.process is not None else None
        return partition is not None and partition.replica.log_end_offset > partition.replica.high_watermark

    def for_a_while(self, most_ms: float = 2500) -> float:
        return self._rng.choice([30, 300, most_ms]) * (0.3 + self._rng.random())

    def _kill_broker(self) -> str:
        return self._killed(self.any_running())

    def _kill_leader(self) -> str:
        return self._killed(self._leader())

    def _killed(self, machine: SimulatedMachine | None, restart_ms: float | None = None) -> str:
        if machine is None:
            return ""
        name = str(machine.process)
        self._world.kill(machine, restart_ms=restart_ms)
        return f"kill -9 of {name}"

    def _bounce_broker(self) -> str:
        """Kill a broker that is back at once: it stays in the ISR, with the high watermark of its last checkpoint."""
        return self._killed(self.any_running(), restart_ms=1.0)

    def _bounce_follower_kill_leader(self) -> str:
        """KIP-101: the worst moment to kill the leader is before the follower that came back has fetched again."""
        leader = self._leader()
        others = [machine for machine in self.running() if machine is not leader]
        if leader is None or not others:
            return ""
        victim = self._rng.choice(others)
        told = self._killed(victim, restart_ms=1.0)
        delay_ms = self._rng.choice([10, 40, 120, 300]) * (0.5 + self._rng.random())
        self._world.scheduler.after(delay_ms, self._world.operator, "kill leader", lambda: self._kill_soon(leader))
        return f"{told}, the leader {leader} follows in {delay_ms:.0f} ms"

    def _kill_soon(self, machine: SimulatedMachine) -> None:
        if not self.over and machine.running:
            self._world.note("fault", TraceKind.FAULT, self._killed(machine))

    def _stop_broker(self) -> str:
        machine, controller = self.any_running(), self._world.controller
        if (
            machine is None
            or machine.process is None
            or controller is None
            or not controller.alive
            or controller.paused
        ):
            return ""
        controller.stop_broker(machine.process.launch)
        return f"controlled shutdown of {machine.process}"

    def _pause_broker(self) -> str:
        machine = self._leader() if self._rng.random() < 0.5 else self.any_running()
        if machine is None or machine.process is None or machine.process.paused:
            return ""
        process = machine.process
        process.paused = True
        for_ms = self.for_a_while()
        self._world.scheduler.after(for_ms, self._world.operator, "SIGCONT", lambda: self._resume(process))
        return f"SIGSTOP of {process} for {for_ms:.0f} ms"

    def _resume(self, process: BrokerProcess) -> None:
        if process.alive and process.paused:
            self._world.note(process.name, TraceKind.PROCESS, "runs again (SIGCONT)")
            self._world.scheduler.resume(process)

    def _lose_machine(self) -> str:
        """A machine fails only while another intact replica holds what it may lose: the promise covers no more."""
        machine = self._rng.choice(self._world.machines)
        if not machine.powered or not self.may_lose(machine):
            return ""
        down_ms = self.for_a_while()
        self._world.lose_machine(machine, down_ms)
        return f"power of {machine} fails for {down_ms:.0f} ms"

    def may_lose(self, machine: SimulatedMachine) -> bool:
        if machine.incomplete:
            return True
        world = self._world
        for topic, number, state in world.invariants.image.partitions():
            if world.bit_flips.forbids_loss(machine, (topic.topic_id, number), state):
                return False
            members = (*state.isr, *state.elr)
            if machine.broker_id not in state.replicas:
                continue
            others = [world.machine_of(broker) for broker in members if broker != machine.broker_id]
            if not any(m is not None and not m.incomplete for m in others):
                return False
        return True

    def _spark_lost(self) -> str:
        """Spark reports a loss while the process lives: a zombie."""
        machine, controller = self.any_running(), self._world.controller
        if (
            machine is None
            or machine.process is None
            or controller is None
            or not controller.alive
            or controller.paused
        ):
            return ""
        controller.spark_lost(machine.process.launch)
        self._world.launch(machine, self._world.swarm.restart_ms)
        return f"Spark takes {machine.process} for lost"

    def _kill_controller(self) -> str:
        controller = self._world.controller
        if controller is None or not controller.alive:
            return ""
        restart_ms = self.for_a_while(1500)
        self._world.kill_controller(restart_ms)
        return f"kill -9 of {controller}, back in {restart_ms:.0f} ms"

    def _depose_controller(self) -> str:
        """The controller freezes, another one takes over, and then it wakes up."""
        controller = self._world.controller
        if controller is None or not controller.alive:
            return ""
        controller.paused = True
        self._world.start_controller()
        self._world.trace.count("controller restarts")
        for machine in self._world.machines:
            # Another application: it brings brokers of its own, on the same log directories.
            self._world.launch(machine, self.for_a_while())
        for_ms = self.for_a_while()

        def wake() -> None:
            if controller.alive:
                self._world.note(controller.name, TraceKind.PROCESS, "runs again (SIGCONT)")
                self._world.scheduler.resume(controller)

        self._world.scheduler.after(for_ms, self._world.operator, "SIGCONT", wake)
        return f"SIGSTOP of {controller} for {for_ms:.0f} ms, and another takes over"

    def _kill_driver(self) -> str:
        """The application ends: the controller and every broker."""
        self._kill_controller()
        for machine in self.running():
            self._killed(machine)
        return "the driver is killed, and every broker with it"

    def _hosts(self) -> list[str]:
        return ["controller", *(machine.host for machine in self._world.machines)]

    def _heal_later(self) -> float:
        for_ms = self.for_a_while()
        self._world.scheduler.after(for_ms, self._world.operator, "network heals", self._world.network.heal)
        return for_ms

    def _isolate_broker(self) -> str:
        """A broker and all others, clients and the controller too, cannot reach each other."""
        machine = self._leader() if self._rng.random() < 0.7 else self._rng.choice(self._world.machines)
        if machine is None:
            return ""
        clients = [client.host for client in (*self._world.producers, *self._world.consumers)]
        clients += self._world.sharing.hosts if self._world.sharing is not None else []
        keep_clients = self._rng.random() < 0.7
        for host in [*self._hosts(), *([] if keep_clients else clients)]:
            if host != machine.host:
                self._world.network.part(host, machine.host)
        kept = ", but not from clients" if keep_clients else ""
        return f"{machine} is cut off{kept} for {self._heal_later():.0f} ms"

    def _one_way(self) -> str:
        source, target = self._rng.sample(self._hosts(), 2)
        self._world.network.block(source, target)
        return f"nothing gets from {source} to {target} for {self._heal_later():.0f} ms"

    def _cut_from_controller(self) -> str:
        """Known bug 9: the leader goes on serving, fenced or not, and does not receive the controller's decisions."""
        machine = self._leader() if self._rng.random() < 0.7 else self._rng.choice(self._world.machines)
        if machine is None:
            return ""
        self._world.network.part("controller", machine.host)
        return f"{machine} is cut off from the controller for {self._heal_later():.0f} ms"

    def _strand_coordinator(self) -> str:
        """Move the leadership of committed offsets away from a broker that is cut off from the controller.

        The old leader has its lease, so it answers clients that do not know of the new one.
        """
        world = self._world
        topic = world.invariants.image.topic(CONSUMER_OFFSETS_TOPIC)
        if topic is None or world.groups is None or world.groups.is_stranding:
            return ""
        number = self._rng.randrange(len(topic.partitions))
        state = topic.partitions[number]
        others = [broker for broker in state.isr if broker != state.leader]
        if state.leader == NO_LEADER or not others:
            return ""
        successor = self._rng.choice(others)
        target = [successor, *(broker for broker in state.replicas if broker != successor)]
        machines, brokers = {machine.host: machine for machine in world.machines}, world.invariants.image.brokers
        machine = machines[brokers[state.leader].host]
        world.network.part("controller", machine.host)
        world.groups.strand(Stranded(machine, machines[brokers[successor].host], number, state.leader_epoch))
        world.call_controller(ReassignPartitionRequest(topic.name, number, target), "reassign")
        elect = partial(world.call_controller, ElectLeadersRequest(None), "elect the successor")
        world.scheduler.after(ELECT_AFTER_MS, world.operator, "elect the successor", elect)
        world.scheduler.after(STRANDED_MS, world.operator, "network heals", world.network.heal)
        return f"broker {successor} is to lead {topic.name}-{number}; broker {state.leader} does not learn of it"

    def _clog(self) -> str:
        source, target = self._rng.sample(self._hosts(), 2)
        if self._rng.random() < 0.4:
            source, target = "controller", self._rng.choice(self._world.machines).host
        for_ms = self.for_a_while(800)
        self._world.network.clog(source, target, for_ms)
        return f"{source} to {target} takes {for_ms:.0f} ms"

    def _break_streams(self) -> str:
        """Every stream of a process breaks, each at an arbitrary place."""
        machine = self.any_running()
        if machine is None or machine.process is None:
            return ""
        for end in list(machine.process.ends):
            if self._rng.random() < 0.7 and not end.closed:
                end.broke(NetworkError("connection reset"))
        return f"streams of {machine} break"

    def _older_metadata(self) -> str:
        return self._world.older_metadata.strike(self._rng)

    def _bit_flip(self) -> str:
        return self._world.bit_flips.strike(self._rng)

    def _leave_a_follower_behind(self) -> str:
        return self._world.compactions.strike(self._rng)

    def _kill_tierer(self) -> str:
        return self._world.tiering.strike(self._rng) if self._world.tiering is not None else ""

    def _late_reader(self) -> str:
        return self._world.tiering.begin_reader() if self._world.tiering is not None else ""

    def _elect_uncleanly(self) -> str:
        return self._world.unclean.strike(self._rng)

    def _disk_error(self) -> str:
        machine = self.any_running()
        if machine is None:
            return ""
        kind = self._rng.choice(["pwritev", "pwritev", "fsync", "fsync", "pread", "rename", "sync_directory"])
        if kind == "pread" and (name := self._world.bit_flips.unreadable(machine)):
            return f"the next reads of {name} on {machine} fail"
        if kind == "pread":
            self._world.bit_flips.may_damage(machine)
        machine.fs.fail_next(kind, errno.EIO)
        return f"the next {kind} on {machine} fails"

    def _failed_sync_lost_power(self) -> str:
        """Known bug 27: the data of a failed fsync is lost with the power, even if the next fsync succeeds."""
        machine = self.any_running()
        if machine is None:
            return ""
        machine.fs.fail_next("fsync", errno.EIO)
        delay_ms = self.for_a_while(600)
        self._world.scheduler.after(delay_ms, self._world.operator, "lose power", lambda: self._lose_soon(machine))
        return f"the next fsync on {machine} fails, and its power in {delay_ms:.0f} ms"

    def _lose_soon(self, machine: SimulatedMachine) -> None:
        if not self.over and machine.powered and self.may_lose(machine):
            self._world.note("fault", TraceKind.FAULT, f"power of {machine} fails")
            self._world.lose_machine(machine, 50.0)

    def _torn_write(self) -> str:
        """The process dies in the middle of one of its next writes: a prefix of it is there."""
        machine = self.any_running()
        if machine is None or machine.fs.on_operation is not None:
            return ""
        countdown, fs = self._rng.randint(1, 6), machine.fs

        def hook(operation: Operation) -> Fault | None:
            nonlocal countdown
            if operation.kind not in ("pwritev", "rename", "ftruncate", "create"):
                return None
            countdown -= 1
            if countdown > 0:
                return None
            fs.on_operation = None
            length = len(operation.detail) if isinstance(operation.detail, bytes) else 0
            return Fault(kept_bytes=self._rng.randint(0, length), kills=True)

        machine.fs.on_operation = hook
        return f"{machine.process} is to die in its write number {countdown} from now"

    def _slow_follower(self) -> str:
        """It fetches so seldom that it leaves the ISR, or comes back half-way."""
        machine = self._rng.choice(self._world.machines)
        if machine.number in self._pauses:
            del self._pauses[machine.number]
            return f"{machine} fetches as usual"
        self._pauses[machine.number] = self._rng.choice([50.0, 200.0, 800.0])
        return f"{machine} fetches only every {self._pauses[machine.number]:.0f} ms"

    def pause_fetches(self, machine: SimulatedMachine, pause_ms: float) -> None:
        """From now on this machine's fetchers wait `pause_ms` between two fetches; 0: as long as usual."""
        self._pauses.pop(machine.number, None)
        if pause_ms:
            self._pauses[machine.number] = pause_ms

    def fetch_pause_ms(self, machine: SimulatedMachine) -> float:
        """How long this machine's fetchers wait between two fetches."""
        return self._pauses.get(machine.number, 0.0 if self.over else self._world.swarm.fetch_pause_ms)

    def _lose_joining_follower(self) -> str:
        self._waits_for_joining = True
        return "the next follower that is about to join an ISR loses its power"

    def proposal_delay_ms(self, key: Key, proposal: ProposeIsr) -> float:
        """How long an ISR proposal waits in its broker.

        Known bug 9: the follower that the proposal lets in restarts meanwhile, and has lost records.
        """
        world = self._world
        state = world.invariants.image.partition(*key)
        joining = [broker for broker, _ in proposal.isr if state is not None and broker not in state.isr]
        victim = world.machine_of(joining[0]) if joining and self._waits_for_joining and not self.over else None
        if victim is None or not victim.powered or not self.may_lose(victim):
            return 0.0
        self._waits_for_joining = False
        delay_ms = 60 + world.swarm.restart_ms * (1 + self._rng.random())
        world.note(
            "fault", TraceKind.FAULT, f"power of {victim} fails; the proposal to let it in waits for {delay_ms:.0f} ms"
        )
        world.scheduler.after(0, world.operator, "lose power", lambda: world.lose_machine(victim, 1.0))
        return delay_ms

    def _store_fails(self) -> str:
        return self._world.store.fail_for(self.for_a_while(6000))

    def _clock_jumps(self) -> str:
        return jump(self._world, self._rng.choice(self._world.machines), self._rng, self.for_a_while(6000))

    def heal(self) -> None:
        """No more faults; everything that can run runs."""
        world = self._world
        self.over = True
        self._pauses.clear()
        world.network.heal()
        world.network.calm()
        world.store.heal()
        for machine in world.machines:
            machine.fs.heal()
            if CLOCK_JUMPS in world.swarm.faults:
                set_right(machine)
            if machine.process is not None and machine.process.paused and machine.process.alive:
                world.scheduler.resume(machine.process)
            if machine.powered and not machine.running:
                world.launch(machine, 1.0)
        if world.controller is not None and world.controller.paused:
            world.scheduler.resume(world.controller)
