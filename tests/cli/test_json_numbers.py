"""Numbers of 32 bits, NaN and Infinity, times: lines of JSON store what they say, and `consume` writes them again."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
import pytest

from spark_broker import Producer
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster


@pytest.mark.parametrize("line", [b'{"x": 1e39}', b'{"xs": [0.5, -1e39]}', b'{"deep": {"x": 1e300}}'])
def test_a_number_that_32_bits_cannot_hold_is_a_bad_line(cluster: FakeCluster, run: Run, line: bytes) -> None:
    """Story: it was stored as infinity, and acknowledged."""
    kind = pa.float32()
    cluster.create("t", schema=pa.schema([("x", kind), ("xs", pa.list_(kind)), ("deep", pa.struct([("x", kind)]))]))
    fitting = b'{"x":0.5,"xs":[0.10000000149011612,null],"deep":{"x":-0.0}}'
    ended = run("produce", "t", "--skip-bad", stdin=line + b"\n" + fitting + b"\n")
    assert ended.status == 0
    assert "line 1 is no JSON object of the topic's columns: float cannot hold the value" in ended.err
    assert run("consume", "t", "-o", "value").out.splitlines() == [fitting.decode()]


@pytest.mark.parametrize("form", ["table", "json", "value"])
def test_numbers_that_json_does_not_have_are_text(cluster: FakeCluster, run: Run, form: str) -> None:
    """Story: NaN and Infinity were `null`, in a table empty: as if there were nothing."""
    kind = pa.float64()
    cluster.create("t", schema=pa.schema([("x", kind), ("xs", pa.list_(kind))]))
    with Producer(cluster.bootstrap) as producer:
        producer.append("t", [{"x": float("nan"), "xs": [float("inf"), None, float("-inf"), 0.5]}]).result()
    ended = run("consume", "t", "-o", form)
    assert "NaN" in ended.out
    assert '["Infinity",null,"-Infinity",0.5]' in ended.out


def test_what_consume_writes_of_such_numbers_can_be_produced_again(cluster: FakeCluster, run: Run) -> None:
    kind = pa.float32()
    deep = pa.struct([("x", kind), ("name", pa.string())])
    cluster.create("t", schema=pa.schema([("x", kind), ("name", pa.string()), ("all", pa.list_(deep))]))
    lines = [
        b'{"x":"NaN","name":"NaN","all":[{"x":"-Infinity","name":"\xc3\xa4 Infinity"},null,{"x":0.5,"name":null}]}',
        b'{"x":"Infinity","name":null,"all":null}',
    ]
    assert run("produce", "t", stdin=b"\n".join(lines)).status == 0
    assert str(cluster.rows("t", 0)[0]["x"]) == "nan"
    written = run("consume", "t", "-o", "value").out
    assert written.encode().splitlines() == lines
    assert run("produce", "t", stdin=written.encode()).status == 0
    assert run("consume", "t", "-o", "value").out == 2 * written


@pytest.mark.parametrize(
    "line", [b'{"x":"nan"}', b'{"x":"NaN"}{"x":1}', b'{"x":"NaN","y":1}', b'{"x":"NaN"', b'{"x":"NaN","x":"NaN"}']
)
def test_other_text_in_place_of_a_number_is_a_bad_line(cluster: FakeCluster, run: Run, line: bytes) -> None:
    cluster.create("t", schema=pa.schema([("x", pa.float64())]))
    ended = run("produce", "t", "--skip-bad", "-o", "json", stdin=line + b'\n{"x":"NaN"}\n')
    assert (ended.status, ended.json["records"], ended.json["skipped"]) == (0, 1, 1)


def test_a_local_time_has_no_zone(cluster: FakeCluster, run: Run) -> None:
    """Story: the zone was dropped, and another time was stored."""
    kind = pa.timestamp("us")
    cluster.create("t", schema=pa.schema([("at", kind), ("all", pa.list_(kind))]))
    line = b'{"at":"2020-01-01T00:00:00.5","all":["2020-01-02 03:04:05",null]}'
    bad = [b'{"at":"2020-01-01T00:00:00+05:00"}', b'{"all":["2020-01-01T00:00:00Z"]}', b'{"at":"soon"}', b'{"at":5}']
    ended = run("produce", "t", "--skip-bad", "-o", "json", stdin=b"\n".join([*bad, line]))
    assert (ended.status, ended.json["records"], ended.json["skipped"]) == (0, 1, len(bad))
    (row,) = cluster.rows("t", 0)
    moments = datetime(2020, 1, 1, microsecond=500_000), datetime(2020, 1, 2, 3, 4, 5)  # noqa: DTZ001
    assert row == {"at": moments[0], "all": [moments[1], None]}
