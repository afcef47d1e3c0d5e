"""The calls that a broker answers, each in its own thread, which waits for its turn and then for the answer.

Only for the answer to a group's heartbeat nobody waits: it is held back on purpose, and would hold a thread.
"""

from __future__ import annotations

from contextlib import nullcontext

from spark_broker.broker.awaited_answer import AwaitedAnswer
from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Reply
from spark_broker.broker.request_queue import RequestKind, RequestQueue, Turn, keep_on
from spark_broker.broker.requests import COMMIT_TIMEOUT_MS, BrokerRequests
from spark_broker.broker.slow import SLOW
from spark_broker.broker.transaction_service import MARKERS_WAIT_MS, TransactionRequests, TransactionService
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import (
    CallRequest,
    ConsumerGroupHeartbeatRequest,
    DeleteGroupOffsetsRequest,
    DeleteGroupRequest,
    DescribeGroupRequest,
    DescribeLogDirRequest,
    DescribeTransactionsRequest,
    ElectLeadersRequest,
    InitProducerIdRequest,
    ListGroupsRequest,
    ListOffsetsRequest,
    Message,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    ReplicaStateRequest,
    TransactionalOffsetCommitRequest,
    WriteTransactionMarkersRequest,
)
from spark_broker.transport.answer_room import expect_small_answer, lend_room
from spark_broker.transport.client import Connection

TURN_WAIT_S = 0.5
"""How long a call waits for its turn. Clients ask the next broker after a second: the refusal comes before that."""

PASS_ON_WAIT_S = 5.0
"""How long an administrative call waits while as many as allowed are at the controller. Clients wait half a minute."""

GRACE_MS = 1000
"""A thread waits this much longer than the deadline of the request that it waits for."""

LARGE = (
    MetadataRequest,
    ListOffsetsRequest,
    OffsetFetchRequest,
    ListGroupsRequest,
    DescribeGroupRequest,
    DescribeLogDirRequest,
    DescribeTransactionsRequest,
    ElectLeadersRequest,
)
"""Requests whose answer may be much larger than they are. A connection has few of them worked on at a time. All others
may wait for long, for the controller say, and keep nobody waiting."""


class BrokerService:
    """Answers `CallRequest`s."""

    def __init__(
        self,
        manager: ReplicaManager,
        coordinator: GroupCoordinator,
        transactions: TransactionService,
        controller: Connection,
        timeout_ms: int,
        queue: RequestQueue,
        passing_on: RequestQueue,
    ) -> None:
        """`passing_on` is for requests that wait for the controller. In `queue`, a controller that does not answer
        would keep clients from appending."""
        self._queue = queue
        self._passing_on = passing_on
        self._controller = controller
        self._timeout_ms = timeout_ms
        self._requests = BrokerRequests(manager, coordinator, transactions.requests.answer, self._ask_controller)

    def answer(self, request: CallRequest) -> Message | AwaitedAnswer:
        """The response, or who will have it. Raises the error that the client gets."""
        if not isinstance(request, LARGE):
            expect_small_answer()
        answer = AwaitedAnswer()
        holds = isinstance(request, ConsumerGroupHeartbeatRequest)  # it waits on purpose
        with nullcontext() if holds else SLOW.watch(type(request).__name__):
            with self._turn(request) as turn:
                if turn is not None and isinstance(request, TransactionalOffsetCommitRequest):
                    turn.end()  # it may wait for the transaction's coordinator, which may be waiting for this broker
                self._requests.answer(request, answer, keep_on if turn is None else turn.give_way)
            if holds:
                return answer
            if not answer.has_come:
                lend_room()
            return answer.wait(self._patience_ms(request))

    def _turn(self, request: CallRequest) -> Turn | nullcontext[None]:
        """Requests of other brokers, and those that wait for a coordinator, need no turn."""
        match request:
            case (
                MetadataRequest()
                | ListOffsetsRequest()
                | OffsetFetchRequest()
                | OffsetCommitRequest()
                | TransactionalOffsetCommitRequest()
                | ConsumerGroupHeartbeatRequest()
                | ListGroupsRequest()
                | DescribeGroupRequest()
                | DeleteGroupRequest()
                | DeleteGroupOffsetsRequest()
            ):
                return self._queue.turn(RequestKind.CALL, TURN_WAIT_S)
            case ReplicaStateRequest():
                return nullcontext()
            case _ if TransactionRequests.serves(request):
                return nullcontext()
            case InitProducerIdRequest():
                return self._passing_on.turn(RequestKind.CALL, TURN_WAIT_S)
            case _:
                return self._passing_on.turn(RequestKind.CALL, PASS_ON_WAIT_S)

    def _patience_ms(self, request: CallRequest) -> int:
        match request:
            case OffsetCommitRequest() | TransactionalOffsetCommitRequest() | OffsetFetchRequest():
                return COMMIT_TIMEOUT_MS
            case WriteTransactionMarkersRequest():
                return MARKERS_WAIT_MS + GRACE_MS
            case _:
                return self._timeout_ms + GRACE_MS

    def _ask_controller(self, request: Message, reply: Reply) -> None:
        """Call the controller in the thread that asks."""
        try:
            answer = self._controller.call(request, timeout_ms=self._timeout_ms)
        except SparkBrokerError as error:
            reply(error)
        else:
            reply(answer)
