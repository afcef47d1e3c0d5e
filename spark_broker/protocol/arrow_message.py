"""The stored form of a micro-batch: one encapsulated Arrow IPC RecordBatch message.

Its only custom metadata entry is in fixed-width hexadecimal. It holds every field of the index entry except the
position and the CRCs, then a CRC-32C of the body, and one of the head (everything before the body, without itself).
The producer writes the entry with placeholders; the leader overwrites its bytes in place and never encodes the batch
again.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from spark_broker.errors import (
    CorruptMessageError,
    InvalidDataError,
    InvalidRequestError,
    MessageTooLargeError,
    SchemaMismatchError,
    invariant,
)
from spark_broker.native_calls import native_calls
from spark_broker.protocol.crc32c import Buffer, crc32c, crc32c_of
from spark_broker.protocol.frame import (
    ABORT,
    COMPRESSED,
    CONTROL,
    FIELDS_BYTES,
    FIRST_OF_SEGMENT,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    OFFSET_MAX,
    ROW_OFFSETS,
    TRANSACTIONAL,
    BatchHeader,
    Frame,
    pack_fields,
    unpack_fields,
)
from spark_broker.protocol.ipc_message import METADATA_KEY, MessageMetadata, head_length, read_metadata
from spark_broker.protocol.row_offsets import Deltas, decode_row_offsets, encode_row_offsets
from spark_broker.protocol.schema import schema_to_bytes

VALUE_BYTES = 2 * (FIELDS_BYTES + 4 + 4)
"""Hexadecimal characters of the custom metadata: the fields, the body's CRC, the head's CRC."""

MAX_ROWS = 2**31 - 1
_HEAD_CRC_CHARS = 8
_PLACEHOLDER = b"0" * VALUE_BYTES
_CRCS = struct.Struct("<II")
_I64 = struct.Struct("<q")
_OPTIONS = {
    None: pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5),
    "lz4": pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5, compression="lz4"),
    "zstd": pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5, compression="zstd"),
}


@dataclass(frozen=True, slots=True)
class ParsedBatch:
    """A batch that passed validation. `header` has the leader's fields as the sender left them."""

    batch: pa.RecordBatch
    header: BatchHeader


@dataclass(frozen=True, slots=True)
class _Head:
    """What a message says about itself: Arrow's metadata and our value."""

    metadata: MessageMetadata
    header: BatchHeader
    body_crc: int
    head_crc: int


def encode_batch(
    batch: pa.RecordBatch,
    *,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
    schema_id: int = 0,
    attributes: int = 0,
    compression: str | None = None,
    max_timestamp_us: int = NO_TIMESTAMP,
) -> bytes:
    """The message of a batch of one row or more, with the leader's fields left open.

    Slices are encoded without the rows around them. Raises InvalidDataError for an empty batch.
    """
    if not 0 < batch.num_rows <= MAX_ROWS:
        raise InvalidDataError(f"a micro-batch of {batch.num_rows} rows")
    return _encode(
        batch,
        BatchHeader(
            base_offset=-1,
            append_time_ms=-1,
            max_timestamp_us=max_timestamp_us,
            producer_id=producer_id,
            last_offset_delta=batch.num_rows - 1,
            row_count=batch.num_rows,
            length=0,
            leader_epoch=-1,
            base_sequence=base_sequence,
            schema_id=schema_id,
            producer_epoch=producer_epoch,
            attributes=attributes | (COMPRESSED if compression else 0),
        ),
        compression,
    )


def encode_marker(
    schema: pa.Schema, *, producer_id: int, producer_epoch: int, committed: bool, schema_id: int
) -> bytes:
    """The message of a marker that ends a transaction: a batch without rows, which takes one offset.

    A segment with markers is still an Arrow stream. `producer_epoch` is the one that begins after the marker (KIP-890).
    """
    header = BatchHeader(
        base_offset=-1,
        append_time_ms=-1,
        max_timestamp_us=NO_TIMESTAMP,
        producer_id=producer_id,
        last_offset_delta=0,
        row_count=0,
        length=0,
        leader_epoch=-1,
        base_sequence=NO_SEQUENCE,
        schema_id=schema_id,
        producer_epoch=producer_epoch,
        attributes=CONTROL | TRANSACTIONAL | (0 if committed else ABORT),
    )
    return _encode(_no_rows(schema), header, None)


