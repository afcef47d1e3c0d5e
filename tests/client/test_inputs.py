"""What a user hands in is stored as it is, or refused with its place: nothing of it is dropped or changed silently."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spark_broker import Producer
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
    ("kind", "source"),
    [
        (pa.decimal128(6, 2), pa.array([7.0, 1.239])),
        (pa.float32(), pa.array([1.0, 1e300])),
        (pa.int32(), pa.array([1.0, 1.5])),
        (pa.date32(), pa.array([datetime(2026, 1, 1), datetime(2026, 1, 1, 3)])),  # noqa: DTZ001
        (pa.float64(), pa.array([Decimal("0.10"), Decimal("12345678901234567.89")])),
        (pa.float64(), pa.array([Decimal(2**53), Decimal(2**53 + 1)], pa.decimal128(38, 0))),
        (pa.float32(), pa.array([Decimal("0.5"), Decimal("0.123456789")])),
    ],
)
@pytest.mark.parametrize("within", WITHIN)
def test_a_column_of_arrow_that_would_be_changed_is_refused(kind: pa.DataType, source: pa.Array, within: str) -> None:
    rows, column = WITHIN[within](source, kind)
    with pytest.raises(SchemaMismatchError, match="row 1 does not fit"):
        conformed(pa.table({"c": rows}), view_of(pa.schema([("c", column)])))
    whole, _ = WITHIN[within](source.slice(0, 1), kind)
    assert conformed(pa.table({"c": whole}), view_of(pa.schema([("c", column)])))


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
