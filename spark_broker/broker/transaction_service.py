"""What a broker does for transactions: it coordinates some, and writes markers where others ask for them."""

from __future__ import annotations

from collections.abc import Callable

from spark_broker.broker.append import AwaitedTransaction
from spark_broker.broker.awaited_answer import AwaitedAnswer
from spark_broker.broker.broker_calls import BrokerCalls
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.confirmation import Confirmations
from spark_broker.broker.marker_writer import MarkerWriter
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.transaction_coordinator import MARKERS_TIMEOUT_MS, TransactionCoordinator
from spark_broker.broker.transaction_thread import TransactionThread
from spark_broker.config import ClusterConfig
from spark_broker.core.transaction_coordinator import CoordinatorRequest
from spark_broker.errors import InvariantError
from spark_broker.protocol.messages import (
    CallRequest,
    DescribeTransactions,
    Message,
    WriteTransactionMarkers,
)

MARKERS_WAIT_MS = MARKERS_TIMEOUT_MS * 4 // 5
"""Shorter than the coordinator's own deadline, so that it hears which markers have failed."""

_GRACE_MS = 1000

_SERVED = CoordinatorRequest | DescribeTransactions | WriteTransactionMarkers


class TransactionService:
    """Each call waits in its own thread; the coordinator itself never does."""

    def __init__(
        self,
        manager: ReplicaManager,
        config: ClusterConfig,
        calls: BrokerCalls,
        on_bug: Callable[[BaseException], None],
    ) -> None:
        self._timeout_ms = config.request_timeout_ms
        self._markers = MarkerWriter(manager)
        self._thread = TransactionThread(on_bug)
        self.coordinator = TransactionCoordinator(manager, config, calls, self._markers, wake=self._thread.wake)
        self._thread.coordinator = self.coordinator
        self._confirmations = Confirmations(manager, self.coordinator, calls)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    def confirm(
        self, partition: Partition, awaited: AwaitedTransaction, transactional_id: str, deadline_ms: int
    ) -> None:
        """See `confirmation.Confirm`."""
        self._confirmations.confirm(partition, awaited, transactional_id, deadline_ms)

    @staticmethod
    def serves(request: CallRequest) -> bool:
        return isinstance(request, _SERVED)

    def answer(self, request: CallRequest) -> Message:
        """The response. Raises the error that the client gets."""
        now_ms = SYSTEM_CLOCK.boottime_ms()
        answer = AwaitedAnswer()
        match request:
            case DescribeTransactions():
                return self.coordinator.describe(request)
            case WriteTransactionMarkers():
                self._markers.write(request, now_ms + MARKERS_WAIT_MS, answer)
                return answer.wait(MARKERS_WAIT_MS + _GRACE_MS)
            case _ if isinstance(request, CoordinatorRequest):
                self.coordinator.handle(request, now_ms + self._timeout_ms, answer)
                return answer.wait(self._timeout_ms + _GRACE_MS)
        raise InvariantError(f"a {type(request).__name__} is not the coordinator's")
