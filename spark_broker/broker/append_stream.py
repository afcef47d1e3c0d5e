"""A producer's stream of appends. They are stored in the order of arrival, and answered as their acks ask."""

from __future__ import annotations

import logging
import threading
import time

from spark_broker.broker.append import Append, AwaitedTransaction
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.confirmation import Confirm, append_confirmed, no_coordinator
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.request_queue import RequestKind, RequestQueue, Turn
from spark_broker.broker.slow import SLOW, SLOW_S
from spark_broker.errors import (
    InvalidRequestError,
    InvalidTopicError,
    SparkBrokerError,
    StorageRefusedError,
    ThrottlingQuotaExceededError,
)
from spark_broker.model import INTERNAL_PREFIX
from spark_broker.protocol.messages import AppendRequest, AppendResponse
from spark_broker.protocol.wire import Buffer
from spark_broker.transport.server_stream import ServerStream

logger = logging.getLogger(__name__)

TURN_WAIT_S = 10.0
"""How long an append waits for its turn. Meanwhile nothing more is read from its producer, whose buffer fills."""


class AppendStream:
    """Serves one stream. Responses may leave in another order than the requests came in: they name their request."""

    def __init__(
        self,
        manager: ReplicaManager,
        stream: ServerStream,
        max_waiting: int,
        clock: Clock = SYSTEM_CLOCK,
        confirm: Confirm = no_coordinator,
        queue: RequestQueue | None = None,
    ) -> None:
        self._manager = manager
        self._stream = stream
        self._clock = clock
        self._confirm = confirm
        self._queue = queue if queue is not None else RequestQueue()
        self.answers = _Answers(stream, max_waiting)

    def run(self) -> None:
        """Serve appends until the client leaves."""
        while (received := self._stream.receive()) is not None:
            request, payload = received
            if not isinstance(request, AppendRequest):
                raise InvalidRequestError(f"a {type(request).__name__} on a stream of appends")
            self._append(request, payload)

    def _append(self, request: AppendRequest, payload: Buffer) -> None:
        token = None if request.acks == 0 else self._token(request)
        if request.acks != 0 and token is None:
            return
        append = Append(
            message=payload,
            leader_epoch=request.leader_epoch,
            acks=request.acks,
            schema_id=request.schema_id,
            deadline_ms=self._clock.boottime_ms() + request.timeout_ms,
        )
        try:
            partition = self._manager.partition(request.topic_id, request.partition)
            if token is not None:
                token.partition = partition
            if partition.topic.name.startswith(INTERNAL_PREFIX):
                raise InvalidTopicError(f"{partition.topic.name} is internal: only brokers append to it")
            # The producer must learn of the overload before its own request times out.
            wait_s = min(TURN_WAIT_S, request.timeout_ms / 2000)
            with self._queue.turn(RequestKind.APPEND, wait_s) as turn:
                # The first batch of a transaction blocks this stream while its coordinator is asked, so that later
                # batches stay behind it. Other streams have threads of their own.
                confirm = self._without(turn)
                append_confirmed(partition, append, token, request.transactional_id, confirm)
        except SparkBrokerError as error:
            if token is None:
                # acks=0 asks for no answer. Ending the stream would also fail the batches behind this one. Such a
                # producer refreshes its metadata every second instead, and so finds a leader that has moved.
                # `Room` logs a full disk once, and overload would make a line for each append.
                often = isinstance(error, StorageRefusedError | ThrottlingQuotaExceededError)
                level = logging.DEBUG if often else logging.INFO
                logger.log(level, "an append with acks=0 was refused: %s", error)
                return
            token.refuse(error)

    def _without(self, turn: Turn) -> Confirm:
        """Gives the turn up while another broker is asked: that broker may be waiting for this one."""

        def confirm(partition: Partition, awaited: AwaitedTransaction, transactional_id: str, deadline_ms: int) -> None:
            turn.end()
            self._confirm(partition, awaited, transactional_id, deadline_ms)
            turn.begin()

        return confirm

    def _token(self, request: AppendRequest) -> _Token | None:
        while not self.answers.waiting.acquire(timeout=0.25):
            if self._stream.cancelled:
                return None
        return _Token(self.answers, request.correlation_id)


class _Answers:
    """The answers of one stream. The thread that sends one serves other streams, too, so a producer that does not read
    must not block it: what the producer's system does not take waits in memory, and counts as an append that waits.
    """

    def __init__(self, stream: ServerStream, max_waiting: int) -> None:
        # Bounds the appends that wait for the high watermark or for their answer. At the bound, nothing more is read.
        self.waiting = threading.BoundedSemaphore(max_waiting)
        self._stream = stream

    def send(self, response: AppendResponse) -> None:
        self._stream.post(response, self.waiting.release)


class _Token:
    """Answers one append. Called once, perhaps from another stream's thread."""

    def __init__(self, answers: _Answers, correlation_id: int) -> None:
        self._answers = answers
        self._correlation_id = correlation_id
        self.partition: Partition | None = None  # for the log line of a slow append, like `began_s`
        self.began_s = time.monotonic()

    def acknowledge(self, base_offset: int) -> None:
        took_s = time.monotonic() - self.began_s
        if took_s >= SLOW_S and self.partition is not None:
            epoch = self.partition.replica.assignment.leader_epoch
            SLOW.took("append", took_s, topic_partition=self.partition, leader_epoch=epoch, offset=base_offset)
        self._answers.send(AppendResponse(self._correlation_id, 0, "", base_offset))

    def refuse(self, error: SparkBrokerError) -> None:
        self._answers.send(AppendResponse(self._correlation_id, error.code, error.message[:65_000]))
