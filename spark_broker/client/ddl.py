"""Spark's DDL of a schema, `dest STRING NOT NULL, delay INT`, as an Arrow schema: without Spark and without a JVM.

columns  = column {"," column}
column   = name [":"] type ["NOT" "NULL"] ["COMMENT" text]
type     = "ARRAY" "<" type ">"  |  "MAP" "<" type "," type ">"  |  "STRUCT" "<" columns ">"
         | name ["(" number {"," number} ")"]  |  "INTERVAL" "DAY" ["TO" "SECOND"]
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa

from spark_broker.digits import digits
from spark_broker.errors import InvalidSchemaError
from spark_broker.protocol.schema import TIMESTAMP_TYPE

NESTING_MAX = 32
DECIMAL = (10, 0)
"""Precision and scale of a DECIMAL that names none, as in Spark."""

DECIMAL_PRECISION_MAX = 38

_TYPES: dict[str, pa.DataType] = {
    "BOOLEAN": pa.bool_(),
    **dict.fromkeys(("TINYINT", "BYTE"), pa.int8()),
    **dict.fromkeys(("SMALLINT", "SHORT"), pa.int16()),
    **dict.fromkeys(("INT", "INTEGER"), pa.int32()),
    **dict.fromkeys(("BIGINT", "LONG"), pa.int64()),
    **dict.fromkeys(("FLOAT", "REAL"), pa.float32()),
    "DOUBLE": pa.float64(),
    **dict.fromkeys(("STRING", "VARCHAR", "CHAR", "CHARACTER"), pa.string()),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    **dict.fromkeys(("TIMESTAMP", "TIMESTAMP_LTZ"), TIMESTAMP_TYPE),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
    "TIME": pa.time64("us"),
}
_WITH_LENGTH = ("VARCHAR", "CHAR", "CHARACTER", "TIME")
_DECIMALS = ("DECIMAL", "DEC", "NUMERIC")
_NESTED = ("ARRAY", "MAP", "STRUCT", "INTERVAL")

_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)*`)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(\w+)|([<>(),:]))")


@dataclass(frozen=True)
class _Token:
    text: str
    kind: str  # "name" (quoted), "text", "word" or "sign"
    at: int


def parse_ddl(text: str) -> pa.Schema:
    """The schema that the text describes. Raises InvalidSchemaError, which says where the text is wrong."""
    parser = _Parser(text)
    whole = parser.next_is("STRUCT", "<")
    if whole:
        parser.take("STRUCT")
        parser.take("<")
    fields = parser.columns(0)
    if whole:
        parser.take(">")
    parser.end()
    return pa.schema(fields)


class _Parser:
    """One pass over the tokens."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._at = 0

    def columns(self, depth: int) -> list[pa.Field]:
        columns = [self._column(depth)]
        while self._accept(","):
            columns.append(self._column(depth))
        return columns

    def _column(self, depth: int) -> pa.Field:
        token = self._peek()
        if token is None or token.kind not in ("name", "word"):
            self._fail("a column's name")
        self._at += 1
        self._accept(":")
        kind = self._type(depth)
        nullable = True
        if self._accept("NOT"):
            self.take("NULL")
            nullable = False
        if self._accept("COMMENT"):
            comment = self._peek()
            if comment is None or comment.kind != "text":
                self._fail("the comment's text")
            self._at += 1
        return pa.field(token.text, kind, nullable=nullable)

    def _type(self, depth: int) -> pa.DataType:
        token = self._peek()
        if token is None or token.kind != "word":
            self._fail("a type")
        if depth > NESTING_MAX:
            raise InvalidSchemaError(f"the schema nests deeper than {NESTING_MAX}")
        self._at += 1
        name = token.text.upper()
        nested: dict[str, Callable[[int], pa.DataType]] = {
            "ARRAY": self._array,
            "MAP": self._map,
            "STRUCT": self._struct,
        }
        if name in nested:
            self.take("<")
            kind = nested[name](depth + 1)
            self.take(">")
            return kind
        if name == "INTERVAL":
            return self._interval()
        if name in _DECIMALS:
            return self._decimal()
        if name not in _TYPES:
            self._unknown(token)
        if name in _WITH_LENGTH:
            self._numbers()
        return _TYPES[name]

    def _array(self, depth: int) -> pa.DataType:
        return pa.list_(self._type(depth))

    def _map(self, depth: int) -> pa.DataType:
        key = self._type(depth)
        self.take(",")
        return pa.map_(key, self._type(depth))

    def _struct(self, depth: int) -> pa.DataType:
        return pa.struct(self.columns(depth))

    def _interval(self) -> pa.DataType:
        self.take("DAY")
        if self._accept("TO"):
            self.take("SECOND")
        return pa.duration("us")

    def _decimal(self) -> pa.DataType:
        numbers = self._numbers()
        precision, scale = (*numbers, 0)[:2] if numbers else DECIMAL
        if len(numbers) > 2 or not 0 < precision <= DECIMAL_PRECISION_MAX or scale > precision:
            raise InvalidSchemaError(f"DECIMAL({', '.join(map(str, numbers))}) is no type of Spark")
        return pa.decimal128(precision, scale)

    def _numbers(self) -> list[int]:
        """`(10, 2)`, where it is there."""
        numbers: list[int] = []
        if not self._accept("("):
            return numbers
        while not numbers or self._accept(","):
            token = self._peek()
            number = None if token is None else digits(token.text)
            if number is None:
                self._fail("a number")
            numbers.append(number)
            self._at += 1
        self.take(")")
        return numbers

    def next_is(self, *texts: str) -> bool:
        ahead = self._tokens[self._at : self._at + len(texts)]
        return [token.text.upper() for token in ahead] == list(texts)

    def take(self, text: str) -> None:
        """The next token, which must be this one."""
        if not self._accept(text):
            self._fail(repr(text))

    def end(self) -> None:
        """Nothing may follow."""
        if self._peek() is not None:
            self._fail("',' or the end")

    def _accept(self, text: str) -> bool:
        token = self._peek()
        if token is None or token.kind not in ("word", "sign") or token.text.upper() != text:
            return False
        self._at += 1
        return True

    def _peek(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _fail(self, expected: str) -> NoReturn:
        token = self._peek()
        read = "its end" if token is None else f"{token.text!r} at character {token.at}"
        raise InvalidSchemaError(f"schema {self._text!r}: expected {expected}, not {read}")

    def _unknown(self, token: _Token) -> NoReturn:
        type_names = [*_TYPES, *_DECIMALS, *_NESTED]
        near = difflib.get_close_matches(token.text.upper(), type_names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidSchemaError(f"schema {self._text!r}: unknown type {token.text!r} at character {token.at}{hint}")


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at = 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if match is None:
            raise InvalidSchemaError(
                f"schema {text!r}: {stripped[at:].strip()[:10]!r} at character {at} has no meaning"
            )
        quoted, literal, word, sign = match.groups()
        start = match.end() - len(quoted or literal or word or sign)
        if quoted is not None:
            tokens.append(_Token(quoted[1:-1].replace("``", "`"), "name", start))
        elif literal is not None:
            tokens.append(_Token(literal, "text", start))
        else:
            tokens.append(_Token(word or sign, "word" if word else "sign", start))
        at = match.end()
    return tokens
