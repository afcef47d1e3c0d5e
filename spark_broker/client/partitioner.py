"""Which partition each row of a batch goes to: Kafka's murmur2 over the key columns, the whole batch at once.

Key bytes: a string or binary column is its bytes, as in Kafka. An integer (also a boolean, a date or a timestamp) is 8
bytes big-endian, so that widening its type does not reroute it. Several columns are concatenated, each with its length
(4 bytes big-endian; 0xFFFFFFFF for null) before it. A row without any key value has no key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_broker.errors import SchemaMismatchError
from spark_broker.protocol.arrays import from_numpy, to_numpy
from spark_broker.protocol.murmur2 import Bytes, Positions, murmur2_rows, partition_of

Partitions = npt.NDArray[np.int64]

UNKEYED = -1
_NULL_LENGTH = 0xFFFFFFFF

REMEMBERED_KEYS = 16_384
REMEMBERED_KEY_BYTES = 128


class _Keys(NamedTuple):
    """Key bytes of a column: row i is `data[starts[i] : starts[i] + lengths[i]]`. `valid` is false where it is null."""

    data: Bytes
    starts: Positions
    lengths: Positions
    valid: npt.NDArray[np.bool_]


class KeyPartitions(dict[bytes, int]):
    """The partition of each key of `send`. Short keys are remembered, because most keys come again.

    `partitions`: how many the topic has.
    """

    def __init__(self, partitions: int) -> None:
        super().__init__()
        self.partitions = partitions

    def __missing__(self, key: bytes) -> int:
        partition = partition_of(key, self.partitions)
        if len(key) <= REMEMBERED_KEY_BYTES:
            if len(self) >= REMEMBERED_KEYS:
                self.clear()
            self[key] = partition
        return partition


def partition_batch(
    batch: pa.RecordBatch, key_columns: Sequence[str], partitions: int, *, sticky: int = 0
) -> list[tuple[int, pa.RecordBatch]]:
    """The batch's rows by partition, in the order of partitions. Within a partition, rows keep their order.

    Rows without a key go to `sticky`. Raises SchemaMismatchError for a key column that is missing or cannot be a key.
    """
    if batch.num_rows == 0:
        return []
    if partitions == 1:
        return [(0, batch)]
    wanted = row_partitions(batch, key_columns, partitions)
    if wanted is None:
        return [(sticky, batch)]
    wanted[wanted == UNKEYED] = sticky
    return split_by_partition(batch, wanted, partitions)


def split_by_partition(batch: pa.RecordBatch, wanted: Partitions, partitions: int) -> list[tuple[int, pa.RecordBatch]]:
    """The rows of each partition that `wanted` names, in order. `wanted` has a number from 0 to `partitions` - 1 for
    each row.
    """
    counts = np.bincount(wanted, minlength=partitions)
    used = np.flatnonzero(counts)
    if len(used) == 1:
        return [(int(used[0]), batch)]
    # A stable sort keeps the rows' order. For 16-bit integers it is a radix sort.
    order = np.argsort(wanted.astype(np.uint16) if partitions <= 65_536 else wanted, kind="stable")
    sorted_rows = batch.take(from_numpy(order))
    ends = np.cumsum(counts)
    return [(int(p), sorted_rows.slice(int(ends[p] - counts[p]), int(counts[p]))) for p in used]


def row_partitions(batch: pa.RecordBatch, key_columns: Sequence[str], partitions: int) -> Partitions | None:
    """The partition of each row, or UNKEYED for a row without a key. None when no row has a key."""
    if not key_columns:
        return None
    columns = [_column(batch, name) for name in key_columns]
    if all(column.null_count == len(column) for column in columns):
        return None
    keys = [_key_bytes(column, name) for column, name in zip(columns, key_columns, strict=True)]
    joined = keys[0] if len(keys) == 1 else _concatenated(keys)
    hashes = murmur2_rows(joined.data, joined.starts, joined.lengths)
    wanted = (hashes & np.uint32(0x7FFFFFFF)).astype(np.int64) % partitions
    wanted[~joined.valid] = UNKEYED
    return wanted


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    index = batch.schema.get_field_index(name)
    if index < 0:
        raise SchemaMismatchError(f"key column {name!r} is not in the batch")
    return batch.column(index)


def _key_bytes(column: pa.Array, name: str) -> _Keys:
    kind = column.type
    valid = np.ones(len(column), dtype=np.bool_)
    if column.null_count:
        valid = to_numpy(column.is_valid())
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _binary_keys(column, valid)
    if pa.types.is_fixed_size_binary(kind):
        return _binary_keys(column.cast(pa.binary()), valid)
    return _integer_keys(column, name, valid)


def _binary_keys(column: pa.Array, valid: npt.NDArray[np.bool_]) -> _Keys:
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32, count=len(column) + 1, offset=column.offset * 4)
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)[first:last]
    starts = offsets[:-1].astype(np.int64) - first
    lengths = np.diff(offsets).astype(np.int64)
    lengths[~valid] = 0
    starts[~valid] = 0
    return _Keys(data, starts, lengths, valid)


def _integer_keys(column: pa.Array, name: str, valid: npt.NDArray[np.bool_]) -> _Keys:
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
    elif not pa.types.is_integer(kind):
        raise SchemaMismatchError(f"key column {name!r} is {kind}; a key is text, binary or an integer (no floats)")
    unsigned = pa.types.is_uint64(column.type)
    numbers = np.where(valid, to_numpy(column), 0).astype(">u8" if unsigned else ">i8")
    count = len(numbers)
    return _Keys(numbers.view(np.uint8), np.arange(count, dtype=np.int64) * 8, np.full(count, 8, dtype=np.int64), valid)


def _concatenated(keys: Sequence[_Keys]) -> _Keys:
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
    return _Keys(out, starts, lengths, np.logical_or.reduce([key.valid for key in keys]))


def _spans(starts: Positions, lengths: Positions) -> Positions:
    """Every position of every row, row after row."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)
