"""The stored form of a micro-batch: one encapsulated Arrow IPC RecordBatch message.

Its only custom metadata entry is in fixed-width hexadecimal. It holds every field of the index entry except the
position and the CRCs, then a CRC-32C of the body, and one of the head (everything before the body, without itself).
The producer writes the entry with placeholders; the leader overwrites its bytes in place and never encodes the batch
again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
from spark_broker.protocol.crc32c import Buffer, crc32c
from spark_broker.protocol.frame import (
    ABORT,
    COMPRESSED,
    CONTROL,
    FIRST_OF_SEGMENT,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    OFFSET_MAX,
    ROW_OFFSETS,
    TRANSACTIONAL,
    BatchHeader,
    Frame,
)
from spark_broker.protocol.head_template import HeadTemplate, template_of
from spark_broker.protocol.ipc_message import METADATA_KEY, MessageMetadata, head_length, read_metadata
from spark_broker.protocol.message_head import VALUE_BYTES, EncodedBatch, Head, check_head, read_head, write_value
from spark_broker.protocol.row_offsets import Deltas, decode_row_offsets, encode_row_offsets
from spark_broker.protocol.schema import schema_from_bytes, schema_to_bytes

MAX_ROWS = 1 << 22
"""Of a batch that is appended. Booleans take an eighth of a byte each, and what is computed for each row takes more: a
batch of 16 MiB could have 134 million rows, and every look at it would take a gigabyte.
"""

_PLACEHOLDER = b"0" * VALUE_BYTES
_LAYOUTS_KEPT = 1024

FEW_ROWS = 16
SMALL_BYTES = 64 * 1024
"""For batches that are not larger, it costs more to ask for their size than to encode them into what grows."""

_VALUE_ROOM = 1024  # for the custom metadata, and what aligns it
_I64 = struct.Struct("<q")
_OPTIONS = {
    None: pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5),
    "lz4": pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5, compression="lz4"),
    "zstd": pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5, compression="zstd"),
}


@dataclass(frozen=True, slots=True)
class ParsedBatch:
    """A batch that passed validation. The header has the leader's fields as the sender left them."""

    batch: pa.RecordBatch
    head: Head
    layout: BatchLayout

    def column(self, name: str) -> pa.Array | None:
        """None: there is no such column. Arrow's look-up by name costs as much as the check of a column."""
        index = self.layout.columns.get(name)
        return None if index is None else self.batch.column(index)

    @property
    def header(self) -> BatchHeader:
        return self.head.header


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """What is known of the messages of a schema before they come.

    `columns`: the index of each. `nodes`, `buffers`: how many a message has. `required`: columns that take no nulls.
    `templates`: heads as our own writer makes them, of each compression.
    """

    schema: pa.Schema
    columns: Mapping[str, int]
    nodes: int
    buffers: int
    required: tuple[int, ...]
    templates: tuple[HeadTemplate, ...]


@lru_cache(maxsize=_LAYOUTS_KEPT)
def layout_of(schema_bytes: bytes) -> BatchLayout:
    """The layout of a stored schema, which is computed once. Raises InvalidSchemaError."""
    schema = schema_from_bytes(schema_bytes)
    counts = [count for field in schema for count in _layout(field.type)]
    required = tuple(index for index, field in enumerate(schema) if not field.nullable)
    row = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
    templates = (template_of(encode_batch(row, compression=compression)) for compression in _OPTIONS)
    columns = {name: index for index, name in enumerate(schema.names)}
    return BatchLayout(schema, columns, len(counts), sum(counts), required, tuple(filter(None, templates)))


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
    """The message of what `encoded_batch` returns."""
    return bytes(
        encoded_batch(
            batch,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
            schema_id=schema_id,
            attributes=attributes,
            compression=compression,
            max_timestamp_us=max_timestamp_us,
        )
    )


