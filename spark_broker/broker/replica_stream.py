"""A follower's stream on the leader: the long polls of its fetch session."""

from __future__ import annotations

import time

from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.replica_session import ReplicaSession
from spark_broker.config import ClusterConfig
from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.messages import ReplicaFetchRequest
from spark_broker.transport.server_stream import ServerStream


class ReplicaStream:
    """Serves one follower."""

    def __init__(
        self,
        manager: ReplicaManager,
        stream: ServerStream,
        max_partition_bytes: int,
        max_response_bytes: int = ClusterConfig().replica_fetch_response_max_bytes,
        lag_max_ms: int = ClusterConfig().replica_lag_time_max_ms,
    ) -> None:
        self._session = ReplicaSession(
            manager, max_partition_bytes, max_response_bytes=max_response_bytes, lag_max_ms=lag_max_ms
        )
        self._stream = stream
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
            self._session.close()

    def _serve(self, request: ReplicaFetchRequest) -> None:
        self._session.begin(request)
        deadline = time.monotonic() + request.max_wait_ms / 1000
        while not self._session.poll():
            remaining = deadline - time.monotonic()
            if remaining <= 0 or self._stream.cancelled:
                break
            self._session.notifier.wait(remaining)
        response, payload = self._session.finish()
        self._stream.send(response, *payload)
