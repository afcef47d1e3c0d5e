"""How a topic's schema may change, and that what was stored before can be read afterwards."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.errors import InvalidSchemaError
from spark_broker.protocol.schema import columns_stored, conform, normalize_schema
from spark_broker.protocol.schema_evolution import evolved, widened

CURRENT = normalize_schema(
    pa.schema([pa.field("id", pa.int32(), nullable=False), ("price", pa.decimal128(10, 2)), ("note", pa.string())])
)


def test_new_columns_come_last_and_columns_that_are_not_named_stay() -> None:
    changes = pa.schema([("weight", pa.float32()), ("price", pa.decimal128(20, 2)), ("tags", pa.list_(pa.string()))])
    new = evolved(CURRENT, changes)
    assert new.names == ["id", "price", "note", "weight", "tags"]
    assert new.field("price").type == pa.decimal128(20, 2)
    assert new.field("id") == CURRENT.field("id")
    assert evolved(new, changes) == evolved(new, CURRENT.remove(1)) == new


def test_a_column_that_must_not_be_null_stays_so_when_it_becomes_wider() -> None:
    new = evolved(CURRENT, pa.schema([pa.field("id", pa.int64())]))
    assert (new.field("id").type, new.field("id").nullable) == (pa.int64(), False)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.field("id", pa.int16()), "'id' is int32 and cannot become int16"),
        (pa.field("id", pa.float64()), "cannot become double"),
        (pa.field("price", pa.decimal128(12, 4)), "cannot become decimal128"),
        (pa.field("note", pa.binary()), "cannot become binary"),
        (pa.field("at", pa.timestamp("us"), nullable=False), "new column 'at' must be nullable"),
        (pa.field("ID", pa.int64()), "case does not count"),
        (pa.field("_offset", pa.int64()), "reserved"),
        (pa.field("big", pa.uint64()), "uint64"),
    ],
)
def test_what_would_lose_values_is_refused(column: pa.Field, said: str) -> None:
    with pytest.raises(InvalidSchemaError, match=said):
        evolved(CURRENT, pa.schema([column]))


TYPES = st.sampled_from(
    [
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.decimal128(9, 2),
        pa.decimal128(18, 2),
    ]
)


@given(TYPES, TYPES, st.lists(st.none() | st.integers(-128, 127)))
def test_every_value_of_the_narrow_type_is_read_as_the_wide_one(
    narrow: pa.DataType, wide: pa.DataType, values: list[int | None]
) -> None:
    old = pa.schema([pa.field("x", narrow)])
    if not (widened(narrow, wide) or narrow == wide):
        with pytest.raises(InvalidSchemaError):
            evolved(old, pa.schema([pa.field("x", wide)]))
        return
    new = evolved(old, pa.schema([pa.field("x", wide), ("y", pa.string())]))
    stored = pa.record_batch([pa.array(values, narrow)], schema=old)
    read = conform(stored, new)
    assert read.schema == new
    assert read.column("x").to_pylist() == stored.column("x").to_pylist()
    assert read.column("y").null_count == len(values)


def test_rows_of_an_older_schema_are_counted_by_a_column_that_they_have() -> None:
    assert columns_stored(CURRENT, ["later", "note"]) == ["note"]
    assert columns_stored(CURRENT, ["later"]) == ["id"]
