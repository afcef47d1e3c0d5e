"""What a user hands in is stored as it is, or refused with its place: nothing of it is dropped or changed silently."""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row

from spark_broker import Admin, Consumer, Producer
from spark_broker.client.cluster_view import TopicView
from spark_broker.client.inputs import conformed
from spark_broker.errors import InvalidTimestampError, SchemaMismatchError
from spark_broker.protocol.schema import schema_to_bytes
from tests.client.fake_broker import FakeCluster

INNER = pa.struct([("first", pa.string()), ("more", pa.list_(pa.struct([("n", pa.int64())])))])
NESTED = pa.schema([("s", INNER), ("l", pa.list_(INNER)), ("m", pa.map_(pa.string(), INNER))])


@pytest.mark.parametrize(
    ("row", "path"),
    [
        ({"s": {"first": "F", "frist": "X"}}, "s.frist"),
        ({"s": {"first": "F", "more": [{"n": 1}, {"n": 2, "k": 3}]}}, r"s\.more\[1\]\.k"),
        ({"l": [{"first": "F"}, {"last": "L"}]}, r"l\[1\]\.last"),
        ({"m": {"a": {"last": "L"}}}, r"m\['a'\]\.last"),
        ({"m": [("a", {"last": "L"})]}, r"m\['a'\]\.last"),
        ({"s": [("first", "F"), ("last", "L")]}, "s.last"),
    ],
)
def test_a_name_that_the_schema_does_not_have_is_refused_however_deep_it_is(
    cluster: FakeCluster, row: dict[str, object], path: str
) -> None:
    """Story: the record was acknowledged without the value."""
    cluster.create("t", schema=NESTED)
    with Producer(cluster.bootstrap) as producer:
        with pytest.raises(SchemaMismatchError, match=f"row 1: unknown field {path}"):
            producer.append("t", [{"s": None}, row]).result(10)
        good = {"s": {"first": "F", "more": [{"n": 1}]}, "l": [], "m": {"a": {"first": None}}}
        assert producer.append("t", [good]).result(10)[0].count == 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"s": {"more": [{"n": 1}, {"n": 1.5}]}}, "s.more[1].n: 1.5 does not fit: int64 has no fractions"),
        ({"l": [None, {"first": 1}]}, "l[1].first: 1 does not fit: int is no string"),
        ({"m": [("a", {"more": [{"n": "1"}]})]}, "m['a'].more[0].n: '1' does not fit: str is no int64"),
        ({"s": 7}, "7 does not fit: int is no struct<"),
        ({"s": ("F",)}, "('F',) does not fit: it has 1 values for 2 fields"),
    ],
)
def test_a_value_is_named_by_its_place_however_deep_it_is(row: dict[str, object], told: str) -> None:
    with pytest.raises(SchemaMismatchError, match=r"column '.' \(.*\), row 1: " + re.escape(told)):
        conformed([{"s": None}, row], view_of(NESTED))


class Odd:
    """A number whose methods fail."""

    def __index__(self) -> int:
        raise LookupError("no such number")


def test_a_value_whose_methods_fail_fails_the_future(cluster: FakeCluster) -> None:
    cluster.create("t", schema=pa.schema([("n", pa.int64())]))
    with Producer(cluster.bootstrap) as producer:
        future = producer.append("t", [{"n": 1}, {"n": Odd()}])
        with pytest.raises(SchemaMismatchError, match=r"row 1: <tests.* does not fit: no such number"):
            future.result(10)


def test_decimals_do_not_depend_on_the_context_of_the_caller() -> None:
    """Story: with a precision of six digits, `append` raised decimal.InvalidOperation for a number of seven."""
    topic = view_of(pa.schema([("n", pa.int64()), ("d", pa.decimal128(10, 2))]))
    row = {"n": Decimal(1234567), "d": Decimal("1234567.890")}
    with decimal.localcontext(decimal.Context(prec=6, traps=[decimal.Inexact, decimal.Rounded])):
        (batch,) = conformed([row], topic).batches
    assert batch.to_pylist() == [row]


