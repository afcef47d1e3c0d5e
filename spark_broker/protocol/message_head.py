"""The bytes of a message before its body: Arrow's metadata, and in it our value, which the leader overwrites in place.

The value is fixed-width hexadecimal (`protocol/arrow_message.py` says what is in it).
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.crc32c import Buffer, crc32c_of
from spark_broker.protocol.frame import COMPRESSED, CONTROL, FIELDS_BYTES, ROW_OFFSETS, BatchHeader, checked_header
from spark_broker.protocol.head_template import HeadTemplate
from spark_broker.protocol.ipc_message import MessageMetadata, read_metadata

VALUE_BYTES = 2 * (FIELDS_BYTES + 4 + 4)
"""Hexadecimal characters of the custom metadata: the fields, the body's CRC, the head's CRC."""

_HEAD_CRC_CHARS = 8
_VALUE = struct.Struct("<4q6ihHIII")  # the fields, the reserved one, the body's CRC, the head's CRC
_SEALED = struct.Struct("<4q6ihHII")  # without the head's CRC


class Head(NamedTuple):
    """What a message says about itself: Arrow's metadata and our value. `data`: its bytes before the body."""

    data: bytes
    metadata: MessageMetadata
    header: BatchHeader
    body_crc: int
    head_crc: int


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch that was encoded here: what a message says about itself is known, and need not be read from it.

    `head`: the bytes before `body`. A producer numbers a batch when it is first sent, which is after it was encoded.
    """

    head: bytes
    body: Buffer
    header: BatchHeader
    body_crc: int
    value_at: int

    def numbered(self, *, producer_id: int, producer_epoch: int, base_sequence: int) -> EncodedBatch:
        """The batch with its place in its producer's sequence. The body is the same."""
        header = self.header._replace(
            producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence
        )
        return self.stamped(header)

    def stamped(self, header: BatchHeader) -> EncodedBatch:
        """The batch with these fields in place of its own."""
        end = self.value_at + VALUE_BYTES
        value = _value_of(self.head, self.value_at, header, self.body_crc)
        head = b"".join((self.head[: self.value_at], value, self.head[end:]))
        return EncodedBatch(head, self.body, header, self.body_crc, self.value_at)

    def __len__(self) -> int:
        """Bytes of the message."""
        return self.header.length

    def __bytes__(self) -> bytes:
        return b"".join((self.head, self.body))


def read_head(message: Buffer, templates: Sequence[HeadTemplate] = ()) -> Head:
    """`templates`: heads that are likely. Raises CorruptMessageError."""
    for template in templates:
        if metadata := template.read(message):
            break
    else:
        metadata = read_metadata(message)
    if metadata.value_bytes < VALUE_BYTES:
        raise CorruptMessageError(f"custom metadata of {metadata.value_bytes} characters; it must have {VALUE_BYTES}")
    data = bytes(memoryview(message)[: metadata.head_bytes])
    value = data[metadata.value_at : metadata.value_at + VALUE_BYTES]
    try:
        raw = binascii.unhexlify(value)
    except ValueError:
        raise CorruptMessageError("the custom metadata is not hexadecimal") from None
    if binascii.hexlify(raw) != value:
        raise CorruptMessageError("the custom metadata is not in lower case")
    *fields, reserved, body_crc, head_crc = _VALUE.unpack(raw)
    header = checked_header(fields, reserved)
    if metadata.value_bytes > VALUE_BYTES and not header.attributes & ROW_OFFSETS:
        raise CorruptMessageError(f"custom metadata of {metadata.value_bytes} characters; it must have {VALUE_BYTES}")
    return Head(data, metadata, header, body_crc, head_crc)


def write_value(target: bytearray | memoryview, head: Head, header: BatchHeader, body_crc: int) -> None:
    """Overwrite the value in place; `target` begins with this head."""
    at = head.metadata.value_at
    target[at : at + VALUE_BYTES] = _value_of(head.data, at, header, body_crc)


def _value_of(head: bytes, value_at: int, header: BatchHeader, body_crc: int) -> bytes:
    """The value with these fields, in the place of the one that the head has at `value_at`."""
    fields = binascii.hexlify(_SEALED.pack(*header[:12], 0, body_crc))
    head_crc = crc32c_of((head[:value_at], fields, head[value_at + VALUE_BYTES :]))
    return fields + binascii.hexlify(head_crc.to_bytes(4, "little"))


def _head_crc(head: Head) -> int:
    end = head.metadata.value_at + VALUE_BYTES
    return crc32c_of((head.data[: end - _HEAD_CRC_CHARS], head.data[end:]))


def check_head(message: Buffer, head: Head) -> None:
    metadata, header = head.metadata, head.header
    if header.length != len(message) or metadata.body_bytes != len(message) - metadata.head_bytes:
        raise CorruptMessageError(f"the message has {len(message)} bytes and claims {header.length}")
    if metadata.row_count != header.row_count:
        raise CorruptMessageError(f"the batch has {metadata.row_count} rows and claims {header.row_count}")
    if not _spans_its_rows(header):
        raise CorruptMessageError(f"{header.row_count} rows, but a last offset delta of {header.last_offset_delta}")
    if (metadata.compression is not None) != bool(header.attributes & COMPRESSED):
        raise CorruptMessageError("the batch and its attributes disagree about compression")
    if _head_crc(head) != head.head_crc:
        raise CorruptMessageError("the head of the batch fails its CRC")


def _spans_its_rows(header: BatchHeader) -> bool:
    """Whether a batch has as many offsets as rows; a marker has one offset, a compacted batch has more than rows."""
    span = header.last_offset_delta + 1
    if header.attributes & ROW_OFFSETS:
        return 0 <= header.row_count <= span
    return bool(header.attributes & CONTROL) or 0 < header.row_count == span
