"""The driver's connections to keepers: one thread reads them all."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from spark_broker.broker.hosting import Lines
from spark_broker.driver.keeper_task import FromDriver, FromKeeper, KeeperHello, to_line
from spark_broker.driver.port_probe import PORTS_HINT
from spark_broker.errors import ClusterStartError, InvalidRequestError
from spark_broker.ports import ports_to_try
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.threads import BeginAgain, Worker

logger = logging.getLogger(__name__)

SELECT_S = 1.0
ACCEPT_PAUSE_S = 0.25
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0

HELLO_TIMEOUT_S = 10.0
MAX_STRANGERS = 100
"""At most this many connections may have named no job yet."""


@dataclass(eq=False)
class KeeperConnection:
    """A connection from a keeper. `known`: it has named its job; `since_s`: when it was accepted."""

    socket: socket.socket
    since_s: float
    known: bool = False
    lines: Lines = field(default_factory=Lines)

    def send(self, *orders: FromDriver) -> bool:
        """Send orders, from any thread. True does not prove that the keeper lives: its end may be noticed later."""
        try:
            self.socket.sendall(b"".join(to_line(order) for order in orders))
        except OSError as error:
            logger.info("a keeper takes no orders: %s", error)
            return False
        return True

    def end(self) -> None:
        """End the connection, from any thread. The keeper notices, and so does the thread that reads it."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("a keeper's connection had ended: %s", error)


def _listen(address: str, allowed: str) -> socket.socket:
    why: OSError | None = None
    for port in ports_to_try(allowed):
        try:
            return socket.create_server((address, port), family=_family(address))
        except OSError as error:
            why = error
    where = f"{address}, driver.ports = {allowed}" if allowed else address
    raise ClusterStartError(f"the driver cannot listen on {where} for its brokers: {why}", hint=PORTS_HINT) from why


class KeeperListener(Protocol):
    """Is called by the connections, from their thread. Calls return quickly."""

    def welcome(self, connection: KeeperConnection, token: str) -> bool:
        """A connection's first message has come. Returns whether it is from a keeper of this cluster."""

    def heard(self, connection: KeeperConnection, message: FromKeeper) -> None:
        """A later message of a welcome keeper has come."""

    def gone(self, connection: KeeperConnection) -> None:
        """A welcome keeper's connection ended."""


class KeeperConnections(Worker):
    """Accepts keepers at `address` until `close`."""

    def __init__(self, address: str, listener: KeeperListener, allowed: str = "") -> None:
        """`allowed`: the setting `driver.ports`. Raises ClusterStartError."""
        self._closed = threading.Event()
        super().__init__("keepers", BeginAgain(self._closed.is_set))
        self._listener = listener
        self._server = _listen(address, allowed)
        self._decoder = msgspec.json.Decoder(FromKeeper)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._waker, self._wakes = socket.socketpair()
        self._selector.register(self._wakes, selectors.EVENT_READ, None)

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def close(self) -> None:
        """End every connection, and accept no more."""
        self._closed.set()
        self._waker.close()
        if self.ident is None:
            self._close_sockets()  # It was never started, and the thread would do it.
        elif self.is_alive():
            self.join(CLOSE_TIMEOUT_S)

    def work(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(SELECT_S):
                if key.data is not None:
                    self._hear(key.data)
                elif key.fileobj is self._server:
                    self._accept()
            self._refuse_the_silent()
        for connection in self._all():
            self._drop(connection)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._selector.close()
        self._server.close()
        self._wakes.close()

    def _all(self) -> list[KeeperConnection]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _accept(self) -> None:
        try:
            accepted, _ = self._server.accept()
        except OSError as error:
            logger.warning("a keeper cannot connect: %s", error)
            self._closed.wait(ACCEPT_PAUSE_S)
            return
        accepted.settimeout(SEND_TIMEOUT_S)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sum(not connection.known for connection in self._all()) >= MAX_STRANGERS:
            accepted.close()
            return
        self._selector.register(accepted, selectors.EVENT_READ, KeeperConnection(accepted, time.monotonic()))

    def _hear(self, connection: KeeperConnection) -> None:
        try:
            data = connection.socket.recv(65_536)
            for line in connection.lines.feed(data):
                self._take(connection, self._decoder.decode(line))
        except (OSError, InvalidRequestError, *UNDECODABLE) as error:
            logger.info("a keeper's connection is given up: %s", error)
            data = b""
        if not data:
            self._drop(connection)

    def _take(self, connection: KeeperConnection, message: FromKeeper) -> None:
        if connection.known:
            self._listener.heard(connection, message)
        elif isinstance(message, KeeperHello) and self._listener.welcome(connection, message.token):
            connection.known = True
        else:
            raise InvalidRequestError("it is of no job of this cluster")

    def _drop(self, connection: KeeperConnection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.known:
            self._listener.gone(connection)

    def _refuse_the_silent(self) -> None:
        oldest = time.monotonic() - HELLO_TIMEOUT_S
        for connection in self._all():
            if not connection.known and connection.since_s < oldest:
                self._drop(connection)


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
