"""Whatever a row is given: each value is refused with its column and row, or read back equal to what was given."""

from __future__ import annotations

import array
import decimal
import enum
import math
import re
import uuid
import warnings
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.inputs import conformed
from spark_broker.errors import SchemaMismatchError
from spark_broker.protocol.schema import normalize_schema, schema_to_bytes

LOCAL, POINT, TIME, SPAN = pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.time64("us"), pa.duration("us")
NAMES = ("a", "b")
EPOCH = date(1970, 1, 1).toordinal()

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
LEAVES = [
    *(pa.bool_(), *INTEGERS, pa.float32(), pa.float64(), pa.decimal128(10, 2), pa.decimal128(38, 10)),
    *(pa.string(), pa.binary(), pa.date32(), TIME, LOCAL, POINT, SPAN),
]
NESTED = [
    pa.list_(pa.int64()),
    pa.list_(pa.float32()),
    pa.list_(pa.float64()),
    pa.list_(pa.string()),
    pa.list_(pa.date32()),
    pa.list_(TIME),
    pa.list_(POINT),
    pa.list_(SPAN),
    pa.list_(pa.list_(pa.int64())),
    pa.struct([("a", pa.int64()), ("b", pa.date32())]),
    pa.struct([("a", pa.list_(pa.string())), ("b", pa.float32())]),
    pa.map_(pa.string(), pa.int64()),
    pa.map_(pa.int64(), pa.struct([("a", pa.int64()), ("b", pa.float64())])),
]


class Fails:
    """A value whose methods raise what nobody expects."""

    def __index__(self) -> int:
        raise ZeroDivisionError("a value of a caller")

    def __repr__(self) -> str:
        raise LookupError("a name of a caller")


class Measure:
    """A number of another library (torch, sympy): Python's `int` and `float` work on it."""

    def __int__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.75


class Word(str, enum.Enum):  # noqa: UP042 - the `str` of a StrEnum is its text
    """Text that has another `str`."""

    A = "a"


Pair = namedtuple("Pair", ["a", "b"])
Swapped = namedtuple("Swapped", ["b", "a"])
Entry = namedtuple("Entry", ["value", "key"])
ZONE = timezone(timedelta(hours=-5))
MASKED = np.ma.array([1, 2], mask=[False, True])
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=ZONE)
NAIVE = MOMENT.replace(tzinfo=None)