def encoded_batch(
    batch: pa.RecordBatch,
    *,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
    schema_id: int = 0,
    attributes: int = 0,
    compression: str | None = None,
    max_timestamp_us: int = NO_TIMESTAMP,
) -> EncodedBatch:
    """A batch of one row or more, encoded with the leader's fields left open.

    Slices are encoded without the rows around them. Raises InvalidDataError for an empty batch.
    """
    if not 0 < batch.num_rows <= MAX_ROWS:
        raise InvalidDataError(f"a micro-batch of {batch.num_rows} rows; it may have 1 to {MAX_ROWS}")
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
    return bytes(_encode(_no_rows(schema), header, None))


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
    message = bytes(_encode(batch, header, compression, tail))
    return Frame(header._replace(length=len(message), message_crc=crc32c(message)), message)


def encode_gap(schema: pa.Schema, header: BatchHeader) -> Frame:
    """A stored batch of which no row is left. `header`: as in `encode_compacted`."""
    return encode_compacted(_no_rows(schema), header, np.empty(0, np.int64))


def restamp(message: Buffer, header: BatchHeader) -> Frame:
    """The stored message with these fields in place of its own, and the CRC of that. The rows stay as they are."""
    head = read_head(message)
    invariant(header.row_count == head.header.row_count, "other rows than the message has")
    target = bytearray(message)
    header = header._replace(length=len(target))
    write_value(target, head, header, head.body_crc)
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


def _encode(batch: pa.RecordBatch, header: BatchHeader, compression: str | None, tail: bytes = b"") -> EncodedBatch:
    """`tail`: what follows the fixed-width value in the custom metadata."""
    with native_calls:
        stream_bytes = _write_stream(batch, compression, tail)
    # The stream begins with the schema message, which is the topic's and not the batch's.
    message = stream_bytes[head_length(memoryview(stream_bytes)) :]
    view = memoryview(message)
    head_bytes = head_length(view)
    head = bytes(view[:head_bytes])
    # So many zeros in text are nowhere else in a head: it has no names, and its numbers are smaller.
    value_at = head.find(_PLACEHOLDER + tail)
    invariant(value_at > 0, "the placeholder is in the head")
    body = view[head_bytes:]
    header = header._replace(length=len(view))
    return EncodedBatch(head, body, header, crc32c(message[head_bytes:]), value_at).stamped(header)


def _write_stream(batch: pa.RecordBatch, compression: str | None, tail: bytes) -> pa.Buffer:
    """The schema and the batch. The buffer has hardly any room left, since the batch may wait in it for long."""
    if compression is None and batch.num_rows > FEW_ROWS:
        length = pa.ipc.get_record_batch_size(batch)
        if length > SMALL_BYTES:  # A stream that grows would take more memory at first, and be copied.
            target = pa.allocate_buffer(batch.schema.serialize().size + length + len(tail) + _VALUE_ROOM)
            with pa.FixedSizeBufferWriter(target) as fixed:
                _write_to(fixed, batch, compression, tail)
                return target.slice(0, fixed.tell())
    growing = pa.BufferOutputStream()
    _write_to(growing, batch, compression, tail)
    return pa.py_buffer(growing.getvalue().to_pybytes())


def _write_to(stream: pa.NativeFile, batch: pa.RecordBatch, compression: str | None, tail: bytes) -> None:
    writer = pa.ipc.new_stream(stream, batch.schema, options=_OPTIONS[compression])
    writer.write_batch(batch, custom_metadata={METADATA_KEY: _PLACEHOLDER + tail})


def assign(
    message: Buffer,
    *,
    base_offset: int,
    leader_epoch: int,
    append_time_ms: int,
    max_timestamp_us: int,
    first_of_segment: bool = False,
    schema_id: int | None = None,
    head: Head | None = None,
) -> tuple[BatchHeader, bytearray | memoryview]:
    """Fill the leader's fields into a *validated* message, and compute the CRC.

    `max_timestamp_us` is the running maximum of the partition, this batch included. `head`: what `validate` found in
    this very message; None: it is read now. A message that can be written is changed in place and returned; any other
    is copied once. Raises InvalidRequestError if the partition has too few offsets left: any peer can have its records
    deleted up to the last offset that there is.
    """
    head = head or read_head(message)
    before = head.header
    if base_offset + before.last_offset_delta + 1 > OFFSET_MAX:
        raise InvalidRequestError(f"the partition has no offsets left for {before.last_offset_delta + 1} records")
    attributes = before.attributes & ~FIRST_OF_SEGMENT
    header = BatchHeader(
        base_offset,
        append_time_ms,
        max_timestamp_us,
        before.producer_id,
        before.last_offset_delta,
        before.row_count,
        before.length,
        leader_epoch,
        before.base_sequence,
        before.schema_id if schema_id is None else schema_id,
        before.producer_epoch,
        attributes | FIRST_OF_SEGMENT if first_of_segment else attributes,
    )
    target = _writable(message)
    write_value(target, head, header, head.body_crc)
    return BatchHeader(*header[:12], crc32c(target)), target