EVERY_TYPE: dict[pa.DataType, object] = {
    pa.bool_(): True,
    pa.int8(): -128,
    pa.int64(): 2**63 - 1,
    pa.float32(): 0.5,
    pa.float64(): 0.1,
    pa.decimal128(38, 10): Decimal("-1234567890123456789012345678.0123456789"),
    pa.string(): "grüße",
    pa.binary(): b"\xff\x00",
    pa.date32(): date(1, 1, 1),
    pa.time64("us"): time.max,
    pa.timestamp("us"): datetime(9999, 12, 31, 23, 59, 59, 999_999),  # noqa: DTZ001
    pa.timestamp("us", "UTC"): datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    pa.duration("us"): timedelta(-1, 0, 1),
}
AROUND: list[Callable[[pa.DataType, object], tuple[pa.DataType, object]]] = [
    lambda kind, value: (kind, value),
    lambda kind, value: (pa.list_(kind), [value, None]),
    lambda kind, value: (pa.struct([("x", kind), ("y", pa.int8())]), {"x": value, "y": None}),
    lambda kind, value: (pa.map_(pa.string(), kind), [("k", value), ("n", None)]),
    lambda kind, value: (pa.map_(kind, pa.int8()), [(value, 1)]),
    lambda kind, value: (pa.list_(pa.map_(pa.string(), kind)), [[("k", value)], [], None]),
    lambda kind, value: (pa.struct([("m", pa.map_(pa.string(), kind))]), {"m": [("k", value)]}),
    lambda kind, value: (pa.map_(pa.string(), pa.struct([("l", pa.list_(kind))])), [("k", {"l": [value]})]),
]


def test_what_a_consumer_hands_out_can_be_appended(cluster: FakeCluster) -> None:
    """Story: `append` raised AttributeError for a map that a consumer had handed out."""
    columns = [around(kind, value) for kind, value in EVERY_TYPE.items() for around in AROUND]
    schema = pa.schema([(f"c{number}", kind) for number, (kind, _) in enumerate(columns)])
    row = {f"c{number}": value for number, (_, value) in enumerate(columns)}
    for name in ("t", "copy"):
        cluster.create(name, schema=schema)
    with (
        Producer(cluster.bootstrap) as producer,
        Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer,
    ):
        producer.append("t", [row, {"c0": None}], partition=0).result(10)
        records = [record for batch in consumer.poll(10) for record in batch.records()]
        assert records[0].value == row
        producer.append("copy", [record.value for record in records], partition=0).result(10)
    assert cluster.rows("copy", 0) == cluster.rows("t", 0)


NOON = datetime(2026, 1, 1, 12)  # noqa: DTZ001
NEW_YORK = timezone(timedelta(hours=-5))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.date32(), [date(2026, 1, 1), NOON]),
        (pa.list_(pa.date32()), [[date(2026, 1, 1)], [NOON]]),
        (pa.struct([("d", pa.date32())]), [{"d": date(2026, 1, 1)}, {"d": NOON}]),
        (pa.timestamp("us"), [NOON, NOON.replace(tzinfo=NEW_YORK)]),
        (pa.timestamp("us"), [NOON, pd.Timestamp(1_500)]),
        (pa.duration("us"), [timedelta(1), pd.Timedelta(1_500)]),
        (pa.time64("us"), [time(12), time(12, tzinfo=UTC)]),
        (pa.float64(), [1.5, np.uint64(2**64 - 1)]),
        (pa.float64(), [1.5, True]),
        (pa.string(), ["a", 1]),
        (pa.string(), ["a", "\ud800"]),
        (pa.int64(), [1, "a"]),
        (pa.map_(pa.string(), pa.int64()), [{"a": 1}, {"a": 1.5}]),
    ],
)
def test_objects_of_a_frame_are_refused_as_those_of_rows(kind: pa.DataType, values: list[object]) -> None:
    """Story: Arrow looked for a type that all of them can be given. Zones, nanoseconds and times of day were gone."""
    topic = view_of(pa.schema([("c", kind), ("n", pa.float64())]))
    with pytest.raises(SchemaMismatchError, match=r"column 'c' \(.*\), row 1: .* does not fit"):
        conformed(pd.DataFrame({"n": [1.5, 2.5], "c": pd.Series(values, dtype=object)}), topic)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.date32(), [date(2026, 1, 1), NOON]),
        (pa.timestamp("us"), [NOON, NOON.replace(tzinfo=NEW_YORK)]),
        (pa.time64("us"), [time(12), time(12, tzinfo=UTC)]),
        (pa.string(), ["a", "\ud800"]),
        (pa.int64(), ["a", "b"]),
    ],
)
def test_categories_of_a_frame_are_refused_as_the_values_that_they_are(kind: pa.DataType, values: list[object]) -> None:
    column = pd.Categorical([values[0], values[1]], categories=pd.Index(values, dtype=object))
    with pytest.raises(SchemaMismatchError, match=r"column 'c' \(.*\), row [01]: .* does not fit"):
        conformed(pd.DataFrame({"c": column}), view_of(pa.schema([("c", kind)])))


