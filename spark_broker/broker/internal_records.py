"""Rows of internal topics: key and value as bytes, in Kafka's record schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from spark_broker.protocol.arrays import array_of, nulls, scalar_of
from spark_broker.protocol.arrow_message import encode_batch

BATCH_BYTES = 1_048_576

Row = tuple[bytes, bytes | None]
"""Key and value. None: a tombstone."""


def encode_rows(
    rows: Sequence[Row],
    schema: pa.Schema,
    schema_id: int,
    now_ms: int,
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    sequence: int = -1,
    attributes: int = 0,
) -> bytes:
    """The message of a batch of these rows; `now_ms` (UTC) is their timestamp."""
    columns: list[pa.Array] = [
        array_of([row[0] for row in rows], schema.field("key").type),
        array_of([row[1] for row in rows], schema.field("value").type),
        nulls(len(rows), schema.field("headers").type),
        pa.repeat(scalar_of(now_ms * 1000, schema.field("timestamp").type), len(rows)),
    ]
    return encode_batch(
        pa.RecordBatch.from_arrays(columns, schema=schema),
        schema_id=schema_id,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=sequence,
        attributes=attributes,
    )


def row_batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows in batches of a moderate size, so that the topic accepts each, however many rows there are."""
    batch: list[Row] = []
    size_bytes = 0
    for row in rows:
        key, value = row
        batch.append(row)
        size_bytes += len(key) + len(value or b"")
        if size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Key and value of each row; None where the record has none."""
    return zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
