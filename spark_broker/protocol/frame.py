"""The index entry of a batch, and the frame in which a batch crosses the wire.

On disk, each batch has one fixed-width little-endian entry of 80 bytes. The entry's first 72 bytes, everything but the
position, are also the batch's header on the wire. A frame is that header and the message's bytes. `entry_crc` covers
the 68 bytes before it, so it is the same on disk and on the wire. A wrong position shows as a gap.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntFlag
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spark_broker.errors import CorruptMessageError, invariant
from spark_broker.protocol.crc32c import Buffer, crc32c

FIELDS_BYTES = 64
HEADER_BYTES = 72
ENTRY_BYTES = 80

OFFSET_MAX = 2**63 - 1
"""Also of the offset after the last record."""

NO_TIMESTAMP = -1
NO_PRODUCER_ID = -1
NO_SEQUENCE = -1

ENTRY_DTYPE = np.dtype(
    [
        ("base_offset", "<i8"),
        ("append_time_ms", "<i8"),
        ("max_timestamp_us", "<i8"),
        ("producer_id", "<i8"),
        ("last_offset_delta", "<i4"),
        ("row_count", "<i4"),
        ("length", "<i4"),
        ("leader_epoch", "<i4"),
        ("base_sequence", "<i4"),
        ("schema_id", "<i4"),
        ("producer_epoch", "<i2"),
        ("attributes", "<u2"),
        ("reserved", "<u4"),
        ("message_crc", "<u4"),
        ("entry_crc", "<u4"),
        ("position", "<i8"),
    ]
)
"""The entry on disk; `position` is the byte of the `.arrow` file at which the message begins."""

_COVERED = struct.Struct("<4q6ihHII")
_REST = struct.Struct("<Iq")  # of the entry: its CRC, the position
_HEADER = struct.Struct("<4q6ihHIII")
_U32 = struct.Struct("<I")
_CRC_AT = 68
invariant(ENTRY_DTYPE.itemsize == ENTRY_BYTES and _HEADER.size == HEADER_BYTES, "the entry has 80 bytes, the header 72")
invariant(_COVERED.size == _CRC_AT == FIELDS_BYTES + 4, "the fields have 64 bytes")


class Attributes(IntFlag):
    """Flags of a batch."""

    CONTROL = 1
    TRANSACTIONAL = 2
    COMPRESSED = 4
    ROW_OFFSETS = 8
    """Compacted: the rows' offsets are in the metadata and are not consecutive."""
    FIRST_OF_SEGMENT = 16
    """The leader began a segment here; followers begin theirs here and nowhere else."""
    ABORT = 32
    """Of a control batch: it ends its producer's transaction as aborted; without the flag, as committed."""


CONTROL = int(Attributes.CONTROL)
TRANSACTIONAL = int(Attributes.TRANSACTIONAL)
COMPRESSED = int(Attributes.COMPRESSED)
ROW_OFFSETS = int(Attributes.ROW_OFFSETS)
FIRST_OF_SEGMENT = int(Attributes.FIRST_OF_SEGMENT)
ABORT = int(Attributes.ABORT)


class BatchHeader(NamedTuple):
    """What the log knows of a batch without reading it.

    Fields that the leader assigns (`base_offset`, `append_time_ms`, `leader_epoch`) are -1 before that.
    `max_timestamp_us` is the running maximum over the partition; `length` is that of the encapsulated message in bytes.
    """

    base_offset: int
    append_time_ms: int
    max_timestamp_us: int
    producer_id: int
    last_offset_delta: int
    row_count: int
    length: int
    leader_epoch: int
    base_sequence: int
    schema_id: int
    producer_epoch: int
    attributes: int
    message_crc: int = 0

    @property
    def last_offset(self) -> int:
        """Offset of the last record (inclusive)."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def first_of_segment(self) -> bool:
        return bool(self.attributes & FIRST_OF_SEGMENT)


class Frame(NamedTuple):
    """A batch as it is stored and replicated: header and opaque message bytes."""

    header: BatchHeader
    message: Buffer


def checked_header(fields: Sequence[int], reserved: int) -> BatchHeader:
    """The header of these fields, as they travel inside the message; `message_crc` is 0. Raises CorruptMessageError."""
    if reserved:
        raise CorruptMessageError(f"the reserved field of a batch is {reserved}")
    return _checked(BatchHeader._make((*fields, 0)))


def pack_header(header: BatchHeader) -> bytes:
    """The 72 bytes of the header on the wire, with the entry's CRC."""
    covered = _COVERED.pack(*header[:12], 0, header[12])
    return covered + _U32.pack(crc32c(covered))


