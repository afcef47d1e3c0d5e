"""How a topic's schema may change: new columns that may be null, and types that hold every value of the old ones.

Columns match by name and keep their places. None is ever removed. So what was stored under an older schema can be read
under each later one.
"""

from __future__ import annotations

import pyarrow as pa

from spark_broker.errors import InvalidSchemaError
from spark_broker.protocol.schema import normalize_schema

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def evolved(current: pa.Schema, changes: pa.Schema) -> pa.Schema:
    """`current` with these columns: one that it has takes the wider type, and others are added at its end.

    `changes` may name any part of the columns. Whether a column that is there may be null stays as it is. Raises
    InvalidSchemaError where a column would lose values, or have none in older records.
    """
    normalize_schema(changes)
    fields = {field.name: field for field in current}
    for field in normalize_schema(changes):
        there = fields.get(field.name)
        if there is None and not field.nullable:
            raise InvalidSchemaError(f"new column {field.name!r} must be nullable: older records have no value for it")
        if there is not None and not _holds(field.type, there.type):
            raise InvalidSchemaError(
                f"column {field.name!r} is {there.type} and cannot become {field.type}: only integers, floats and "
                "decimals become wider"
            )
        fields[field.name] = field if there is None else there.with_type(field.type)
    return normalize_schema(pa.schema(list(fields.values())))


def widened(current: pa.DataType, other: pa.DataType) -> bool:
    """Whether the other type is another one that holds every value of this one."""
    return current != other and _holds(other, current)


def _holds(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether each value of the narrow type has its place in the wide one."""
    if wide == narrow:
        return True
    if wide in _INTEGERS and narrow in _INTEGERS:
        return _INTEGERS.index(wide) > _INTEGERS.index(narrow)
    if pa.types.is_decimal128(wide) and pa.types.is_decimal128(narrow):
        return bool(wide.scale == narrow.scale and wide.precision > narrow.precision)
    return bool(wide == pa.float64() and narrow == pa.float32())
