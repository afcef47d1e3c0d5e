"""A broker's part in transactions: the production coordinator and marker writer, with events for their threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.broker.append import AwaitedTransaction
from spark_broker.broker.confirmation import Confirmations
from spark_broker.broker.marker_writer import MarkerWriter, OnWritten
from spark_broker.broker.partition import Partition
from spark_broker.broker.reply import Reply
from spark_broker.broker.transaction_coordinator import TransactionCoordinator
from spark_broker.broker.transaction_service import TransactionRequests
from spark_broker.controller.image import BrokerState
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import (
    AllocateProducerIdsRequest,
    Message,
    WriteTransactionMarkersRequest,
)
from spark_broker.testing.simulation.controller import CONTROLLER_ADDRESS, CONTROLLER_HOST
from spark_broker.testing.simulation.coordinator_driver import Driver
from spark_broker.testing.simulation.transaction_faults import Strike

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess
    from spark_broker.testing.simulation.transactional import Transactional

PEER_TIMEOUT_MS = 1000
"""Shorter than in production: a coordinator that gives a call up sooner misses answers, and has to ask more often."""


class Coordination:
    """`broker.transaction_service` and `broker.broker_calls`, without their threads."""

    def __init__(self, process: BrokerProcess, transactional: Transactional) -> None:
        self._process = process
        self._transactional = transactional
        self._driver = Driver(process, "transactions")
        clock, config = process.machine.clock, process.world.settings.cluster
        self.coordinator = TransactionCoordinator(
            process.manager,
            config,
            self,
            _OwnMarkers(self, process),
            wake=self._driver.wake,
            clock=clock,
            end_keys_max=transactional.draw.end_keys_max,
        )
        self._driver.coordinator = self.coordinator
        markers = _ServedMarkers(transactional, process)
        self.requests = TransactionRequests(self.coordinator, markers, config.request_timeout_ms, clock)
        self._confirmations = Confirmations(process.manager, self.coordinator, self._call, clock)

    def start(self) -> None:
        """Tick from now on."""
        self._driver.start()

    def confirm(
        self,
        partition: Partition,
        awaited: AwaitedTransaction,
        transactional_id: str,
        deadline_ms: int,
        done: Callable[[SparkBrokerError | None], None],
    ) -> None:
        """Do as `TransactionService.confirm`. `done` is called with the error that refuses the batch, or None."""

        def take(answer: Message | SparkBrokerError) -> None:
            try:
                self._confirmations.take(partition, awaited, transactional_id, answer)
            except SparkBrokerError as error:
                done(error)
            else:
                done(None)

        def answered(answer: Message | SparkBrokerError) -> None:
            self._later(partial(take, answer), "confirmed")

        self._confirmations.ask(partition, awaited, transactional_id, deadline_ms, answered)

    def _later(self, action: Callable[[], None], label: str) -> None:
        """Do `action`, perhaps late: a thread may be delayed between receiving an answer and acting on it."""
        late_ms = self._transactional.late_ms()
        self._process.world.scheduler.after(late_ms, self._process, label, action)

    def send(self, broker: BrokerState, request: Message, timeout_ms: int, answered: Reply) -> None:
        """Send a request, at times twice: the late copy stands for one that the network or a frozen machine kept."""
        send = partial(self._call, broker, request, min(timeout_ms, PEER_TIMEOUT_MS), answered)
        if isinstance(request, WriteTransactionMarkersRequest):
            self.send_markers(send)
        else:
            send()
        copy_ms = self._transactional.copy_ms()
        if copy_ms:
            again = partial(self._call, broker, request, PEER_TIMEOUT_MS, lambda _: None)
            world = self._process.world
            world.scheduler.after(copy_ms, world.operator, "late copy", again)

    def _call(self, broker: BrokerState, request: Message, timeout_ms: float, answered: Reply) -> None:
        self._process.world.network.call(
            self._process,
            broker.host,
            (broker.host, broker.port),
            request,
            timeout_ms=timeout_ms,
            on_answer=answered,  # type: ignore[arg-type]
            on_error=answered,
        )

    def allocate_producer_ids(self, answered: Reply) -> None:
        manager = self._process.manager
        self._process.world.network.call(
            self._process,
            CONTROLLER_HOST,
            CONTROLLER_ADDRESS,
            AllocateProducerIdsRequest(manager.broker_id, manager.broker_epoch),
            timeout_ms=self._process.world.settings.cluster.request_timeout_ms,
            on_answer=answered,  # type: ignore[arg-type]
            on_error=answered,
        )

    def send_markers(self, send: Callable[[], None]) -> None:
        """Send markers, unless a fault comes between the decision and its markers, or delays them."""
        match self._transactional.faults.before_markers(self._process):
            case Strike.NONE:
                send()
            case Strike.PAUSE:
                self._process.world.scheduler.after(0, self._process, "markers", send)
            case Strike.KILL:
                return


class _OwnMarkers(MarkerWriter):
    """Markers of this broker's transactions for partitions that it leads itself."""

    def __init__(self, coordination: Coordination, process: BrokerProcess) -> None:
        super().__init__(process.manager)
        self._coordination = coordination

    def write(self, request: WriteTransactionMarkersRequest, deadline_ms: int, written: OnWritten) -> None:
        self._coordination.send_markers(partial(super().write, request, deadline_ms, written))


class _ServedMarkers(MarkerWriter):
    """Markers that other brokers ask this one to write, unless it dies at that moment."""

    def __init__(self, transactional: Transactional, process: BrokerProcess) -> None:
        super().__init__(process.manager)
        self._faults = transactional.faults
        self._process = process

    def write(self, request: WriteTransactionMarkersRequest, deadline_ms: int, written: OnWritten) -> None:
        if not self._faults.kills_leader(self._process):
            super().write(request, deadline_ms, written)
