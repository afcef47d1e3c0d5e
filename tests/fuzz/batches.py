"""Arrow messages that lie: damage in the flatbuffer metadata and the body, with right checksums afterwards."""

from __future__ import annotations

import random
import struct
from functools import cache

import pyarrow as pa

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.arrow_message import (
    encode_batch,
)
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.ipc_message import MessageMetadata, read_metadata
from spark_broker.protocol.message_head import VALUE_BYTES, read_head, write_value
from spark_broker.protocol.schema import DEFAULT_SCHEMA, TIMESTAMP_TYPE
from tests.fuzz.mutate import INTERESTING, mutate, overwrite_number

_NESTED = pa.schema(
    [
        pa.field("lists", pa.list_(pa.list_(pa.list_(pa.int64())))),
        pa.field("counts", pa.map_(pa.string(), pa.list_(pa.int32()))),
        pa.field(
            "point", pa.struct([pa.field("x", pa.int32()), pa.field("y", pa.struct([pa.field("z", pa.bool_())]))])
        ),
    ]
)
_SCALARS = pa.schema(
    [
        pa.field("n", pa.int64(), nullable=False),
        pa.field("flag", pa.bool_()),
        pa.field("price", pa.decimal128(38, 10)),
        pa.field("day", pa.date32()),
        pa.field("at", TIMESTAMP_TYPE),
        pa.field("took", pa.duration("us")),
        pa.field("real", pa.float32()),
    ]
)
_TEXTS = pa.schema([pa.field("s", pa.string(), nullable=False), pa.field("b", pa.binary())])
SCHEMAS = (DEFAULT_SCHEMA, _NESTED, _SCALARS, _TEXTS)


@cache
def sample_batches() -> tuple[tuple[int, pa.RecordBatch], ...]:
    """Batches of all schemas, each with the number of its schema: of one row, with nulls, with empty values."""
    batches: list[tuple[int, pa.RecordBatch]] = []
    for number, schema in enumerate(SCHEMAS):
        for rows in (1, 3, 20):
            values = [_row(number, i) for i in range(rows)]
            batches.append((number, pa.RecordBatch.from_pylist(values, schema=schema)))
    return tuple(batches)


def _row(schema: int, i: int) -> dict[str, object]:
    if schema == 0:
        headers = [{"key": f"h{j}", "value": None if j else b"v"} for j in range(i % 3)]
        return {"key": None if i % 2 else b"k", "value": bytes([i]) * i, "headers": headers, "timestamp": i * 10**6}
    if schema == 1:
        lists = None if i % 4 == 3 else [[[i, None]] * (i % 2), None]
        return {"lists": lists, "counts": [(str(i), [i])], "point": {"x": i, "y": {"z": None}} if i % 3 else None}
    if schema == 2:
        return {"n": i, "flag": i % 2 == 0, "price": None, "day": i, "at": i, "took": i, "real": i / 3}
    return {"s": f"zürich {i}" * (i % 3), "b": None if i % 2 else bytes(i)}


@cache
def sample_messages() -> tuple[tuple[int, bytes], ...]:
    """The encoded sample batches, plain and compressed."""
    return tuple(
        (number, encode_batch(batch, compression=compression, producer_id=number, base_sequence=0, producer_epoch=0))
        for number, batch in sample_batches()
        for compression in (None, "lz4", "zstd")
    )


def foreign_message(rng: random.Random) -> bytes:
    """An Arrow message that is none of ours: a schema, a dictionary, view types, another metadata key, no metadata."""
    words = ["a", "b", "a"]
    kinds = (pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.large_string(), pa.string())
    batch = pa.record_batch({"w": pa.array(words).cast(rng.choice(kinds))})
    custom = rng.choice((None, {"spark_broker": "0" * VALUE_BYTES}, {"spark_broker": ""}, {"x": "y"}))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata=custom)
    stream = sink.getvalue().to_pybytes()
    starts = [at for at in range(0, len(stream), 8) if stream[at : at + 4] == b"\xff\xff\xff\xff"]
    return bytes(stream[rng.choice(starts) :])


