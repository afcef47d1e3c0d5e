"""Peers that speak another protocol: a browser, a probe, or spark-broker before version 4 (gRPC). What a server tells
them, and what a client says of a server.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from spark_broker.protocol.messages import PROTOCOL_VERSION

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_GRPC = _PREFACE[:12]
_HTTP = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"CONN", b"DELE", b"PATC")
_TLS = b"\x16\x03"

_HEADERS, _SETTINGS = 1, 4
_ACK, _END_OF_STREAM_AND_HEADERS = 1, 5
_HTTP2_HEADER = struct.Struct(">BHBBI")
_HTTP2_FRAME_MAX_BYTES = 1 << 14
"""A peer sends no larger frame to one that has not allowed it."""

_UNAVAILABLE = b"14"
_CALLS_MAX = 100
"""So many calls of one connection are answered."""

SPEAKS = f"this port speaks spark-broker's protocol, version {PROTOCOL_VERSION}"
UPGRADE = f"{SPEAKS}; the client is older: upgrade it"
"""What a client of an earlier version shows its user."""


_SERVERS = (
    (b"HTTP/", "a web server"),
    (b"SSH-", "a server of SSH"),
    (b"\x15\x03", "a server of TLS"),
    (_TLS, "one of TLS"),
)
_OLDER = "a broker of spark-broker before version 4 (upgrade it), or a server of gRPC"


def foreign_server(first: bytes) -> str:
    """Who it seems to be whose first bytes these are; empty: that is not known."""
    if len(first) >= _HTTP2_HEADER.size and _HTTP2_HEADER.unpack_from(first)[2:] == (_SETTINGS, 0, 0):
        return _OLDER
    return next((who for begins, who in _SERVERS if first.startswith(begins)), "")


@dataclass(frozen=True)
class ForeignPeer:
    """Who it seems to be, what is `said` to it in its own protocol, and what is said to each piece that it then sends
    until the connection is closed."""

    who: str
    said: bytes = b""
    answer: Callable[[bytes], bytes] | None = None


def foreign_peer(first: bytes) -> ForeignPeer:
    """Of whom these bytes are the first."""
    if first.startswith(_GRPC):
        calls = _RefusedCalls()
        settings = _frame(_SETTINGS) + _frame(_SETTINGS, flags=_ACK)
        said = settings + calls(first)
        return ForeignPeer("a client of spark-broker before version 4, or of gRPC", said, calls)
    if first[:4] in _HTTP:
        body = f"{SPEAKS}, not HTTP\n".encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n\r\n"
        return ForeignPeer("a client of HTTP", head.encode() + body)
    if first.startswith(_TLS):
        return ForeignPeer("a client of TLS, which this port does not speak")
    return ForeignPeer("something that does not speak spark-broker's protocol")


class _RefusedCalls:
    """Refuses each call of a client of gRPC with a line that its user reads.

    A client that is refused as a whole (GOAWAY) connects again at once, a thousand times a second, and shows no reason.
    """

    def __init__(self) -> None:
        self._left = _CALLS_MAX
        self._begun = b""  # a frame, or the preface before the first one, of which not everything has come
        self._frames_at = len(_PREFACE)  # where in `_begun` the next frame begins

    def __call__(self, data: bytes) -> bytes:
        """What is said to these bytes."""
        data, at, said = self._begun + data, self._frames_at, b""
        while self._left and len(data) >= at + _HTTP2_HEADER.size:
            high, low, kind, _, stream = _HTTP2_HEADER.unpack_from(data, at)
            end = at + _HTTP2_HEADER.size + (high << 16 | low)
            if end - at > _HTTP2_FRAME_MAX_BYTES:
                self._left = 0
            if end > len(data) or not self._left:
                break
            if kind == _HEADERS:
                self._left -= 1
                said += _frame(_HEADERS, _REFUSAL, _END_OF_STREAM_AND_HEADERS, stream)
            at = end
        self._begun, self._frames_at = (data[at:], 0) if len(data) >= at else (data, at)
        if not self._left:
            self._begun = b""
        return said


def _frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return _HTTP2_HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _field(name: bytes, value: bytes) -> bytes:
    """A header of HTTP/2, not compressed. Name and value are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


_REFUSAL = b"".join(
    (
        _field(b":status", b"200"),
        _field(b"content-type", b"application/grpc"),
        _field(b"grpc-status", _UNAVAILABLE),
        _field(b"grpc-message", UPGRADE.encode()),
    )
)
