"""A column as a person writes it, `name:type`, and back: `topics create --column` takes what `topics describe` prints.

Types have Arrow's names. `list<T>`, `struct<name: T, ...>` and `map<K, V>` nest; `decimal(p, s)` is decimal128, and
`timestamp` alone is microseconds UTC. A name that is not a plain word stands in backticks; a backtick in it is doubled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa

from spark_broker.errors import InvalidSchemaError
from spark_broker.protocol.schema import MAX_NESTING, TIMESTAMP_TYPE

NOT_NULL = "not null"

_PLAIN_NAME = re.compile(r"[\w.-]+")
_NAME = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^:`<>,]+?))\s*:")
_LEAF = re.compile(r"\s*(\w+\s*(?:\[[^\]]*\]|\([^)]*\))?)")
_NESTED = re.compile(r"\s*(list|struct|map)\s*<")
_DECIMAL = re.compile(r"decimal(?:128)?\s*\(\s*(\d+)\s*,\s*(-?\d+)\s*\)")
_TIMESTAMP = re.compile(r"timestamp\s*\[\s*(\w+)\s*,\s*tz\s*=\s*([^\]]+?)\s*\]")
_EXAMPLES = "int32, double, string, timestamp, decimal(10, 2), list<string>, struct<a: int32, b: string>"


def parse_schema(columns: Sequence[str]) -> pa.Schema:
    """A schema of these columns, each `name:type`. Raises InvalidSchemaError."""
    return pa.schema([parse_column(column) for column in columns])


def parse_column(text: str) -> pa.Field:
    """`name:type`, or `name:type not null`. Raises InvalidSchemaError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidSchemaError(f"column {text!r} is not Unicode text: {error}") from None
    return _Parser(text).column()


def spelled(field: pa.Field) -> str:
    """The type of a column as `--column` takes it, with `not null` where a value must be there."""
    return _spelled_type(field.type) + ("" if field.nullable else f" {NOT_NULL}")


def spelled_name(name: str) -> str:
    """The name of a column as `--column` takes it."""
    return name if _PLAIN_NAME.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def _spelled_type(kind: pa.DataType) -> str:
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{spelled_name(f.name)}: {_spelled_type(f.type)}' for f in kind)}>"
    if pa.types.is_map(kind):
        return f"map<{_spelled_type(kind.key_type)}, {_spelled_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"list<{_spelled_type(kind.value_type)}>"
    return str(kind)


class _Parser:
    """Recursive descent over one column."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._column = text

    def column(self) -> pa.Field:
        name = self._name()
        self._column = name
        kind = self._type(0)
        rest = " ".join(self._text[self._at :].split())
        if rest not in ("", NOT_NULL):
            raise InvalidSchemaError(f"column {name!r}: {rest!r} follows the type {_spelled_type(kind)!r}")
        return pa.field(name, kind, nullable=not rest)

    def _name(self) -> str:
        match = self._match(_NAME)
        if match is None:
            raise InvalidSchemaError(f"{self._text[self._at :].strip()!r} is not NAME:TYPE")
        return match[1].replace("``", "`") if match[1] else match[2]

    def _type(self, depth: int) -> pa.DataType:
        if depth > MAX_NESTING:
            raise InvalidSchemaError(f"column {self._column!r} nests deeper than {MAX_NESTING}")
        nested = self._match(_NESTED)
        if nested is None:
            return self._leaf()
        if nested[1] == "struct":
            fields = [self._struct_field(depth)]
            while self._skip(","):
                fields.append(self._struct_field(depth))
            kind = pa.struct(fields)
        elif nested[1] == "map":
            key = self._type(depth + 1)
            self._expect(",")
            kind = pa.map_(key, self._type(depth + 1))
        else:
            self._match(_NAME)  # Arrow prints the name of a list's element, which says nothing.
            kind = pa.list_(self._type(depth + 1))
        self._expect(">")
        return kind

    def _struct_field(self, depth: int) -> pa.Field:
        return pa.field(self._name(), self._type(depth + 1))

    def _leaf(self) -> pa.DataType:
        match = self._match(_LEAF)
        text = match[1].strip() if match else self._text[self._at :].strip()
        try:
            if decimal := _DECIMAL.fullmatch(text):
                return pa.decimal128(int(decimal[1]), int(decimal[2]))
            if timestamp := _TIMESTAMP.fullmatch(text):
                return pa.timestamp(timestamp[1], tz=timestamp[2])
            return TIMESTAMP_TYPE if text == "timestamp" else pa.type_for_alias(text)
        except (ValueError, OverflowError):
            raise InvalidSchemaError(f"column {self._column!r}: {text!r} is no type ({_EXAMPLES})") from None

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _skip(self, sign: str) -> bool:
        return self._match(re.compile(r"\s*" + re.escape(sign))) is not None

    def _expect(self, sign: str) -> None:
        if not self._skip(sign):
            rest = self._text[self._at :].strip()
            raise InvalidSchemaError(f"column {self._column!r}: {sign!r} is missing before {rest!r}")
