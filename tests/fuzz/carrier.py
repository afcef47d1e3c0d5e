"""Damaged streams of frames, in random pieces, against a reader of frames that is written in another way.

An input is eight bytes that say into which pieces it is cut, and then what a peer sends.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import msgspec

from spark_broker.errors import InvalidRequestError, UnsupportedVersionError
from spark_broker.protocol.messages import PROTOCOL_VERSION, StreamMessage
from spark_broker.protocol.wire import MAX_MESSAGE_BYTES
from spark_broker.transport.frames import Frame, FrameHeader, FrameReader, Operation, encode
from spark_broker.transport.hello import MAGIC, Hello, check_hello, hello
from tests.fuzz.mutate import INTERESTING, mutate
from tests.fuzz.samples import hostile, sample
from tests.fuzz.violation import ViolationError

BODY_MAX_BYTES = 1 << 20
HELLO_MAX_BYTES = 4096
_HEADER = struct.Struct("<2sBBIIII")
_SEED_BYTES = 8


FRAMES = 2000
"""So many frames are made once. Most inputs take theirs from these: making them anew takes longer than judging them."""


def make(rng: random.Random) -> bytes:
    """A hello and a few frames; four of five are damaged."""
    fresh = rng.random() < 0.1
    hellos, others = ([_hello(rng)], []) if fresh else _made()
    count = rng.randrange(6)
    frames = [rng.choice(hellos), *([_frame(rng) for _ in range(count)] if fresh else rng.choices(others, k=count))]
    if rng.random() < 0.05:
        rng.shuffle(frames)
    data = b"".join(frames)
    if rng.random() < 0.8:
        damaged = mutate(rng, data, data)
        data = _lie(rng, data) if rng.random() < 0.3 else damaged
    return rng.randbytes(_SEED_BYTES) + data


@cache
def _made() -> tuple[list[bytes], list[bytes]]:
    """Hellos, and other frames; always the same."""
    rng = random.Random("frames")
    return [_hello(rng) for _ in range(FRAMES // 10)], [_frame(rng) for _ in range(FRAMES)]


def _hello(rng: random.Random) -> bytes:
    if rng.random() < 0.85:
        return _joined(*hello(rng.choice(("", "client", "é" * 100))))
    version = rng.choice((PROTOCOL_VERSION, PROTOCOL_VERSION + 1, rng.choice(INTERESTING) % 2**63, -1))
    said = Hello(rng.choice((MAGIC, "")), version, "", "x" * rng.choice((0, 250, 251, 5000)))
    message = msgspec.msgpack.encode(said) if rng.random() < 0.5 else hostile(rng, said)
    return _joined(*encode(Operation.HELLO, message[:10_000]))


def _frame(rng: random.Random) -> bytes:
    message = (
        msgspec.msgpack.encode(sample(rng, StreamMessage)) if rng.random() < 0.5 else rng.randbytes(rng.randrange(50))
    )
    payload = rng.randbytes(70_000 if rng.random() < 0.03 else rng.choice((0, 0, 1, 7, 8, 500)))
    numbers = [rng.choice((0, 1, 2**32 - 1, rng.randrange(2**32))) for _ in range(2)]
    parts = encode(rng.choice(list(Operation)), message, payload, stream=numbers[0], correlation=numbers[1])
    return _joined(*parts)


def _lie(rng: random.Random, data: bytes) -> bytes:
    """One length in one header says something else."""
    headers = list(_positions(data))
    at = rng.choice(headers) + rng.choice((4, 8))
    return data[:at] + (rng.choice(INTERESTING) % 2**32).to_bytes(4, "little") + data[at + 4 :]


def _positions(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        yield at
        at += _HEADER.size + int.from_bytes(data[at + 4 : at + 8], "little")


def _joined(*parts: object) -> bytes:
    return b"".join(bytes(part) for part in parts)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Expected:
    """What is to come out of a stream. `refused`: something that is no frame follows. `rest`: a frame is begun."""

    frames: list[tuple[int, bytes, bytes, int, int]]
    refused: bool
    rest: bool


def expected(data: bytes) -> Expected:
    """Cut the whole stream at once."""
    frames: list[tuple[int, bytes, bytes, int, int]] = []
    while len(data) >= _HEADER.size:
        magic, operation, flags, size, message_size, stream, correlation = _HEADER.unpack_from(data)
        valid = magic == b"SB" and 1 <= operation <= max(Operation) and not flags
        small = message_size <= min(size, MAX_MESSAGE_BYTES) and size <= _most(operation, first=not frames)
        if not valid or not small:
            return Expected(frames, refused=True, rest=False)
        end = _HEADER.size + size
        if end > len(data):
            return Expected(frames, refused=False, rest=True)
        body = data[_HEADER.size : end]
        frames.append((operation, body[:message_size], body[message_size:], stream, correlation))
        data = data[end:]
    foreign = len(data) >= 12 and not data.startswith(b"SB")
    return Expected(frames, refused=foreign, rest=bool(data) and not foreign)


def _most(operation: int, *, first: bool) -> int:
    if first:
        return HELLO_MAX_BYTES if operation == Operation.HELLO else -1
    return BODY_MAX_BYTES


class Receiver:
    """Receives as a channel does, and checks at each step what the reader holds."""

    def __init__(self, rng: random.Random) -> None:
        self.got: list[Frame] = []
        self.refused: InvalidRequestError | None = None
        self._rng = rng
        self._admitted = 0  # bytes of the frame that is being received
        self.reader = FrameReader(self._admit)

    def _admit(self, header: FrameHeader) -> bool:
        self._admitted = 0
        self._check()
        if header.body_bytes > _most(header.operation, first=not self.got):
            raise InvalidRequestError("too large, or no hello")
        if self._rng.random() < 0.2:
            return False
        self._admitted = header.body_bytes
        return True

    def _check(self) -> None:
        target = self.reader.target
        room = 0 if target is None else len(target)
        if room > self._admitted:
            raise ViolationError(f"{room} bytes were allocated where {self._admitted} were admitted")

    def receive(self, data: bytes) -> None:
        """All of it, in random pieces; stops at a refusal."""
        view, at = memoryview(data), 0
        try:
            while at < len(view) or self.reader.waits:
                at += self._step(view[at:])
                self._check()
        except InvalidRequestError as error:
            self.refused = error

    def _step(self, view: memoryview) -> int:
        if self.reader.waits:
            self._take(self.reader.resume())
            return 0
        piece = self._rng.choice((1, 7, 19, 20, 21, 300, 65_536))
        target = self.reader.target
        if target is not None and self._rng.random() < 0.7:
            count = min(len(target), piece, len(view))
            target[:count] = view[:count]
            frame = self.reader.filled(count)
            self.got += [] if frame is None else [frame]
            return count
        self._take(self.reader.feed(view[:piece]))
        return min(piece, len(view))

    def _take(self, frames: Iterator[Frame]) -> None:
        for frame in frames:  # One by one: what is admitted next depends on it.
            self.got.append(frame)


def judge(data: bytes) -> None:
    """Raises ViolationError, or the typed error that refuses the stream."""
    sent = data[_SEED_BYTES:]
    receiver = Receiver(random.Random(data[:_SEED_BYTES]))
    receiver.receive(sent)
    wanted = expected(sent)
    got = [
        (int(f.header.operation), bytes(f.message), bytes(f.payload), f.header.stream, f.header.correlation)
        for f in receiver.got
    ]
    if got != wanted.frames or (receiver.refused is not None) != wanted.refused:
        raise ViolationError(f"{len(got)} frames came out, not {len(wanted.frames)}; {receiver.refused}")
    if receiver.refused is None and receiver.reader.is_within_a_frame != wanted.rest:
        raise ViolationError("the reader does not know whether a frame is begun")
    again = b"".join(_joined(*encode(Operation(o), m, p, stream=s, correlation=c)) for o, m, p, s, c in got)
    if not sent.startswith(again):
        raise ViolationError("a frame that came out is encoded in another way")
    _judge_hello(receiver.got)
    if receiver.refused is not None:
        raise receiver.refused


def _judge_hello(frames: list[Frame]) -> None:
    if not frames:
        return
    try:
        said = check_hello(frames[0].message)
    except (InvalidRequestError, UnsupportedVersionError):
        raise
    except Exception as error:
        raise ViolationError("a hello is refused by another error") from error
    if (said.magic, said.version) != (MAGIC, PROTOCOL_VERSION):
        raise ViolationError(f"a hello that must be refused passes: {said}")