def test_a_frame_has_objects_of_every_type() -> None:
    """Story: a map could not be given in a frame."""
    moments: list[object] = [NOON, NOON.replace(tzinfo=NEW_YORK), None]
    columns: dict[str, tuple[pa.DataType, list[object], list[object]]] = {
        "map": (pa.map_(pa.string(), pa.int64()), [{"a": 1}, [("b", 2)], None], [[("a", 1)], [("b", 2)], None]),
        "text": (pa.string(), ["a", math.nan, pd.NA], ["a", None, None]),
        "bytes": (pa.binary(), [b"a", "b", None], [b"a", b"b", None]),
        "int": (pa.int32(), [1, pd.NA, math.nan], [1, None, None]),
        "day": (pa.date32(), [date(2026, 1, 1), pd.NaT, None], [date(2026, 1, 1), None, None]),
        "moment": (
            pa.timestamp("us", "UTC"),
            moments,
            [NOON.replace(tzinfo=UTC), NOON.replace(hour=17, tzinfo=UTC), None],
        ),
        "decimal": (
            pa.decimal128(5, 2),
            [Decimal(1), Decimal("2.5"), Decimal("NaN")],
            [Decimal(1), Decimal("2.5"), None],
        ),
        "nested": (pa.list_(pa.float64()), [[1.5, math.inf], np.array([2.5]), []], [[1.5, math.inf], [2.5], []]),
        "float": (pa.float64(), [1.5, math.nan, np.float32("nan")], [1.5, None, None]),
        "none": (pa.string(), [None, None, None], [None, None, None]),
    }
    frame = pd.DataFrame({name: pd.Series(given, dtype=object) for name, (_, given, _) in columns.items()})
    frame["typed"] = [1, 2, 3]
    frame["category"] = pd.Categorical(["a", None, "b"])
    frame["moments"] = pd.Series(moments, dtype=object).astype("category")
    kinds = [("category", pa.string()), ("moments", pa.timestamp("us", "UTC")), ("typed", pa.int64())]
    schema = pa.schema([*kinds, *((name, kind) for name, (kind, _, _) in columns.items())])
    (batch,) = conformed(frame.iloc[:, ::-1], view_of(schema)).batches
    assert batch.schema == schema
    for name, (_, _, stored) in columns.items():
        assert batch.column(name).to_pylist() == stored, name
    assert batch.column("typed").to_pylist() == [1, 2, 3]
    assert batch.column("category").to_pylist() == ["a", None, "b"]
    assert batch.column("moments").equals(batch.column("moment"))


