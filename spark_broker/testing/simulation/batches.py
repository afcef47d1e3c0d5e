"""Micro-batches with unique values, encoded once for all schedules of this process, and read back.

A schedule with compaction has keyed batches: a record's value is in its timestamp, because a tombstone has no other
column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from spark_broker.protocol.arrow_message import decode_batch, encoded_batch
from spark_broker.protocol.ipc_message import head_length, read_metadata
from spark_broker.protocol.message_head import EncodedBatch
from spark_broker.protocol.schema import TIMESTAMP_TYPE, schema_to_bytes
from spark_broker.protocol.wire import Buffer

SCHEMA = pa.schema([pa.field("value", pa.binary())])
KEYED_SCHEMA = pa.schema([pa.field("key", pa.binary()), pa.field("text", pa.binary()), pa.field("at", TIMESTAMP_TYPE)])

KEYS = 4
TOMBSTONE_EVERY = 5
_ROWS_MAX = 16

_decoded: dict[bytes, tuple[bytes, ...]] = {}
_MAX_DECODED = 100_000


def values_of(number: int, rows: int) -> tuple[bytes, ...]:
    """The values of batch `number` of a schedule: no two batches share one."""
    return tuple(_value(number, row) for row in range(rows))


def _value(number: int, row: int) -> bytes:
    return b"%d.%d" % (number, row)


@dataclass(frozen=True, slots=True)
class Payloads:
    """What the clients of a schedule send. `keyed`: its topics are compacted."""

    keyed: bool = False

    @property
    def schema_bytes(self) -> bytes:
        return schema_to_bytes(KEYED_SCHEMA if self.keyed else SCHEMA)

    def encoded(self, number: int, rows: int, attributes: int = 0) -> EncodedBatch:
        """The batch as a producer encodes it."""
        return _encoded(number, rows, attributes, self.keyed)

    def keys(self, number: int, rows: int) -> tuple[bytes, ...]:
        """The keys of the batch's values."""
        return tuple(key_of(_value(number, row)) for row in range(rows)) if self.keyed else ()

    def tombstones(self, number: int, rows: int) -> tuple[int, ...]:
        """Which rows of the batch delete their keys."""
        values = values_of(number, rows) if self.keyed else ()
        return tuple(row for row, value in enumerate(values) if is_tombstone(value))


def key_of(value: bytes) -> bytes:
    """The key of a keyed record."""
    number, row = _parsed(value)
    return b"k%d" % ((number * 7 + row) * 5 // 3 % KEYS)


def is_tombstone(value: bytes) -> bool:
    """Whether a keyed record deletes its key."""
    number, row = _parsed(value)
    return (number + row) % TOMBSTONE_EVERY == 0


def _parsed(value: bytes) -> tuple[int, int]:
    number, _, row = value.partition(b".")
    return int(number), int(row)


@lru_cache(maxsize=50_000)
def _encoded(number: int, rows: int, attributes: int, keyed: bool) -> EncodedBatch:
    values = values_of(number, rows)
    if not keyed:
        columns = [pa.array(values, type=pa.binary())]
        return encoded_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), attributes=attributes)
    columns = [
        pa.array([key_of(value) for value in values], pa.binary()),
        pa.array([None if is_tombstone(value) else b"text" for value in values], pa.binary()),
        pa.array([number * _ROWS_MAX + row for row in range(rows)], pa.int64()).cast(TIMESTAMP_TYPE),
    ]
    return encoded_batch(pa.RecordBatch.from_arrays(columns, schema=KEYED_SCHEMA), attributes=attributes)


def decoded(message: Buffer) -> tuple[bytes, ...]:
    """The values in a stored batch, cached by the bytes of its body, which only the producer and compaction write."""
    view = memoryview(message)
    body = bytes(view[head_length(view) :])
    values = _decoded.get(body)
    if values is None:
        keyed = len(read_metadata(view).nodes) == len(KEYED_SCHEMA)
        values = _keyed_values(message) if keyed else _values(message)
        if len(_decoded) < _MAX_DECODED:
            _decoded[body] = values
    return values


def _values(message: Buffer) -> tuple[bytes, ...]:
    return tuple(decode_batch(message, SCHEMA).column(0).to_pylist())


def _keyed_values(message: Buffer) -> tuple[bytes, ...]:
    numbers = decode_batch(message, KEYED_SCHEMA).column("at").cast(pa.int64()).to_pylist()
    return tuple(_value(*divmod(number, _ROWS_MAX)) for number in numbers)