VALUES: list[Any] = [
    # numbers of Python
    *(0, -1, 300, 2**24 + 1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30),
    *(86_399_999_999, 86_400_000_000),
    *(2.0, -0.0, 1.5, 0.1, 1e300, 2.0**62, 2.0**63, math.nan, math.inf),
    *(True, 1 + 5j, Fraction(3, 2), Fraction(2), enum.IntEnum("E", "A"), Measure(), uuid.UUID(int=1)),
    *map(Decimal, ("2.00", "-1.5", "1E+2", "-0", "1E+29", "NaN", "sNaN", "Infinity", "1." + "0" * 99)),
    *map(Decimal, ("1E-99999999", "0E-99999999", "0E+99999999", "1E+1000000", "1E-5000000")),
    *map(Decimal, ("99999999.99", "99999999.995", "100000000", "1234567", "9" * 28 + "." + "9" * 10)),
    Decimal("3.078966000094400478295756699E-14"),
    # text and bytes
    *("grüße", "\ud800", b"ab", b"\xff", bytearray(b"ab"), memoryview(b"ab"), np.str_("a"), np.bytes_(b"a"), Word.A),
    # numbers and times of numpy
    *(np.int8(5), np.uint64(2**64 - 1), np.uint64(2**60), np.float16(1.5), np.float32(0.1), np.float64(2)),
    *(np.complex128(1 + 5j), np.bool_(True), np.longdouble(1) / 3, np.longdouble(2), np.void(b"ab")),
    *(np.datetime64(1500, unit) for unit in ("ns", "us", "ms", "s", "D")),
    *(np.timedelta64(1500, unit) for unit in ("ns", "us", "ms", "s", "D", (b"us", 2))),
    # nothing
    *(None, pd.NaT, pd.NA, np.ma.masked, np.datetime64("NaT"), np.timedelta64("NaT")),
    # times
    *(date(1969, 1, 2), NAIVE, NAIVE.replace(hour=0, minute=0, second=0, microsecond=0), MOMENT),
    *(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=ZONE)),
    *(time(1, 2, 3, 4), time.max, time(12, tzinfo=UTC), timedelta(1, 2, 3), timedelta.max, timedelta.min),
    *(pd.Timestamp(2_000), pd.Timestamp(1_500), pd.Timestamp(1), pd.Timestamp("3000-01-01").as_unit("s")),
    *(pd.Timestamp("2026-01-01", tz="Europe/Rome"), pd.Timedelta(2_000), pd.Timedelta(1_500)),
    *(pd.Period("2026-01"), pd.Interval(0, 1)),
    # lists
    *([1, None, 2], [], (1, 2), [1.5, 2.0], [1.0, math.nan], ["a", b"b"], [[1]], [True], [date(2026, 1, 1), NAIVE]),
    *({1, 2}, frozenset([1]), range(3), deque([1]), {1: 2}.keys(), array.array("q", [1]), iter([1])),
    # arrays of numpy
    *(np.arange(4).astype(dtype) for dtype in ("i1", "u8", "f2", "f4", ">f4", "f8", ">i8", "c16", "?", "O")),
    *(np.array(5), np.array(5.5), np.array(None), np.ma.array(1, mask=True), np.array([2**64 - 1], np.uint64)),
    *(np.arange(9)[::-2], np.arange(9.0)[::-2], np.ones((2, 2)), np.array([1.5]), np.array([1, "a"], object)),
    *(np.ma.array([1, 2], mask=[False, True]), np.ma.array([[1.0, 2.0]], mask=[[True, False]])),
    *(np.array([0, 1500], f"M8[{unit}]") for unit in ("ns", "us", "D")),
    *(np.array([0, 1500], f"m8[{unit}]") for unit in ("ns", "us")),
    np.ma.array(np.array([0, 15], "m8[us]"), mask=[True, False]),
    *(np.array([(1, 2)], "i8,i8"), np.array([(1, 2)], "i8,i8")[0]),
    # of pandas and Arrow
    *(pd.Series([10, 20, 30], index=[2, 1, 0]), pd.Series([1, 2], index=[5, 6]), pd.Series(["a", None])),
    *(pd.Series([1, None], dtype="Int64"), pd.Series([pd.Timestamp("2026-01-01", tz="Europe/Rome")])),
    *(pd.Index([1, 2]), pd.DataFrame({"a": [1], "b": [2]})),
    *(pa.array([1, None]), pa.chunked_array([[1], [2]]), pa.array([1500], pa.time64("ns"))),
    *(pa.scalar(5), pa.scalar(1.5), pa.scalar(None, pa.int8()), pa.scalar(1500, pa.time64("ns"))),
    # structs
    *({"a": 1, "b": 2}, {"a": 1}, {}, {"a": 1, "c": 2}, {b"a": 1}, {"a": 1, b"a": 2}, {"a": 1, "b": NAIVE}),
    *([("a", 1), ("b", 2)], [("a", 1), ("a", 2)], [["a", 1]], OrderedDict(b=1, a=2), MappingProxyType({"a": 1})),
    *(Pair(1, 2), Swapped(1, 2), Row(b=1, a=2), Row(a=1, c=2), Row("a", "b")),
    *((1, date(2026, 1, 1)), (1, 2, 3), (1,), (1.5, 2), (["a"], 1e300), ("ab", 1.0)),
    # maps
    *({"x": 1, "y": None}, {1: {"a": 1.5}}, {1: Row(b=1, a=2)}, [(None, 1)], [("x", 1.5)], {"a": 1}.items()),
    *([{"key": "a", "value": 1}], [{"key": "a", "value": 1.5}], [{"key": "a", "item": 1}], [Entry(1, "a")]),
]

UNSHOWABLE: list[Any] = [
    10**5000,
    [10**5000],
    Fails(),
    [1, Fails()],
    {"a": Fails()},
    {"x": 10**5000},
    np.array(Fails()),
]
"""Nobody can write these, in an error either."""