def encode_compacted(
    batch: pa.RecordBatch, header: BatchHeader, deltas: Deltas, compression: str | None = None
) -> Frame:
    """A stored batch of which only these rows are left. `header`: of the batch, with the attributes that it is to have.

    `deltas`: the rows' offsets, counted from the base offset. Without rows, the batch keeps only its offsets and its
    place in its producer's sequence.
    """
    invariant(batch.num_rows == len(deltas), "%d rows at %d offsets", batch.num_rows, len(deltas))
    attributes = (header.attributes & ~COMPRESSED) | ROW_OFFSETS | (COMPRESSED if compression else 0)
    header = header._replace(row_count=batch.num_rows, attributes=attributes, length=0, message_crc=0)
    tail = encode_row_offsets(deltas, header.last_offset_delta + 1)
    message = _encode(batch, header, compression, tail)
    return Frame(header._replace(length=len(message), message_crc=crc32c(message)), message)


def encode_gap(schema: pa.Schema, header: BatchHeader) -> Frame:
    """A stored batch of which no row is left. `header`: as in `encode_compacted`."""
    return encode_compacted(_no_rows(schema), header, np.empty(0, np.int64))


def restamp(message: Buffer, header: BatchHeader) -> Frame:
    """The stored message with these fields in place of its own, and the CRC of that. The rows stay as they are."""
    target = bytearray(message)
    head = _read_head(target)
    invariant(header.row_count == head.header.row_count, "other rows than the message has")
    header = header._replace(length=len(target))
    _write_value(target, head.metadata, header, head.body_crc)
    return Frame(header._replace(message_crc=crc32c(target)), target)


def row_deltas(header: BatchHeader, message: Buffer) -> Deltas:
    """The offsets of a stored batch's rows, counted from the base offset. Raises CorruptMessageError."""
    if not header.attributes & ROW_OFFSETS:
        return np.arange(header.row_count, dtype=np.int64)
    metadata = read_metadata(message)
    at = metadata.value_at
    tail = bytes(memoryview(message)[at + VALUE_BYTES : at + metadata.value_bytes])
    return decode_row_offsets(tail, span=header.last_offset_delta + 1, rows=header.row_count)


def compression_of(message: Buffer) -> str | None:
    """How the buffers of a message are compressed."""
    return read_metadata(message).compression


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _encode(batch: pa.RecordBatch, header: BatchHeader, compression: str | None, tail: bytes = b"") -> bytes:
    """`tail`: what follows the fixed-width value in the custom metadata."""
    with native_calls:
        stream_bytes = _write_stream(batch, compression, tail)
    # The stream begins with the schema message, which is the topic's and not the batch's.
    message = stream_bytes[head_length(memoryview(stream_bytes)) :]
    metadata = read_metadata(memoryview(message))
    body = message[metadata.head_bytes :]
    head = bytearray(message[: metadata.head_bytes])
    _write_value(head, metadata, header._replace(length=message.size), crc32c(body))
    return b"".join((head, body))


def _write_stream(batch: pa.RecordBatch, compression: str | None, tail: bytes) -> pa.Buffer:
    stream = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(stream, batch.schema, options=_OPTIONS[compression])
    writer.write_batch(batch, custom_metadata={METADATA_KEY: _PLACEHOLDER + tail})
    return stream.getvalue()


