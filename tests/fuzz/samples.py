"""Values of any message type, found by looking at the types: valid ones with values at their bounds, and hostile ones.

Nothing here names a message: one that is added to `protocol/messages` is fuzzed from then on.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
import string
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as types

from spark_broker.protocol import messages
from spark_broker.protocol.messages import Message

I64 = (-(2**63), 2**63 - 1)
MAX_BYTES = 1 << 20
MAX_ITEMS = 4
MAX_TEXT = 40
_TEXT = string.printable + "\0é日𝄞"


@cache
def message_types() -> tuple[type[Message], ...]:
    """Every message of `protocol/messages`, whichever file it is in, by name."""
    for module in pkgutil.iter_modules(messages.__path__, f"{messages.__name__}."):
        importlib.import_module(module.name)
    subclasses: set[type[Message]] = set()
    open_ends: list[type[Message]] = [Message]
    while open_ends:
        kinds = open_ends.pop().__subclasses__()
        open_ends += kinds
        subclasses.update(kind for kind in kinds if kind.__module__.startswith(messages.__name__))
    return tuple(sorted(subclasses, key=lambda kind: kind.__name__))


def sample(rng: random.Random, kind: object) -> Any:
    """A valid value of a type that msgspec knows; half of the numbers are at a bound of theirs."""
    return _sample(rng, type_info(kind))


@cache
def type_info(kind: Any) -> types.Type:
    """What msgspec knows of a type; looking costs more than a sample does."""
    return types.type_info(kind)


def _sample(rng: random.Random, kind: types.Type) -> Any:
    make = _MAKERS.get(type(kind))
    if make is None:
        raise TypeError(f"the fuzzer does not know how to make a {kind}: teach it")
    return make(rng, kind)


def _integer(rng: random.Random, kind: types.IntType) -> int:
    low = I64[0] if kind.ge is None else kind.ge
    high = I64[1] if kind.le is None else kind.le
    edges = (low, high, 0, 1, -1, 2**31 - 1, rng.randint(0, 100), rng.randint(low, high))
    return min(max(rng.choice(edges), low), high)


def _text(rng: random.Random, kind: types.StrType) -> str:
    if kind.min_length == kind.max_length and kind.min_length:
        return "".join(rng.choices("0123456789abcdef", k=kind.min_length))
    longest = MAX_TEXT if kind.max_length is None else kind.max_length
    length = rng.choice((0, 1, rng.randint(0, min(longest, MAX_TEXT)), min(longest, 300)))
    return "".join(rng.choices(_TEXT, k=max(length, kind.min_length or 0)))


def _items(rng: random.Random, kind: Any) -> list[Any]:
    most = MAX_ITEMS if kind.max_length is None else min(MAX_ITEMS, kind.max_length)
    return [_sample(rng, kind.item_type) for _ in range(rng.randint(kind.min_length or 0, most))]


def _struct(rng: random.Random, kind: types.StructType) -> Any:
    fields = {field.name: _sample(rng, field.type) for field in kind.fields if field.required or rng.random() < 0.7}
    return kind.cls(**fields)


_MAKERS: dict[type, Callable[[random.Random, Any], Any]] = {
    types.IntType: _integer,
    types.StrType: _text,
    types.BytesType: lambda rng, kind: rng.randbytes(rng.choice((0, 1, 30))),
    types.BoolType: lambda rng, kind: rng.random() < 0.5,
    types.FloatType: lambda rng, kind: rng.choice((0.0, -1.5, 1e308, float("inf"))),
    types.NoneType: lambda rng, kind: None,
    types.ListType: _items,
    types.VarTupleType: lambda rng, kind: tuple(_items(rng, kind)),
    types.TupleType: lambda rng, kind: tuple(_sample(rng, item) for item in kind.item_types),
    types.DictType: lambda rng, kind: {
        _sample(rng, kind.key_type): _sample(rng, kind.value_type) for _ in range(rng.randint(0, MAX_ITEMS))
    },
    types.UnionType: lambda rng, kind: _sample(rng, rng.choice(kind.types)),
    types.StructType: _struct,
    types.EnumType: lambda rng, kind: rng.choice(list(kind.cls)),
    types.LiteralType: lambda rng, kind: rng.choice(list(kind.values)),
}


_DEEP = (b"\x91" * 5000 + b"\xc0", b"\x81\xa0" * 5000 + b"\xc0", b"\x91" * 200_000)
_LIES = (
    b"\xdd\xff\xff\xff\xff",  # an array, a map, a text, bytes and an extension that claim 4 Gi items
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x00",
    b"\xdd\x00\x01\x00\x00\xc0",
    b"\xa4\xff\xfe\xfd\xfc",  # texts that are not UTF-8: a stray byte, a surrogate, one cut short
    b"\xa3\xed\xa0\x80",
    b"\xa1\xc3",
    b"\xc1",  # never used
    b"\xd6\xff\xff\xff\xff\xff",  # a timestamp
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xcb\x7f\xf8" + bytes(6),
    *_DEEP,
)


def hostile(rng: random.Random, message: object) -> bytes:
    """The message's encoding after a change of its structure: fields that are missing, added, swapped or replaced."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for _ in range(rng.choice((1, 1, 2))):
        tree = _change(rng, tree, depth=rng.randint(0, 3))
    return msgspec.msgpack.encode(tree)


def _change(rng: random.Random, node: Any, depth: int) -> Any:
    """The node, changed; never in place: a list may hold one node a thousand times, and would grow by a thousand."""
    if isinstance(node, list) and node and depth:
        at = rng.randrange(len(node))
        return [*node[:at], _change(rng, node[at], depth - 1), *node[at + 1 :]]
    if isinstance(node, dict) and node and depth:
        return {**node, rng.choice(("", "a" * 70_000, 0, None, b"", 2**64 - 1)): _hostile_value(rng)}
    if isinstance(node, list) and rng.random() < 0.6:
        return _change_list(rng, node)
    return _hostile_value(rng)


def _change_list(rng: random.Random, node: list[Any]) -> list[Any]:
    kind = rng.randrange(5)
    if kind == 0:
        return node[: rng.randrange(len(node) + 1)]
    if kind == 1:
        return [*node, *(_hostile_value(rng) for _ in range(rng.choice((1, 10))))]
    if kind == 2:
        return rng.sample(node, len(node))
    if kind == 3:
        return node * min(rng.choice((2, 1000)), MAX_BYTES // len(msgspec.msgpack.encode(node)) + 1)
    return [*node, node]


def _hostile_value(rng: random.Random) -> Any:
    if rng.random() < 0.5:
        return msgspec.Raw(rng.choice(_LIES[: -len(_DEEP)] if rng.random() < 0.8 else _DEEP))
    values = (None, True, "", "a" * 70_000, b"", bytes(70_000), -1, 2**63 - 1, 2**64 - 1, -(2**63), 1.5, 10**6)
    return rng.choice(values)
