"""Carries the fetches of a `ConsumerMachine` to one leader: a thread with a stream of long polls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_broker.client.fetch_machine import Fetch, FetchAnswer
from spark_broker.client.settings import Address
from spark_broker.errors import NetworkError, SparkBrokerError
from spark_broker.threads import begin
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream

if TYPE_CHECKING:
    from spark_broker.client.consumer_threads import ConsumerThreads


class LeaderFetcher:
    """One leader's thread. Everything but the exchange itself happens under the consumer's lock."""

    def __init__(self, consumer: ConsumerThreads, broker_id: int, address: Address, request_timeout_ms: int) -> None:
        self._consumer = consumer
        self._broker_id = broker_id
        self._address = address
        self._request_timeout_ms = request_timeout_ms
        self._connection: Connection | None = None
        self._stream: ClientStream | None = None
        self._left = False
        self._thread = begin(f"fetch-{broker_id}", consumer.died, self._run)

    def interrupt(self) -> None:
        """Break a long poll. The caller holds the consumer's lock."""
        if self._stream is not None:
            self._stream.close()

    def leave(self) -> None:
        """End the thread. The caller holds the consumer's lock."""
        self._left = True
        self.interrupt()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (fetch := self._next()) is not None:
                self._carry_out(fetch)
        finally:
            self._drop_stream()
            self._drop_connection()

    def _next(self) -> Fetch | None:
        """Wait until there is something to fetch; None: the leader was left."""
        consumer = self._consumer
        with consumer.lock:
            while not self._left:
                fetch = consumer.machine.leaders.next_fetch(self._broker_id, consumer.now_ms())
                if fetch is not None:
                    return fetch
                consumer.wait()
            return None

    def _carry_out(self, fetch: Fetch) -> None:
        consumer = self._consumer
        try:
            answers = self._exchange(fetch)
        except SparkBrokerError as error:
            self._drop_stream()
            with consumer.lock:
                failed = consumer.machine.leaders.fetch_failed(self._broker_id, fetch, error, consumer.now_ms())
                if failed:
                    consumer.suspect(self._address)
                consumer.advance()
            if failed:
                self._drop_connection()
            return
        with consumer.lock:
            awaited = consumer.machine.leaders.awaits(self._broker_id, fetch)
            news = consumer.machine.leaders.fetched(self._broker_id, fetch, answers, consumer.now_ms())
            consumer.advance(news=news)
        if not awaited:
            self._drop_stream()  # it was closed after its last answer had come

    def _exchange(self, fetch: Fetch) -> list[FetchAnswer]:
        stream = self._open_stream(fetch)
        stream.send(fetch.request, timeout_ms=self._request_timeout_ms)
        response, payload = stream.receive(timeout_ms=fetch.request.max_wait_ms + self._request_timeout_ms)
        # Decoded here, beside the caller's work.
        return self._consumer.machine.leaders.machine.read(fetch, response, payload)

    def _open_stream(self, fetch: Fetch) -> ClientStream:
        stream = self._stream
        if stream is None:
            if self._connection is None:
                self._connection = Connection(self._address.host, self._address.port)
            stream = self._connection.open_stream("fetch")
            with self._consumer.lock:
                self._stream = stream
                if not self._consumer.machine.leaders.awaits(self._broker_id, fetch):
                    raise NetworkError("interrupted")
        return stream

    def _drop_stream(self) -> None:
        with self._consumer.lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