def is_missing(value: object) -> bool:
    if isinstance(value, np.datetime64 | np.timedelta64):
        return bool(np.isnat(value))
    return any(value is nothing for nothing in (None, pd.NaT, pd.NA, np.ma.masked))


def raw(stored: pa.Scalar) -> Any:
    """What is stored, times as their numbers: Python cannot show them all."""
    if not stored.is_valid:
        return None
    kind = stored.type
    if pa.types.is_map(kind):
        return [(raw(entry["key"]), raw(entry["value"])) for entry in stored.values]
    if pa.types.is_list(kind):
        return [raw(element) for element in stored.values]
    if pa.types.is_struct(kind):
        return {name: raw(stored[name]) for name in NAMES if kind.get_field_index(name) >= 0}
    return stored.value if pa.types.is_temporal(kind) else stored.as_py()


def equal(value: Any, stored: Any, kind: pa.DataType) -> bool:
    """Whether what is stored (`raw`) is what the value says."""
    if isinstance(value, pa.Scalar):
        return bool(stored == raw(value)) and (value.type == kind or not value.is_valid)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if is_missing(value) or stored is None:
        return is_missing(value) and stored is None
    if pa.types.is_map(kind):
        return equal_maps(value, stored, kind)
    if pa.types.is_struct(kind):
        return equal_structs(value, stored, kind)
    if pa.types.is_list(kind):
        return equal_lists(value, stored, kind.value_type)
    return equal_leaves(value, stored, kind)


def equal_leaves(value: Any, stored: Any, kind: pa.DataType) -> bool:
    if pa.types.is_boolean(kind):
        return isinstance(value, bool | np.bool_) and stored is bool(value)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return as_bytes(value) == as_bytes(stored)
    if isinstance(value, str | bytes | bool | np.bool_):
        return False
    if pa.types.is_temporal(kind):
        if pa.types.is_time(kind) and not 0 <= stored < 86_400_000_000:
            return False
        return bool(stored == number_of_time(value, kind))
    if isinstance(value, np.datetime64 | np.timedelta64):
        return False
    if pa.types.is_float32(kind) and isinstance(value, float | np.floating):
        return equal_numbers(float(np.float32(value)), stored)
    return equal_numbers(value, stored)


def equal_numbers(value: Any, stored: Any) -> bool:
    return bool(value == stored) or bool(value != value and stored != stored)  # noqa: PLR0124


def as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def number_of_time(value: Any, kind: pa.DataType) -> object:
    """What is to be stored for it: None, where the type has no such value."""
    if isinstance(value, np.datetime64 | np.timedelta64):
        fits = pa.types.is_timestamp(kind) if isinstance(value, np.datetime64) else pa.types.is_duration(kind)
        return int(value.astype(value.dtype.name.partition("[")[0] + "[us]").astype(int)) if fits else None
    if isinstance(value, pd.Timestamp | pd.Timedelta) and value != value.floor("us"):
        return None
    if isinstance(value, datetime):
        if pa.types.is_date(kind):
            return value.toordinal() - EPOCH if value == datetime.combine(value.date(), time()) else None
        if not pa.types.is_timestamp(kind) or (is_zoned(value) and kind.tz is None):
            return None
        since = (value if is_zoned(value) else value.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
        return since // timedelta(microseconds=1)
    if isinstance(value, date):
        return value.toordinal() - EPOCH if pa.types.is_date(kind) else None
    if isinstance(value, time):
        since = timedelta(0, value.second, value.microsecond, 0, value.minute, value.hour)
        return since // timedelta(microseconds=1) if pa.types.is_time(kind) and value.tzinfo is None else None
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1) if pa.types.is_duration(kind) else None
    return value


def is_zoned(value: Any) -> bool:
    return getattr(value, "tzinfo", None) is not None


def equal_lists(value: Any, stored: list[Any], kind: pa.DataType) -> bool:
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return False
    rows = value.to_numpy() if isinstance(value, pd.DataFrame) else value
    elements = list(rows)
    return len(elements) == len(stored) and all(equal(*both, kind) for both in zip(elements, stored, strict=True))