def renumber(head: bytearray, *, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
    """Write a batch's place in its producer's sequence into the encoded batch.

    `head` is the message, or its part before the body. A producer numbers a batch when it is first sent, which is after
    it was encoded.
    """
    parsed = _read_head(head)
    header = parsed.header._replace(producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence)
    _write_value(head, parsed.metadata, header, parsed.body_crc)


def assign(
    message: Buffer,
    *,
    base_offset: int,
    leader_epoch: int,
    append_time_ms: int,
    max_timestamp_us: int,
    first_of_segment: bool = False,
    schema_id: int | None = None,
) -> tuple[BatchHeader, bytearray]:
    """Fill the leader's fields into a *validated* message, and compute the CRC.

    `max_timestamp_us` is the running maximum of the partition, this batch included. A bytearray is changed in place and
    returned; anything else is copied once. Raises InvalidRequestError if the partition has too few offsets left: any
    peer can have its records deleted up to the last offset that there is.
    """
    target = message if isinstance(message, bytearray) else bytearray(message)
    head = _read_head(target)
    if base_offset + head.header.last_offset_delta + 1 > OFFSET_MAX:
        raise InvalidRequestError(f"the partition has no offsets left for {head.header.last_offset_delta + 1} records")
    attributes = head.header.attributes & ~FIRST_OF_SEGMENT
    header = head.header._replace(
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        append_time_ms=append_time_ms,
        max_timestamp_us=max_timestamp_us,
        attributes=attributes | (FIRST_OF_SEGMENT if first_of_segment else 0),
        schema_id=head.header.schema_id if schema_id is None else schema_id,
    )
    _write_value(target, head.metadata, header, head.body_crc)
    return header._replace(message_crc=crc32c(target)), target


def validate(message: Buffer, schema: pa.Schema, *, max_uncompressed_bytes: int) -> ParsedBatch:
    """Check everything about a message from a client before it is stored; decode it without a copy.

    Raises CorruptMessageError for bytes that are not a valid batch, SchemaMismatchError for a batch of another schema
    and MessageTooLargeError when the buffers claim more than `max_uncompressed_bytes` (checked before inflating any).
    """
    head = _read_head(message)
    if head.header.attributes & (CONTROL | ROW_OFFSETS | FIRST_OF_SEGMENT | ABORT):
        raise CorruptMessageError(f"a client may not set attributes {head.header.attributes:#x}")
    _check_head(message, head)
    _check_shape(head.metadata, schema)
    _check_body(message, head.metadata, max_uncompressed_bytes)
    if crc32c(_body(message, head.metadata)) != head.body_crc:
        raise CorruptMessageError("the body of the batch fails its CRC")
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
        batch.validate(full=True)
    except MemoryError:
        raise  # It says nothing of the bytes. ArrowMemoryError is an ArrowException, too.
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptMessageError(f"not a valid Arrow batch: {error}") from None
    for field, column in zip(schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            raise SchemaMismatchError(f"column {field.name!r} is not nullable and has {column.null_count} nulls")
    return ParsedBatch(batch, head.header)


def decode_batch(message: Buffer, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.RecordBatch:
    """The rows of a stored message, without a copy; with `columns`, only those (and only those are inflated).

    The message must have passed its CRC. Raises CorruptMessageError when it does not decode, KeyError for an unknown
    column.
    """
    buffer = pa.py_buffer(message)
    if buffer.address % 8:
        # Arrow's kernels want aligned values; a view into a larger message may begin anywhere.
        buffer = pa.py_buffer(bytes(message))
    try:
        if columns is None:
            return pa.ipc.read_record_batch(buffer, schema)
        return _decode_columns(buffer, schema, columns)
    except MemoryError:
        raise  # It says nothing of the bytes. ArrowMemoryError is an ArrowException, too.
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptMessageError(f"a stored batch does not decode: {error}") from None


def verify_stored(message: Buffer) -> BatchHeader:
    """The header of a message found in a log file, `message_crc` included, after checking the CRCs that it carries.

    Raises CorruptMessageError. This is how recovery makes an index entry out of the `.arrow` file alone.
    """
    head = _read_head(message)
    _check_head(message, head)
    if crc32c(_body(message, head.metadata)) != head.body_crc:
        raise CorruptMessageError("the body of the batch fails its CRC")
    return head.header._replace(message_crc=crc32c(message))


def _decode_columns(buffer: pa.Buffer, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    indices = [_column_index(schema, name) for name in columns]
    if read_metadata(memoryview(buffer)).compression is None:
        return pa.ipc.read_record_batch(buffer, schema).select(list(columns))
    # `read_record_batch` takes no options, so the message is read as a stream of one batch.
    stream = pa.py_buffer(b"".join((schema_to_bytes(schema), buffer)))
    with native_calls:
        return _read_stream(stream, indices).select(list(columns))


def _read_stream(stream: pa.Buffer, indices: Sequence[int]) -> pa.RecordBatch:
    options = pa.ipc.IpcReadOptions(included_fields=sorted(set(indices)))
    with pa.ipc.open_stream(stream, options=options) as reader:
        return reader.read_next_batch()


def _column_index(schema: pa.Schema, name: str) -> int:
    index = schema.get_field_index(name)
    if index < 0:
        raise KeyError(name)
    return int(index)


def _body(message: Buffer, metadata: MessageMetadata) -> pa.Buffer:
    return pa.py_buffer(message).slice(metadata.head_bytes)


def _read_head(message: Buffer) -> _Head:
    metadata = read_metadata(message)
    if metadata.value_bytes < VALUE_BYTES:
        raise CorruptMessageError(f"custom metadata of {metadata.value_bytes} characters; it must have {VALUE_BYTES}")
    value = bytes(memoryview(message)[metadata.value_at : metadata.value_at + VALUE_BYTES])
    try:
        raw = binascii.unhexlify(value)
    except ValueError:
        raise CorruptMessageError("the custom metadata is not hexadecimal") from None
    if binascii.hexlify(raw) != value:
        raise CorruptMessageError("the custom metadata is not in lower case")
    body_crc, head_crc = _CRCS.unpack_from(raw, FIELDS_BYTES)
    header = unpack_fields(raw[:FIELDS_BYTES])
    if metadata.value_bytes > VALUE_BYTES and not header.attributes & ROW_OFFSETS:
        raise CorruptMessageError(f"custom metadata of {metadata.value_bytes} characters; it must have {VALUE_BYTES}")
    return _Head(metadata, header, body_crc, head_crc)


def _write_value(target: bytearray, metadata: MessageMetadata, header: BatchHeader, body_crc: int) -> None:
    """Overwrite the value in place; `target` begins with the message's head."""
    invariant(metadata.value_bytes >= VALUE_BYTES, "the placeholder has the width of the value")
    end = metadata.value_at + VALUE_BYTES
    value = binascii.hexlify(pack_fields(header) + body_crc.to_bytes(4, "little"))
    target[metadata.value_at : end - _HEAD_CRC_CHARS] = value
    target[end - _HEAD_CRC_CHARS : end] = binascii.hexlify(_head_crc(target, metadata).to_bytes(4, "little"))


def _head_crc(message: Buffer, metadata: MessageMetadata) -> int:
    head = bytes(memoryview(message)[: metadata.head_bytes])
    end = metadata.value_at + VALUE_BYTES
    return crc32c_of((head[: end - _HEAD_CRC_CHARS], head[end:]))


def _check_head(message: Buffer, head: _Head) -> None:
    metadata, header = head.metadata, head.header
    if header.length != len(message) or metadata.body_bytes != len(message) - metadata.head_bytes:
        raise CorruptMessageError(f"the message has {len(message)} bytes and claims {header.length}")
    if metadata.row_count != header.row_count:
        raise CorruptMessageError(f"the batch has {metadata.row_count} rows and claims {header.row_count}")
    if not _spans_its_rows(header):
        raise CorruptMessageError(f"{header.row_count} rows, but a last offset delta of {header.last_offset_delta}")
    if (metadata.compression is not None) != bool(header.attributes & COMPRESSED):
        raise CorruptMessageError("the batch and its attributes disagree about compression")
    if _head_crc(message, metadata) != head.head_crc:
        raise CorruptMessageError("the head of the batch fails its CRC")


def _spans_its_rows(header: BatchHeader) -> bool:
    """Whether a batch has as many offsets as rows; a marker has one offset, a compacted batch has more than rows."""
    span = header.last_offset_delta + 1
    if header.attributes & ROW_OFFSETS:
        return 0 <= header.row_count <= span
    return bool(header.attributes & CONTROL) or 0 < header.row_count == span


def _check_shape(metadata: MessageMetadata, schema: pa.Schema) -> None:
    layout = [counts for field in schema for counts in _layout(field.type)]
    nodes, buffers = len(layout), sum(layout)
    if len(metadata.nodes) != nodes or len(metadata.buffers) != buffers:
        raise SchemaMismatchError(
            f"the batch has {len(metadata.nodes)} columns (nested ones counted) in {len(metadata.buffers)} buffers; "
            f"the topic's schema has {nodes} in {buffers}"
        )


def _layout(kind: pa.DataType) -> Iterator[int]:
    """Number of buffers of each node of a type, in the order of the message."""
    if pa.types.is_struct(kind):
        yield 1
        for child in kind:
            yield from _layout(child.type)
    elif pa.types.is_map(kind):
        yield 2
        yield 1
        yield from _layout(kind.key_type)
        yield from _layout(kind.item_type)
    elif pa.types.is_list(kind):
        yield 2
        yield from _layout(kind.value_type)
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        yield 3
    else:
        yield 2


def _check_body(message: Buffer, metadata: MessageMetadata, max_uncompressed_bytes: int) -> None:
    """Every node and buffer is within bounds, and what the buffers would inflate to is within the limit."""
    for node in metadata.nodes:
        if not 0 <= node.null_count <= node.length:
            raise CorruptMessageError(f"a column of {node.length} rows with {node.null_count} nulls")
    total = 0
    for span in metadata.buffers:
        if span.offset < 0 or span.length < 0 or span.offset + span.length > metadata.body_bytes or span.offset % 8:
            raise CorruptMessageError(f"a buffer at {span} in a body of {metadata.body_bytes} bytes")
        total += _inflated_bytes(message, metadata, span.offset, span.length) if metadata.compression else span.length
    if total > max_uncompressed_bytes:
        raise MessageTooLargeError(f"the batch is {total} bytes uncompressed; the limit is {max_uncompressed_bytes}")


def _inflated_bytes(message: Buffer, metadata: MessageMetadata, offset: int, length: int) -> int:
    """Bytes that a compressed buffer claims to inflate to: an int64 before its data, where -1 says "stored raw"."""
    if length == 0:
        return 0
    if length < _I64.size:
        raise CorruptMessageError(f"a compressed buffer of {length} bytes")
    (claimed,) = _I64.unpack_from(message, metadata.head_bytes + offset)
    if claimed < -1:
        raise CorruptMessageError(f"a compressed buffer claims {claimed} bytes")
    return length - _I64.size if claimed == -1 else int(claimed)
