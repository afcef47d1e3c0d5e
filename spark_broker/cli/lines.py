"""Lines of text as rows of a topic's schema: a value, a key and a value, or one JSON object a line."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import pyarrow as pa
import pyarrow.json

from spark_broker.cli.columns import spelled
from spark_broker.errors import InvalidDataError
from spark_broker.protocol.arrays import array_of
from spark_broker.protocol.schema import DEFAULT_SCHEMA

SHOWN_BYTES = 80


class RowMaker:
    """Makes rows of a schema from lines, and counts the lines: an error names the number of its line, from 1."""

    def __init__(self, schema: pa.Schema, key_separator: str) -> None:
        """Raises InvalidDataError where a separator makes no sense."""
        self._schema = schema
        self._separator = key_separator.encode()
        self._typed = not schema.equals(DEFAULT_SCHEMA)
        self._lines_before = 0
        if self._typed and key_separator:
            raise InvalidDataError(
                "the topic has columns, so that --key-separator does not apply",
                hint="Leave it out: a line is a JSON object, and key.columns of the topic name its key.",
            )

    def rows(self, lines: Sequence[bytes]) -> pa.Table:
        """The rows of the next lines. Raises InvalidDataError."""
        table = self._objects(lines) if self._typed else self._records(lines)
        self._lines_before += len(lines)
        return table

    def _records(self, lines: Sequence[bytes]) -> pa.Table:
        if not self._separator:
            return _key_value_table([None] * len(lines), lines)
        parts = [line.partition(self._separator) for line in lines]
        for index, (line, (_, separator, _)) in enumerate(zip(lines, parts, strict=True)):
            if not separator:
                text = f"{self._separator.decode()!r} is not in {_shown(line)}"
                raise InvalidDataError(f"line {self._lines_before + index + 1}: {text}")
        return _key_value_table([key for key, _, _ in parts], [value for _, _, value in parts])

    def _objects(self, lines: Sequence[bytes]) -> pa.Table:
        try:
            table = self._parsed(lines)
        except pa.ArrowInvalid as error:
            raise self._why(lines, error) from None
        return table.select([name for name in self._schema.names if name in table.column_names])

    def _parsed(self, lines: Sequence[bytes]) -> pa.Table:
        options = pa.json.ParseOptions(explicit_schema=self._schema, unexpected_field_behavior="error")
        return pa.json.read_json(BytesIO(b"\n".join(lines)), parse_options=options)

    def _why(self, lines: Sequence[bytes], error: pa.ArrowInvalid) -> InvalidDataError:
        """The error with the number of its line. Arrow does not give it: the first line that fails by itself has it."""
        for number, line in enumerate(lines, self._lines_before + 1):
            try:
                if line.strip():
                    self._parsed([line])
            except pa.ArrowInvalid as of_line:
                what = f"line {number} is no JSON object of the topic's columns: {of_line}: {_shown(line)}"
                return InvalidDataError(what, hint=_columns_hint(self._schema))
        first, last = self._lines_before + 1, self._lines_before + len(lines)
        return InvalidDataError(f"lines {first} to {last}: {error}", hint=_columns_hint(self._schema))


def _key_value_table(keys: Sequence[bytes | None], values: Sequence[bytes]) -> pa.Table:
    return pa.table({"key": array_of(keys, pa.binary()), "value": array_of(values, pa.binary())})


def _columns_hint(schema: pa.Schema) -> str:
    return f"Write one object a line with these columns: {', '.join(f'{f.name} ({spelled(f)})' for f in schema)}."


def _shown(line: bytes) -> str:
    return repr(line[:SHOWN_BYTES].decode(errors="replace")) + ("..." if len(line) > SHOWN_BYTES else "")
