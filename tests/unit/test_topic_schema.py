"""A topic's schema may be given as Arrow's, as Spark's, or as DDL: the topic is the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_type

from spark_broker.client.topic_schema import arrow_schema
from spark_broker.errors import InvalidSchemaError
from spark_broker.protocol.schema import normalize_schema

UTC = pa.timestamp("us", tz="UTC")


def test_a_schema_of_spark_is_that_of_its_rows() -> None:
    schema = spark.StructType(
        [
            spark.StructField("dest", spark.StringType(), nullable=False),
            spark.StructField("at", spark.TimestampType()),
            spark.StructField("legs", spark.ArrayType(spark.IntegerType(), containsNull=False)),
        ]
    )
    assert normalize_schema(arrow_schema(schema)) == pa.schema(
        [pa.field("dest", pa.string(), nullable=False), ("at", UTC), ("legs", pa.list_(pa.int32()))]
    )


def test_ddl_is_the_schema_that_it_describes() -> None:
    ddl = """
        dest STRING NOT NULL COMMENT 'it''s where', `a``b c` int, price DECIMAL(12, 2), whole dec, name varchar(10),
        legs ARRAY<STRUCT<at: TIMESTAMP, `x`: ARRAY<TIME(6)> NOT NULL COMMENT "y">>, seen MAP<STRING,MAP<LONG, BYTE>>,
        took INTERVAL DAY TO SECOND
    """.replace("it''s", "it is")
    leg = pa.struct([pa.field("at", UTC), pa.field("x", pa.list_(pa.time64("us")), nullable=False)])
    assert arrow_schema(ddl) == pa.schema(
        [
            pa.field("dest", pa.string(), nullable=False),
            ("a`b c", pa.int32()),
            ("price", pa.decimal128(12, 2)),
            ("whole", pa.decimal128(10, 0)),
            ("name", pa.string()),
            ("legs", pa.list_(leg)),
            ("seen", pa.map_(pa.string(), pa.map_(pa.int64(), pa.int8()))),
            ("took", pa.duration("us")),
        ]
    )


LEAVES = st.sampled_from(
    [
        *(spark.BooleanType(), spark.ByteType(), spark.ShortType(), spark.IntegerType(), spark.LongType()),
        *(spark.FloatType(), spark.DoubleType(), spark.StringType(), spark.BinaryType(), spark.DateType()),
        *(spark.TimestampType(), spark.TimestampNTZType(), spark.DayTimeIntervalType(), spark.DecimalType(20, 3)),
    ]
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="`", categories=("L", "N")), min_size=1, max_size=5)


def structs(kinds: st.SearchStrategy[spark.DataType]) -> st.SearchStrategy[spark.StructType]:
    fields = st.builds(spark.StructField, NAMES, kinds, st.booleans())
    return st.lists(fields, min_size=1, max_size=4, unique_by=lambda field: field.name.lower()).map(spark.StructType)


TYPES: st.SearchStrategy[spark.DataType] = st.recursive(
    LEAVES,
    lambda kinds: st.one_of(
        st.builds(spark.ArrayType, kinds), st.builds(spark.MapType, st.just(spark.StringType()), kinds), structs(kinds)
    ),
    max_leaves=6,
)


@given(structs(TYPES))
def test_ddl_and_struct_type_make_the_same_topic(schema: spark.StructType) -> None:
    assert normalize_schema(arrow_schema(ddl_of(schema))) == normalize_schema(arrow_schema(schema))


def ddl_of(schema: spark.StructType) -> str:
    return ", ".join(
        f"`{field.name}` {type_of(field.dataType)}{'' if field.nullable else ' NOT NULL'}" for field in schema
    )


def type_of(kind: spark.DataType) -> str:
    match kind:
        case spark.StructType():
            return f"STRUCT<{ddl_of(kind)}>"
        case spark.ArrayType():
            return f"array<{type_of(kind.elementType)}>"
        case spark.MapType():
            return f"map<{type_of(kind.keyType)}, {type_of(kind.valueType)}>"
        case _:
            return kind.simpleString()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("", "expected a column's name, not its end"),
        ("a", "expected a type, not its end"),
        ("a STRNG", "unknown type 'STRNG' at character 2; did you mean STRING"),
        ("a INT b INT", r"expected ',' or the end, not 'b' at character 6"),
        ("a INT NOT", "expected 'NULL', not its end"),
        ("a INT COMMENT b", "expected the comment's text"),
        ("a ARRAY<INT", "expected '>', not its end"),
        ("a ARRAY INT", "expected '<', not 'INT'"),
        ("a MAP<INT>", "expected ',', not '>'"),
        ("a DECIMAL(40, 2)", "is no type of Spark"),
        ("a DECIMAL(x)", "expected a number"),
        ("a INTERVAL YEAR", "expected 'DAY'"),
        ("a INT; DROP", "has no meaning"),
        ("a " + "ARRAY<" * 200 + "INT" + ">" * 200, "nests deeper"),
        (7, "not int"),
        (spark.StructType([spark.StructField("a", spark.CalendarIntervalType())]), "column 'a' is interval"),
    ],
)
def test_what_is_no_schema_is_named(schema: object, message: str) -> None:
    with pytest.raises(InvalidSchemaError, match=message):
        arrow_schema(schema)


def test_ddl_needs_no_spark() -> None:
    code = "import sys; from spark_broker.client.topic_schema import arrow_schema; arrow_schema('a INT'); "
    code += "print([name for name in ('pyspark', 'py4j') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class OfAUser(spark.UserDefinedType):
    """As the vectors of Spark's ML are."""

    @classmethod
    def sqlType(cls) -> spark.DataType:
        return spark.ArrayType(spark.DoubleType())


