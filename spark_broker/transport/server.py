"""The server: one thread moves bytes, and handlers answer calls and streams of messages in threads of their own.

Nothing of it must be shut down in order: the process ends.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping

from spark_broker.config import ClusterConfig
from spark_broker.errors import (
    InvariantError,
    NetworkError,
    SparkBrokerError,
    UnknownServerError,
)
from spark_broker.process_limits import limit_reached
from spark_broker.protocol import wire
from spark_broker.protocol.messages import CallRequest, Message
from spark_broker.threads import Fate
from spark_broker.transport.byte_budget import ByteBudget
from spark_broker.transport.handler_threads import HandlerThreads
from spark_broker.transport.io_loop import IoLoop
from spark_broker.transport.server_connection import Later, ServerConnection
from spark_broker.transport.server_limits import ServerLimits
from spark_broker.transport.server_stream import ServerStream

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = ClusterConfig().socket_request_max_bytes
SEND_TIMEOUT_MS = ClusterConfig().socket_send_timeout_ms

BACKLOG = 1024
ACCEPTED_AT_ONCE = 100
LOOK_S = 0.5
"""How often slow connections are looked for."""

NO_DESCRIPTOR_PAUSE_S = 0.5
"""How long nothing is accepted when the process has no descriptor left."""

DESCRIPTORS_SPARED = 32
"""For what the process itself connects to: a broker that cannot reach the controller serves nobody. The system gives
out the lowest number that is free."""

SAY_AGAIN_S = 30.0

KINDS_OF_BROKERS = ("replica", "session")
"""Streams between brokers, and between brokers and the controller."""

CallHandler = Callable[[CallRequest], Message | Later]
StreamHandler = Callable[[ServerStream], None]


class Server:
    """Serves calls and streams on `host:port` (0: any free port) from the moment it is made. Raises OSError if it
    cannot.

    A handler's typed errors go to its client. Anything else is our own bug. The client gets UnknownServerError, and
    only its call or stream ends: any peer may send a value that nobody has thought of. But after a broken invariant
    nothing that this process holds can be relied on: `on_bug` is called. `StateLock` raises InvariantError, too. It is
    also called if the thread that moves bytes ends.
    """

    def __init__(
        self,
        host: str,
        port: int,
        calls: CallHandler,
        streams: Mapping[str, StreamHandler],
        on_bug: Fate,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        send_timeout_ms: int = SEND_TIMEOUT_MS,
        limits: ServerLimits | None = None,
    ) -> None:
        self.host = host
        self.calls = calls
        self.streams = dict(streams)
        self.max_request_bytes = max_request_bytes
        self.send_timeout_s = send_timeout_ms / 1000
        self.limits = limits if limits is not None else ServerLimits.of(ClusterConfig())
        self.threads = HandlerThreads("handler", on_bug)
        self._on_bug = on_bug
        self._connections: set[ServerConnection] = set()  # only the loop's thread changes it
        self._of_peer: Counter[str] = Counter()
        self._client_streams = 0  # only the loop's thread changes it
        self._refusing_since_s = 0.0
        self._sock = _listening(host, port)
        self.port: int = self._sock.getsockname()[1]
        self.of_clients = ByteBudget(self.limits.queued_bytes)
        self.of_brokers = ByteBudget(self.limits.queued_bytes)
        self.of_answers = ByteBudget(self.limits.answer_bytes)  # to calls
        self.loop = IoLoop("io", self._loop_ended)
        self.loop.soon(self._listen)
        self.loop.begin()

    def _loop_ended(self, error: BaseException) -> None:
        """Nobody is served any more. The peers learn it at once, before the process ends."""
        self._sock.close()
        for connection in list(self._connections):
            connection.channel.orphaned("the server ended on a bug")
        self._on_bug(error)

    def close(self) -> None:
        """Close the port and all connections. Handlers that wait for something else than their client go on."""
        self.loop.soon(self._close)

    def _close(self) -> None:
        self.loop.loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for connection in list(self._connections):
            connection.channel.close("the server was closed")
        self.loop.loop.call_soon(self.loop.loop.call_soon, self.loop.stop)

    def budget_of(self, kind: str) -> ByteBudget:
        """Of streams of this kind. Clients that send much must not keep brokers from replicating."""
        return self.of_brokers if kind in KINDS_OF_BROKERS else self.of_clients

    def streams_begun(self, kind: str, count: int) -> None:
        """So many more streams of this kind are open. In the loop's thread."""
        if kind not in KINDS_OF_BROKERS:
            self._client_streams += count

    def has_too_many(self, kind: str) -> bool:
        """Whether the last one is one too many. Each has a thread, and a client's connection has one stream."""
        return kind not in KINDS_OF_BROKERS and self._client_streams > self.limits.connections

    def answer(self, request: wire.Buffer) -> Message | Later:
        """The answer to a call, in a handler's thread. It may come later."""
        try:
            return self.calls(wire.decode_request(request))
        except SparkBrokerError as error:
            return wire.error_response(error)
        except Exception as error:  # noqa: BLE001 (it is logged, and perhaps ends the process)
            return wire.error_response(self._failed("a call", error))

    def handle(self, stream: ServerStream) -> None:
        """One stream, in a handler's thread, until the client leaves."""
        ended: SparkBrokerError | None = None
        try:
            self.streams[stream.kind](stream)
        except NetworkError:
            pass
        except SparkBrokerError as error:
            ended = error
        except Exception as error:  # noqa: BLE001 (it is logged, and perhaps ends the process)
            ended = self._failed("a stream", error)
        finally:
            stream.end(ended)

    def forget(self, connection: ServerConnection) -> None:
        """It is closed."""
        self._connections.discard(connection)
        self._of_peer[connection.host] -= 1
        if not self._of_peer[connection.host]:
            del self._of_peer[connection.host]

    def _failed(self, what: str, error: Exception) -> SparkBrokerError:
        """Log it, and end the process if an invariant is broken. Returns the client's error."""
        limit = limit_reached(error)
        if limit is None:
            logger.error("%s failed on a bug", what, exc_info=error)
        else:
            logger.error("%s failed: %s", what, limit)
        if isinstance(error, InvariantError):
            self._on_bug(error)
        return limit or UnknownServerError(f"{type(error).__name__}: {error}")

    def _listen(self) -> None:
        self.loop.loop.add_reader(self._sock.fileno(), self._accept)
        self._look_later()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # Linux also hands on errors of the network that a pending connection met.
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP):
                    raise
                self._pause_accepting(error)
                return
            self._admit(sock, address)

    def _pause_accepting(self, error: OSError) -> None:
        """Whoever wants to connect waits in the system's queue meanwhile."""
        self.say(f"no connection can be accepted: {error.strerror}")
        self.loop.loop.remove_reader(self._sock.fileno())
        self.loop.loop.call_later(
            NO_DESCRIPTOR_PAUSE_S, lambda: self.loop.loop.add_reader(self._sock.fileno(), self._accept)
        )

    def _admit(self, sock: socket.socket, address: tuple[str, int]) -> None:
        host = address[0]
        why = ""
        if sock.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS_SPARED:
            why = "the process has hardly any descriptors left (ulimit -n)"
        elif len(self._connections) >= self.limits.connections:
            why = f"broker.max.connections = {self.limits.connections} is reached"
        elif self._of_peer[host] >= self.limits.connections_per_ip:
            why = f"{host} has max.connections.per.ip = {self.limits.connections_per_ip}"
        if why:
            self.say(f"a connection of {host} was refused: {why}")
            sock.close()
            return
        try:
            self._connections.add(ServerConnection(self, sock, address))
        except OSError:  # it has left already
            sock.close()
            return
        self._of_peer[host] += 1

    def say(self, what: str) -> None:
        """Say it, at most twice a minute."""
        now_s = time.monotonic()
        if now_s - self._refusing_since_s > SAY_AGAIN_S:
            self._refusing_since_s = now_s
            logger.warning("%s", what)

    def _look_later(self) -> None:
        self.loop.loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Close connections that are too slow, or idle."""
        now_s = time.monotonic()
        for connection in list(self._connections):
            connection.look(now_s)
        self._look_later()


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    return sock
