"""The calls that a broker answers: itself, or by passing them on to the controller."""

from __future__ import annotations

import threading

from spark_broker.broker.awaited_answer import AwaitedAnswer
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.coordinator import Coordinator
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.request_queue import RequestKind, RequestQueue, Turn
from spark_broker.broker.transaction_service import TransactionService
from spark_broker.controller.describe import describe
from spark_broker.errors import LeaderNotAvailableError, NetworkError, NotControllerError, SparkBrokerError
from spark_broker.protocol.messages import (
    EARLIEST_TIMESTAMP_MS,
    LATEST_TIMESTAMP_MS,
    AllocateProducerIds,
    CallRequest,
    GetMetadata,
    InitProducerId,
    ListOffsets,
    Message,
    Metadata,
    OffsetCommit,
    OffsetFetch,
    OffsetInfo,
    Offsets,
    OffsetSpec,
    ProducerIdBlock,
    ProducerIdentity,
    ReplicaState,
    TransactionalOffsetCommit,
)
from spark_broker.transport.client import Connection

COMMIT_TIMEOUT_MS = 10_000

TURN_WAIT_S = 0.5
"""How long a call waits for its turn. Clients ask the next broker after a second; they hear of overload before."""

PASS_ON_WAIT_S = 5.0
"""How long administration waits while as much as may be is with the controller already; clients wait half a minute."""


class BrokerService:
    """Answers `CallRequest`s; each call has its own thread."""

    def __init__(
        self,
        manager: ReplicaManager,
        coordinator: Coordinator,
        transactions: TransactionService,
        controller: Connection,
        timeout_ms: int,
        queue: RequestQueue,
        passing_on: RequestQueue,
    ) -> None:
        """`passing_on`: what waits for the controller; were it in the same queue, a controller that does not answer
        would keep clients from appending."""
        self._queue = queue
        self._passing_on = passing_on
        self._manager = manager
        self._coordinator = coordinator
        self._transactions = transactions
        self._controller = controller
        self._timeout_ms = timeout_ms
        self._producer_ids = _ProducerIds(manager, controller, timeout_ms)

    def answer(self, request: CallRequest) -> Message:
        """The response. Raises the error that the client gets.

        What brokers ask of each other, and what waits for a coordinator, has no turn.
        """
        match request:
            case GetMetadata(topics):
                with self._turn():
                    return self._metadata(topics)
            case ListOffsets(partitions):
                with self._turn():
                    return Offsets([self._offset(spec) for spec in partitions])
            case InitProducerId():
                with self._passing_on.turn(RequestKind.CALL, TURN_WAIT_S):
                    return ProducerIdentity(self._producer_ids.take(), 0)
            case OffsetCommit() | TransactionalOffsetCommit():
                return self._commit(request)
            case OffsetFetch():
                with self._turn():
                    return self._coordinator.fetch(request)
            case ReplicaState(topic_id, partition, leader_epoch):
                return self._manager.partition(topic_id, partition).replica_state(leader_epoch)
            case _ if self._transactions.serves(request):
                return self._transactions.answer(request)
            case _:
                with self._passing_on.turn(RequestKind.CALL, PASS_ON_WAIT_S):
                    return self._pass_on(request)

    def _turn(self) -> Turn:
        return self._queue.turn(RequestKind.CALL, TURN_WAIT_S)

    def _commit(self, request: OffsetCommit | TransactionalOffsetCommit) -> Message:
        answer = AwaitedAnswer()
        with self._turn() as turn:
            if isinstance(request, TransactionalOffsetCommit):
                turn.end()  # it may wait for the transaction's coordinator, which may be waiting for this broker
            self._coordinator.commit(request, SYSTEM_CLOCK.boottime_ms() + COMMIT_TIMEOUT_MS, answer)
        return answer.wait(COMMIT_TIMEOUT_MS)

    def _metadata(self, topics: list[str] | None) -> Metadata:
        image = self._manager.image
        if not image.cluster_id:
            raise LeaderNotAvailableError("this broker has not heard from the controller yet")
        return describe(image, topics)

    def _offset(self, spec: OffsetSpec) -> OffsetInfo:
        key = (spec.topic_id, spec.partition)
        try:
            partition = self._manager.partition(*key)
            log_start, high_watermark = partition.offsets(spec.leader_epoch)
            _, offset = partition.offsets(spec.leader_epoch, read_committed=spec.read_committed)
            timestamp_ms = -1
            if spec.timestamp_ms == EARLIEST_TIMESTAMP_MS:
                offset = log_start
            elif spec.timestamp_ms != LATEST_TIMESTAMP_MS:
                found = partition.offset_at(spec.leader_epoch, spec.timestamp_ms, read_committed=spec.read_committed)
                offset, timestamp_ms = found if found is not None else (-1, -1)
        except SparkBrokerError as error:
            return OffsetInfo(*key, error.code, error.message[:1000])
        return OffsetInfo(
            *key,
            0,
            offset=offset,
            timestamp_ms=timestamp_ms,
            leader_epoch=partition.leader_epoch(),
            log_start_offset=log_start,
            high_watermark=high_watermark,
            last_epoch=partition.epoch_before(offset),
        )

    def _pass_on(self, request: Message) -> Message:
        """Administration is the controller's; any broker passes it on."""
        try:
            return self._controller.call(request, timeout_ms=self._timeout_ms)
        except NetworkError as error:
            raise NotControllerError(f"the controller cannot be reached: {error.message}") from None


class _ProducerIds:
    """Producer ids, taken from the controller in blocks so that most clients cost it nothing."""

    def __init__(self, manager: ReplicaManager, controller: Connection, timeout_ms: int) -> None:
        self._manager = manager
        self._controller = controller
        self._timeout_ms = timeout_ms
        self._lock = threading.Lock()
        self._next = 0
        self._end = 0  # exclusive

    def take(self) -> int:
        with self._lock:
            if self._next >= self._end:
                self._refill()
            self._next += 1
            return self._next - 1

    def _refill(self) -> None:
        request = AllocateProducerIds(self._manager.broker_id, self._manager.broker_epoch)
        try:
            block = self._controller.call(request, timeout_ms=self._timeout_ms)
        except NetworkError as error:
            raise NotControllerError(f"no producer id: {error.message}") from None
        if not isinstance(block, ProducerIdBlock):
            raise NotControllerError(f"no producer id: the controller answered with {type(block).__name__}")
        self._next, self._end = block.first_id, block.first_id + block.count
