"""Topic schemas: which Arrow types the log stores, their stored form, and the cast of a user's batch.

The stored types are those that both Spark and Arrow readers take without a conversion: plain (not large, view or
dictionary) types, signed integers, microseconds. Nested fields are nullable; metadata is stripped.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa

from spark_broker.errors import InvalidSchemaError, SchemaMismatchError
from spark_broker.protocol.arrays import is_local_time, nulls
from spark_broker.protocol.casts import cast, first_refused, has_times_of_day, is_any_list

MAX_SCHEMA_BYTES = 1024 * 1024
MAX_NESTING = 32
RESERVED_PREFIXES = ("_topic", "_partition", "_offset", "_timestamp", "_leader_epoch")

LOG_COLUMNS = ("_partition", "_offset", "_timestamp", "_leader_epoch")
"""Of a topic's table: where each record was in the log."""

TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
DEFAULT_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
        pa.field("timestamp", TIMESTAMP_TYPE),
    ]
)
"""Kafka's record. Every column is nullable; the client fills `timestamp`."""

_WIDENED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.date64(): pa.date32(),
}


_MARKS = (b"variant", b"geometry", b"geography")
"""Metadata of a struct's field, with which Spark marks what is no struct."""


def normalize_schema(schema: pa.Schema) -> pa.Schema:
    """The stored form of a schema. Raises InvalidSchemaError for a type, name or shape that the log does not store."""
    if len(schema) == 0:
        raise InvalidSchemaError("a topic needs at least one column")
    for name in schema.names:
        if name.lower().startswith(RESERVED_PREFIXES):
            raise InvalidSchemaError(f"column {name!r}: names beginning {', '.join(RESERVED_PREFIXES)} are reserved")
    _check_names(schema.names, "the schema")
    return pa.schema([pa.field(f.name, _stored_type(f.type, f.name, 0), nullable=f.nullable) for f in schema])


def schema_to_bytes(schema: pa.Schema) -> bytes:
    """The encapsulated IPC schema message: what an Arrow stream of this schema begins with."""
    return bytes(schema.serialize().to_pybytes())


def schema_from_bytes(data: bytes) -> pa.Schema:
    """The schema of an IPC schema message. Raises InvalidSchemaError unless the bytes are exactly one."""
    if not 8 <= len(data) <= MAX_SCHEMA_BYTES:
        raise InvalidSchemaError(f"a schema message of {len(data)} bytes; the limit is {MAX_SCHEMA_BYTES}")
    if data[:4] != b"\xff\xff\xff\xff" or int.from_bytes(data[4:8], "little") != len(data) - 8:
        raise InvalidSchemaError("not one whole Arrow schema message")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
        for field in schema:
            _check_text(field, 0)
        return schema
    except MemoryError:
        raise  # It says nothing of the bytes. ArrowMemoryError is an ArrowException, too.
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise InvalidSchemaError(f"not an Arrow schema message: {error}") from None


def _check_text(field: pa.Field, depth: int) -> None:
    """Read every text now: pyarrow decodes it only when it is read, and raises UnicodeDecodeError (a ValueError)."""
    if depth > MAX_NESTING:
        raise InvalidSchemaError(f"a column nests deeper than {MAX_NESTING}")
    texts = [field.name, field.type.tz if pa.types.is_timestamp(field.type) else None]
    for number in range(field.type.num_fields if None in texts else 0):
        _check_text(field.type.field(number), depth + 1)


