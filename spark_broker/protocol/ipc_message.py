"""A bounded reader of the metadata of an encapsulated Arrow IPC message.

The bytes come from clients, so every offset is checked against the buffer before it is followed. The leader later
overwrites some of the bytes in place. Nothing that the reader followed may overlap those: otherwise a crafted message
could pass validation and change its own shape when the leader assigns its offset.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.crc32c import Buffer

CONTINUATION = 0xFFFFFFFF
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
METADATA_KEY = b"spark_broker"

_PREFIX = struct.Struct("<II")
_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_PAIR = struct.Struct("<qq")
_METADATA_V5 = 4
_RECORD_BATCH = 3
_CODECS = ("lz4", "zstd")
"""By their number in Arrow's metadata."""


Pairs = Sequence[tuple[int, int]]


class MessageMetadata(NamedTuple):
    """A RecordBatch message: `head_bytes` up to the body; our value is at `value_at`, `value_bytes` long.

    `nodes`: length and null count of each (possibly nested) column. `buffers`: offset in the body and length of each.
    `compression`: the codec of the buffers; None: they are not compressed.
    """

    head_bytes: int
    body_bytes: int
    row_count: int
    nodes: Pairs
    buffers: Pairs
    compression: str | None
    value_at: int
    value_bytes: int


class Place(NamedTuple):
    """Bytes of a head, from `start` to `end` (exclusive), that hold numbers or our value: nothing that leads on."""

    start: int
    end: int

    def moved(self, by: int) -> Place:
        """The same place, where `by` bytes are put before the head."""
        return Place(self.start + by, self.end + by)


class Places(NamedTuple):
    """Where a head has what differs from batch to batch. An empty place: the head leaves out a number that is 0."""

    body_bytes: Place
    row_count: Place
    nodes: Place
    buffers: Place
    value: Place


def head_length(message: Buffer) -> int:
    """Bytes before the body: prefix and metadata. Raises CorruptMessageError when they are not all there."""
    if len(message) < _PREFIX.size:
        raise CorruptMessageError(f"a message of {len(message)} bytes")
    continuation, metadata_bytes = _PREFIX.unpack_from(message)
    if continuation != CONTINUATION:
        raise CorruptMessageError("an Arrow message begins with 0xFFFFFFFF")
    head = _PREFIX.size + int(metadata_bytes)
    if metadata_bytes == 0 or head > len(message) or head % 8:
        raise CorruptMessageError(f"metadata of {metadata_bytes} bytes in a message of {len(message)}")
    return head


def read_metadata(message: Buffer) -> MessageMetadata:
    """Parse the head of the message (the body need not be there). Raises CorruptMessageError."""
    return read_places(message)[0]


def read_places(message: Buffer) -> tuple[MessageMetadata, Places]:
    """What `read_metadata` returns, and where it was found. Raises CorruptMessageError."""
    head = head_length(message)
    reader = _Reader(bytes(memoryview(message)[_PREFIX.size : head]))
    try:
        return reader.message(head)
    except (struct.error, OverflowError):
        raise CorruptMessageError("the metadata of an Arrow message points outside itself") from None


class _Table(NamedTuple):
    at: int
    vtable_at: int
    vtable_bytes: int
    bytes: int