def damaged_message(rng: random.Random) -> tuple[int, bytes]:
    """The number of a schema, and a message: sealed with right checksums in most cases, as a liar would."""
    number, message = rng.choice(sample_messages())
    if rng.random() < 0.05:
        return rng.randrange(len(SCHEMAS)), foreign_message(rng)
    if rng.random() < 0.2:
        return number, mutate(rng, message, rng.choice(sample_messages())[1])
    target = bytearray(message)
    metadata = read_metadata(message)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _damage(rng, target, metadata)
    return number, _forged(rng, target) if rng.random() < 0.9 else bytes(target)


def _damage(rng: random.Random, target: bytearray, metadata: MessageMetadata) -> None:
    kind = rng.random()
    if kind < 0.25:
        overwrite_number(rng, target, 8, metadata.head_bytes)
    elif kind < 0.5:
        overwrite_number(rng, target, metadata.head_bytes, len(target))
    elif kind < 0.7:
        pairs = [struct.pack("<qq", *pair) for pair in (*metadata.nodes, *metadata.buffers)]
        _overwrite_pair(rng, target, metadata, rng.choice(pairs))
    elif kind < 0.8:
        _overwrite_pair(rng, target, metadata, struct.pack("<q", metadata.row_count))
    elif kind < 0.9 and metadata.compression is not None:
        _lie_about_inflation(rng, target, metadata)
    else:
        at = rng.randrange(len(target))
        target[at] ^= 1 << rng.randrange(8)


def _overwrite_pair(rng: random.Random, target: bytearray, metadata: MessageMetadata, pair: bytes) -> None:
    """One of the two numbers of a node, a buffer or the row count becomes a lie."""
    at = target.find(pair, 8, metadata.head_bytes)
    if at < 0:
        return
    at += rng.randrange(len(pair) // 8) * 8
    (old,) = struct.unpack_from("<q", target, at)
    lie = rng.choice((rng.choice(INTERESTING) % 2**63, -rng.choice(INTERESTING) % -(2**63), old + 1, old - 1, old + 8))
    struct.pack_into("<q", target, at, lie)


def _lie_about_inflation(rng: random.Random, target: bytearray, metadata: MessageMetadata) -> None:
    offsets = [offset for offset, length in metadata.buffers if length >= 8]
    if offsets:
        offset = rng.choice(offsets)
        lie = rng.choice((-1, -2, 0, 1, 8, 1 << 16, 1 << 22, 1 << 24, 2**31, 2**62))
        struct.pack_into("<q", target, metadata.head_bytes + offset, lie)


def _forged(rng: random.Random, target: bytearray) -> bytes:
    """The message with right checksums, sometimes with other fields in the placeholder; unchanged without a head."""
    try:
        head = read_head(target)
    except CorruptMessageError:
        return bytes(target)
    header = head.header._replace(length=len(target))
    if head.metadata.row_count > 0 and rng.random() < 0.5:
        rows = min(head.metadata.row_count, 2**31 - 1)
        header = header._replace(row_count=rows, last_offset_delta=rows - 1)
    if rng.random() < 0.2:
        header = _lying_header(rng, header)
    write_value(target, head, header, crc32c(bytes(target[head.metadata.head_bytes :])))
    return bytes(target)


def _lying_header(rng: random.Random, header: BatchHeader) -> BatchHeader:
    bits = {"producer_epoch": 15, "attributes": 16}
    narrow = ("last_offset_delta", "row_count", "length", "leader_epoch", "base_sequence", "schema_id")
    name = rng.choice(BatchHeader._fields[:12])
    most = 2 ** bits.get(name, 31 if name in narrow else 63) - 1
    low = 0 if name == "attributes" else -most - 1
    lie = rng.choice((low, -1 if low else 1, 0, 1, most, rng.randint(low, most)))
    return header._replace(**{name: lie})
