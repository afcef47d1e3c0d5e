"""`--column` takes every column that a topic can have, as `topics describe` prints it."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.cli.columns import parse_column, parse_schema, spelled, spelled_name
from spark_broker.errors import InvalidSchemaError
from spark_broker.protocol.schema import RESERVED_PREFIXES, TIMESTAMP_TYPE, normalize_schema
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(
    lambda name: not name.lower().startswith(RESERVED_PREFIXES)
)
leaves = st.one_of(
    st.sampled_from(
        [
            *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
            *(pa.string(), pa.binary(), pa.date32(), pa.time64("us"), pa.duration("us")),
            *(pa.timestamp("us"), TIMESTAMP_TYPE, pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("ns", "+02:00")),
            *(pa.uint8(), pa.uint32(), pa.date64(), pa.time32("s")),
        ]
    ),
    st.tuples(st.integers(1, 38), st.integers(0, 38)).map(lambda p: pa.decimal128(max(p), min(p))),
)


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.lists(st.tuples(names, inner), min_size=1, max_size=3, unique_by=lambda f: f[0].lower())
    return st.one_of(
        inner.map(pa.list_),
        fields.map(lambda found: pa.struct([pa.field(*field) for field in found])),
        st.tuples(inner, inner).map(lambda pair: pa.map_(*pair)),
    )


types = st.recursive(leaves, nested, max_leaves=6)


@given(name=names, kind=types, nullable=st.booleans())
def test_what_describe_prints_is_what_column_takes(name: str, kind: pa.DataType, nullable: bool) -> None:
    (stored,) = normalize_schema(pa.schema([pa.field(name, kind, nullable)]))
    assert parse_column(f"{spelled_name(name)}:{spelled(stored)}").equals(stored)


@given(name=names, kind=types)
def test_arrows_own_spelling_of_a_type_is_taken(name: str, kind: pa.DataType) -> None:
    if pa.types.is_nested(kind):
        return  # Arrow does not quote the names of fields
    assert parse_column(f"{spelled_name(name)}: {kind}").type == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("at:timestamp", TIMESTAMP_TYPE),
        ("at:timestamp[ms, tz=Europe/Berlin]", pa.timestamp("ms", "Europe/Berlin")),
        ("price:decimal(10,2)", pa.decimal128(10, 2)),
        ("tags: list<string>", pa.list_(pa.string())),
        ("tags:list<item: string>", pa.list_(pa.string())),
        ("p : struct<x: double, `y z`: list<int8>>", pa.struct([("x", pa.float64()), ("y z", pa.list_(pa.int8()))])),
        ("m:map<string, decimal128(5, 1)>", pa.map_(pa.string(), pa.decimal128(5, 1))),
    ],
)
def test_a_column_is_read_as_a_person_writes_it(text: str, kind: pa.DataType) -> None:
    assert parse_column(text).type == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id", "'id' is not NAME:TYPE"),
        (":int32", "is not NAME:TYPE"),
        ("n:number", "column 'n': 'number' is no type"),
        ("n:", "column 'n': '' is no type"),
        ("n:list<int32", "column 'n': '>' is missing"),
        ("n:list<>", "is no type"),
        ("n:struct<int32>", "is not NAME:TYPE"),
        ("n:map<string>", "',' is missing"),
        ("n:int32 nullable", "'nullable' follows the type 'int32'"),
        ("n:decimal(77, 2)", "is no type"),
        ("\udcff:int32", "is not Unicode text"),
        ("n:struct<\udcff: int32>", "is not Unicode text"),
        ("n:" + "list<" * 40 + "int8" + ">" * 40, "nests deeper than"),
    ],
)
def test_a_mistake_in_a_column_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidSchemaError) as refused:
        parse_column(text)
    assert message in str(refused.value)


def test_a_described_topic_is_created_again_from_its_description(cluster: FakeCluster, run: Run) -> None:
    schema = parse_schema(["id:int64 not null", "price:decimal(10, 2)", "tags:list<string>", "at:timestamp"])
    columns = [part for field in schema for part in ("--column", f"{field.name}:{spelled(field)}")]
    assert run("topics", "create", "t", *columns).status == 0
    described = run("topics", "describe", "t", "-o", "json").json["schema"]
    assert described == {
        "id": "int64 not null",
        "price": "decimal128(10, 2)",
        "tags": "list<string>",
        "at": "timestamp[us, tz=UTC]",
    }
    again = [part for name, kind in described.items() for part in ("--column", f"{name}:{kind}")]
    assert run("topics", "create", "u", *again).status == 0
    assert cluster.topics["u"].parsed_schemas[0].equals(cluster.topics["t"].parsed_schemas[0])
    assert "decimal128(10, 2)" in run("topics", "describe", "t").out
