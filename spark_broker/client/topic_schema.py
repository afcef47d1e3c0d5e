"""The schema of a topic to create. The user gives it as an Arrow schema, a Spark StructType or DDL text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from spark_broker.client.ddl import parse_ddl
from spark_broker.errors import InvalidSchemaError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_IN_PLACE = {
    "variant": "Write its text, to_json(v); parse_json makes a variant of it again.",
    "geometry": "Write its bytes, st_asbinary(g).",
    "geography": "Write its bytes, st_asbinary(g).",
}
"""What to write instead of Spark's types that Arrow has as a struct of bytes. A topic would give back that struct."""

_OF_A_USER = "Write its values in columns of their own, or as an array or a struct of plain types."


def arrow_schema(schema: object) -> pa.Schema:
    """The schema as Arrow's. Raises InvalidSchemaError for a type that a topic cannot have, and for other objects."""
    if isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, str):
        try:
            schema.encode()
        except UnicodeEncodeError as error:
            raise InvalidSchemaError(f"the schema is not Unicode text: {error}") from None
        return parse_ddl(schema)
    if type(schema).__name__ == "StructType" and type(schema).__module__.startswith("pyspark."):
        return _from_spark(schema)
    if hasattr(schema, "__arrow_c_schema__") and not isinstance(schema, type):
        try:
            return pa.schema(schema)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidSchemaError(f"{type(schema).__name__} does not become a schema: {error}") from None
    raise InvalidSchemaError(f"a schema is a pyarrow.Schema, a StructType or its DDL, not {type(schema).__name__}")


def _from_spark(schema: object) -> pa.Schema:
    # A caller with a StructType has pyspark already; no other caller loads it.
    from pyspark.sql.types import StructType

    if not isinstance(schema, StructType):
        raise InvalidSchemaError(f"a {type(schema).__module__}.StructType is not pyspark's")
    for field in schema:
        unkept = unkept_type(field.dataType)
        if unkept:
            raise unkept_error(field.name, unkept)
    return rows_schema(schema)


def rows_schema(schema: StructType) -> pa.Schema:
    """The schema of rows as Spark hands them on, also of types that a topic does not keep (`unkept_type`).

    Raises InvalidSchemaError for a type that Spark does not hand on.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    fields = []
    for field in schema:
        try:
            kind = to_arrow_type(field.dataType, timezone="UTC")
        except PySparkException as error:
            raise InvalidSchemaError(
                f"column {field.name!r} is {field.dataType.simpleString()}, which a topic cannot have: {error}"
            ) from None
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
    return pa.schema(fields)


def unkept_type(kind: DataType) -> str:
    """The type in this one, or itself, that a topic would give back as another; empty: there is none."""
    from pyspark.sql.types import ArrayType, MapType, StructType, UserDefinedType

    match kind:
        case UserDefinedType():
            return type(kind).__name__
        case ArrayType():
            return unkept_type(kind.elementType)
        case MapType():
            return unkept_type(kind.keyType) or unkept_type(kind.valueType)
        case StructType():
            return next(filter(None, (unkept_type(field.dataType) for field in kind)), "")
        case _:
            return kind.typeName() if kind.typeName() in _IN_PLACE else ""


def unkept_error(column: str, kind: str) -> InvalidSchemaError:
    """The error for a column with such a type."""
    what = f"column {column!r} has the type {kind}, which a topic cannot have: it would come back as another type"
    return InvalidSchemaError(what, hint=_IN_PLACE.get(kind, _OF_A_USER))
