"""Keys and tombstones of stored batches, of Kafka's record and of typed topics, whole and compacted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.arrow_message import decode_batch, encode_batch, encode_compacted, inflated_bytes
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.keys import key_array
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.storage.keyed_rows import KeyedRows, offsets_of
from spark_broker.storage.log_view import Chunk
from tests.storage.keyed_logs import keyed_frame, only, stored

TYPED = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("name", pa.string()), ("n", pa.int32())])
LATER = TYPED.append(pa.field("later", pa.string()))
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def chunk_of(frames: Sequence[Frame]) -> Chunk:
    return Chunk(list(frames), b"".join(bytes(frame.message) for frame in frames))


def keyed_rows(schema: pa.Schema, keys: Sequence[str], timestamp: str = "") -> KeyedRows:
    return KeyedRows([schema], [schema_to_bytes(schema)], keys, timestamp)


KAFKA = keyed_rows(DEFAULT_SCHEMA, ["key"])


def typed_frame(base_offset: int, *rows: dict[str, object], compression: str | None = None) -> Frame:
    return stored(
        encode_batch(pa.RecordBatch.from_pylist(list(rows), schema=TYPED), compression=compression), base_offset
    )


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_keys_tombstones_and_offsets_of_many_batches_come_at_once(compression: str | None) -> None:
    first = keyed_frame(10, (b"a", b"1"), (b"b", None), (None, b"3"), first=True, compression=compression)
    second = keyed_frame(13, (b"", b""), (b"a", None), compression=compression)
    chunk = chunk_of(
        [first, only(keyed_frame(15, (b"x", b"1"), (b"y", b"2")), [1]), second._replace(header=second.header)]
    )
    assert KAFKA.keys(chunk).to_pylist() == [b"a", b"b", None, b"y", b"", b"a"]
    assert KAFKA.tombstones(chunk).tolist() == [False, True, False, False, False, True]
    assert offsets_of(chunk).tolist() == [10, 11, 12, 16, 13, 14]


def test_a_tombstone_of_a_typed_topic_has_nothing_but_its_key_and_its_time() -> None:
    rows = keyed_rows(TYPED, ["id"], "at")
    frame = typed_frame(
        0,
        {"id": 1, "at": NOW, "name": None, "n": None},
        {"id": 1, "at": NOW, "name": "", "n": None},
        {"id": 2, "at": None, "name": None, "n": 0},
        {"id": 2, "at": None, "name": None, "n": None},
    )
    assert rows.tombstones(chunk_of([frame])).tolist() == [True, False, False, True]


def test_without_a_timestamp_column_a_time_is_a_value() -> None:
    frame = typed_frame(0, {"id": 1, "at": NOW, "name": None, "n": None})
    assert keyed_rows(TYPED, ["id"]).tombstones(chunk_of([frame])).tolist() == [False]


def test_a_topic_of_keys_alone_has_no_tombstones() -> None:
    """Its rows would delete themselves."""
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    frame = stored(encode_batch(pa.record_batch({"a": [1], "b": [2]}, schema=schema)), 0)
    assert keyed_rows(schema, ["a", "b"]).tombstones(chunk_of([frame])).tolist() == [False]


def test_keys_of_several_columns_are_those_that_choose_the_partition() -> None:
    batch = pa.RecordBatch.from_pylist([{"id": 1, "name": "x"}, {"id": 1, "name": None}], schema=TYPED)
    frame = stored(encode_batch(batch), 0)
    assert keyed_rows(TYPED, ["name", "id"]).keys(chunk_of([frame])) == key_array(batch, ["name", "id"])


def test_rows_of_a_schema_without_the_key_columns_have_no_keys() -> None:
    """The key columns were added to the topic later."""
    frame = typed_frame(0, {"id": 1}, {"id": 2})
    rows = KeyedRows([TYPED, LATER], [schema_to_bytes(TYPED), schema_to_bytes(LATER)], ["later"])
    assert rows.keys(chunk_of([frame])).to_pylist() == [None, None]


def test_rows_of_a_schema_with_some_of_the_key_columns_have_the_key_of_rows_with_null_in_the_others() -> None:
    """Story: such a row had no key, so that a later tombstone of its key left it where it was."""
    frame = typed_frame(0, {"id": 1}, {"id": 2})
    rows = KeyedRows([TYPED, LATER], [schema_to_bytes(TYPED), schema_to_bytes(LATER)], ["id", "later"])
    newer = pa.RecordBatch.from_pylist([{"id": 1}, {"id": 2}], schema=LATER)
    assert rows.keys(chunk_of([frame])) == key_array(newer, ["id", "later"])


def test_a_batch_that_does_not_decode_is_named_as_damage() -> None:
    frame = keyed_frame(0, (b"a", b"1"))
    broken = bytes(frame.message[:-40]) + bytes(40)
    chunk = Chunk([frame], broken[: len(broken) // 2])
    with pytest.raises(CorruptMessageError, match="do not decode"):
        KAFKA.keys(chunk)


def test_a_compacted_batch_among_others_keeps_its_offsets() -> None:
    frame = keyed_frame(100, *((b"%d" % n, b"v") for n in range(50)))
    left = decode_batch(frame.message, DEFAULT_SCHEMA).take(pa.array([0, 49]))
    compacted = encode_compacted(left, frame.header, np.array([0, 49], np.int64), "zstd")
    chunk = chunk_of([keyed_frame(90, (b"a", b"b")), compacted, only(frame, [])])
    assert offsets_of(chunk).tolist() == [90, 100, 149]
    assert KAFKA.keys(chunk).to_pylist() == [b"a", b"0", b"49"]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_chunk_is_divided_by_what_it_inflates_to(compression: str | None) -> None:
    """Story: batches of a megabyte of zeros are stored as a kilobyte each. 16 MiB of them were inflated to 16 GiB at
    once, at each start of every broker.
    """
    frames = [keyed_frame(n, (bytes(1000 * n), b"x"), first=n == 0, compression=compression) for n in range(10)]
    whole = chunk_of(frames)
    assert list(whole.parts(1 << 20, 1 << 20)) == [whole]
    parts = list(whole.parts(10_000, 1 << 20))
    assert len(parts) > 3
    assert [frame for part in parts for frame in part.frames] == frames
    assert b"".join(part.data for part in parts) == whole.data
    assert [key for part in parts for key in KAFKA.keys(part).to_pylist()] == KAFKA.keys(whole).to_pylist()
    for part in parts:
        assert len(part.frames) == 1 or sum(map(inflated_bytes, part.frames)) <= 10_000
    assert [part.row_count for part in whole.parts(1 << 20, 3)] == [3, 3, 3, 1]
    assert [part.row_count for part in whole.parts(1, 1)] == [1] * 10
