"""Arrays that are built without `pa.array` are those that `pa.array` builds."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.protocol.arrays import array_of, from_numpy, nulls, scalar_of, to_numpy
from spark_broker.protocol.schema import DEFAULT_SCHEMA, TIMESTAMP_TYPE
from spark_broker.protocol.values import UnknownFieldError


def whole(number: float) -> float:
    return float(round(number)) if math.isfinite(number) else number


ZONES = st.one_of(st.none(), st.integers(-720, 720).map(lambda minutes: timezone(timedelta(minutes=minutes))))
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.binary(): st.one_of(st.binary(max_size=5), st.text(max_size=5)),
    pa.string(): st.one_of(st.text(max_size=5), st.binary(max_size=2)),
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-130, 130),
    pa.int32(): st.one_of(st.integers(-(2**31) - 1, 2**31), st.booleans()),
    # Where Arrow would make another value of one, `array_of` refuses it: tests/client/test_given_values.py has these.
    pa.int64(): st.one_of(st.integers(-(2**63) - 1, 2**63), st.integers(0, 9), st.floats().map(whole)),
    pa.float32(): st.one_of(st.floats(width=32), st.integers(-(2**100), 2**100)),
    pa.float64(): st.one_of(st.floats(), st.integers()),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.one_of(st.datetimes(), st.integers(0, 9)),
    TIMESTAMP_TYPE: st.one_of(st.datetimes(timezones=ZONES), st.integers(0, 9)),
    pa.decimal128(5, 2): st.decimals(0, 9, places=2),
}


def kinds() -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    def nested(
        inner: st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]],
    ) -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
        lists = inner.map(lambda kind: (pa.list_(kind[0]), st.lists(st.none() | kind[1], max_size=3)))
        tuples = inner.map(lambda kind: (pa.list_(kind[0]), st.tuples(kind[1], kind[1])))
        return st.one_of(lists, tuples, st.lists(inner, min_size=1, max_size=2).map(struct))

    def struct(fields: list[tuple[pa.DataType, st.SearchStrategy[Any]]]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
        names = [str(number) for number in range(len(fields))]
        values = {name: st.none() | kind[1] for name, kind in zip(names, fields, strict=True)}
        rows = st.fixed_dictionaries({}, optional=values)
        return pa.struct([(name, kind[0]) for name, kind in zip(names, fields, strict=True)]), rows

    return st.recursive(st.sampled_from(sorted(VALUES.items(), key=str)), nested, max_leaves=3)


def built(build: Callable[[list[object], pa.DataType], pa.Array], values: list[object], kind: pa.DataType) -> str:
    """The type, the values and the count of nulls as text, because NaN is not equal to NaN; or that it is refused."""
    try:
        array = build(values, kind)
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        return "refused"
    array.validate(full=True)
    return f"{array.type} {array.to_pylist()} {array.null_count}"


@given(st.data())
def test_an_array_is_the_one_that_arrow_builds(data: st.DataObject) -> None:
    kind, value = data.draw(kinds())
    values = data.draw(st.lists(st.none() | value, max_size=6))
    assert built(array_of, values, kind) == built(pa.array, values, kind)


def test_names_in_bytes_are_names() -> None:
    kind = pa.struct([("a", pa.int64())])
    assert array_of([{b"a": 1}], kind) == pa.array([{b"a": 1}], kind)


def test_a_name_that_the_struct_does_not_have_is_refused() -> None:
    with pytest.raises(UnknownFieldError, match="b"):
        array_of([{"a": 1}, {"a": 1, "b": None}], pa.struct([("a", pa.int64())]))


@given(st.lists(st.booleans() | st.none(), max_size=20), st.integers(0, 20))
def test_a_slice_of_booleans_in_numpy(bits: list[bool | None], start: int) -> None:
    part = pa.array(bits, pa.bool_())[start:]
    validity = to_numpy(part.is_valid())
    assert validity.dtype == np.bool_
    assert validity.tolist() == [bit is not None for bit in bits[start:]]
    assert to_numpy(part.drop_null()).tolist() == [bit for bit in bits[start:] if bit is not None]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint64", "float32", "float64"])
@given(st.lists(st.integers(0, 100), max_size=20), st.integers(0, 20))
def test_numbers_go_to_numpy_and_back(dtype: str, numbers: list[int], start: int) -> None:
    values = np.array(numbers, dtype=dtype)
    array = from_numpy(values)
    assert array.equals(pa.array(values))
    assert to_numpy(array[start:]).dtype == values.dtype
    assert to_numpy(array[start:]).tolist() == values[start:].tolist()
    assert from_numpy(values[::2]).to_pylist() == values[::2].tolist()


def test_a_scalar() -> None:
    assert scalar_of(5, pa.int64()).equals(pa.scalar(5, pa.int64()))
    assert scalar_of(datetime(2024, 1, 1, tzinfo=UTC), TIMESTAMP_TYPE).value == 1_704_067_200_000_000


NO_PANDAS = """
import sys
from datetime import UTC, datetime
import numpy as np
import pyarrow as pa
from spark_broker.protocol.arrays import array_of, from_numpy, nulls, scalar_of, to_numpy
from spark_broker.protocol.schema import DEFAULT_SCHEMA
row = {"key": b"k", "value": "text", "headers": [{"key": "h", "value": None}], "timestamp": datetime.now(UTC)}
for field in DEFAULT_SCHEMA:
    array_of([row[field.name], None], field.type)
    array_of([], field.type)
for value, kind in ((1, pa.int32()), (1.5, pa.float64()), (True, pa.bool_()), ("text", pa.string()), (5, pa.int64())):
    scalar_of(value, kind)
to_numpy(from_numpy(np.arange(5)).is_valid())
to_numpy(from_numpy(np.arange(5)))
print("pandas" in sys.modules)
"""


def test_nobody_looks_for_pandas() -> None:
    run = subprocess.run([sys.executable, "-c", NO_PANDAS], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "False\n", f"{DEFAULT_SCHEMA.names} needed pandas"


NESTED = [
    DEFAULT_SCHEMA.field("headers").type,
    pa.map_(pa.string(), pa.list_(pa.int32())),
    pa.list_(pa.struct([pa.field("m", pa.map_(pa.string(), pa.string()))])),
]
STRUCT = pa.struct([pa.field("a", pa.list_(pa.string())), pa.field("b", pa.int64(), nullable=False)])


@pytest.mark.parametrize("kind", [*NESTED, STRUCT, *VALUES, pa.dictionary(pa.int32(), pa.string())], ids=str)
@pytest.mark.parametrize("count", [0, 1, 8, 9, 1000])
def test_nulls_are_those_of_pyarrow(kind: pa.DataType, count: int) -> None:
    array = nulls(count, kind)
    array.validate(full=True)
    assert array.equals(pa.nulls(count, kind))
    assert array.null_count == count


@pytest.mark.parametrize("kind", NESTED, ids=str)
def test_a_message_of_nulls_has_an_offset_for_each_row_and_no_more(kind: pa.DataType) -> None:
    rows = 10_000
    message = pa.RecordBatch.from_arrays([nulls(rows, kind)], ["x"]).serialize()
    assert message.size < rows * (4 + 1 / 8) + 1000
