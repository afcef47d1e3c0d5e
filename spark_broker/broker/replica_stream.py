"""A follower's stream on the leader: the long polls of its fetch session."""

from __future__ import annotations

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.replica_session import ReplicaSession
from spark_broker.config import ClusterConfig
from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.messages import ReplicaFetchRequest
from spark_broker.transport.server_stream import ServerStream


class ReplicaStream:
    """Serves one follower, in a thread."""

    def __init__(
        self,
        manager: ReplicaManager,
        stream: ServerStream,
        max_partition_bytes: int,
        max_response_bytes: int = ClusterConfig().replica_fetch_response_max_bytes,
        lag_max_ms: int = ClusterConfig().replica_lag_time_max_ms,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._session = ReplicaSession(
            manager, max_partition_bytes, max_response_bytes=max_response_bytes, lag_max_ms=lag_max_ms
        )
        self._stream = stream
        self._clock = clock
        stream.on_gone = self._session.notifier.interrupt

    def run(self) -> None:
        """Serve fetches until the follower leaves."""
        try:
            while (received := self._stream.receive()) is not None:
                if self._stream.cancelled:
                    return  # what it reported before it left may not hold any more
                request, _ = received
                if not isinstance(request, ReplicaFetchRequest):
                    raise InvalidRequestError(f"a {type(request).__name__} on a follower's stream")
                self._serve(request)
        finally:
            self._session.cancelled()

    def _serve(self, request: ReplicaFetchRequest) -> None:
        session, now_ms = self._session, self._clock.boottime_ms()
        session.received(request, now_ms)
        while (answer := session.try_answer(now_ms)) is None:
            with self._stream.waiting_for_client():
                session.notifier.wait((session.deadline_ms - now_ms) / 1000)
            if self._stream.cancelled:
                return
            now_ms = self._clock.boottime_ms()
        self._stream.send(answer.response, *answer.payload)
