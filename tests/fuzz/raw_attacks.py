"""Attacks on the carrier itself: bytes that are no frames, frames that lie or have no place, and too many of them.

Each attack is a function of a target and a generator. It leaves when it is done, in order or not. Its target must
hold nothing for it afterwards.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from spark_broker.protocol import wire
from spark_broker.protocol.messages import PROTOCOL_VERSION, FetchRequest, MetadataRequest
from spark_broker.transport.frames import HEADER_BYTES, Operation, encode
from spark_broker.transport.hello import Hello, hello
from tests.fuzz.mutate import INTERESTING, mutate
from tests.support.raw_peer import RawPeer, joined

READ_TIMEOUT_S = 0.2
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HTTP2_FRAME_TYPES = 10


@dataclass(frozen=True)
class Target:
    """A server, and the kinds of streams that it has."""

    host: str
    port: int
    kinds: tuple[str, ...]

    def peer(self, *, greet: bool = True, receive_buffer: int = 0) -> RawPeer:
        """A connection; the caller closes it."""
        return RawPeer(self.port, self.host, greet=greet, timeout_s=READ_TIMEOUT_S, receive_buffer=receive_buffer)


Attack = Callable[[Target, random.Random], None]

GREETING = joined(hello("attacker"))
CALL = joined(encode(Operation.CALL, wire.encode(MetadataRequest(None)), correlation=1))
_FETCH = wire.encode(FetchRequest(1, max_wait_ms=0, min_bytes=0, max_bytes=1, partitions=[]))


def _open(kind: str, stream: int) -> bytes:
    return joined(encode(Operation.OPEN, kind.encode(), stream=stream))


def _message(stream: int, payload: bytes = b"") -> bytes:
    return joined(encode(Operation.MESSAGE, _FETCH, payload, stream=stream))


def _cancel(stream: int) -> bytes:
    return joined(encode(Operation.CANCEL, stream=stream))


def say(target: Target, data: bytes, *, reset: bool = False, greet: bool = False) -> bytes:
    """Say this on a connection of its own, and leave. Returns what came back within a moment."""
    answer = b""
    with contextlib.suppress(OSError), target.peer(greet=greet) as peer:
        peer.write(data)
        while not reset and (received := peer.sock.recv(65_536)):
            answer += received
        if reset:
            peer.reset()
    return answer


def conversation(target: Target, rng: random.Random) -> list[bytes]:
    """Frames of an ordinary client: calls, and streams of which some are left."""
    frames = [GREETING]
    for stream in range(1, rng.randint(2, 6)):
        frames.append(_open(rng.choice(target.kinds), stream))
        frames += [_message(stream, rng.randbytes(rng.choice((0, 10, 5000)))) for _ in range(rng.randrange(3))]
        frames += [_cancel(stream)] * rng.randrange(2) + [CALL] * rng.randrange(2)
    return frames


def garbage(target: Target, rng: random.Random) -> None:
    """Bytes that are no frames."""
    for data in (*_foreign(rng), *(rng.randbytes(rng.choice((1, 19, 20, 1000, 100_000))) for _ in range(5))):
        say(target, data, reset=rng.random() < 0.3)
        say(target, GREETING + data)


def _foreign(rng: random.Random) -> Iterator[bytes]:
    """HTTP, TLS, and gRPC."""
    start = PREFACE + _http2(4, 0, b"")
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"POST /x HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + bytes(100_000)
    yield b"\x16\x03\x01" + rng.randbytes(500)
    yield PREFACE[:10]
    yield start + b"\xff\xff\xff" + bytes([0, 0, 0, 0, 0, 1]) + rng.randbytes(1000)
    yield start + b"".join(_http2(1, 2 * number + 1, rng.randbytes(20)) for number in range(5000))
    yield start + b"".join(_http2(6, 0, rng.randbytes(8)) for _ in range(2000))
    yield start + b"".join(_http2(rng.randrange(_HTTP2_FRAME_TYPES), number, rng.randbytes(30)) for number in range(50))


def _http2(kind: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + struct.pack(">I", stream) + payload


def damaged_frames(target: Target, rng: random.Random) -> None:
    """An ordinary conversation whose bytes are damaged."""
    for _ in range(20):
        data = b"".join(conversation(target, rng))
        say(target, mutate(rng, data, data))


def cut_frames(target: Target, rng: random.Random) -> None:
    """An ordinary conversation that breaks off anywhere."""
    for _ in range(20):
        data = b"".join(conversation(target, rng))
        say(target, data[: rng.randrange(len(data))], reset=rng.random() < 0.5)


def lying_lengths(target: Target, rng: random.Random) -> None:
    """Headers whose lengths do not fit each other, or what follows."""
    del rng
    for size in (*INTERESTING, 100):
        for message_size in (0, size, size + 1, 2**32 - 1):
            header = (
                b"SB" + bytes([Operation.MESSAGE, 0]) + struct.pack("<IIII", size % 2**32, message_size % 2**32, 1, 0)
            )
            say(target, GREETING + _open(target.kinds[0], 1) + header + b"x" * 50, reset=True)


def bodies_that_never_come(target: Target, rng: random.Random) -> None:
    """Twenty connections that begin a large message each, and leave after a byte of it."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(target.peer()) for _ in range(20)]
        for peer in peers:
            peer.write(_open(target.kinds[0], 1) + _message(1, bytes(5_000_000))[: HEADER_BYTES + rng.randrange(2)])
        say(target, CALL, greet=True)
        for peer in peers[::2]:
            peer.reset()