def _writable(message: Buffer) -> bytearray | memoryview:
    if isinstance(message, bytearray) or (isinstance(message, memoryview) and not message.readonly):
        return message
    return bytearray(message)


def validate(message: Buffer, layout: BatchLayout, *, max_uncompressed_bytes: int) -> ParsedBatch:
    """Check everything about a message from a client before it is stored; decode it without a copy.

    Raises CorruptMessageError for bytes that are not a valid batch, SchemaMismatchError for a batch of another schema
    and MessageTooLargeError when the buffers claim more than `max_uncompressed_bytes` (checked before inflating any).
    """
    head = read_head(message, layout.templates)
    if head.header.attributes & (CONTROL | ROW_OFFSETS | FIRST_OF_SEGMENT | ABORT):
        raise CorruptMessageError(f"a client may not set attributes {head.header.attributes:#x}")
    check_head(message, head)
    _check_shape(head.metadata, layout)
    if head.header.row_count > MAX_ROWS:
        raise MessageTooLargeError(f"the batch has {head.header.row_count} rows; the limit is {MAX_ROWS}")
    _check_body(message, head.metadata, max_uncompressed_bytes)
    buffer = pa.py_buffer(message)
    if crc32c(buffer.slice(head.metadata.head_bytes)) != head.body_crc:
        raise CorruptMessageError("the body of the batch fails its CRC")
    try:
        batch = pa.ipc.read_record_batch(buffer, layout.schema)
        batch.validate(full=True)
    except MemoryError:
        raise  # It says nothing of the bytes. ArrowMemoryError is an ArrowException, too.
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptMessageError(f"not a valid Arrow batch: {error}") from None
    for index in layout.required:
        nulls = batch.column(index).null_count
        if nulls:
            raise SchemaMismatchError(f"column {layout.schema.names[index]!r} is not nullable and has {nulls} nulls")
    return ParsedBatch(batch, head, layout)


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
    head = read_head(message)
    check_head(message, head)
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


def _check_shape(metadata: MessageMetadata, layout: BatchLayout) -> None:
    if len(metadata.nodes) != layout.nodes or len(metadata.buffers) != layout.buffers:
        raise SchemaMismatchError(
            f"the batch has {len(metadata.nodes)} columns (nested ones counted) in {len(metadata.buffers)} buffers; "
            f"the topic's schema has {layout.nodes} in {layout.buffers}"
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
    for length, nulls in metadata.nodes:
        if not 0 <= nulls <= length:
            raise CorruptMessageError(f"a column of {length} rows with {nulls} nulls")
    total = _body_bytes(message, metadata)
    if total > max_uncompressed_bytes:
        raise MessageTooLargeError(f"the batch is {total} bytes uncompressed; the limit is {max_uncompressed_bytes}")


def inflated_bytes(frame: Frame) -> int:
    """How many bytes the buffers of a stored batch have once they are inflated. Raises CorruptMessageError."""
    if not frame.header.attributes & COMPRESSED:
        return frame.header.length
    return _body_bytes(frame.message, read_metadata(frame.message))


def _body_bytes(message: Buffer, metadata: MessageMetadata) -> int:
    total, body_bytes, compressed = 0, metadata.body_bytes, metadata.compression is not None
    for offset, length in metadata.buffers:
        if offset < 0 or length < 0 or offset + length > body_bytes or offset % 8:
            raise CorruptMessageError(f"a buffer at {offset} of {length} bytes in a body of {body_bytes} bytes")
        total += _inflated_bytes(message, metadata, offset, length) if compressed else length
    return total


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
