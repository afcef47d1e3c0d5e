"""Sockets as both sides use them: never blocking, without delay, and with keep-alive."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice

from spark_broker.addresses import address_text
from spark_broker.errors import NetworkError

CONNECT_TIMEOUT_S = 3.0
"""How long one attempt to connect may take: longer than a lost packet, shorter than any call's deadline."""

KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A peer whose machine is gone is noticed after a minute and a half, even if nothing is sent to it."""

PARTS_MAX = 512
"""How many buffers one system call writes. The system allows 1,024."""


class OwnSocket(socket.socket):
    """It is closed when nobody holds it. A signal's handler may raise between any two steps of a user's thread, also
    before anybody holds the socket, and before the standard library has finished it."""

    __del__ = socket.SocketType.close
    """Of the C type: no handler can raise in it, and it needs nothing that `socket.__init__` sets."""


def connected(host: str, port: int, timeout_s: float = CONNECT_TIMEOUT_S) -> socket.socket:
    """A socket that is connected to `host:port`. Raises NetworkError."""
    # As bytes: of a text, the standard library first imports what knows foreign letters.
    name: str | bytes = host.encode() if host.isascii() else host
    where = address_text(host, port)
    limit_s = min(max(timeout_s, 0.001), CONNECT_TIMEOUT_S)
    try:
        sock = _connected(name, port, limit_s)
        prepare(sock)
    except TimeoutError:
        raise NetworkError(f"{where}: no connection within {limit_s:.1f} s") from None
    except OSError as error:
        nobody = isinstance(error, ConnectionRefusedError | socket.gaierror)
        raise NetworkError(f"{where}: {error.strerror or error}", nobody_there=nobody) from None
    except UnicodeError as error:
        raise NetworkError(f"{where} is no address: {error}", nobody_there=True) from None
    return sock


def _connected(name: str | bytes, port: int, limit_s: float) -> OwnSocket:
    """To the first of the name's addresses that takes a connection. Raises the last one's OSError, and UnicodeError."""
    addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    for left, (family, kind, protocol, _, address) in zip(range(len(addresses))[::-1], addresses, strict=True):
        try:
            sock = OwnSocket(family, kind, protocol)
            sock.settimeout(limit_s)
            sock.connect(address)
        except OSError:  # Raised where it is caught: one that this frame keeps would keep the frame.
            if not left:
                raise
        else:
            return sock
    raise OSError(f"{name!r} has no address")


def prepare(sock: socket.socket) -> None:
    """Make a connected socket what the carrier expects. Raises OSError if the peer has left already."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def write_some(sock: socket.socket, parts: deque[memoryview]) -> int:
    """Write what the system takes of these in one call, and drop it from them. Returns the bytes. Raises OSError,
    BlockingIOError where it takes nothing now."""
    count = left = sock.sendmsg(list(islice(parts, PARTS_MAX)))
    while parts and left >= len(parts[0]):
        left -= len(parts.popleft())
    if left:
        parts[0] = parts[0][left:]
    return count