class _Reader:
    """Reads flatbuffer tables of one message; `touched` are the (start, end) ranges that it followed."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.touched: list[tuple[int, int]] = []

    def message(self, head_bytes: int) -> tuple[MessageMetadata, Places]:
        self._touch(0, 4)
        root = self._table(_U32.unpack_from(self.data, 0)[0])
        version_at, kind_at = self._field(root, 0, 2), self._field(root, 1, 1)
        version = _U16.unpack_from(self.data, version_at)[0] if version_at else 0
        kind = self.data[kind_at] if kind_at else 0
        if version != _METADATA_V5 or kind != _RECORD_BATCH:
            raise CorruptMessageError(f"not a record batch of metadata V5 (version {version}, message type {kind})")
        batch = self._child(root, 2)
        body_at, value, rows_at = self._field(root, 3, 8), self._value(root), self._field(batch, 0, 8)
        nodes, buffers = self._pairs(batch, 1), self._pairs(batch, 2)
        compression = self._compression(batch)
        if self._field(batch, 4, 4):
            raise CorruptMessageError("the batch uses view types")
        self._check_disjoint(value)
        metadata = MessageMetadata(
            head_bytes=head_bytes,
            body_bytes=_I64.unpack_from(self.data, body_at)[0] if body_at else 0,
            row_count=_I64.unpack_from(self.data, rows_at)[0] if rows_at else 0,
            nodes=tuple(_PAIR.iter_unpack(self.data[nodes.start : nodes.end])),
            buffers=tuple(_PAIR.iter_unpack(self.data[buffers.start : buffers.end])),
            compression=compression,
            value_at=value.start + _PREFIX.size,
            value_bytes=value.end - value.start,
        )
        numbers = (Place(at, at + 8 if at else 0) for at in (body_at, rows_at))
        places = Places(*(place.moved(_PREFIX.size) for place in (*numbers, nodes, buffers, value)))
        return metadata, places

    def _value(self, root: _Table) -> Place:
        """Where the value of the only custom metadata key is. The value itself is not in `touched`."""
        start, count = self._vector(self._field(root, 4, 4), 4)
        if count != 1:
            raise CorruptMessageError(f"the batch has {count} custom metadata keys; it must have one")
        pair = self._table(start + _U32.unpack_from(self.data, start)[0])
        key_at, key_bytes = self._vector(self._field(pair, 0, 4), 1)
        if self.data[key_at : key_at + key_bytes] != METADATA_KEY:
            raise CorruptMessageError("the custom metadata key of the batch is not ours")
        value_at, value_bytes = self._vector(self._field(pair, 1, 4), 1)
        self.touched[-1] = (value_at - 4, value_at)
        return Place(value_at, value_at + value_bytes)

    def _compression(self, batch: _Table) -> str | None:
        field = self._field(batch, 3, 4)
        if not field:
            return None
        table = self._table(field + _U32.unpack_from(self.data, field)[0])
        codec_at = self._field(table, 0, 1)
        self._field(table, 1, 1)
        codec = self.data[codec_at] if codec_at else 0
        if codec >= len(_CODECS):
            raise CorruptMessageError(f"the batch is compressed by codec {codec}, which is not known")
        return _CODECS[codec]

    def _check_disjoint(self, value: Place) -> None:
        start, end = value
        if any(low < end and start < high for low, high in self.touched):
            raise CorruptMessageError("the custom metadata of the batch overlaps its other metadata")

    def _touch(self, start: int, end: int) -> None:
        if start < 0 or end > len(self.data):
            raise CorruptMessageError("the metadata of an Arrow message points outside itself")
        self.touched.append((start, end))

    def _table(self, at: int) -> _Table:
        self._touch(at, at + 4)
        vtable_at = at - _I32.unpack_from(self.data, at)[0]
        self._touch(vtable_at, vtable_at + 4)
        vtable_bytes, table_bytes = struct.unpack_from("<HH", self.data, vtable_at)
        if vtable_bytes < 4 or vtable_bytes % 2 or table_bytes < 4:
            raise CorruptMessageError("a table of an Arrow message is malformed")
        self._touch(vtable_at, vtable_at + vtable_bytes)
        self._touch(at, at + table_bytes)
        return _Table(at, vtable_at, vtable_bytes, table_bytes)

    def _field(self, table: _Table, slot: int, size: int) -> int:
        """Position of a field of `size` bytes; 0 when it is absent."""
        entry = 4 + 2 * slot
        if entry + 2 > table.vtable_bytes:
            return 0
        offset = int(_U16.unpack_from(self.data, table.vtable_at + entry)[0])
        if offset == 0:
            return 0
        if offset < 4 or offset + size > table.bytes:
            raise CorruptMessageError("a field of an Arrow message lies outside its table")
        return table.at + offset

    def _child(self, table: _Table, slot: int) -> _Table:
        field = self._field(table, slot, 4)
        if not field:
            raise CorruptMessageError("an Arrow message lacks its header")
        return self._table(field + _U32.unpack_from(self.data, field)[0])

    def _vector(self, field: int, item_bytes: int) -> tuple[int, int]:
        """Position of the first item and number of items of the vector that the field points at."""
        if not field:
            return 0, 0
        at = field + int(_U32.unpack_from(self.data, field)[0])
        self._touch(at, at + 4)
        count = int(_U32.unpack_from(self.data, at)[0])
        self._touch(at, at + 4 + count * item_bytes)
        return at + 4, count

    def _pairs(self, table: _Table, slot: int) -> Place:
        start, count = self._vector(self._field(table, slot, 4), _PAIR.size)
        return Place(start, start + count * _PAIR.size)
