"""A client that speaks in frames, or in bytes that are none, and keeps no rule of its own."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from spark_broker.errors import SparkBrokerError, error_from_code
from spark_broker.protocol import wire
from spark_broker.protocol.messages import ErrorResponse, Message
from spark_broker.transport.frames import Frame, FrameReader, Operation, encode
from spark_broker.transport.hello import hello

TIMEOUT_S = 30.0
RECEIVED_BYTES = 65_536


class RawPeer:
    """Connected from the start, and greeted unless `greet` is false. A context manager.

    `receive_buffer`: how much of what it does not read its system takes, in bytes.
    """

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        *,
        greet: bool = True,
        timeout_s: float = TIMEOUT_S,
        receive_buffer: int = 0,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(timeout_s)
        try:
            self.sock.connect((host, port))
        except OSError:
            self.sock.close()
            raise
        self._reader = FrameReader(lambda header: True)
        self._frames: list[Frame] = []
        if greet:
            self.write(joined(hello("raw")))

    def write(self, data: bytes) -> None:
        """Raises OSError: TimeoutError when the peer takes nothing."""
        self.sock.sendall(data)

    def frame(
        self, operation: Operation, message: bytes = b"", payload: bytes = b"", *, stream: int = 0, correlation: int = 0
    ) -> None:
        """Send a frame."""
        self.write(joined(encode(operation, message, payload, stream=stream, correlation=correlation)))

    def call(self, request: Message, correlation: int = 1) -> None:
        """Send a call; the answer is to be received."""
        self.frame(Operation.CALL, wire.encode(request), correlation=correlation)

    def open(self, kind: str, stream: int = 1) -> None:
        """Open a stream."""
        self.frame(Operation.OPEN, kind.encode(), stream=stream)

    def message(self, message: Message, payload: bytes = b"", stream: int = 1) -> None:
        """Send a message of a stream."""
        self.frame(Operation.MESSAGE, wire.encode(message), payload, stream=stream)

    def receive(self) -> Frame | None:
        """The next frame that is no hello; None when the connection is closed. Raises TimeoutError."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.header.operation is not Operation.HELLO:
                    return frame
            try:
                data = self.sock.recv(RECEIVED_BYTES)
            except ConnectionError:
                return None
            if not data:
                return None
            self._frames += self._reader.feed(memoryview(data))

    def frames(self) -> Iterator[Frame]:
        """All that come until the connection is closed. Raises TimeoutError."""
        while (frame := self.receive()) is not None:
            yield frame

    def bytes_until_closed(self) -> bytes:
        """What comes, whether it is frames or not."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := self.sock.recv(RECEIVED_BYTES):
                received += data
        return received

    def reset(self) -> None:
        """Break the connection: the peer gets a reset instead of an end."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()


def joined(parts: list[wire.Buffer]) -> bytes:
    """The parts of a frame, as they cross the connection."""
    return b"".join(bytes(part) for part in parts)


def refusal(frame: Frame | None) -> SparkBrokerError:
    """The error that a frame carries."""
    assert frame is not None, "the connection was closed without a word"
    message = wire.decode_message(frame.message)
    assert isinstance(message, ErrorResponse), message
    return error_from_code(message.error_code, message.error_message)