def test_objects_in_a_column_that_is_new_are_taken(cluster: FakeCluster) -> None:
    """The producer learns of a newer schema when the data does not fit."""
    cluster.create("t", schema=pa.schema([("a", pa.int64())]))
    with Producer(cluster.bootstrap) as producer, Admin(cluster.bootstrap) as admin:
        producer.append("t", [{"a": 1}]).result(10)
        admin.alter_topic_schema("t", "days ARRAY<DATE>")
        newer = pd.DataFrame({"a": [2], "days": [[date(2026, 1, 1)]]})
        assert producer.append("t", newer).result(10)[0].count == 1
        with pytest.raises(SchemaMismatchError, match="unknown column 'dais'; did you mean 'days'"):
            producer.append("t", newer.rename(columns={"days": "dais"})).result(10)


@pytest.mark.parametrize("time_us", [-1, 2**63 - 1, 1_515_695_000_000_000_000])
def test_a_time_that_no_reader_can_show_is_refused(cluster: FakeCluster, time_us: int) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap) as producer:
        rows = pa.table(
            {"value": [b"a", b"b", b"c"], "timestamp": pa.array([5, None, time_us], pa.timestamp("us", "UTC"))}
        )
        with pytest.raises(InvalidTimestampError, match=str(time_us)):
            producer.append("t", rows).result(10)
        assert producer.append("t", rows.slice(0, 2)).result(10)[0].count == 2


def view_of(schema: pa.Schema) -> TopicView:
    return TopicView("t", "t" * 32, (), (schema_to_bytes(schema),), {})


def _struct(values: pa.Array) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.nulls(len(values)), values], ["nothing", "x"])


def _list(values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([*range(len(values) + 1)], pa.int32()), values)


def _view(values: pa.Array) -> pa.ListViewArray:
    offsets, sizes = pa.array([*range(len(values))], pa.int32()), pa.array([1] * len(values), pa.int32())
    return pa.ListViewArray.from_arrays(offsets, sizes, values)


def _map(values: pa.Array) -> pa.MapArray:
    keys = pa.array(["k"] * len(values))
    return pa.MapArray.from_arrays(pa.array([*range(len(values) + 1)], pa.int32()), keys, values)


def _struct_of(kind: pa.DataType) -> pa.StructType:
    """With its fields in another order than `_struct`."""
    return pa.struct([("x", kind), ("nothing", pa.string()), ("more", pa.int64())])


WITHIN: dict[str, Callable[[pa.Array, pa.DataType], tuple[pa.Array, pa.DataType]]] = {
    "itself": lambda values, kind: (values, kind),
    "dictionary": lambda values, kind: (values.dictionary_encode(), kind),
    "list": lambda values, kind: (_list(values), pa.list_(kind)),
    "fixed list": lambda values, kind: (pa.FixedSizeListArray.from_arrays(values, 1), pa.list_(kind)),
    "list view": lambda values, kind: (_view(values), pa.list_(kind)),
    "struct": lambda values, kind: (_struct(values), _struct_of(kind)),
    "map": lambda values, kind: (_map(values), pa.map_(pa.string(), kind)),
    "list of structs": lambda values, kind: (_list(_struct(values)), pa.list_(_struct_of(kind))),
}
"""Values within something, and the type of the column that is to take it."""


class Measure:
    """A number of another library (torch, sympy): Python's `int` and `float` work on it."""

    def __int__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.75


