"""A follower's side of replication: one thread for each leader broker, pulling every partition they share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from spark_broker.broker.fetch_session import RETRY_MS, Fetcher, FetcherSettings, FetchSession
from spark_broker.broker.partition import Partition, PartitionKey
from spark_broker.errors import InvariantError, NetworkError, SparkBrokerError
from spark_broker.protocol.messages import ReplicaFetchResponse
from spark_broker.transport.client import ClientStream, Connection

__all__ = ["Fetcher", "FetcherSettings", "ReplicaFetcher"]

logger = logging.getLogger(__name__)


class ReplicaFetcher(threading.Thread):
    """Pulls from one leader. The set of partitions may change at any time; a change interrupts a long poll."""

    def __init__(
        self, host: str, port: int, settings: FetcherSettings, on_bug: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name=f"fetcher-{host}:{port}", daemon=True)
        self._host, self._port = host, port
        self._settings = settings
        self._on_bug = on_bug
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._partitions: dict[PartitionKey, Partition] = {}
        self._leader_epochs: dict[PartitionKey, int] = {}
        self._stopped = False
        self._generation = 0  # rises with every change of what is to be pulled
        self._stream: ClientStream | None = None

    @property
    def address(self) -> tuple[str, int]:
        return self._host, self._port

    @property
    def settings(self) -> FetcherSettings:
        return self._settings

    def follow(self, partitions: dict[PartitionKey, Partition], leader_epochs: dict[PartitionKey, int]) -> None:
        """Pull exactly these from now on, at these leader epochs; a change interrupts a long poll that is under way."""
        with self._changed:
            if partitions == self._partitions and leader_epochs == self._leader_epochs:
                return
            self._partitions = dict(partitions)
            self._leader_epochs = dict(leader_epochs)
            self._interrupt()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._partitions = {}
            self._interrupt()

    def _interrupt(self) -> None:
        self._generation += 1
        self._changed.notify_all()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def run(self) -> None:
        connection = Connection(self._host, self._port)
        try:
            while (generation := self._wait_for_work()) is not None:
                try:
                    self._session_on(connection, generation)
                except NetworkError as error:
                    logger.debug("replication from %s: %s", connection.address, error)
                    self._pause(generation)
                except InvariantError:
                    raise
                except SparkBrokerError as error:
                    logger.warning("replication from %s: %s", connection.address, error)
                    self._pause(generation)
        except BaseException as error:
            self._on_bug(error)
            raise
        finally:
            connection.close()

    def _wait_for_work(self) -> int | None:
        """The generation of the work at hand; None: stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or bool(self._partitions))
            return None if self._stopped else self._generation

    def _pause(self, generation: int) -> None:
        """Wait before the next try; not at all when there is other work by now."""
        with self._changed:
            self._changed.wait_for(lambda: self._generation != generation, RETRY_MS / 1000)

    def _session_on(self, connection: Connection, generation: int) -> None:
        stream = connection.open_stream("replica")
        try:
            with self._changed:
                if self._generation != generation:
                    return
                self._stream = stream
                session = FetchSession(self._settings, self._partitions)
            while self._generation == generation:
                self._pull(connection, stream, session)
        finally:
            stream.close()

    def _pull(self, connection: Connection, stream: ClientStream, session: FetchSession) -> None:
        """One request, one response, and what it says carried out."""
        timeout_ms = self._settings.request_timeout_ms
        stream.send(session.request(), timeout_ms=timeout_ms)
        response, payload = stream.receive(timeout_ms=timeout_ms)
        if not isinstance(response, ReplicaFetchResponse):
            raise NetworkError(f"a {type(response).__name__} where a fetch response was due")
        for to_restart in session.received(response, payload):
            session.restart(to_restart, lambda request: connection.call(request, timeout_ms=timeout_ms))
