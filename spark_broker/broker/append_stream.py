"""A producer's stream of appends: validated and stored in the order in which they come, answered when they are safe."""

from __future__ import annotations

import logging
import threading

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.confirmation import Confirm, append_confirmed, no_coordinator
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.errors import (
    InvalidRequestError,
    InvalidTopicError,
    InvariantError,
    SparkBrokerError,
    StorageFullError,
)
from spark_broker.model import INTERNAL_PREFIX
from spark_broker.protocol.messages import AppendRequest, AppendResponse
from spark_broker.protocol.wire import Buffer
from spark_broker.transport.server import ServerStream

logger = logging.getLogger(__name__)


class AppendStream:
    """Serves one stream. Responses may leave in another order than the requests came in: they name their request."""

    def __init__(
        self,
        manager: ReplicaManager,
        stream: ServerStream,
        max_waiting: int,
        clock: Clock = SYSTEM_CLOCK,
        confirm: Confirm = no_coordinator,
    ) -> None:
        self._manager = manager
        self._stream = stream
        self._clock = clock
        self._confirm = confirm
        # Bounds what waits on this stream for the high watermark, or to be answered: beyond it, nothing more is read.
        self._waiting = threading.BoundedSemaphore(max_waiting)

    def run(self) -> None:
        """Until the client leaves."""
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
            if partition.topic.name.startswith(INTERNAL_PREFIX):
                raise InvalidTopicError(f"{partition.topic.name} is internal: only brokers append to it")
            # The first batch of a transaction holds up this stream while its coordinator is asked, so that what comes
            # behind it stays behind it; other streams have threads of their own.
            append_confirmed(partition, append, token, request.transactional_id, self._confirm)
        except InvariantError:
            raise
        except SparkBrokerError as error:
            if token is None:
                # acks=0 asks for no answer. Ending the stream would also break the batches behind this one; such a
                # producer refreshes its metadata every second instead, and so finds a leader that has moved.
                level = logging.DEBUG if isinstance(error, StorageFullError) else logging.INFO  # Room says it once.
                logger.log(level, "an append with acks=0 was refused: %s", error)
                return
            token.refuse(error)

    def _token(self, request: AppendRequest) -> _Token | None:
        while not self._waiting.acquire(timeout=0.25):
            if self._stream.cancelled:
                return None
        return _Token(self._stream, request.correlation_id, self._waiting)


class _Token:
    """Answers one append. Called once, perhaps from another stream's thread."""

    def __init__(self, stream: ServerStream, correlation_id: int, waiting: threading.BoundedSemaphore) -> None:
        self._stream = stream
        self._correlation_id = correlation_id
        self._waiting = waiting

    def acknowledge(self, base_offset: int) -> None:
        self._send(AppendResponse(self._correlation_id, 0, "", base_offset))

    def refuse(self, error: SparkBrokerError) -> None:
        self._send(AppendResponse(self._correlation_id, error.code, error.message[:65_000]))

    def _send(self, response: AppendResponse) -> None:
        # Whoever calls this serves others, too, and must not wait for a producer that does not read its answers.
        self._stream.post(response, self._waiting.release)
