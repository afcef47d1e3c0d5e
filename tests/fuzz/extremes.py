"""The extreme values of every field of every message, found by looking at the types.

A case is a message that is right in all but one field, which has an extreme value of its own type, or one just beyond
it. Nothing here names a message or a field: those that are added are tried from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import inspect as types

from tests.fuzz.samples import type_info

INTEGERS = (-(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, float(2**64))
"""msgpack ends at 2**64 - 1. JSON does not: see `JSON_INTEGERS`."""
JSON_INTEGERS = (2**64, -(2**64), 10**4000)

NAMES = (
    "",
    "x",
    "..",
    ".",
    "/",
    "a/b",
    "../../x",
    "\0",
    "a\0b",
    "\n",
    " ",
    "\u202e",
    "é",
    "日本",
    "😀",
    "-1",
    "__x",
    "%s{}",
)
SIZE_OF_MANY = 10_000
MANY_BYTES_MAX = 4 << 20
"""A list or text of many is cut to this, so that it is refused for what it is and not for the request's size."""
HUGE = 9 << 20
"""Above `socket.request.max.bytes` of the cluster that is attacked."""

Path = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One field of a message, or two, has an extreme value. `tree`: the message as msgpack's plain values; `path`: the
    field's place in it."""

    message: str
    field: str
    value: object
    tree: Any
    path: Path = ()

    def with_value(self, path: Path, value: object) -> Case:
        """The same with another value at a place of the tree."""
        return replace(self, tree=_with(self.tree, path, value))

    def and_also(self, other: Case) -> Case:
        """The same with another case's extreme as well, which is of another field of such a message."""
        field, value = f"{self.field}, {other.field}", (self.value, other.value)
        return Case(self.message, field, value, _with(self.tree, other.path, other.value))

    def meets(self, other: Case) -> bool:
        """Whether one of the two fields is, or is within, the other one, or a field is none."""
        shorter = min(len(self.path), len(other.path))
        return self.path[:shorter] == other.path[:shorter]

    @property
    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self.tree)

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{self.message}.{self.field} = {text if len(text) <= 80 else f'{text[:80]}... ({len(text)})'}"


