"""Which partition each row of a batch goes to: Kafka's murmur2 over the key (`protocol.keys`), all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_broker.protocol.arrays import from_numpy
from spark_broker.protocol.keys import keys_of
from spark_broker.protocol.murmur2 import murmur2_rows, partition_of

Partitions = npt.NDArray[np.int64]

UNKEYED = -1

REMEMBERED_KEYS = 16_384
REMEMBERED_KEY_BYTES = 128


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
    keys = keys_of(batch, key_columns)
    if keys is None:
        return None
    hashes = murmur2_rows(keys.data, keys.starts, keys.lengths)
    wanted = (hashes & np.uint32(0x7FFFFFFF)).astype(np.int64) % partitions
    wanted[~keys.valid] = UNKEYED
    return wanted
