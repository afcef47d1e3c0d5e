"""Faults that aim at transactions: at the moments between a decision and its markers, and at clients and producers."""

from __future__ import annotations

import random
from enum import Enum
from typing import TYPE_CHECKING

from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.testing.simulation.trace import TraceKind
from spark_broker.testing.simulation.transaction_draw import EXPIRY_MS

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess
    from spark_broker.testing.simulation.transactional import Transactional
    from spark_broker.testing.simulation.world import World


class Strike(Enum):
    """What becomes of markers that are about to leave the coordinator."""

    NONE = "sent"
    PAUSE = "sent when the process goes on"
    KILL = "never sent"


class TransactionFaults:
    """`testing.simulation.faults` calls the methods that are named like a fault; they return what they did."""

    def __init__(self, world: World, transactional: Transactional, rng: random.Random) -> None:
        self._world = world
        self._transactional = transactional
        self._rng = rng
        self._next_markers: Strike = Strike.NONE
        self._kills_leader = False

    def _kill_coordinator_before_markers(self) -> str:
        self._next_markers = Strike.KILL
        return "the next coordinator that is about to send markers dies"

    def _pause_coordinator_before_markers(self) -> str:
        self._next_markers = Strike.PAUSE
        return "the next coordinator that is about to send markers is stopped for a while"

    def _kill_leader_before_marker(self) -> str:
        self._kills_leader = True
        return "the next leader that is asked to write markers dies"

    def before_markers(self, process: BrokerProcess) -> Strike:
        """A coordinator is about to send markers."""
        strike, self._next_markers = self._next_markers, Strike.NONE
        if strike is Strike.NONE or self._world.faults.over or process.paused:
            return Strike.NONE
        if strike is Strike.KILL:
            self._kill_soon(process)
        else:
            self._pause(process)
        return strike

    def kills_leader(self, process: BrokerProcess) -> bool:
        """A leader has been asked to write markers. Returns whether it is killed before it writes them."""
        kills, self._kills_leader = self._kills_leader and not self._world.faults.over, False
        if kills:
            self._kill_soon(process)
        return kills

    def _kill_soon(self, process: BrokerProcess) -> None:
        def kill() -> None:
            if process.alive:
                self._world.note("fault", TraceKind.FAULT, f"kill -9 of {process}, which coordinates or leads")
                self._world.kill(process.machine)

        self._world.scheduler.after(0, self._world.operator, "kill", kill)

    def _pause(self, process: BrokerProcess) -> None:
        process.paused = True
        for_ms = self._rng.choice([50, 500, 2500]) * (0.3 + self._rng.random())

        def resume() -> None:
            if process.alive and process.paused:
                self._world.scheduler.resume(process)

        self._world.note(
            "fault", TraceKind.FAULT, f"SIGSTOP of {process} for {for_ms:.0f} ms, with markers in its hands"
        )
        self._world.scheduler.after(for_ms, self._world.operator, "SIGCONT", resume)

    def _freeze_transactional_client(self) -> str:
        """A zombie: another instance takes over, and then this one goes on where it was."""
        live = self._transactional.live_clients()
        if not live:
            return ""
        client = self._rng.choice(live)
        for_ms = self._rng.choice([50, 400, 2500]) * (0.3 + self._rng.random())
        client.paused = True
        client.replaced()

        def resume() -> None:
            if client.alive and client.paused:
                self._world.scheduler.resume(client)

        self._world.scheduler.after(for_ms, self._world.operator, "SIGCONT", resume)
        return f"SIGSTOP of {client} for {for_ms:.0f} ms, and another takes over"

    def _kill_transactional_client(self) -> str:
        live = self._transactional.live_clients()
        if not live:
            return ""
        client = self._rng.choice(live)
        client.quit(f"kill -9 of {client}")
        client.replaced()
        return f"kill -9 of {client}"

    def _expire_producers(self) -> str:
        """Every broker forgets producers that were idle for a short while."""
        for machine in self._world.machines:
            process = machine.process
            if process is not None and process.alive and not process.paused:
                for partition in process.manager.partitions():
                    partition.expire_producers(EXPIRY_MS, EXPIRY_MS)
        return f"producers that appended nothing for {EXPIRY_MS} ms are forgotten"

    def kill_coordinators(self) -> None:
        """Kill the present coordinators, at the very end: others have to find the open transactions."""
        topic = self._world.invariants.image.topic(TRANSACTION_STATE_TOPIC)
        for broker_id in sorted({state.leader for state in topic.partitions} if topic is not None else ()):
            machine = self._world.machine_of(broker_id)
            if machine is not None and machine.running:
                self._kill_soon(machine.process)  # type: ignore[arg-type]

    def heal(self) -> None:
        """No more faults; clients that are frozen go on."""
        self._next_markers, self._kills_leader = Strike.NONE, False
        for client in self._transactional.live_clients(frozen=True):
            if client.paused:
                self._world.scheduler.resume(client)