CHANGED = [
    (pa.int32(), 1.5),
    (pa.int64(), Decimal("3.5")),
    (pa.int64(), np.float32(0.25)),
    (pa.timestamp("us", "UTC"), 1.5),
    (pa.date32(), datetime(2026, 1, 1, 23, 59)),  # noqa: DTZ001
    (pa.date32(), datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=5)))),
    (pa.float32(), 1e300),
    (pa.list_(pa.int32()), [1, 1.5]),
    (pa.struct([("x", pa.list_(pa.float32()))]), {"x": [1e300]}),
    (pa.map_(pa.string(), pa.int8()), {"a": 0.5}),
    (pa.list_(pa.int64()), np.array([1, 1.5])),
    (pa.list_(pa.int64()), np.array([1.5], object)),
    (pa.list_(pa.int64()), pd.Series([1.5])),
    (pa.list_(pa.int64()), {1.5}),
    (pa.list_(pa.float32()), np.array([1e300])),
    (pa.list_(pa.timestamp("us")), np.array(["2026-01-01"], "datetime64[ns]")),
    (pa.list_(pa.timestamp("us", "UTC")), np.array(["2026-01-01"], "datetime64[s]")),
    (pa.list_(pa.duration("us")), np.array([1], "timedelta64[ms]")),
    (pa.struct([("x", pa.list_(pa.int32()))]), {"x": np.array([0.5])}),
    (pa.map_(pa.string(), pa.list_(pa.int32())), {"a": np.array([0.5])}),
    (pa.list_(pa.string()), "text"),
    (pa.list_(pa.int64()), b"bytes"),
    (pa.int64(), np.array(5.5)),
    (pa.timestamp("us"), pd.Timestamp(1_500)),
    (pa.duration("us"), pd.Timedelta(1, "ns")),
    (pa.time64("us"), time(12, tzinfo=UTC)),
    (pa.int64(), Fraction(3, 2)),
    (pa.int64(), Measure()),
    (pa.timestamp("us"), Measure()),
    (pa.list_(pa.int32()), [Fraction(7, 2)]),
    (pa.timestamp("us"), datetime(2026, 1, 1, tzinfo=UTC)),
    (pa.timestamp("us"), pd.Timestamp("2026-01-01", tz="Europe/Rome")),
    (pa.list_(pa.timestamp("us")), pd.Series([pd.Timestamp("2026-01-01", tz="Europe/Rome")])),
    (pa.decimal128(10, 2), Decimal("3.078966000094400478295756699E-14")),
    (pa.decimal128(10, 2), Decimal("1E-99999999")),
    (pa.int64(), Decimal("1E+1000000")),
    (pa.duration("us"), Decimal("1E+29")),
    (pa.map_(pa.string(), pa.int64()), [("x", 1.5)]),
    (pa.map_(pa.string(), pa.int64()), [{"key": "x", "value": 1.5}]),
    (pa.struct([("x", pa.int64()), ("y", pa.string())]), [("x", 1.5)]),
    (pa.struct([("x", pa.int64()), ("y", pa.string())]), Row(x=1.5, y="a")),
    (pa.struct([("d", pa.date32())]), Row(d=datetime(2026, 1, 1, 12))),  # noqa: DTZ001
    (pa.struct([("x", pa.float32()), ("y", pa.int64())]), (1e300, 2)),
    (pa.struct([("l", pa.list_(pa.string()))]), ("ab",)),
    (pa.list_(pa.int64()), bytearray(b"ab")),
    (pa.list_(pa.int64()), np.void(b"ab")),
    (pa.float64(), np.uint64(2**64 - 1)),
    (pa.list_(pa.float32()), np.array([2**64 - 1], np.uint64)),
    (pa.float64(), True),
    (pa.int64(), np.complex128(1 + 5j)),
    (pa.int64(), np.bool_(True)),
    (pa.list_(pa.int64()), np.array([True, False])),
    (pa.time64("us"), np.timedelta64(1, "ns")),
    (pa.time64("us"), np.datetime64(1, "ns")),
    (pa.time64("us"), 86_400_000_000),
    (pa.time64("us"), -(2**63)),
    (pa.date32(), pd.Timestamp(1)),
    (pa.time64("us"), pa.scalar(1_500, pa.time64("ns"))),
]


