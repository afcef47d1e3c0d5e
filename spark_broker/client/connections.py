"""Connections for calls: one for each address, and a bounded number of them.

A broken one is dropped; its next user opens another.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from spark_broker.client.settings import Address
from spark_broker.errors import ClosedError, NetworkError, RequestTimedOutError
from spark_broker.protocol.messages import CallResponse, Message
from spark_broker.transport.client import Connection, Meanwhile

MAX_CONNECTIONS = 64


class ConnectionPool:
    """Calls to brokers by address. Safe for use by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: OrderedDict[Address, Connection] = OrderedDict()
        self._closed = False

    def call(
        self, address: Address, request: Message, *, timeout_ms: int, meanwhile: Meanwhile | None = None
    ) -> CallResponse:
        """One call, without retries. Raises the broker's typed error, NetworkError or RequestTimedOutError."""
        connection = self._get(address)
        try:
            return connection.call(request, timeout_ms=timeout_ms, meanwhile=meanwhile)
        except (NetworkError, RequestTimedOutError):
            # Nobody knows what became of the call: the next one must not wait behind it, nor be overtaken by it.
            self._drop(address, connection)
            connection.give_up()
            raise

    def close(self) -> None:
        """Close every connection. Calls that wait end by their deadline. Later calls raise ClosedError."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.close()

    def _get(self, address: Address) -> Connection:
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            connection = self._connections.pop(address, None) or Connection(address.host, address.port)
            self._connections[address] = connection
            while len(self._connections) > MAX_CONNECTIONS:
                self._connections.popitem(last=False)
            return connection

    def _drop(self, address: Address, connection: Connection) -> None:
        with self._lock:
            if self._connections.get(address) is connection:
                del self._connections[address]
