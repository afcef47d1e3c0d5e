"""The partitioner gives Kafka's answers, for one key and for a whole column, and keeps the order of rows."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.client.partitioner import (
    REMEMBERED_KEY_BYTES,
    REMEMBERED_KEYS,
    KeyPartitions,
    partition_batch,
    row_partitions,
)
from spark_broker.errors import SchemaMismatchError
from spark_broker.protocol.murmur2 import LONG_KEY_BYTES, murmur2, murmur2_rows, partition_of

# From Kafka's own UtilsTest.testMurmur2.
KAFKA_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def hashes_of(keys: list[bytes]) -> list[int]:
    lengths = np.array([len(key) for key in keys], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    hashes = murmur2_rows(np.frombuffer(b"".join(keys), dtype=np.uint8), starts, lengths)
    return [int(value) for value in hashes.astype(np.int32)]


def batch_of(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


@pytest.mark.parametrize(("key", "expected"), KAFKA_VECTORS.items())
def test_one_key_has_kafkas_hash(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected


def test_a_column_has_kafkas_hashes() -> None:
    assert hashes_of(list(KAFKA_VECTORS)) == list(KAFKA_VECTORS.values())


@given(st.lists(st.binary(max_size=40), max_size=50))
def test_a_column_hashes_like_its_keys_one_by_one(keys: list[bytes]) -> None:
    assert hashes_of(keys) == [murmur2(key) for key in keys]


@given(st.binary(min_size=100, max_size=300))
def test_a_long_key_alone_hashes_like_one_in_a_column(key: bytes) -> None:
    assert hashes_of([key]) == [murmur2(key)]


@given(st.lists(st.binary(max_size=200), max_size=50), st.integers(1, 9))
def test_a_key_that_comes_again_goes_to_the_same_partition(keys: list[bytes], partitions: int) -> None:
    by_key = KeyPartitions(partitions)
    assert [by_key[key] for key in keys * 2] == [partition_of(key, partitions) for key in keys * 2]


def test_keys_that_are_remembered_are_few_and_short() -> None:
    by_key = KeyPartitions(7)
    for number in range(REMEMBERED_KEYS + 10):
        by_key[b"%d" % number]
    assert len(by_key) <= REMEMBERED_KEYS
    by_key[b"x" * (REMEMBERED_KEY_BYTES + 1)]
    assert max(map(len, by_key)) <= REMEMBERED_KEY_BYTES


def test_long_keys_among_short_ones_hash_like_one_by_one() -> None:
    keys = [b"x" * n for n in (0, 3, LONG_KEY_BYTES, LONG_KEY_BYTES + 1, 5000, 7)]
    assert hashes_of(keys) == [murmur2(key) for key in keys]


@given(st.lists(st.one_of(st.none(), st.binary(max_size=12)), min_size=1, max_size=60), st.integers(2, 9))
def test_rows_keep_their_order_and_go_where_kafka_sends_them(keys: list[bytes | None], partitions: int) -> None:
    batch = batch_of(key=pa.array(keys, pa.binary()), n=pa.array(range(len(keys))))
    parts = partition_batch(batch, ["key"], partitions, sticky=1)
    expected: dict[int, list[int]] = {}
    for row, key in enumerate(keys):
        expected.setdefault(1 if key is None else partition_of(key, partitions), []).append(row)
    assert {p: part.column("n").to_pylist() for p, part in parts} == expected
    assert [p for p, _ in parts] == sorted(p for p, _ in parts)


def test_a_slice_of_a_column_is_hashed_without_the_rows_around_it() -> None:
    whole = batch_of(key=pa.array(["a", "bb", None, "ccc", "dddd"]), n=pa.array(range(5)))
    sliced = row_partitions(whole.slice(1, 3), ["key"], 7)
    full = row_partitions(whole, ["key"], 7)
    assert sliced is not None
    assert full is not None
    assert sliced.tolist() == full.tolist()[1:4]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint16()])
def test_an_integer_is_eight_bytes_so_that_widening_does_not_reroute(kind: pa.DataType) -> None:
    partitions = row_partitions(batch_of(k=pa.array([0, 1, 77, None], kind)), ["k"], 1000)
    assert partitions is not None
    assert partitions.tolist()[:3] == [partition_of(struct.pack(">q", n), 1000) for n in (0, 1, 77)]
    assert partitions.tolist()[3] == -1


def test_several_columns_are_length_prefixed() -> None:
    batch = batch_of(
        a=pa.array(["ab", "a", None, None]), b=pa.array(["c", "bc", "x", None]), n=pa.array([1, 2, 3, None])
    )
    partitions = row_partitions(batch, ["a", "b", "n"], 100_003)
    assert partitions is not None

    def prefixed(value: bytes | None) -> bytes:
        return b"\xff" * 4 if value is None else struct.pack(">I", len(value)) + value

    rows = [(b"ab", b"c", 1), (b"a", b"bc", 2), (None, b"x", 3)]
    wanted = [partition_of(prefixed(a) + prefixed(b) + prefixed(struct.pack(">q", n)), 100_003) for a, b, n in rows]
    assert partitions.tolist() == [*wanted, -1]
    assert wanted[0] != wanted[1], "('ab', 'c') and ('a', 'bc') are different keys"


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.list_(pa.int32())])
def test_a_key_that_is_no_key_is_refused(kind: pa.DataType) -> None:
    batch = batch_of(k=pa.array([[1]] if pa.types.is_list(kind) else [1.0], kind))
    with pytest.raises(SchemaMismatchError, match="'k'"):
        partition_batch(batch, ["k"], 3)


def test_a_missing_key_column_is_named() -> None:
    with pytest.raises(SchemaMismatchError, match="'nope'"):
        partition_batch(batch_of(k=pa.array([1])), ["nope"], 3)


def test_rows_without_a_key_stay_in_one_batch() -> None:
    batch = batch_of(key=pa.nulls(4, pa.binary()))
    assert partition_batch(batch, ["key"], 5, sticky=3) == [(3, batch)]
    assert partition_batch(batch, [], 5, sticky=2) == [(2, batch)]
