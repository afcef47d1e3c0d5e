"""The schema of a topic to create. The user gives it as an Arrow schema, a Spark StructType or DDL text."""

from __future__ import annotations

import pyarrow as pa

from spark_broker.client.ddl import parse_ddl
from spark_broker.errors import InvalidSchemaError


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
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type
    from pyspark.sql.types import StructType

    if not isinstance(schema, StructType):
        raise InvalidSchemaError(f"a {type(schema).__module__}.StructType is not pyspark's")
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
