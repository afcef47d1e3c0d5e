"""A producer's stream of appends. They are stored in the order of arrival, and answered as their acks ask."""

from __future__ import annotations

import threading

from spark_broker.broker.append_operation import AppendOperation
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.confirmation import Confirm, no_coordinator
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.request_queue import RequestKind, RequestQueue
from spark_broker.errors import InvalidRequestError, SparkBrokerError
from spark_broker.protocol.messages import AppendRequest, AppendResponse
from spark_broker.protocol.wire import Buffer
from spark_broker.transport.server_stream import ServerStream

TURN_WAIT_S = 10.0
"""How long an append waits for its turn. Meanwhile nothing more is read from its producer, whose buffer fills."""


class AppendStream:
    """Serves one stream, in a thread. Responses may leave in another order than the requests came in: they name their
    request.
    """

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
            if request.acks == 0 or self._has_room():
                self._serve(request, payload)

    def _serve(self, request: AppendRequest, payload: Buffer) -> None:
        now_ms = self._clock.boottime_ms()
        operation = AppendOperation(self._manager, request, payload, now_ms, self.answers.send)
        # The producer must learn of the overload before its own request times out.
        wait_s = min(TURN_WAIT_S, request.timeout_ms / 2000)
        try:
            with self._queue.turn(RequestKind.APPEND, wait_s) as turn:
                while (question := operation.try_answer()) is not None:
                    # The first batch of a transaction blocks this stream while its coordinator is asked, so that later
                    # batches stay behind it. Other streams have threads of their own. The turn is given up meanwhile:
                    # the coordinator may be a broker that waits for this one.
                    turn.end()
                    self._confirm(*question)
                    turn.begin()
        except SparkBrokerError as error:
            operation.refuse(error)

    def _has_room(self) -> bool:
        """Wait until one more append may wait for its answer. False: the client has left."""
        while not self.answers.waiting.acquire(timeout=0.25):
            if self._stream.cancelled:
                return False
        return True


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
