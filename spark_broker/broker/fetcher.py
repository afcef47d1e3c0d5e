"""A follower's side of replication: one thread for each leader broker, pulling every partition they share."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.fetch_session import FetcherSettings, FetchSession
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_fetcher import FetcherState, ReplicaFetcher
from spark_broker.errors import NoMemoryError, SparkBrokerError
from spark_broker.process_limits import limit_reached
from spark_broker.protocol.messages import ReplicaStateRequest
from spark_broker.threads import Worker
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream


class ReplicaFetcherThread(Worker):
    """Runs a `ReplicaFetcher`: its sessions' requests, one after the other. Other threads interrupt a long poll."""

    def __init__(
        self, host: str, port: int, settings: FetcherSettings, on_bug: Callable[[BaseException], None]
    ) -> None:
        super().__init__(f"fetcher-{host}:{port}", on_bug)
        self._connection = Connection(host, port)
        self._timeout_ms = settings.request_timeout_ms
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._fetcher = ReplicaFetcher(self._connection.address, settings)
        self._stream: ClientStream | None = None

    @property
    def address(self) -> tuple[str, int]:
        return self._connection.host, self._connection.port

    @property
    def settings(self) -> FetcherSettings:
        return self._fetcher.settings

    def follow(self, partitions: dict[PartitionKey, Partition], leader_epochs: dict[PartitionKey, int]) -> None:
        """See `ReplicaFetcher.follow`. From any thread."""
        with self._changed:
            if self._fetcher.follow(partitions, leader_epochs):
                self._interrupt()

    def stop(self) -> None:
        with self._changed:
            self._fetcher.stop()
            self._interrupt()

    def _interrupt(self) -> None:
        self._changed.notify_all()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def work(self) -> None:
        try:
            while (session := self._await_session()) is not None:
                try:
                    self._run_session(session)
                except SparkBrokerError as error:
                    self._failed(session, error)
                except MemoryError as error:  # Under a partition's lock it would be an InvariantError.
                    self._failed(session, limit_reached(error) or NoMemoryError(str(error)))
        finally:
            self._connection.close()

    def _failed(self, session: FetchSession, error: SparkBrokerError) -> None:
        with self._changed:
            self._fetcher.failed(session, error)

    def _await_session(self) -> FetchSession | None:
        """Wait for the session that is due; None when this thread is to stop."""
        with self._changed:
            while (session := self._fetcher.session) is None and self._fetcher.state is not FetcherState.STOPPED:
                deadline_ms = self._fetcher.deadline_ms
                self._changed.wait(None if deadline_ms is None else (deadline_ms - SYSTEM_CLOCK.boottime_ms()) / 1000)
                self._fetcher.tick()
            return session

    def _run_session(self, session: FetchSession) -> None:
        stream = self._connection.open_stream("replica")
        try:
            with self._changed:
                if self._fetcher.session is not session:
                    return
                self._stream = stream
            while self._fetcher.session is session:
                self._ask(stream, session)
        finally:
            stream.close()

    def _ask(self, stream: ClientStream, session: FetchSession) -> None:
        """Send one request, and carry out its response."""
        request = session.next_request()
        if isinstance(request, ReplicaStateRequest):
            session.state_received(self._call(request))
        else:
            stream.send(request, timeout_ms=self._timeout_ms)
            session.received(*stream.receive(timeout_ms=self._timeout_ms))
            self._fetcher.answered()

    def _call(self, request: ReplicaStateRequest) -> object:
        try:
            return self._connection.call(request, timeout_ms=self._timeout_ms, patient=True)
        except SparkBrokerError as error:
            return error
