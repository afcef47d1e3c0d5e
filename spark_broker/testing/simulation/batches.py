"""Micro-batches with unique values, encoded once for all schedules of this process, and read back."""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa

from spark_broker.protocol.arrow_message import decode_batch, encode_batch
from spark_broker.protocol.ipc_message import head_length
from spark_broker.protocol.schema import schema_to_bytes
from spark_broker.protocol.wire import Buffer

SCHEMA = pa.schema([pa.field("value", pa.binary())])
SCHEMA_BYTES = schema_to_bytes(SCHEMA)

_decoded: dict[bytes, tuple[bytes, ...]] = {}
_MAX_DECODED = 100_000


def values_of(number: int, rows: int) -> tuple[bytes, ...]:
    """The values of batch `number` of a schedule: no two batches share one."""
    return tuple(b"%d.%d" % (number, row) for row in range(rows))


@lru_cache(maxsize=50_000)
def encoded(number: int, rows: int) -> bytes:
    """The batch as a producer encodes it."""
    values = pa.array(values_of(number, rows), type=pa.binary())
    return encode_batch(pa.RecordBatch.from_arrays([values], schema=SCHEMA))


def decoded(message: Buffer) -> tuple[bytes, ...]:
    """The values in a stored batch, cached by the bytes of its body, which only the producer writes."""
    view = memoryview(message)
    body = bytes(view[head_length(view) :])
    values = _decoded.get(body)
    if values is None:
        values = tuple(decode_batch(message, SCHEMA).column(0).to_pylist())
        if len(_decoded) < _MAX_DECODED:
            _decoded[body] = values
    return values
