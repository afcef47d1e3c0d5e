"""How a broker answers calls: by itself, or with the controller's answer.

Nothing waits here. `broker.service` waits for the answers in its callers' threads, the simulator in events.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from spark_broker.broker import log_dir
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.record_deletion import RecordDeletion
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.replica_state import piece_of
from spark_broker.broker.reply import Answer, Reply
from spark_broker.broker.request_queue import GiveWay, keep_on, pieces
from spark_broker.controller.describe import describe
from spark_broker.controller.image import MetadataImage
from spark_broker.core.transaction_decision import ProducerIdPool
from spark_broker.errors import (
    InvalidRequestError,
    LeaderNotAvailableError,
    NetworkError,
    NotControllerError,
    SparkBrokerError,
    UnknownServerError,
)
from spark_broker.protocol.messages import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    CallRequest,
    ConfirmHistoryRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeleteRecordsRequest,
    DeleteTopicRequest,
    DescribeLogDirRequest,
    ElectLeadersRequest,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListedOffset,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    Message,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    RaiseLogStartsRequest,
    ReassignPartitionRequest,
    ReplicaStateRequest,
    ReportTieringRequest,
    TransactionalOffsetCommitRequest,
)
from spark_broker.times import EARLIEST

COMMIT_TIMEOUT_MS = 10_000

NOT_HEARD = "this broker has not heard from the controller yet"

AskController = Callable[[Message, Reply], None]
"""Sends a request to the controller, and hands its answer or the error of the call to the reply."""

AnswerTransactional = Callable[[CallRequest, Reply], bool]
"""Answers a request about transactions, now or later. False: it is no such request."""


PASSED_ON = (
    CreateTopicRequest,
    DeleteTopicRequest,
    CreatePartitionsRequest,
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    ElectLeadersRequest,
    ReassignPartitionRequest,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    ConfirmHistoryRequest,
    RaiseLogStartsRequest,
    ReportTieringRequest,
    MetadataRequest,
)
"""What users and their jobs ask of the controller. What brokers ask of it, they ask themselves."""


class BrokerRequests:
    """Safe for use by many threads. A reply may come under a partition's lock, from any thread: it must not block."""

    def __init__(
        self,
        manager: ReplicaManager,
        coordinator: GroupCoordinator,
        answer_transactional: AnswerTransactional,
        ask_controller: AskController,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._manager = manager
        self._coordinator = coordinator
        self._answer_transactional = answer_transactional
        self._ask_controller = ask_controller
        self._clock = clock
        self._producer_ids = _ProducerIds(manager, ask_controller)

    @property
    def image(self) -> MetadataImage:
        """What clients are told of the cluster. Raises LeaderNotAvailableError before anything is known."""
        image = self._manager.image
        if not image.cluster_id:
            raise LeaderNotAvailableError(NOT_HEARD)
        return image

    def answer(self, request: CallRequest, reply: Reply, give_way: GiveWay = keep_on) -> None:
        """Answer now or later. Raises the error that the caller gets, or hands it to `reply`.

        Work that grows with the request calls `give_way` between its pieces.
        """
        match request:
            case MetadataRequest(topics, certain=False):
                reply(describe(self.image, topics, give_way))
            case ListOffsetsRequest(partitions):
                reply(ListOffsetsResponse([self._offset(spec) for spec in pieces(partitions, give_way)]))
            case DeleteRecordsRequest():
                RecordDeletion(self._manager, self._pass_on, request, reply, give_way).begin()
            case InitProducerIdRequest():
                self._producer_ids.take(reply)
            case OffsetCommitRequest() | TransactionalOffsetCommitRequest():
                self._coordinator.commit(request, self._clock.boottime_ms() + COMMIT_TIMEOUT_MS, reply, give_way)
            case OffsetFetchRequest():
                self._coordinator.fetch(request, reply)
            case DescribeLogDirRequest():
                reply(log_dir.describe(self._manager))
            case ReplicaStateRequest(topic_id, partition, leader_epoch):
                reply(piece_of(self._manager.partition(topic_id, partition).replica_state(leader_epoch), request))
            case _:
                if self._coordinator.answer(request, reply) or self._answer_transactional(request, reply):
                    return
                if not isinstance(request, PASSED_ON):
                    raise InvalidRequestError(f"a {type(request).__name__} is not for clients")
                self._pass_on(request, reply)

    def _is_member(self) -> bool:
        """Whether a controller has let this process in."""
        return bool(self._manager.image.cluster_id)

    def _offset(self, spec: ListOffsetsPartition) -> ListedOffset:
        key = (spec.topic_id, spec.partition)
        try:
            partition = self._manager.partition(*key)
            reader = partition.reader
            bounds = reader.bounds(spec.leader_epoch, read_committed=spec.read_committed)
            offset, timestamp_us = bounds.log_start if spec.at == EARLIEST else bounds.latest, None
            if isinstance(spec.at, int):
                record = reader.offset_at(bounds.leader_epoch, spec.at, read_committed=spec.read_committed)
                offset, timestamp_us = record if record is not None else (-1, None)
            size, fitting = reader.extent(spec.start, offset, spec.max_bytes) if spec.max_bytes else (-1, -1)
        except SparkBrokerError as error:
            return ListedOffset(*key, error.code, error.message[:1000])
        return ListedOffset(
            *key,
            0,
            offset=offset,
            timestamp_us=timestamp_us,
            leader_epoch=bounds.leader_epoch,
            log_start_offset=bounds.log_start,
            high_watermark=bounds.high_watermark,
            last_epoch=reader.epoch_before(offset),
            start_epoch=reader.epoch_before(spec.start) if spec.start >= 0 else -1,
            size_bytes=size,
            fitting_offset=fitting,
            sealed_offset=bounds.sealed,
            history_end_offset=partition.topic.history_end(spec.partition),
            now_ms=self._clock.wall_ms(),
        )

    def _pass_on(self, request: Message, reply: Reply) -> None:
        """Pass an administrative request on to the controller, as any member does. Raises NotControllerError.

        A controller on an older copy of the metadata lets no broker in. What it said would be wrong, and what it did
        would be undone when the newest metadata is put back.
        """
        if not self._is_member():
            raise NotControllerError(NOT_HEARD)

        def answered(answer: Answer) -> None:
            reply(_unreachable("the controller cannot be reached", answer))

        self._ask_controller(request, answered)


class _ProducerIds:
    """Producer ids, taken from the controller in blocks so that most clients cost it nothing."""

    def __init__(self, manager: ReplicaManager, ask_controller: AskController) -> None:
        self._manager = manager
        self._ask_controller = ask_controller
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._pool = ProducerIdPool()
        self._waiting: deque[Reply] = deque()  # for the block that was asked for

    def take(self, reply: Reply) -> None:
        with self._lock:
            if len(self._pool):
                identity = InitProducerIdResponse(self._pool.take(), 0)
            else:
                self._waiting.append(reply)
                if len(self._waiting) > 1:
                    return  # The first of them has asked.
                identity = None
        if identity is not None:
            reply(identity)
        else:
            self._ask()

    def _ask(self) -> None:
        """Ask for a block, for everybody who waits. A bug ends the call that asks; the others would wait for ever."""
        request = AllocateProducerIdsRequest(self._manager.broker_id, self._manager.broker_epoch)
        try:
            self._ask_controller(request, self._answered)
        except Exception as error:
            self._answered(UnknownServerError(f"no producer id: {type(error).__name__}: {error}"))
            raise

    def _answered(self, block: Answer) -> None:
        """Each waiting request gets an id of the block, or the error. If some are left, another block is asked for."""
        answers: list[tuple[Reply, Answer]] = []
        with self._lock:
            if isinstance(block, AllocateProducerIdsResponse):
                self._pool.refill(block.first_id, block.count)
                while self._waiting and len(self._pool):
                    answers.append((self._waiting.popleft(), InitProducerIdResponse(self._pool.take(), 0)))
            else:
                if not isinstance(block, SparkBrokerError):
                    block = NotControllerError(f"no producer id: the controller answered with {type(block).__name__}")
                error = _unreachable("no producer id", block)
                answers = [(reply, error) for reply in self._waiting]
                self._waiting.clear()
            ask_again = bool(self._waiting)
        for reply, answer in answers:
            reply(answer)
        if ask_again:
            self._ask()


def _unreachable(what: str, answer: Answer) -> Answer:
    """A client that got a network error would believe that this broker is gone."""
    return NotControllerError(f"{what}: {answer.message}") if isinstance(answer, NetworkError) else answer
