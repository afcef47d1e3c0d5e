"""Between Arrow's types and Spark's: the schema of a DataFrame, and the schema that a user asks for with
`.schema(...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructField, StructType

from spark_broker.errors import InvalidSchemaError, SchemaMismatchError
from spark_broker.spark.columns import Column, by_name


@dataclass(frozen=True)
class ReadSchema:
    """What a read yields: one Arrow schema, exactly as Spark expects it, and the column of each field."""

    schema: pa.Schema
    columns: tuple[Column, ...]


def spark_schema(columns: Sequence[Column]) -> StructType:
    """The DataFrame's schema. Raises InvalidSchemaError that names a column which Spark cannot hold."""
    return StructType([_spark_field(column) for column in columns])


def _spark_field(column: Column) -> StructField:
    decimals = (kind for kind in _leaves(column.type) if pa.types.is_decimal(kind))
    refused = next((kind for kind in decimals if not 0 <= kind.scale <= kind.precision), None)
    if refused is not None:
        why = "negative" if refused.scale < 0 else "above its precision"
        raise InvalidSchemaError(f"column {column.name!r}: Spark has no {refused}, whose scale is {why}")
    try:
        return StructField(column.name, from_arrow_type(column.type), column.nullable)
    except PySparkException as error:
        raise InvalidSchemaError(f"column {column.name!r}: Spark has no type for {column.type}: {error}") from None


def _leaves(kind: pa.DataType) -> list[pa.DataType]:
    children = [kind.field(index).type for index in range(kind.num_fields)]
    return [leaf for child in children for leaf in _leaves(child)] or [kind]


def output_of(schema: StructType, columns: Sequence[Column]) -> ReadSchema:
    """The output of a read with this schema, the source's own or the user's.

    Raises InvalidConfigError for an unknown column, and SchemaMismatchError for a column of another type.
    """
    try:
        target = to_arrow_schema(schema, timezone="UTC")
    except PySparkException as error:
        raise SchemaMismatchError(f"the schema of the read has a type that a topic cannot have: {error}") from None
    positions = by_name(columns, target.names, "the schema of the read")
    for field, column in zip(target, positions, strict=True):
        if not _fits(column.type, field.type):
            raise SchemaMismatchError(
                f"the schema of the read has {field.name!r} as {field.type}; in the topic it is {column.type}"
            )
    return ReadSchema(target, positions)


def _fits(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether every value of one type is a value of the other, which is the same type or a wider one."""
    if pa.types.is_list(stored) and pa.types.is_list(wanted):
        return wanted.value_field.nullable and _fits(stored.value_type, wanted.value_type)
    if pa.types.is_map(stored) and pa.types.is_map(wanted):
        return (
            wanted.item_field.nullable
            and _fits(stored.key_type, wanted.key_type)
            and _fits(stored.item_type, wanted.item_type)
        )
    if pa.types.is_struct(stored) and pa.types.is_struct(wanted):
        return stored.num_fields == wanted.num_fields and all(
            mine.name == other.name and other.nullable and _fits(mine.type, other.type)
            for mine, other in zip(stored, wanted, strict=True)
        )
    if pa.types.is_time(stored):
        return bool(pa.types.is_time(wanted))  # Spark's TIME is in nanoseconds
    if pa.types.is_signed_integer(stored) and pa.types.is_signed_integer(wanted):
        return bool(stored.bit_width <= wanted.bit_width)
    if pa.types.is_float32(stored):
        return bool(pa.types.is_floating(wanted))
    return bool(stored == wanted)
