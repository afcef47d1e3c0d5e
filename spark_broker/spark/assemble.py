"""Turns fetched batches into the record batches that Spark takes. It looks at no row, and copies few columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from spark_broker.errors import SchemaMismatchError, invariant
from spark_broker.model import ConsumedBatch
from spark_broker.protocol.arrays import from_numpy, scalar_of
from spark_broker.spark.columns import CREATE_TIME, Column, Source
from spark_broker.spark.spark_schema import ReadSchema

TARGET_ROWS = 10_000
"""Small micro-batches are joined up to this many rows (Spark's own batch size). Each batch costs the JVM a fixed price.
"""


def assembled(batches: Sequence[ConsumedBatch], output: ReadSchema) -> Iterator[pa.RecordBatch]:
    """Batches of exactly the output's schema, rows in the order of the input. Raises SchemaMismatchError."""
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        pending.append(_assemble(batch, output))
        rows += batch.data.num_rows
        if rows >= TARGET_ROWS:
            yield _joined(pending)
            pending, rows = [], 0
    if rows:
        yield _joined(pending)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _assemble(batch: ConsumedBatch, output: ReadSchema) -> pa.RecordBatch:
    arrays = []
    for column, field in zip(output.columns, output.schema, strict=True):
        array = _values(batch, column)
        if not field.nullable and array.null_count:
            raise SchemaMismatchError(
                f"{batch.topic}-{batch.partition}: {field.name!r} has nulls from offset {batch.base_offset} on;"
                " the schema of the read says that it has none"
            )
        # Spark has its own names for the fields inside lists and maps.
        arrays.append(array if array.type.equals(field.type, check_metadata=True) else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=output.schema)


def _values(batch: ConsumedBatch, column: Column) -> pa.Array:
    rows = batch.data.num_rows
    match column.source:
        case Source.DATA:
            return batch.data.column(column.name)
        case Source.TOPIC:
            return pa.repeat(scalar_of(batch.topic, pa.string()), rows)
        case Source.PARTITION:
            return pa.repeat(scalar_of(batch.partition, pa.int32()), rows)
        case Source.OFFSET:
            return from_numpy(batch.offsets)
        case Source.TIMESTAMP:
            invariant(len(batch.timestamps) == rows, "every record has a timestamp")
            return batch.timestamps
        case Source.TIMESTAMP_TYPE:
            return pa.repeat(scalar_of(CREATE_TIME, pa.int32()), rows)
        case Source.LEADER_EPOCH:
            return pa.repeat(scalar_of(batch.leader_epoch, pa.int32()), rows)