def unpack_header(data: Buffer, offset: int = 0, *, verify: bool = True) -> BatchHeader:
    """The header at this byte of the buffer. Raises CorruptMessageError when it is cut short or its CRC is wrong."""
    if len(data) - offset < HEADER_BYTES:
        raise CorruptMessageError(f"a header of {len(data) - offset} bytes")
    *fields, reserved, message_crc, entry_crc = _HEADER.unpack_from(data, offset)
    header = BatchHeader._make((*fields, message_crc))
    if verify:
        if entry_crc != crc32c(bytes(data[offset : offset + _CRC_AT])) or reserved:
            raise CorruptMessageError(f"the header of the batch at offset {header.base_offset} fails its CRC")
        _checked(header)
    return header


def pack_entry(header: BatchHeader, position: int) -> bytes:
    """The 80 bytes of the entry on disk."""
    covered = _COVERED.pack(*header[:12], 0, header[12])
    return covered + _REST.pack(crc32c(covered), position)


def encode_frames(frames: Iterable[Frame]) -> list[Buffer]:
    """Headers and messages in wire order, as parts to be joined or written; messages are not copied."""
    parts: list[Buffer] = []
    for frame in frames:
        parts.append(pack_header(frame.header))
        parts.append(frame.message)
    return parts


def decode_frames(data: Buffer, *, verify: bool = True) -> list[Frame]:
    """The frames in the buffer; messages are views of it. `verify` checks both CRCs of each.

    Raises CorruptMessageError on truncation, trailing bytes or a wrong CRC.
    """
    view = memoryview(data)
    buffer = pa.py_buffer(view)
    frames: list[Frame] = []
    at = 0
    while at < len(view):
        header = unpack_header(view, at, verify=verify)
        start, end = at + HEADER_BYTES, at + HEADER_BYTES + header.length
        if header.length < 0 or end > len(view):
            raise CorruptMessageError(f"a frame claims a message of {header.length} bytes of {len(view) - start}")
        if verify and crc32c(buffer.slice(start, header.length)) != header.message_crc:
            raise CorruptMessageError(f"the batch at offset {header.base_offset} fails its CRC")
        frames.append(Frame(header, view[start:end]))
        at = end
    return frames


def verified_frames(headers: Iterable[BatchHeader], messages: Buffer) -> list[Frame]:
    """The frames of messages that lie one after the other, as views. Raises CorruptMessageError on a wrong CRC."""
    view, buffer = memoryview(messages), pa.py_buffer(messages)
    frames = []
    at = 0
    for header in headers:
        if crc32c(buffer.slice(at, header.length)) != header.message_crc:
            raise CorruptMessageError(f"the batch at offset {header.base_offset} fails its CRC")
        frames.append(Frame(header, view[at : at + header.length]))
        at += header.length
    return frames


def decode_headers(data: Buffer) -> list[BatchHeader]:
    """Headers without messages, one after the other. Raises CorruptMessageError."""
    return [unpack_header(data, at) for at in range(0, len(data), HEADER_BYTES)]


def _checked(header: BatchHeader) -> BatchHeader:
    if header.length < 0 or header.row_count < 0 or header.last_offset_delta < 0:
        span = header.last_offset_delta
        raise CorruptMessageError(f"a batch of {header.row_count} rows, span {span}, {header.length} bytes")
    return header
