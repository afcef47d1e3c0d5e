"""Topic schemas: their stored form and the cast of a user's batch."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from spark_broker.errors import InvalidSchemaError, SchemaMismatchError
from spark_broker.protocol.schema import (
    DEFAULT_SCHEMA,
    TIMESTAMP_TYPE,
    conform,
    normalize_schema,
    schema_from_bytes,
    schema_to_bytes,
)


def one(kind: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field("c", kind)])


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (pa.large_string(), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.binary_view(), pa.binary()),
        (pa.binary(16), pa.binary()),
        (pa.timestamp("ns"), pa.timestamp("us")),
        (pa.timestamp("ms", "Europe/Zurich"), TIMESTAMP_TYPE),
        (pa.date64(), pa.date32()),
        (pa.time32("ms"), pa.time64("us")),
        (pa.duration("ns"), pa.duration("us")),
        (pa.uint8(), pa.int16()),
        (pa.uint32(), pa.int64()),
        (pa.decimal128(5, 1), pa.decimal128(5, 1)),
        (pa.large_list(pa.large_string()), pa.list_(pa.string())),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float32())),
        (pa.list_(pa.field("item", pa.int8(), nullable=False)), pa.list_(pa.int8())),
        (pa.struct([pa.field("x", pa.timestamp("s"), nullable=False)]), pa.struct([("x", pa.timestamp("us"))])),
        (pa.map_(pa.large_string(), pa.uint16()), pa.map_(pa.string(), pa.int32())),
        (pa.uuid(), pa.binary()),
    ],
)
def test_types_are_stored_as_spark_reads_them(given: pa.DataType, stored: pa.DataType) -> None:
    normal = normalize_schema(one(given))
    assert normal.field("c").type == stored
    assert normalize_schema(normal) == normal


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int32(), pa.string()),
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.int8()),
        pa.float16(),
        pa.month_day_nano_interval(),
        pa.null(),
        pa.uint64(),
        pa.decimal256(50, 2),
        pa.struct([]),
        pa.list_(pa.float16()),
        pa.struct([("a", pa.int8()), ("A", pa.int8())]),
        pa.map_(pa.string(), pa.null()),
    ],
)
def test_types_that_the_log_does_not_store_are_refused_wherever_they_are(kind: pa.DataType) -> None:
    with pytest.raises(InvalidSchemaError, match="'c"):
        normalize_schema(one(kind))


@pytest.mark.parametrize(
    "names", [["a", "a"], ["a", "A"], ["_offset"], ["_Timestamp_x"], ["_topic"], ["_partition"], [""], []]
)
def test_names_that_could_not_be_queried_are_refused(names: list[str]) -> None:
    with pytest.raises(InvalidSchemaError):
        normalize_schema(pa.schema([pa.field(name, pa.int8()) for name in names]))


def test_deep_nesting_is_refused() -> None:
    kind: pa.DataType = pa.int8()
    for _ in range(40):
        kind = pa.list_(kind)
    with pytest.raises(InvalidSchemaError):
        normalize_schema(one(kind))


def test_metadata_is_stripped_and_top_level_nullability_is_kept() -> None:
    field = pa.field("c", pa.int8(), nullable=False, metadata={"k": "v"})
    normal = normalize_schema(pa.schema([field], metadata={"pandas": "{}"}))
    assert normal.metadata is None
    assert normal.field("c").metadata is None
    assert not normal.field("c").nullable


def test_the_default_schema_is_normal_and_survives_its_bytes() -> None:
    assert normalize_schema(DEFAULT_SCHEMA).equals(DEFAULT_SCHEMA, check_metadata=True)
    assert schema_from_bytes(schema_to_bytes(DEFAULT_SCHEMA)).equals(DEFAULT_SCHEMA, check_metadata=True)
    assert len(schema_to_bytes(DEFAULT_SCHEMA)) % 8 == 0


def test_bytes_that_are_no_schema_are_refused_and_do_no_harm() -> None:
    data = schema_to_bytes(DEFAULT_SCHEMA)
    rng = random.Random(5)
    for bad in (b"", data[:-1], data + data, b"x" * 100, bytes(2_000_000)):
        with pytest.raises(InvalidSchemaError):
            schema_from_bytes(bad)
    for _ in range(2000):
        mutated = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(8, len(mutated))] = rng.randrange(256)
        try:
            normalize_schema(schema_from_bytes(bytes(mutated)))
        except InvalidSchemaError:
            continue


TARGET = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("at", TIMESTAMP_TYPE)]
)


def test_columns_are_ordered_by_name_filled_and_cast() -> None:
    batch = pa.record_batch({"name": pa.array(["a"]).dictionary_encode(), "id": pa.array([1], pa.int8())})
    conformed = conform(batch, TARGET)
    assert conformed.schema == TARGET
    assert conformed.to_pylist() == [{"id": 1, "name": "a", "at": None}]


def test_a_batch_that_fits_is_not_copied() -> None:
    batch = pa.record_batch([pa.array([1])], schema=one(pa.int64()))
    assert conform(batch, one(pa.int64())) is batch


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": pa.array([1]), "nam": pa.array(["x"])}, "'nam'.*did you mean 'name'"),
        ({"name": pa.array(["x"])}, "'id'.*missing"),
        ({"id": pa.array([None], pa.int64())}, "'id'.*nulls"),
        ({"id": pa.array(["1"])}, "'id' is string.*int64"),
        ({"id": pa.array([1.5])}, "'id' is double.*int64"),
        ({"id": pa.array([1]), "at": pa.array([1])}, "'at' is int64.*timestamp"),
        ({"id": pa.array([1]), "name": pa.array([1])}, "'name' is int64.*string"),
        ({"id": pa.array([1]), "name": pa.array([b"\xff"])}, "'name' is binary.*string"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_column_and_both_types(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        conform(pa.record_batch(columns), TARGET)


def test_nested_columns_are_cast_inside() -> None:
    batch = pa.RecordBatch.from_pylist(
        [{"key": "k", "value": b"v", "headers": [{"key": "h", "value": b"1"}]}],
        schema=pa.schema(
            [
                pa.field("key", pa.string()),
                pa.field("value", pa.large_binary()),
                pa.field("headers", pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.binary())]))),
            ]
        ),
    )
    row = conform(batch, DEFAULT_SCHEMA).to_pylist()[0]
    assert row == {"key": b"k", "value": b"v", "headers": [{"key": "h", "value": b"1"}], "timestamp": None}
