"""The index entry and the frame on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.crc32c import crc32c, crc32c_of
from spark_broker.protocol.frame import (
    ENTRY_DTYPE,
    HEADER_BYTES,
    Attributes,
    BatchHeader,
    Frame,
    decode_frames,
    encode_frames,
    pack_entry,
    pack_header,
    unpack_header,
)

HEADER = BatchHeader(
    base_offset=2**40,
    append_time_ms=1_700_000_000_000,
    max_timestamp_us=5,
    producer_id=2**41,
    last_offset_delta=9,
    row_count=10,
    length=8,
    leader_epoch=3,
    base_sequence=7,
    schema_id=1,
    producer_epoch=2,
    attributes=int(Attributes.COMPRESSED),
    message_crc=crc32c(b"01234567"),
)


def _frames(count: int) -> list[Frame]:
    messages = [bytes([i]) * (8 * i) for i in range(1, count + 1)]
    return [
        Frame(HEADER._replace(base_offset=i, length=len(m), message_crc=crc32c(m)), m) for i, m in enumerate(messages)
    ]


def test_crc32c_has_its_check_value_and_takes_any_buffer() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(memoryview(b"x123456789")[1:]) == crc32c(bytearray(b"123456789")) == 0xE3069283
    assert crc32c_of((b"123", memoryview(b"456"), bytearray(b"789"))) == 0xE3069283


def test_the_numpy_entry_and_the_struct_agree_and_the_header_is_its_beginning() -> None:
    packed = pack_entry(HEADER, 12345)
    entry = np.frombuffer(packed, ENTRY_DTYPE)[0]
    for name in BatchHeader._fields:
        assert entry[name] == getattr(HEADER, name), name
    assert entry["position"] == 12345
    assert packed[:HEADER_BYTES] == pack_header(HEADER)
    assert unpack_header(packed) == HEADER


def test_the_next_offset_follows_the_span() -> None:
    assert (HEADER.last_offset, HEADER.next_offset) == (2**40 + 9, 2**40 + 10)


def test_frames_come_back_without_a_copy() -> None:
    data = b"".join(encode_frames(_frames(3)))
    decoded = decode_frames(data)
    assert [(f.header, bytes(f.message)) for f in decoded] == [(f.header, f.message) for f in _frames(3)]
    assert all(isinstance(f.message, memoryview) and f.message.obj is data for f in decoded)


def test_nothing_is_no_frames() -> None:
    assert decode_frames(b"") == []


def test_a_cut_at_every_byte_is_noticed() -> None:
    data = b"".join(encode_frames(_frames(2)))
    whole = {0, HEADER_BYTES + 8}
    for length in set(range(len(data))) - whole:
        with pytest.raises(CorruptMessageError):
            decode_frames(data[:length])


def test_a_flip_of_every_byte_is_noticed() -> None:
    data = b"".join(encode_frames(_frames(2)))
    for at in range(len(data)):
        with pytest.raises(CorruptMessageError):
            decode_frames(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    if data:
        with pytest.raises(CorruptMessageError):
            decode_frames(data)


@given(st.binary(min_size=HEADER_BYTES, max_size=400))
def test_without_verification_lengths_are_still_bounded(data: bytes) -> None:
    try:
        frames = decode_frames(data, verify=False)
    except CorruptMessageError:
        return
    assert sum(HEADER_BYTES + len(f.message) for f in frames) == len(data)
