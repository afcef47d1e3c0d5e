"""The key of each row of a batch, as bytes, the whole batch at once.

A string or binary column is its bytes, as in Kafka. An integer (also a boolean, a date or a timestamp) is 8 bytes
big-endian, so that widening its type changes no key. Several columns are concatenated, each with its length (4 bytes
big-endian; 0xFFFFFFFF for null) before it. A row without any key value has no key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_broker.errors import SchemaMismatchError
from spark_broker.protocol.arrays import to_numpy
from spark_broker.protocol.murmur2 import Bytes, Positions

_NULL_LENGTH = 0xFFFFFFFF

WHAT_KEYS_ARE = "a key is text, binary, an integer, a boolean, a date or a time"

_KINDS: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
    pa.types.is_duration,
)


class Keys(NamedTuple):
    """Key bytes of rows: row i has `data[starts[i] : starts[i] + lengths[i]]`. `valid` is false where it has no key."""

    data: Bytes
    starts: Positions
    lengths: Positions
    valid: npt.NDArray[np.bool_]


def can_be_key(kind: pa.DataType) -> bool:
    """Whether a column of this type may be part of a key. Equal floats and decimals may differ in their bytes."""
    return any(is_kind(kind) for is_kind in _KINDS)


def keys_of(batch: pa.RecordBatch, key_columns: Sequence[str]) -> Keys | None:
    """The keys of a batch; None when no row has one.

    Raises SchemaMismatchError for a key column that is missing or cannot be a key.
    """
    if not key_columns:
        return None
    columns = [_column(batch, name) for name in key_columns]
    if all(column.null_count == len(column) for column in columns):
        return None
    keys = [_key_bytes(column, name) for column, name in zip(columns, key_columns, strict=True)]
    return keys[0] if len(keys) == 1 else _concatenated(keys)


def key_array(batch: pa.RecordBatch, key_columns: Sequence[str]) -> pa.Array:
    """The keys of a batch as a binary column, null where a row has none. Raises as `keys_of` does."""
    if len(key_columns) == 1:
        column = _column(batch, key_columns[0])
        if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
            return column.cast(pa.binary())
    keys = keys_of(batch, key_columns)
    if keys is None:
        return pa.nulls(batch.num_rows, pa.binary())
    # Their bytes lie one after the other, in the order of the rows.
    offsets = np.zeros(len(keys.lengths) + 1, np.int32)
    np.cumsum(keys.lengths, out=offsets[1:])
    valid = None if keys.valid.all() else pa.py_buffer(np.packbits(keys.valid, bitorder="little"))
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(keys.data))]
    return pa.Array.from_buffers(pa.binary(), len(keys.lengths), buffers)


def with_key_columns(batch: pa.RecordBatch, key_columns: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
    """The batch with nulls for those of the columns that it lacks: its rows are of an older schema than this one.

    Raises SchemaMismatchError where this schema lacks one, too.
    """
    for name in key_columns:
        if batch.schema.get_field_index(name) < 0:
            if schema.get_field_index(name) < 0:
                raise SchemaMismatchError(f"key column {name!r} is not in the topic's schema")
            batch = batch.append_column(name, pa.nulls(batch.num_rows, schema.field(name).type))
    return batch


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    index = batch.schema.get_field_index(name)
    if index < 0:
        raise SchemaMismatchError(f"key column {name!r} is not in the batch")
    return batch.column(index)


def _key_bytes(column: pa.Array, name: str) -> Keys:
    kind = column.type
    valid = np.ones(len(column), dtype=np.bool_)
    if column.null_count:
        valid = to_numpy(column.is_valid())
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _binary_keys(column, valid)
    if pa.types.is_fixed_size_binary(kind):
        return _binary_keys(column.cast(pa.binary()), valid)
    return _integer_keys(column, name, valid)


def _binary_keys(column: pa.Array, valid: npt.NDArray[np.bool_]) -> Keys:
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32, count=len(column) + 1, offset=column.offset * 4)
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)[first:last]
    starts = offsets[:-1].astype(np.int64) - first
    lengths = np.diff(offsets).astype(np.int64)
    lengths[~valid] = 0
    starts[~valid] = 0
    return Keys(data, starts, lengths, valid)


def _integer_keys(column: pa.Array, name: str, valid: npt.NDArray[np.bool_]) -> Keys:
    kind = column.type
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        column = column.cast(pa.int32())
    elif (
        pa.types.is_timestamp(kind)
        or pa.types.is_time64(kind)
        or pa.types.is_duration(kind)
        or pa.types.is_date64(kind)
    ):
        column = column.cast(pa.int64())
    elif pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif not can_be_key(kind):
        raise SchemaMismatchError(f"key column {name!r} is {kind}; {WHAT_KEYS_ARE}")
    unsigned = pa.types.is_uint64(column.type)
    numbers = np.where(valid, to_numpy(column), 0).astype(">u8" if unsigned else ">i8")
    count = len(numbers)
    return Keys(numbers.view(np.uint8), np.arange(count, dtype=np.int64) * 8, np.full(count, 8, dtype=np.int64), valid)


def _concatenated(keys: Sequence[Keys]) -> Keys:
    rows = len(keys[0].lengths)
    lengths = sum((key.lengths for key in keys), np.full(rows, 4 * len(keys), dtype=np.int64))
    starts = np.zeros(rows, dtype=np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])
    out = np.empty(int(lengths.sum()), dtype=np.uint8)
    at = starts.copy()
    for key in keys:
        prefix = np.where(key.valid, key.lengths, _NULL_LENGTH).astype(">u4")
        out[at[:, None] + np.arange(4)] = prefix.view(np.uint8).reshape(rows, 4)
        at += 4
        out[_spans(at, key.lengths)] = key.data[_spans(key.starts, key.lengths)]
        at += key.lengths
    return Keys(out, starts, lengths, np.logical_or.reduce([key.valid for key in keys]))


def _spans(starts: Positions, lengths: Positions) -> Positions:
    """Every position of every row, row after row."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)
