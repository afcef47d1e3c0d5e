"""What crosses a connection: frames of a fixed header, a message and a payload. No I/O: bytes in, frames out.

A header says how long its frame is, so that every bound is checked before the body is received:

    2 bytes  the magic, "SB"
    u8       the operation
    u8       flags, 0
    u32      bytes of the body: message and payload
    u32      bytes of the message
    u32      the stream; 0: none
    u32      the correlation of a call with its answer; 0: none

Numbers are little endian. The first frame of either side is a hello. A payload becomes a buffer of its own, aligned to
8 bytes: what is received there is what is validated, decoded and stored.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.wire import MAX_MESSAGE_BYTES, Buffer
from spark_broker.transport.foreign_peers import foreign_server

MAGIC = b"SB"
_HEADER = struct.Struct("<2sBBIIII")
HEADER_BYTES = _HEADER.size

HELLO_BYTES_MAX = 4096
"""A hello is small: whoever connects may send this much before it is known who it is."""

RECOGNISED_BYTES = 12
"""With so many bytes a peer that speaks another protocol is known, and refused before it has sent a whole header."""

UINT32_MAX = 2**32 - 1


FRAME_OVERHEAD_BYTES = 512
"""What a frame takes in memory beside its body, at most: the objects that it consists of, and its place in a queue."""


class Operation(enum.IntEnum):
    """What a frame is for."""

    HELLO = 1
    CALL = 2
    """A request; the peer answers with the same correlation."""
    ANSWER = 3
    OPEN = 4
    """Open a stream. The message is its kind."""
    MESSAGE = 5
    """A message of a stream, in order."""
    END = 6
    """The server ends a stream."""
    CANCEL = 7
    """The client leaves a stream."""


_OPERATIONS = {int(operation): operation for operation in Operation}


class FrameHeader(NamedTuple):
    """The header of a frame. `message_bytes <= body_bytes`."""

    operation: Operation
    body_bytes: int
    message_bytes: int
    stream: int
    correlation: int

    @property
    def payload_bytes(self) -> int:
        return self.body_bytes - self.message_bytes

    @property
    def held_bytes(self) -> int:
        """What the frame counts as while it is held. A body of a byte, or of none, is not free."""
        return self.body_bytes + FRAME_OVERHEAD_BYTES


class Frame(NamedTuple):
    """A frame that has arrived. Nobody else writes into `payload`."""

    header: FrameHeader
    message: Buffer
    payload: memoryview


NO_PAYLOAD = memoryview(b"")


def encode(
    operation: Operation, message: bytes = b"", *payload: Buffer, stream: int = 0, correlation: int = 0
) -> list[Buffer]:
    """The parts of a frame, to be written one after the other. Parts of the payload are not copied."""
    body_bytes = len(message) + sum(len(part) for part in payload)
    if body_bytes > UINT32_MAX:
        raise InvalidRequestError(f"a message of {body_bytes} bytes; a frame holds at most {UINT32_MAX}")
    head = _HEADER.pack(MAGIC, operation, 0, body_bytes, len(message), stream, correlation)
    return [head + message, *payload]


def decode_header(data: Buffer) -> FrameHeader:
    """The header at the beginning of the bytes. Raises InvalidRequestError."""
    magic, number, flags, body_bytes, message_bytes, stream, correlation = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise InvalidRequestError(no_frame(bytes(data[:HEADER_BYTES])))
    operation = _OPERATIONS.get(number)
    if operation is None or flags:
        raise InvalidRequestError(
            f"a frame of operation {number} with flags {flags:#x}, which this version does not have"
        )
    if message_bytes > body_bytes or message_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(f"a message of {message_bytes} bytes in a frame of {body_bytes}")
    return FrameHeader(operation, body_bytes, message_bytes, stream, correlation)


def no_frame(first: bytes) -> str:
    """What to say of a peer that begins with these bytes; empty: a frame may begin with them."""
    if first[: len(MAGIC)] == MAGIC[: len(first)]:
        return ""
    who = foreign_server(first)
    return f"a frame that begins with {first[:8]!r}{who and f': {who}'}"


class FrameReader:
    """Cuts what is received into frames.

    Small frames are cut out of a buffer that the owner of many connections shares among them. A frame that is not
    there as a whole gets exact buffers, into which the rest of it is received.

    Invariants: `_header` is set if and only if a header was checked whose body is not complete. `_begun` is a part of
    a header, or what was refused as none, and empty while `_header` is set. `_filled` counts the bytes of the body that
    have come. While the reader `waits`, no buffer was allocated for the body, and `_held` is what was received behind
    the header.
    """

    def __init__(self, admit: Callable[[FrameHeader], bool]) -> None:
        """`admit` raises if the frame that a header begins must not be received at all. It returns False if there is
        no room for it now: then nothing more is to be received until `resume`."""
        self._admit = admit
        self.waits = False
        self.begun_before = b""
        """The part of a header that had come before what was fed last."""

        self._held = b""
        self._begun = b""
        self._header: FrameHeader | None = None
        self._message = NO_PAYLOAD
        self._payload = NO_PAYLOAD
        self._filled = 0

    def end(self) -> None:
        """Nothing is received any more: let go of `admit`, whose owner may hold this reader."""
        self._admit = _refused

    @property
    def is_within_a_frame(self) -> bool:
        """Whether a part of a frame has come, and the rest has not."""
        return bool(self._begun) or self._header is not None

    @property
    def no_frame(self) -> str:
        """See the function of this name: of the bytes behind the last frame."""
        return no_frame(self._begun)

    @property
    def received_bytes(self) -> int:
        """How much has come of the body of the frame that is not complete."""
        return 0 if self._header is None or self.waits else self._filled

    @property
    def target(self) -> memoryview | None:
        """Where the next bytes are to be received; None: into the shared buffer, whose bytes go to `feed`."""
        if self._header is None:
            return None
        message_bytes = len(self._message)
        if self._filled < message_bytes:
            return self._message[self._filled :]
        return self._payload[self._filled - message_bytes :]

    def filled(self, count: int) -> Frame | None:
        """So many bytes were received into `target`. Returns the frame, if it is complete."""
        self._filled += count
        return self._finished()

    def resume(self) -> Iterator[Frame]:
        """There may be room now: the frames in what was held, as from `feed`."""
        held, self._held, self.waits = memoryview(self._held), b"", False
        return self._frames(held, 0, self._header)

    def feed(self, data: memoryview) -> Iterator[Frame]:
        """The frames that end within these bytes, which the reader does not keep. Raises what `admit` raises."""
        self.begun_before = self._begun
        at = self._fill(data) if self._header is not None else 0
        frame = self._finished()
        if frame is not None:
            yield frame
        if self._header is None:
            yield from self._frames(data, at, None)

    def _frames(self, data: memoryview, at: int, header: FrameHeader | None) -> Iterator[Frame]:
        """The frames from a position on. `header`: of the first one, where it was read before."""
        while True:
            if header is None:
                header, at = self._read_header(data, at)
                if header is None:
                    return
            if not self._admit(header):
                self._header, self._held, self.waits = header, data[at:].tobytes(), True
                return
            payload_at, end = at + header.message_bytes, at + header.body_bytes
            if end > len(data):
                self._header, self._filled = header, 0
                self._message = memoryview(bytearray(header.message_bytes))
                self._payload = _buffer(header.payload_bytes)
                self._fill(data[at:])
                return
            self._header = None
            yield Frame(header, data[at:payload_at].tobytes(), _copied(data[payload_at:end]))
            header, at = None, end

    def _read_header(self, data: memoryview, at: int) -> tuple[FrameHeader | None, int]:
        """The next header, and the position behind it; None: not all of it is there."""
        end = at + HEADER_BYTES - len(self._begun)
        self._begun += data[at:end]
        if end > len(data):
            if len(self._begun) >= RECOGNISED_BYTES and (problem := self.no_frame):
                raise InvalidRequestError(problem)
            return None, len(data)
        header = decode_header(self._begun)
        self._begun = b""
        return header, end

    def _fill(self, data: memoryview) -> int:
        """Copy bytes of the body to where they belong. Returns how many."""
        copied = 0
        while (target := self.target) and copied < len(data):
            count = min(len(target), len(data) - copied)
            target[:count] = data[copied : copied + count]
            self._filled += count
            copied += count
        return copied

    def _finished(self) -> Frame | None:
        header = self._header
        if header is None or self._filled < header.body_bytes:
            return None
        frame = Frame(header, self._message, self._payload)
        self._header, self._message, self._payload = None, NO_PAYLOAD, NO_PAYLOAD
        return frame


def _refused(header: FrameHeader) -> bool:
    raise InvalidRequestError(f"{header.operation.name} after the end")


def _copied(data: memoryview) -> memoryview:
    return memoryview(bytearray(data)) if data else NO_PAYLOAD


def _buffer(size: int) -> memoryview:
    """Not filled with zeros: what is received overwrites it."""
    return np.empty(size, np.uint8).data if size else NO_PAYLOAD