def cases(base: msgspec.Struct) -> Iterator[Case]:
    """Every extreme of every field of this message, which is right as it is."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(base))
    name = type(base).__name__
    yield Case(name, "", "as it is", tree)
    for path, text, kind in _fields(type_info(type(base)), tree, (), ""):
        for value in extremes(kind, _at(tree, path)):
            yield Case(name, text, value, _with(tree, path, value), path)


def json_cases(message: msgspec.Struct) -> Iterator[Case]:
    """Every extreme of the fields of a message that is sent as a JSON object."""
    tree, name = msgspec.to_builtins(message), type(message).__name__
    for field in msgspec.structs.fields(message):
        values = extremes(type_info(field.type), tree[field.name])
        for value in (*values, *JSON_INTEGERS):
            yield Case(name, field.name, value, {**tree, field.name: value})


def _fields(kind: types.Type, value: Any, path: Path, text: str) -> Iterator[tuple[Path, str, types.Type]]:
    """Each field below, with its place in the tree. Of a list, the first item stands for all."""
    if isinstance(kind, types.UnionType):
        # The other members are among the extremes of the field itself.
        kind = next((member for member in kind.types if not isinstance(member, types.NoneType)), kind)
    inner: list[tuple[int, str, types.Type]] = []
    if isinstance(kind, types.StructType):
        tag = 1 if kind.tag is not None else 0
        inner = [(at + tag, f".{field.name}", field.type) for at, field in enumerate(kind.fields)]
    elif isinstance(kind, types.TupleType):
        inner = [(at, f"[{at}]", item) for at, item in enumerate(kind.item_types)]
    elif isinstance(kind, types.ListType) and value:
        inner = [(0, "[]", kind.item_type)]
    for at, name, child in inner:
        if isinstance(value, list) and at < len(value):
            here = (*path, at)
            yield here, (text + name).lstrip("."), child
            yield from _fields(child, value[at], here, text + name)


def extremes(kind: types.Type, value: Any) -> list[Any]:
    """The extreme values of a type, and some just beyond. `value`: one that is right."""
    make = _EXTREMES.get(type(kind))
    if make is None:
        raise TypeError(f"the fuzzer does not know the extremes of {kind}: teach it")
    return [None, *make(kind, value)]


def _integers(kind: types.IntType, _: Any) -> list[Any]:
    bounds = [bound for bound in (kind.ge, kind.le) if bound is not None]
    near = [bound + step for bound in bounds for step in (-1, 0, 1)]
    return [*dict.fromkeys((*INTEGERS, *(n for n in near if -(2**63) <= n < 2**64)))]


def _texts(kind: types.StrType, _: Any) -> list[Any]:
    longest = kind.max_length if kind.max_length is not None else 65_536
    fixed = kind.min_length is not None and kind.min_length == kind.max_length
    names = [(name * longest)[:longest] if fixed and name else name for name in NAMES]
    return [*names, *(letter * length for letter in ("x", "é", "😀", "/") for length in (longest, longest + 1))]


def _bytes(_: types.BytesType, value: Any) -> list[Any]:
    return [b"", b"\0", value[:-1], value * 2, bytes(MANY_BYTES_MAX), bytes(HUGE)]


def _lists(kind: Any, value: Any) -> list[Any]:
    item = value[0] if value else (extremes(kind.item_type, None) or [None])[-1]
    fitting = MANY_BYTES_MAX // max(1, len(msgspec.msgpack.encode(item)))
    many = [item] * min(SIZE_OF_MANY, fitting)
    return [[], [item], [item, item], many, [*many, item], [None], {}]


def _dicts(kind: types.DictType, value: Any) -> list[Any]:
    item = next(iter(value.items()), ("x", "x"))
    keys = [key for key in extremes(kind.key_type, item[0]) if isinstance(key, str | int)]
    values = [value for value in extremes(kind.value_type, item[1]) if not isinstance(value, list) or len(value) < 100]
    return [
        {},
        *({key: item[1]} for key in keys),
        *({item[0]: value} for value in values),
        {f"k{number}": item[1] for number in range(SIZE_OF_MANY)},
        [],
    ]


def _dataclasses(kind: types.DataclassType, value: Any) -> list[Any]:
    """Sent as JSON objects: each field's extremes as well."""
    return [
        {},
        value,
        *({**value, field.name: v} for field in kind.fields for v in (*extremes(field.type, None), *JSON_INTEGERS)),
    ]


def _unions(kind: types.UnionType, value: Any) -> list[Any]:
    return [extreme for member in kind.types for extreme in extremes(member, value)]


_EXTREMES: dict[type, Callable[[Any, Any], list[Any]]] = {
    types.IntType: _integers,
    types.FloatType: lambda kind, value: [0.0, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), 1],
    types.StrType: _texts,
    types.BytesType: _bytes,
    types.BoolType: lambda kind, value: [True, False, 0, 1],
    types.NoneType: lambda kind, value: [None],
    types.ListType: _lists,
    types.VarTupleType: _lists,
    types.TupleType: lambda kind, value: [[], [*(value or ()), None], list(value or ())[:-1]],
    types.DictType: _dicts,
    types.UnionType: _unions,
    types.DataclassType: _dataclasses,
    types.StructType: lambda kind, value: [[], value, list(value or ())[:-1]],
    types.EnumType: lambda kind, value: [*(member.value for member in kind.cls), -1, "x"],
    types.LiteralType: lambda kind, value: [*kind.values, "x"],
}


def _at(tree: Any, path: Path) -> Any:
    for at in path:
        tree = tree[at]
    return tree


def _with(tree: Any, path: Path, value: Any) -> Any:
    """The tree with this value at the path; never in place."""
    if not path:
        return value
    at = path[0]
    return [*tree[:at], _with(tree[at], path[1:], value), *tree[at + 1 :]]
