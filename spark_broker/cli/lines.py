"""Lines of text as rows of a topic's schema: a value, a key and a value, or one JSON object a line."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

import msgspec
import pyarrow as pa
import pyarrow.json

from spark_broker.cli.columns import spelled
from spark_broker.errors import InvalidDataError
from spark_broker.protocol.arrays import array_of, is_local_time
from spark_broker.protocol.casts import cast
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from spark_broker.protocol.wire import UNDECODABLE

SHOWN_BYTES = 80


@dataclass(frozen=True)
class Rows:
    """What became of some lines: the rows of those that fit, and an error for each of the others."""

    table: pa.Table
    refused: tuple[InvalidDataError, ...] = ()


class RowMaker:
    """Makes rows of a schema from lines, and counts the lines: an error names the number of its line, from 1."""

    def __init__(self, schema: pa.Schema, key_separator: str, *, skip_bad: bool = False) -> None:
        """`skip_bad`: a line that does not fit is left out; else it ends the input. Raises InvalidDataError where a
        separator makes no sense, or no line can have one of the columns.
        """
        self._schema = schema
        self._as_read = pa.schema([field.with_type(_as_read(field.type, field.name)) for field in schema])
        self._has_floats = any(_has_floats(field.type) for field in self._as_read)
        self._separator = os.fsencode(key_separator)  # lines are bytes, in whatever encoding
        self._typed = not schema.equals(DEFAULT_SCHEMA)
        self._skip_bad = skip_bad
        self.lines = 0
        """How many were taken: up to the end of the last input, or up to the line that ended it (exclusive)."""
        if self._typed and key_separator:
            raise InvalidDataError(
                "the topic has columns, so that --key-separator does not apply",
                hint="Leave it out: a line is a JSON object, and key.columns of the topic name its key.",
            )

    def rows(self, lines: Sequence[bytes]) -> Rows:
        """The rows of the next lines; unless bad ones are skipped, only of those before the first that does not fit.

        Raises InvalidDataError where no single line is to blame.
        """
        first = self.lines + 1
        try:
            made = Rows(self._table(lines))
        except _UNFIT as error:
            bad = dict(self._unfit(lines, first))
            if not bad:
                raise InvalidDataError(f"lines {first:,} to {first + len(lines) - 1:,}: {error}") from None
            if not self._skip_bad:
                bad, lines = dict([next(iter(bad.items()))]), lines[: min(bad) - first]
            fitting = [line for number, line in enumerate(lines, first) if number not in bad]
            made = Rows(self._table(fitting), tuple(bad.values()))
        self.lines += len(lines)
        return made

    def _table(self, lines: Sequence[bytes]) -> pa.Table:
        """Raises one of `_UNFIT`."""
        return self._objects(lines) if self._typed else self._records(lines)

    def _unfit(self, lines: Sequence[bytes], first: int) -> Iterator[tuple[int, InvalidDataError]]:
        """The lines that do not fit, by number, in order. Halves are tried: one parse for each line takes a minute."""
        try:
            self._table(lines)
        except _UNFIT as error:
            if len(lines) == 1:
                yield first, self._why(first, lines[0], error)
                return
            half = len(lines) // 2
            yield from self._unfit(lines[:half], first)
            yield from self._unfit(lines[half:], first + half)

    def _records(self, lines: Sequence[bytes]) -> pa.Table:
        if not self._separator:
            return _key_value_table([None] * len(lines), lines)
        parts = [line.partition(self._separator) for line in lines]
        if not all(separator for _, separator, _ in parts):
            raise _NoSeparatorError
        return _key_value_table([key for key, _, _ in parts], [value for _, _, value in parts])

    def _objects(self, lines: Sequence[bytes]) -> pa.Table:
        """Empty lines are no objects, and no mistakes."""
        objects = [text for line in lines if (text := line.strip().lstrip(_BEFORE_OBJECTS))]
        if not objects:
            return self._schema.empty_table()
        if not all(text.startswith(b"{") for text in objects):
            raise pa.ArrowInvalid("it does not begin with a brace")  # Arrow crashes where the first line is `null`.
        if not all(map(self._is_one_object, objects)):
            raise pa.ArrowInvalid("it is more than one object")
        if self._has_floats:
            objects = [_with_numbers(text, self._as_read) if _TEXT_OF_NUMBER.search(text) else text for text in objects]
        table = self._parsed(b"\n".join(objects))
        table.validate(full=True)  # Arrow reads texts that are not UTF-8 without a look at them.
        there = [field for field in self._schema if field.name in table.column_names]
        columns = [cast(table.column(field.name).combine_chunks(), field.type) for field in there]
        return pa.Table.from_arrays(columns, schema=pa.schema(there))

    def _is_one_object(self, text: bytes) -> bool:
        """Arrow reads objects one after the other, wherever lines end: two on a line, or one over two lines. Raises
        ArrowInvalid for what is no object.
        """
        try:
            _ONE_VALUE.decode(text)
        except UNDECODABLE:
            return len(self._parsed(text)) == 1  # Arrow takes NaN, too.
        return True

    def _parsed(self, text: bytes) -> pa.Table:
        options = pa.json.ParseOptions(explicit_schema=self._as_read, unexpected_field_behavior="error")
        whole = pa.json.ReadOptions(block_size=len(text) + 1)  # A line may be larger than a block is by default.
        return pa.json.read_json(BytesIO(text), whole, options)

    def _why(self, number: int, line: bytes, error: Exception) -> InvalidDataError:
        if not self._typed:
            separator = self._separator.decode(errors="backslashreplace")
            what = f"line {number:,}: {separator!r} is not in {_shown(line)}"
            return InvalidDataError(what, hint=f"Write KEY{separator}VALUE.")
        what = f"line {number:,} is no JSON object of the topic's columns: {error}: {_shown(line)}"
        return InvalidDataError(what, hint=_columns_hint(self._schema))


def _as_read(kind: pa.DataType, path: str) -> pa.DataType:
    """The type in which Arrow reads JSON of a column: dates and local times as the text that people write; floats of 32
    bits with 64.

    Arrow itself reads a number that is too large for 32 bits as infinity, and takes the zone away from a time.
    """
    if pa.types.is_date(kind) or is_local_time(kind):
        return pa.string()
    if pa.types.is_float32(kind):
        return pa.float64()
    if pa.types.is_list(kind):
        return pa.list_(_as_read(kind.value_type, path))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_read(field.type, f"{path}.{field.name}")) for field in kind])
    if pa.types.is_map(kind) or pa.types.is_duration(kind) or pa.types.is_time(kind):
        raise InvalidDataError(
            f"column {path!r} is {kind}, which a line of JSON cannot have here",
            hint="Write such records with Producer.append, or with a DataFrame.",
        )
    return kind


def _has_floats(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) or pa.types.is_list(kind):
        return any(_has_floats(kind.field(index).type) for index in range(kind.num_fields))
    return bool(pa.types.is_floating(kind))


def _with_numbers(text: bytes, fields: Iterable[pa.Field]) -> bytes:
    """The object with NaN and Infinity as Arrow reads them, where the text of them stands for a number.

    JSON has no such numbers. `consume` writes their text, as Spark does.
    """
    try:
        json.loads(text, object_pairs_hook=_named_once)
        columns = _COLUMNS.decode(text)
    except UNDECODABLE:
        return text  # Arrow says what is wrong, or takes it.
    for field in fields:
        if field.name in columns:
            columns[field.name] = msgspec.Raw(_with_number(bytes(columns[field.name]), field.type))
    return msgspec.json.encode(columns)


def _named_once(pairs: list[tuple[str, object]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a column is named twice")


def _with_number(text: bytes, kind: pa.DataType) -> bytes:
    if pa.types.is_floating(kind) and _TEXT_OF_NUMBER.fullmatch(text):
        return text[1:-1]
    if pa.types.is_struct(kind) and text.startswith(b"{"):
        return _with_numbers(text, kind)
    if pa.types.is_list(kind) and text.startswith(b"["):
        values = [_with_number(bytes(value), kind.value_type) for value in _VALUES.decode(text)]
        return b"[" + b",".join(values) + b"]"
    return text


class _NoSeparatorError(ValueError):
    """A line has no separator."""


_UNFIT = (pa.ArrowInvalid, _NoSeparatorError)

_BEFORE_OBJECTS = codecs.BOM_UTF8 + b" \t\r\n"

_TEXT_OF_NUMBER = re.compile(rb'"(?:NaN|-?Infinity)"')
_COLUMNS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUES = msgspec.json.Decoder(list[msgspec.Raw])

_ONE_VALUE = msgspec.json.Decoder(msgspec.Raw)
"""Looks only where a value ends."""


def _key_value_table(keys: Sequence[bytes | None], values: Sequence[bytes]) -> pa.Table:
    return pa.table({"key": array_of(keys, pa.binary()), "value": array_of(values, pa.binary())})


def _columns_hint(schema: pa.Schema) -> str:
    return f"Write one object a line with these columns: {', '.join(f'{f.name} ({spelled(f)})' for f in schema)}."


def _shown(line: bytes) -> str:
    return repr(line[:SHOWN_BYTES].decode(errors="replace")) + ("..." if len(line) > SHOWN_BYTES else "")