def frames_without_a_place(target: Target, rng: random.Random) -> None:
    """What no client sends at this point."""
    kind = rng.choice(target.kinds)
    wrong_version = Hello("spark-broker", PROTOCOL_VERSION + rng.choice((-1, 1, 2**40)), "attacker", "")
    greetings = [b"", CALL, _open(kind, 1), _message(1), joined(encode(Operation.HELLO, b"\xc1"))]
    greetings.append(joined(encode(Operation.HELLO, msgspec.msgpack.encode(wrong_version))))
    greetings.append(joined(encode(Operation.HELLO, rng.randbytes(4096), rng.randbytes(1000))))
    for greeting in greetings:
        say(target, greeting + CALL * 10 + _open(kind, 1) + _message(1))
    frames = [GREETING, _open(kind, 0), _open(kind, 1) * 2, _open("nonsense", 3), _open("\xff" * 3000, 4)]
    frames += [_message(9), _message(9, rng.randbytes(100_000)), _cancel(9), _cancel(0)]
    frames += [joined(encode(operation, rng.randbytes(10), stream=1)) for operation in Operation]
    frames += [bytes([*b"SB", rng.randrange(256), rng.choice((0, 1, 255))]) + rng.randbytes(16) for _ in range(10)]
    for frame in frames:
        say(target, _open(kind, 1) + frame * 3 + CALL, greet=True)


def many_opens(target: Target, rng: random.Random) -> None:
    """A hundred thousand streams, whether they exist or not, left at once or not at all."""
    count = 25_000
    for kind in ("nonsense", rng.choice(target.kinds)):
        for leave in (False, True):
            frames = (_open(kind, stream) + (_cancel(stream) if leave else b"") for stream in range(1, count + 1))
            say(target, b"".join(frames), greet=True)


def cancels_at_any_moment(target: Target, rng: random.Random) -> None:
    """Streams that are left before, between and behind their messages, and opened again."""
    with contextlib.suppress(OSError), target.peer() as peer:
        for stream in range(1, 300):
            parts = [_message(stream, rng.randbytes(rng.choice((0, 1000)))) for _ in range(rng.randrange(4))]
            parts.insert(rng.randint(0, len(parts)), _cancel(stream))
            peer.write(_open(rng.choice(target.kinds), stream) + b"".join(parts))
        peer.write(CALL)
        peer.bytes_until_closed()


def answers_that_nobody_reads(target: Target, rng: random.Random) -> None:
    """Asks until nothing more is taken, and leaves without having read anything."""
    with target.peer(receive_buffer=4096) as peer, contextlib.suppress(OSError):
        for stream, kind in enumerate(target.kinds, 1):
            peer.write(_open(kind, stream))
        for _ in range(2000):
            peer.write(CALL * 10 + _message(rng.randint(1, len(target.kinds))))
        peer.reset()


def floods(target: Target, rng: random.Random) -> None:
    """Connections that come and go as fast as one thread can make them."""
    for number in range(200):
        with contextlib.suppress(OSError), target.peer(greet=bool(number % 2)) as peer:
            if number % 3:
                peer.reset()
            elif rng.random() < 0.5:
                peer.sock.shutdown(socket.SHUT_WR)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        garbage,
        damaged_frames,
        cut_frames,
        lying_lengths,
        bodies_that_never_come,
        frames_without_a_place,
        many_opens,
        cancels_at_any_moment,
        answers_that_nobody_reads,
        floods,
    )
}


class SlowLoris:
    """Many connections that begin and never finish; `step` lets each say one byte more."""

    def __init__(self, target: Target, count: int) -> None:
        self._says = GREETING + _open(target.kinds[0], 1) + _message(1, bytes(1000))
        self._said = 0
        self._connections = [target.peer(greet=False) for _ in range(count)]

    def step(self) -> None:
        """One byte on each connection."""
        self._said += 1
        for peer in self._connections:
            with contextlib.suppress(OSError):
                peer.write(self._says[self._said - 1 : self._said])

    def begin_request(self) -> None:
        """Everything but the last byte of a message at once, and then nothing more."""
        for peer in self._connections:
            with contextlib.suppress(OSError):
                peer.write(self._says[self._said : -1])
        self._said = len(self._says) - 1

    def close(self) -> None:
        for peer in self._connections:
            peer.sock.close()