def fields_of(value: Any, names: Iterable[str]) -> dict[str, object]:
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, tuple):
        own: Any = getattr(value, "__fields__", None) or getattr(value, "_fields", names)
        pairs = list(zip(own, value, strict=True))
    else:
        pairs = list(value)
    named = {name.decode() if isinstance(name, bytes) else name: inner for name, inner in pairs}
    assert len(named) == len(pairs), "one of two was lost"
    return named


def equal_structs(value: Any, stored: dict[str, Any], kind: pa.DataType) -> bool:
    fields = fields_of(value, stored)
    if not set(fields) <= set(stored):
        return False
    return all(equal(fields.get(name), inner, kind.field(name).type) for name, inner in stored.items())


def equal_maps(value: Any, stored: list[Any], kind: pa.DataType) -> bool:
    entries = (
        [{"key": key, "value": item} for key, item in value.items()] if isinstance(value, Mapping) else list(value)
    )
    if len(entries) != len(stored):
        return False
    for given_entry, (key, item) in zip(entries, stored, strict=True):
        fields = fields_of(given_entry, ("key", "value"))
        if set(fields) != {"key", "value"}:
            return False
        if not equal(fields["key"], key, kind.key_type) or not equal(fields["value"], item, kind.item_type):
            return False
    return True


@cache
def view_of(kind: pa.DataType) -> TopicView:
    schema = normalize_schema(pa.schema([("c", kind)]))
    assert schema.field("c").type == kind
    return TopicView("t", "t" * 32, (), (schema_to_bytes(schema),), {})


def in_rows(values: list[Any]) -> object:
    return [{"c": value} for value in values]


def in_frame(values: list[Any]) -> object:
    return pd.DataFrame({"c": pd.Series(values, dtype=object)})


def stored_of(data: object, kind: pa.DataType) -> list[Any]:
    """Raises SchemaMismatchError."""
    (batch,) = conformed(data, view_of(kind)).batches
    batch.validate(full=True)
    return [raw(stored) for stored in batch.column(0)]


def row_named(message: str) -> int:
    named = re.match(r"column 'c' \(.*\), row (\d+): ", message)
    assert named, message
    return int(named[1])


def check(values: list[Any], kind: pa.DataType, give: Callable[[list[Any]], object] = in_rows) -> None:
    """All are stored, or the row of the first one that is not stored by itself is named."""
    try:
        stored = stored_of(give(values), kind)
    except SchemaMismatchError as error:
        row = row_named(error.message)
        with pytest.raises(SchemaMismatchError):
            stored_of(give(values[row : row + 1]), kind)
        values = values[:row]
        stored = stored_of(give(values), kind) if values else []
    assert len(stored) == len(values)
    for value, kept in zip(values, stored, strict=True):
        assert equal(value, kept, kind), f"{value!r} as {kind}: {kept!r}"


@pytest.mark.parametrize("kind", [*LEAVES, *NESTED], ids=str)
def test_each_kind_of_value_is_refused_or_stored_as_it_is(kind: pa.DataType) -> None:
    for value in VALUES:
        check([None, value], kind)


@pytest.mark.parametrize("kind", [*LEAVES, *NESTED], ids=str)
def test_what_nobody_can_show_is_refused_with_its_place(kind: pa.DataType) -> None:
    for value in UNSHOWABLE:
        with pytest.raises(SchemaMismatchError, match=r"column 'c' \(.*\), row 1: "):
            stored_of(in_rows([None, value]), kind)


