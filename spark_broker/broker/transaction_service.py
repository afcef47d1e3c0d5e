"""What a broker does for transactions: it coordinates some, and writes the markers that coordinators ask for."""

from __future__ import annotations

from collections.abc import Callable

from spark_broker.broker.append import AwaitedTransaction
from spark_broker.broker.awaited_answer import AwaitedAnswer
from spark_broker.broker.broker_calls import BrokerCalls
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.confirmation import Confirmations
from spark_broker.broker.coordinator_thread import CoordinatorThread
from spark_broker.broker.marker_writer import MarkerWriter
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Reply
from spark_broker.broker.transaction_coordinator import MARKERS_TIMEOUT_MS, TransactionCoordinator
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import BrokerState
from spark_broker.core.transaction_coordinator import CoordinatorRequest
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import (
    CallRequest,
    DescribeTransactionsRequest,
    Message,
    WriteTransactionMarkersRequest,
)

MARKERS_WAIT_MS = MARKERS_TIMEOUT_MS * 4 // 5
"""Shorter than the coordinator's own deadline, so that the coordinator learns which markers have failed."""

_SERVED = CoordinatorRequest | DescribeTransactionsRequest | WriteTransactionMarkersRequest


class TransactionRequests:
    """Answers the calls that concern transactions, now or later."""

    def __init__(
        self, coordinator: TransactionCoordinator, markers: MarkerWriter, timeout_ms: int, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._coordinator = coordinator
        self._markers = markers
        self._timeout_ms = timeout_ms
        self._clock = clock

    @staticmethod
    def serves(request: CallRequest) -> bool:
        return isinstance(request, _SERVED)

    def answer(self, request: CallRequest, reply: Reply) -> bool:
        """See `requests.AnswerTransactional`. Raises the error that the caller gets."""
        now_ms = self._clock.boottime_ms()
        match request:
            case DescribeTransactionsRequest():
                reply(self._coordinator.describe(request))
            case WriteTransactionMarkersRequest():
                self._markers.write(request, now_ms + MARKERS_WAIT_MS, reply)
            case _ if isinstance(request, CoordinatorRequest):
                self._coordinator.handle(request, now_ms + self._timeout_ms, reply)
            case _:
                return False
        return True


class TransactionService:
    """The coordinator and its thread. Callers wait in their own threads; the coordinator never waits."""

    def __init__(
        self,
        manager: ReplicaManager,
        config: ClusterConfig,
        calls: BrokerCalls,
        on_bug: Callable[[BaseException], None],
    ) -> None:
        markers = MarkerWriter(manager)
        self._thread = CoordinatorThread("transactions", on_bug)
        self.coordinator = TransactionCoordinator(manager, config, calls, markers, wake=self._thread.wake)
        self._thread.coordinator = self.coordinator
        self.requests = TransactionRequests(self.coordinator, markers, config.request_timeout_ms)
        self._calls = calls
        self._confirmations = Confirmations(manager, self.coordinator, self._call)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    def confirm(
        self, partition: Partition, awaited: AwaitedTransaction, transactional_id: str, deadline_ms: int
    ) -> None:
        """See `confirmation.Confirm`. The thread of the stream waits here."""
        answer = AwaitedAnswer()
        timeout_ms = self._confirmations.ask(partition, awaited, transactional_id, deadline_ms, answer)
        self._confirmations.take(partition, awaited, transactional_id, answer.outcome(timeout_ms))

    def _call(self, broker: BrokerState, request: Message, timeout_ms: int, reply: Reply) -> None:
        """Call the broker in the thread that asks."""
        try:
            answer = self._calls.call(broker, request, timeout_ms)
        except SparkBrokerError as error:
            reply(error)
        else:
            reply(answer)
