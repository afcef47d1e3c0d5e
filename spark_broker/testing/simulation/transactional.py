"""The transactional side of a schedule: its topic, its clients, its faults, its rules."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.protocol.messages import EnsureTransactionsTopicRequest
from spark_broker.testing.history import Isolation
from spark_broker.testing.simulation.application import SimDriver
from spark_broker.testing.simulation.consumer import CONFIG, SimConsumer
from spark_broker.testing.simulation.transaction_draw import TransactionDraw
from spark_broker.testing.simulation.transaction_faults import TransactionFaults
from spark_broker.testing.simulation.transaction_rules import TransactionRules
from spark_broker.testing.simulation.transactional_client import TransactionalClient
from spark_broker.testing.simulation.transactional_producer import SimTransactionalProducer

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World

RESTART_MS = 30.0
LATE_RESTART_SHARE = 0.5
LATE_RESTART_TIMEOUTS = 1.5
LATE_MS = 400.0
COPY_MS = 1500.0

Worker = SimTransactionalProducer | SimDriver


class Transactional:
    """Starts clients, and starts others in place of those that are gone."""

    def __init__(self, world: World, draw: TransactionDraw) -> None:
        self._world = world
        self.draw = draw
        self.rng = random.Random(f"{world.seed}/transactional clients")
        self._broker_rng = random.Random(f"{world.seed}/coordination")
        self.rules = TransactionRules(world)
        self.faults = TransactionFaults(world, self, random.Random(f"{world.seed}/transaction faults"))
        self._stopped = False
        self._clients: list[TransactionalClient] = []
        self._workers: dict[str, Worker] = {}  # the newest instance of each id
        self._instances: dict[str, int] = {}

    def start(self) -> None:
        """Begin to work."""
        for number in range(self.draw.producers):
            self._start_producer(f"x{number}")
        for number in range(self.draw.applications):
            self._start_driver(f"app{number}", None)
        for number in range(self.draw.writes):
            self._start_write(f"write{number}")
        if self.draw.reads_uncommitted and self._world.tiering is None:  # tables have no aborted records
            dirty = replace(CONFIG, isolation_level="read_uncommitted")
            reader = SimConsumer(self._world, "dirty reader", dirty)
            self._world.history.opened(reader.name, isolation=Isolation.READ_UNCOMMITTED)
            self._world.consumers.append(reader)
            reader.start()

    def create_topic(self) -> None:
        """Create the internal topic."""
        self._world.call_controller(
            EnsureTransactionsTopicRequest(), "create __transaction_state", again=self.create_topic
        )

    @property
    def has_begun(self) -> bool:
        """Whether every client has begun a first transaction: before that, faults would hit nothing."""
        return all(worker.begun for worker in self._workers.values())

    def start_client(self, client: TransactionalClient) -> None:
        """Start a client's process."""
        self._clients = [other for other in self._clients if other.alive]
        self._clients.append(client)
        client.start()

    def live_clients(self, *, frozen: bool = False) -> list[TransactionalClient]:
        """Processes that run, zombies among them; with `frozen`, those that are stopped as well."""
        return [client for client in self._clients if client.alive and (frozen or not client.paused)]

    def _number(self, transactional_id: str) -> int:
        self._instances[transactional_id] = self._instances.get(transactional_id, 0) + 1
        return self._instances[transactional_id]

    def _start_worker(self, transactional_id: str, worker: Worker) -> None:
        self._workers[transactional_id] = worker
        worker.stopped = self._stopped
        self.start_client(worker)

    def _start_producer(self, transactional_id: str) -> None:
        name = f"{transactional_id}#{self._number(transactional_id)}"
        again = partial(self._after_restart, partial(self._start_producer, transactional_id))
        self._start_worker(transactional_id, SimTransactionalProducer(self._world, self, name, transactional_id, again))

    def _start_driver(self, application: str, version: int | None) -> None:
        execution = f"e{self._number(application)}"

        def again(known: int | None) -> None:
            self._after_restart(partial(self._start_driver, application, known))

        driver = SimDriver(self._world, self, application, execution, version, again)
        self._start_worker(application, driver)

    def _start_write(self, series: str) -> None:
        """One write after the other, each an application of its own."""
        application = f"{series}.{self._number(series)}"

        def again(version: int | None) -> None:
            del version
            self._after_restart(partial(self._start_write, series))

        self._start_worker(series, SimDriver(self._world, self, application, "e1", 0, again, single_use=True))

    def _after_restart(self, start: partial[None]) -> None:
        if not self._stopped:
            delay_ms = RESTART_MS * self.rng.random()
            if self.draw.writes and self.rng.random() < LATE_RESTART_SHARE:  # only after names are forgotten
                delay_ms += LATE_RESTART_TIMEOUTS * self.draw.timeout_ms
            self._world.scheduler.after(delay_ms, self._world.operator, "start client", start)

    def late_ms(self) -> float:
        """How long a leader is kept from using the coordinator's answer; mostly 0."""
        return self._chance(self.draw.late_rate, LATE_MS)

    def copy_ms(self) -> float:
        """When a call between brokers arrives once more; mostly never (0)."""
        return self._chance(self.draw.duplicate_rate, COPY_MS)

    def _chance(self, rate: float, most_ms: float) -> float:
        if not rate or self._world.faults.over or self._broker_rng.random() >= rate:
            return 0.0
        return most_ms * self._broker_rng.random()

    def stop(self) -> None:
        """No new transactions; those that are open are brought to an end, by their coordinator if need be."""
        self._stopped = True
        self.faults.heal()
        for client in self.live_clients(frozen=True):
            client.stopped = True  # zombies too: a client whose successor has not begun is no zombie yet
            client.want_metadata()
        if self.draw.abrupt_end:
            for client in self.live_clients():
                client.quit("everyone is gone")
            self.faults.kill_coordinators()

    def missing(self) -> str:
        """What is not at rest yet; empty when everything is."""
        for worker in self._workers.values():
            if worker.alive and worker.busy:
                return f"{worker} has a transaction that is not ended"
        return self.rules.undecided()
