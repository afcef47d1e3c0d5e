"""Frames are cut out of whatever pieces arrive, within bounds that are checked before anything is received."""

from __future__ import annotations

import random

import pytest

from spark_broker.errors import InvalidRequestError
from spark_broker.transport.frames import (
    HEADER_BYTES,
    Frame,
    FrameHeader,
    FrameReader,
    Operation,
    decode_header,
    encode,
)

Sent = tuple[Operation, bytes, bytes, int, int]


def sent(seed: int) -> list[Sent]:
    draw = random.Random(seed)
    operations = list(Operation)
    sizes = (0, 1, 7, 8, 300, 5000, 70_000)
    return [
        (
            draw.choice(operations),
            draw.randbytes(draw.choice(sizes[:6])),
            draw.randbytes(draw.choice(sizes)),
            draw.randrange(2**32),
            draw.randrange(2**32),
        )
        for _ in range(40)
    ]


def wire(frames: list[Sent]) -> bytes:
    parts = [
        encode(operation, message, payload[:3], payload[3:], stream=stream, correlation=correlation)
        for operation, message, payload, stream, correlation in frames
    ]
    return b"".join(bytes(part) for frame in parts for part in frame)


def plain(frame: Frame) -> Sent:
    header = frame.header
    assert (header.message_bytes, header.payload_bytes) == (len(frame.message), len(frame.payload))
    return header.operation, bytes(frame.message), bytes(frame.payload), header.stream, header.correlation


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("piece", [1, 19, 20, 21, 700, 65_536, 10_000_000])
def test_frames_come_out_as_they_were_sent_in_whatever_pieces_they_arrive(seed: int, piece: int) -> None:
    frames = sent(seed)
    if piece == 1:
        frames = frames[:12]
    data, draw = memoryview(wire(frames)), random.Random(seed)
    room = [True]

    def admit(header: FrameHeader) -> bool:
        """Refuse one in three at first: there is no room for it yet."""
        room[0] = not room[0] or draw.random() < 0.67
        return room[0]

    reader = FrameReader(admit)
    got: list[Frame] = []
    at = 0
    while at < len(data) or reader.waits:
        target = reader.target
        if reader.waits:
            got += list(reader.resume())
        elif target is not None and draw.random() < 0.7:
            count = min(len(target), piece, len(data) - at)
            target[:count] = data[at : at + count]
            frame = reader.filled(count)
            got += [frame] if frame is not None else []
            at += count
        else:
            got += list(reader.feed(data[at : at + piece]))
            at += min(piece, len(data) - at)
    assert [plain(frame) for frame in got] == frames
    assert not reader.is_within_a_frame


def test_payloads_are_writable_and_belong_to_whoever_gets_them() -> None:
    data = bytearray(wire([(Operation.MESSAGE, b"m", b"payload!" * 4, 1, 0)]))
    (frame,) = FrameReader(lambda header: True).feed(memoryview(data))
    data[:] = bytes(len(data))
    assert bytes(frame.payload) == b"payload!" * 4
    frame.payload[:1] = b"P"


def test_what_must_not_be_received_is_refused_by_its_header_alone() -> None:
    seen: list[FrameHeader] = []

    def admit(header: FrameHeader) -> bool:
        seen.append(header)
        raise InvalidRequestError("too large")

    data = wire([(Operation.MESSAGE, b"m", b"p" * 1000, 7, 0)])[:HEADER_BYTES]
    with pytest.raises(InvalidRequestError, match="too large"):
        list(FrameReader(admit).feed(memoryview(data)))
    assert (seen[0].body_bytes, seen[0].message_bytes, seen[0].stream) == (1001, 1, 7)


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x",
        b"SB\x00\x00" + bytes(16),
        b"SB\x63\x00" + bytes(16),
        b"SB\x05\x01" + bytes(16),
        b"SB\x05\x00" + (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + bytes(8),
        b"SB\x05\x00" + b"\xff" * 8 + bytes(8),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_header(data)