UNKEPT = [
    (spark.VariantType(), "variant", "to_json"),
    (spark.GeometryType(4326), "geometry", "st_asbinary"),
    (spark.GeographyType(4326), "geography", "st_asbinary"),
    (OfAUser(), "OfAUser", "columns of their own"),
]


@pytest.mark.parametrize(("kind", "name", "hint"), UNKEPT, ids=[name for _, name, _ in UNKEPT])
@pytest.mark.parametrize(
    "nested",
    [
        lambda kind: kind,
        spark.ArrayType,
        lambda kind: spark.MapType(spark.StringType(), kind),
        lambda kind: spark.StructType([spark.StructField("x", spark.ArrayType(kind))]),
    ],
    ids=["column", "list", "map", "struct"],
)
def test_a_type_of_spark_that_would_come_back_as_another_is_refused(
    kind: spark.DataType, name: str, hint: str, nested: Callable[[spark.DataType], spark.DataType]
) -> None:
    """Arrow has them as structs of bytes. A topic keeps no mark of what a struct was."""
    schema = spark.StructType([spark.StructField("v", nested(kind))])
    with pytest.raises(InvalidSchemaError, match=f"column 'v' has the type {name}, .*{hint}"):
        arrow_schema(schema)


@pytest.mark.parametrize("kind", [kind for kind, name, _ in UNKEPT if name != "OfAUser"])
def test_the_same_types_are_refused_in_arrows_schemas(kind: spark.DataType) -> None:
    """`DataFrame.toArrow().schema` has them."""
    schema = pa.schema([("v", pa.list_(to_arrow_type(kind)))])
    with pytest.raises(InvalidSchemaError, match=f"'v.element' is Spark's {kind.typeName()}"):
        normalize_schema(schema)


def test_a_struct_with_the_fields_of_a_variant_is_a_struct() -> None:
    plain = pa.struct([("value", pa.binary()), ("metadata", pa.binary())])
    assert normalize_schema(pa.schema([("v", plain)])).field("v").type == plain