def fitting(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values that the type mostly has, in all the forms in which somebody may give them."""
    if pa.types.is_list(kind):
        return st.lists(values_of(kind.value_type), max_size=3).flatmap(lists_of)
    if pa.types.is_map(kind):
        pairs = st.lists(st.tuples(values_of(kind.key_type), values_of(kind.item_type)), max_size=2)
        return pairs.flatmap(maps_of)
    if pa.types.is_struct(kind):
        values = st.tuples(*[values_of(field.type) for field in kind])
        return values.flatmap(lambda inner: structs_of([field.name for field in kind], inner))
    return st.one_of(LEAF_VALUES.get(kind, NUMBERS), NUMBERS)


def lists_of(values: list[Any]) -> st.SearchStrategy[Any]:
    objects = np.empty(len(values), object)
    for number, value in enumerate(values):
        objects[number] = value
    masked = np.ma.array(objects, mask=[number % 2 == 1 for number in range(len(values))])
    labels = list(range(len(values)))[::-1]
    series = pd.Series(objects, index=labels)
    return st.sampled_from([values, tuple(values), deque(values), objects, masked, series, array_of_own_type(values)])


def array_of_own_type(values: list[Any]) -> object:
    """As numpy makes it of them."""
    with warnings.catch_warnings(action="ignore"), suppress(ValueError, TypeError, OverflowError, np.ma.MaskError):
        return np.array(values)
    return values


def structs_of(names: list[str], values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    pairs = list(zip(names, values, strict=True))
    forms = [
        dict(pairs),
        dict(pairs[:1]),
        values,
        pairs,
        pairs[::-1],
        MappingProxyType(dict(pairs)),
        [*pairs, pairs[0]],
    ]
    rows = [
        Row(**dict(pairs[::-1])),
        namedtuple("Own", names[::-1])(*values[::-1]),
        (*values, 1),
        {"other": 1, **dict(pairs)},
    ]
    return st.sampled_from([*forms, *rows])


def maps_of(pairs: list[tuple[Any, Any]]) -> st.SearchStrategy[Any]:
    entries = [{"value": item, "key": key} for key, item in pairs]
    forms: list[object] = [
        pairs,
        tuple(pairs),
        entries,
        [Row(**entry) for entry in entries],
        [list(pair) for pair in pairs],
    ]
    if all(isinstance(key, str | bytes | int) for key, _ in pairs):
        forms.append(dict(pairs))
    return st.sampled_from(forms)


@cache
def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    return st.one_of(fitting(kind), st.integers(0, len(VALUES) - 1).map(VALUES.__getitem__))


ZONES = st.none() | st.integers(-720, 720).map(lambda minutes: timezone(timedelta(minutes=minutes)))
DIGITS = st.builds(Decimal, st.integers(-(10**38), 10**38))
SCALED = st.builds(lambda digits, places: digits.scaleb(places, decimal.Context(prec=50)), DIGITS, st.integers(-60, 20))
DTYPES = st.sampled_from(["i1", "i8", "u1", "u8", "f2", "f4", "f8", "g", "c16", "?", "M8[us]", "m8[us]", "m8[ns]", "O"])


def in_numpy(number: object, dtype: str) -> object:
    with warnings.catch_warnings(action="ignore"):
        return np.array(number).astype(dtype)[()]


WHOLE = st.one_of(st.integers(-300, 300), st.integers(-(2**64), 2**64))
NUMBERS = st.one_of(WHOLE, st.floats(), WHOLE.map(float), SCALED, st.builds(in_numpy, st.integers(-300, 300), DTYPES))
TEXTS = st.text(max_size=3) | st.binary(max_size=3)
DATETIMES = st.datetimes(timezones=ZONES) | st.dates().map(lambda day: datetime.combine(day, time()))
LEAF_VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.string(): TEXTS,
    pa.binary(): TEXTS,
    pa.date32(): st.dates() | DATETIMES,
    TIME: st.times(timezones=st.none() | st.just(UTC)),
    LOCAL: DATETIMES | st.integers(-(2**62), 2**62).map(pd.Timestamp),
    POINT: DATETIMES,
    SPAN: st.timedeltas() | st.integers(-(2**62), 2**62).map(pd.Timedelta),
    **{kind: SCALED for kind in LEAVES if pa.types.is_decimal(kind)},
}
KINDS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        st.builds(pa.map_, st.sampled_from(LEAVES), inner),
        st.builds(lambda first, second: pa.struct([("a", first), ("b", second)]), inner, inner),
    ),
    max_leaves=4,
)


@given(st.data())
def test_values_of_any_type_are_refused_or_stored_as_they_are(data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    values = data.draw(st.lists(values_of(kind), min_size=1, max_size=4))
    check(values, kind)
    check([*map(as_of_pandas, values)], kind, in_frame)


def as_of_pandas(value: Any) -> object:
    """What is in a frame that is given this: no array without dimensions, and nothing for NaN."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = None if value.dtype == object or value is np.ma.masked else value[()]
    is_number = isinstance(value, float | np.floating | Decimal)
    return None if is_number and str(value).lower().lstrip("-s").startswith("nan") else value
