"""What a user hands in is stored as it is, or refused with its place: nothing of it is dropped or changed silently."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spark_broker import Producer
from spark_broker.errors import InvalidTimestampError, SchemaMismatchError
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