@pytest.mark.parametrize(("kind", "value"), CHANGED)
def test_a_value_of_which_only_a_part_would_be_kept_is_refused(kind: pa.DataType, value: object) -> None:
    """Story: 1.5 in a column of integers was acknowledged, and stored as 1."""
    topic = view_of(pa.schema([("c", kind)]))
    with pytest.raises(SchemaMismatchError, match=r"column 'c' .*row 1"):
        conformed([{"c": None}, {"c": value}], topic)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int32(), 2.0),
        (pa.date32(), datetime(2026, 1, 1)),  # noqa: DTZ001
        (pa.float32(), math.inf),
        (pa.float32(), 0.1),
        (pa.list_(pa.float32()), np.array([0.1, math.nan])),
        (pa.list_(pa.int8()), np.array([2.0])),
        (pa.list_(pa.timestamp("us", "UTC")), np.array(["2026-01-01"], "datetime64[us]")),
        (pa.list_(pa.timestamp("us", "UTC")), pd.Series([pd.Timestamp("2026-01-01", tz="Europe/Rome")])),
        (pa.timestamp("us"), datetime(2026, 1, 1)),  # noqa: DTZ001
        (pa.timestamp("us", "UTC"), datetime(2026, 1, 1)),  # noqa: DTZ001
        (pa.int64(), np.int8(5)),
        (pa.timestamp("us"), pd.Timestamp(1_000)),
        (pa.duration("us"), pd.Timedelta(1, "us")),
        (pa.time64("us"), time(12)),
    ],
)
def test_what_a_column_can_hold_is_taken(kind: pa.DataType, value: object) -> None:
    assert conformed([{"c": value}], view_of(pa.schema([("c", kind)])))


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (pa.struct([("a", pa.int64()), ("b", pa.int64())]), Row(b=1, a=2), {"a": 2, "b": 1}),
        (pa.list_(pa.int64()), pd.Series([10, 20, 30], index=[2, 1, 0]), [10, 20, 30]),
        (pa.list_(pa.int64()), pd.Series([1, 2], index=[5, 6]), [1, 2]),
        (pa.list_(pa.int64()), np.ma.array([1, 2], mask=[False, True]), [1, None]),
        (pa.decimal128(10, 2), Decimal("0E-99999999"), Decimal("0.00")),
        (pa.timestamp("us"), pd.NaT, None),
        (pa.date32(), pd.NaT, None),
        (pa.string(), pd.NA, None),
        (pa.map_(pa.string(), pa.int64()), {"x": 1}, [("x", 1)]),
    ],
)
def test_a_value_is_stored_as_it_is_meant(kind: pa.DataType, value: object, stored: object) -> None:
    """Story: a sorted Series was stored in the order of its labels, and a Row by position."""
    (batch,) = conformed([{"c": value}], view_of(pa.schema([("c", kind)]))).batches
    assert batch.column(0).to_pylist() == [stored]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (pa.decimal128(6, 2), pa.array([7.0, 1.239])),
        (pa.float32(), pa.array([1.0, 1e300])),
        (pa.int32(), pa.array([1.0, 1.5])),
        (pa.date32(), pa.array([datetime(2026, 1, 1), datetime(2026, 1, 1, 3)])),  # noqa: DTZ001
        (pa.float64(), pa.array([Decimal("0.10"), Decimal("12345678901234567.89")])),
        (pa.float64(), pa.array([Decimal(2**53), Decimal(2**53 + 1)], pa.decimal128(38, 0))),
        (pa.float32(), pa.array([Decimal("0.5"), Decimal("0.123456789")])),
        (pa.time64("us"), pa.array([86_399, 86_400], pa.time32("s"))),
        (pa.time64("us"), pa.array([0, -1], pa.time64("us"))),
        (pa.time64("us"), pa.array([0, 86_400_000_000_000], pa.time64("ns"))),
    ],
)
@pytest.mark.parametrize("within", WITHIN)
def test_a_column_of_arrow_that_would_be_changed_is_refused(kind: pa.DataType, source: pa.Array, within: str) -> None:
    rows, column = WITHIN[within](source, kind)
    with pytest.raises(SchemaMismatchError, match="row 1 does not fit"):
        conformed(pa.table({"c": rows}), view_of(pa.schema([("c", column)])))
    whole, _ = WITHIN[within](source.slice(0, 1), kind)
    assert conformed(pa.table({"c": whole}), view_of(pa.schema([("c", column)])))


