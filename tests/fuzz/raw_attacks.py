"""Attacks below Flight: bytes that are no gRPC, HTTP/2 frames that lie, connections that say nothing, or slowly."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

CONNECT_TIMEOUT_S = 10
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION, _DATA, _RST = 1, 4, 6, 7, 8, 9, 0, 3


def connect(host: str, port: int) -> socket.socket:
    """A connection; the caller closes it."""
    return socket.create_connection((host, port), CONNECT_TIMEOUT_S)


def send_garbage(host: str, port: int, rng: random.Random) -> None:
    """One connection of each kind of nonsense; the server may answer, close or ignore it."""
    for data in _nonsense(rng):
        with contextlib.suppress(ConnectionError, TimeoutError), connect(host, port) as raw:
            raw.settimeout(0.2)
            raw.sendall(data)
            while raw.recv(65_536):
                pass


def _nonsense(rng: random.Random) -> list[bytes]:
    settings = _frame(_SETTINGS, 0, 0, b"")
    start = PREFACE + settings
    lying = struct.pack(">I", 0xFFFFFF)[1:] + bytes([_DATA, 0]) + struct.pack(">I", 1)
    return [
        rng.randbytes(10_000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + rng.randbytes(500),  # the beginning of TLS
        PREFACE[:10],
        start + lying + rng.randbytes(1000),
        start + b"".join(_frame(_CONTINUATION, 0, 1, rng.randbytes(100)) for _ in range(100)),
        start + b"".join(_frame(_PING, 0, 0, rng.randbytes(8)) for _ in range(2000)),
        start + _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 2**32 - 1)),
        start + _frame(_SETTINGS, 0, 0, struct.pack(">HI", 5, 0) * 100),
        start + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)) * 10,
        start + _frame(_GOAWAY, 0, 0, bytes(8)),
        start + b"".join(_request(2 * i + 1) + _frame(_RST, 0, 2 * i + 1, struct.pack(">I", 8)) for i in range(500)),
        start + _request(1) + _frame(_DATA, 0, 1, b"\0\xff\xff\xff\xff" + rng.randbytes(100)),
        start + _request(1) + _frame(_DATA, 1, 1, b"\0\0\0\0\x10" + rng.randbytes(16)),
        start + b"".join(_frame(rng.randrange(256), rng.randrange(256), i, rng.randbytes(30)) for i in range(50)),
    ]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _request(stream: int) -> bytes:
    """The headers of a DoExchange call, without HPACK's compression."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/arrow.flight.protocol.FlightService/DoExchange",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(_literal(name, value) for name, value in headers.items())
    return _frame(_HEADERS, 0x4, stream, block)


def _literal(name: str, value: str) -> bytes:
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class SlowLoris:
    """Many connections that begin and never finish; `step` lets each say one byte more."""

    def __init__(self, host: str, port: int, count: int) -> None:
        self._says = PREFACE + _frame(_SETTINGS, 0, 0, b"") + _request(1) + b"\0" * 1000
        self._said = 0
        self._connections = [connect(host, port) for _ in range(count)]

    def step(self) -> None:
        """One byte on each connection."""
        self._said += 1
        for raw in self._connections:
            with contextlib.suppress(OSError):
                raw.sendall(self._says[self._said - 1 : self._said])

    def begin_request(self) -> None:
        """Everything up to a request's first bytes at once, and then nothing more."""
        for raw in self._connections:
            with contextlib.suppress(OSError):
                raw.sendall(self._says[self._said : -1])
        self._said = len(self._says) - 1

    def close(self) -> None:
        for raw in self._connections:
            raw.close()


def flood(host: str, port: int, count: int) -> None:
    """Connections that come and go as fast as one thread can make them."""
    for number in range(count):
        with contextlib.suppress(ConnectionError), connect(host, port) as raw:
            if number % 2:
                raw.sendall(PREFACE)
            if number % 3:  # an abrupt end: a reset instead of a FIN
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