def conform(batch: pa.RecordBatch, schema: pa.Schema, *, local_is_utc: bool = True) -> pa.RecordBatch:
    """The batch with this (normalized) schema: columns match by name, missing nullable ones are null, casts are safe.

    `local_is_utc`: local times fit columns of points in time, as UTC's. (Spark would take them by its session's zone.)

    Raises SchemaMismatchError, naming the column and both types, for an unknown or missing column, nulls where none may
    be, or a cast that could lose or reinterpret values.
    """
    if batch.schema.equals(schema, check_metadata=True) and not any(map(_is_checked, schema)):
        return batch
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise SchemaMismatchError(f"the batch has two columns of one name: {', '.join(names)}")
    for name in names:
        if schema.get_field_index(name) < 0:
            kind = batch.schema.field(name).type
            raise SchemaMismatchError(f"unknown column {name!r} ({kind})" + nearest(name, schema.names))
    arrays = [_conformed_column(batch, field, local_is_utc=local_is_utc) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def columns_stored(stored: pa.Schema, names: Sequence[str]) -> list[str]:
    """Those of the columns that rows of an older schema have; its first one where it has none of them.

    A message needs a column to have rows.
    """
    return [name for name in names if stored.get_field_index(name) >= 0] or [stored.names[0]]


def _is_checked(field: pa.Field) -> bool:
    """Whether a column of the very type may have what the field does not take."""
    return not field.nullable or has_times_of_day(field.type)


def _conformed_column(batch: pa.RecordBatch, field: pa.Field, *, local_is_utc: bool) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    if index < 0:
        if not field.nullable:
            raise SchemaMismatchError(f"column {field.name!r} ({field.type}) is missing and is not nullable")
        return nulls(batch.num_rows, field.type)
    column = batch.column(index)
    if not field.nullable and column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise SchemaMismatchError(
            f"column {field.name!r} is not nullable and has {column.null_count} nulls, the first in row {row}"
        )
    if column.type == field.type and not has_times_of_day(field.type):
        return column
    if not _castable(column.type, field.type, local_is_utc=local_is_utc):
        zone = {_family(column.type), _family(field.type)} == {"local time", "point in time"}
        why = ". Convert it, by the zone that it is meant in" if zone else ""
        raise SchemaMismatchError(f"column {field.name!r} is {column.type}; the topic's schema has {field.type}{why}")
    try:
        return cast(column, field.type)
    except (pa.ArrowException, ValueError) as error:
        row = first_refused(column, field.type)
        raise SchemaMismatchError(
            f"column {field.name!r} is {column.type} and row {row} does not fit the topic's {field.type}: {error}"
        ) from None


def nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f"; the topic has {', '.join(names)}"


def _castable(source: pa.DataType, target: pa.DataType, *, local_is_utc: bool) -> bool:
    """Only casts within a family: Arrow would also parse numbers from text, or take integers for points in time.

    A point in time never becomes a local time, or a date: whose zone would count?
    """
    castable = partial(_castable, local_is_utc=local_is_utc)
    if pa.types.is_dictionary(source):
        return castable(source.value_type, target)
    if isinstance(source, pa.BaseExtensionType):
        return castable(source.storage_type, target)
    if pa.types.is_null(source):
        return True
    if is_any_list(source) and pa.types.is_list(target):
        return castable(source.value_type, target.value_type)
    if pa.types.is_map(source) and pa.types.is_map(target):
        return castable(source.key_type, target.key_type) and castable(source.item_type, target.item_type)
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        return _castable_struct(source, target, castable)
    families = _family(source), _family(target)
    return families[0] == families[1] is not None or (local_is_utc and families == ("local time", "point in time"))


def _castable_struct(
    source: pa.StructType, target: pa.StructType, castable: Callable[[pa.DataType, pa.DataType], bool]
) -> bool:
    target_types = {field.name: field.type for field in target}
    if len({field.name for field in source}) < source.num_fields:
        return False  # Arrow would keep one of two fields with the same name.
    return all(field.name in target_types and castable(field.type, target_types[field.name]) for field in source)


def _family(kind: pa.DataType) -> str | None:
    families: dict[str, tuple[Callable[[pa.DataType], bool], ...]] = {
        "boolean": (pa.types.is_boolean,),
        "number": (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
        "text": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, *_BINARY),
        "local time": (pa.types.is_date, is_local_time),
        "point in time": (pa.types.is_timestamp,),
        "time": (pa.types.is_time,),
        "duration": (pa.types.is_duration,),
    }
    return next((name for name, tests in families.items() if any(test(kind) for test in tests)), None)


_BINARY: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def _check_names(names: list[str], where: str) -> None:
    # Spark resolves columns without regard to case: two that differ only in case could not be queried.
    seen: set[str] = set()
    for name in names:
        if not name:
            raise InvalidSchemaError(f"{where} has a column without a name")
        if name.lower() in seen:
            raise InvalidSchemaError(f"{where} has two columns named {name!r} (case does not count)")
        seen.add(name.lower())


def _stored_type(kind: pa.DataType, path: str, depth: int) -> pa.DataType:
    if depth > MAX_NESTING:
        raise InvalidSchemaError(f"column {path.split('.', maxsplit=1)[0]!r} nests deeper than {MAX_NESTING}")
    if isinstance(kind, pa.BaseExtensionType):
        return _stored_type(kind.storage_type, path, depth)
    if is_any_list(kind):
        return pa.list_(_stored_type(kind.value_type, f"{path}.element", depth + 1))
    if pa.types.is_map(kind):
        key = _stored_type(kind.key_type, f"{path}.key", depth + 1)
        return pa.map_(key, _stored_type(kind.item_type, f"{path}.value", depth + 1))
    if pa.types.is_struct(kind):
        return _stored_struct(kind, path, depth)
    return _stored_leaf(kind, path)


def _stored_struct(kind: pa.StructType, path: str, depth: int) -> pa.DataType:
    if kind.num_fields == 0:
        raise InvalidSchemaError(f"column {path!r} is a struct without fields")
    for field in kind:
        marked = next((mark for mark in _MARKS if (field.metadata or {}).get(mark) == b"true"), None)
        if marked is not None:
            raise InvalidSchemaError(f"column {path!r} is Spark's {marked.decode()}, of which only bytes would be left")
    _check_names([field.name for field in kind], f"column {path!r}")
    return pa.struct([pa.field(f.name, _stored_type(f.type, f"{path}.{f.name}", depth + 1)) for f in kind])


def _stored_leaf(kind: pa.DataType, path: str) -> pa.DataType:
    if kind in _WIDENED:
        return _WIDENED[kind]
    family = _family(kind)
    if family == "text":
        return pa.binary() if any(test(kind) for test in _BINARY) else pa.string()
    if pa.types.is_timestamp(kind):
        return TIMESTAMP_TYPE if kind.tz is not None else pa.timestamp("us")
    if family == "time":
        return pa.time64("us")
    if family == "duration":
        return pa.duration("us")
    if pa.types.is_decimal(kind) and kind.bit_width < 256:
        return pa.decimal128(kind.precision, kind.scale)
    refused = pa.types.is_float16(kind) or pa.types.is_uint64(kind) or pa.types.is_decimal(kind)
    if family is None or refused:
        raise InvalidSchemaError(f"column {path!r}: type {kind} cannot be stored")
    return kind