@pytest.mark.parametrize("start", range(3))
@pytest.mark.parametrize("within", [*WITHIN, "list of none"])
def test_a_slice_without_the_wrong_time_of_day_is_taken(within: str, start: int) -> None:
    """A slice of a list has all its values, also those of other rows."""
    values = pa.array([5, None, 6, 7, 86_400_000_000], pa.time64("us"))
    if within == "list of none":
        rows, column = pa.ListArray.from_arrays(pa.array([0, 0, 0, 0, 0, 5], pa.int32()), values), pa.list_(values.type)
    else:
        rows, column = WITHIN[within](values, values.type)
    (batch,) = conformed(pa.table({"c": rows.slice(start, 2)}), view_of(pa.schema([("c", column)]))).batches
    assert batch.column(0).to_pylist() == rows.slice(start, 2).cast(column).to_pylist()
    pa.ipc.read_record_batch(batch.serialize(), batch.schema).validate(full=True)


def test_a_wrong_time_of_day_keeps_all_of_an_append_from_being_sent(cluster: FakeCluster) -> None:
    """Story: the broker of one partition refused it as damaged, and what was for the others was stored."""
    cluster.create("t", partitions=3, schema=pa.schema([("k", pa.int64()), ("c", pa.time64("us"))]))
    rows = pa.table({"k": pa.array(range(30)), "c": pa.array([*range(29), 86_400_000_000], pa.time64("us"))})
    with Producer(cluster.bootstrap) as producer:
        for data in (rows, rows.to_batches()[0], rows.drop_columns("c").append_column("c", rows["c"].cast("int64"))):
            with pytest.raises(SchemaMismatchError):
                producer.append("t", data).result(10)
        with pytest.raises(SchemaMismatchError, match="row 29 does not fit the topic's time64"):
            producer.append("t", rows).result(10)
        with pytest.raises(SchemaMismatchError, match=r"column 'c' \(time64\[us\]\), row 1: 86400000000 does not fit"):
            producer.append("t", [{"k": 1, "c": 1}, {"k": 1, "c": 86_400_000_000}]).result(10)
    assert [cluster.rows("t", number) for number in range(3)] == [[], [], []]


def test_send_takes_a_topic_that_was_made_again_without_columns(cluster: FakeCluster) -> None:
    """Story: it was refused with the columns of the old topic, until the metadata was refreshed."""
    cluster.create("t", schema=pa.schema([("n", pa.int64())]))
    with Producer(cluster.bootstrap) as producer:
        producer.append("t", [{"n": 1}]).result(10)
        with pytest.raises(SchemaMismatchError, match="has columns n"):
            producer.send("t", b"x").result(10)
        cluster.create("t")
        assert producer.send("t", b"x").result(10).offset == 0


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (pa.timestamp("us"), pa.array([0], pa.timestamp("us", "America/New_York"))),
        (pa.timestamp("us"), pa.array([0], pa.timestamp("us", "UTC"))),
        (pa.date32(), pa.array([0], pa.timestamp("us", "UTC"))),
    ],
)
@pytest.mark.parametrize("within", WITHIN)
def test_a_point_in_time_becomes_no_local_time(kind: pa.DataType, source: pa.Array, within: str) -> None:
    """Story: noon of New York was stored as 17:00."""
    rows, column = WITHIN[within](source, kind)
    with pytest.raises(SchemaMismatchError, match=r"column 'c' is .*; the topic's schema has"):
        conformed(pa.table({"c": rows}), view_of(pa.schema([("c", column)])))


def test_a_struct_with_two_fields_of_one_name_is_refused() -> None:
    """Story: the first one was stored, and the other one was gone."""
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(SchemaMismatchError, match="column 'c' is struct<x: int64, x: int64>; the topic's schema has"):
        conformed(pa.table({"c": twice}), view_of(pa.schema([("c", pa.struct([("x", pa.int64())]))])))
