"""Converts values of Python and numpy to Arrow arrays, and back, without importing pandas.

`pa.array`, `pa.scalar`, `np.asarray(array)` and every kernel that is given a Python number import pandas where it is
installed, which takes seconds in the middle of a process's first append. The functions here build the buffers. Values
that they do not know go to `pa.array`, in the normal form that `values.py` gives them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence, Sized
from datetime import datetime
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_broker.protocol.values import FLOAT32_MAX, normal_form
from spark_broker.times import to_us

_BITS = 64
_MICROSECONDS = (pa.timestamp("us"), pa.timestamp("us", tz="UTC"))
_TYPES: dict[str, pa.DataType] = {
    **{f"int{bits}": getattr(pa, f"int{bits}")() for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": getattr(pa, f"uint{bits}")() for bits in (8, 16, 32, 64)},
    **{f"float{bits}": getattr(pa, f"float{bits}")() for bits in (32, 64)},
}
"""Arrow's types by the names of numpy's."""

_DTYPES = {kind: np.dtype(name) for name, kind in _TYPES.items()}

_KEPT_ROWS = 16
"""Arrays of nulls that are not longer are made once for each type."""


class _UnknownValuesError(TypeError):
    """The values have to be brought to their normal form."""


def array_of(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """The values as an array of this type, each of them unchanged (`protocol/values.py` says which there are).

    It builds text, bytes, booleans, integers, floats, timestamps, lists and structs of the types that the log stores,
    where the values are exactly of the Python type that belongs to the Arrow type. Others go to `pa.array`, in their
    normal form. Raises UnfitValueError, errors of `pa.array`, and whatever methods of the values raise.
    """
    try:
        return _build(values, kind)
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        form = normal_form(kind)
        return pa.array([form.of(value) for value in values], kind)


def is_local_time(kind: pa.DataType) -> bool:
    """Whether these are timestamps without a zone."""
    return pa.types.is_timestamp(kind) and kind.tz is None


def scalar_of(value: object, kind: pa.DataType) -> pa.Scalar:
    """`pa.scalar(value, kind)`."""
    return array_of([value], kind)[0]


def nulls(count: int, kind: pa.DataType) -> pa.Array:
    """`pa.nulls(count, kind)`, in as few bytes as a message of it can have.

    In `pa.nulls` all parts share one buffer. A message takes it whole for each part of a list that has no elements:
    8 bytes a row for the headers of Kafka's record.
    """
    return _few_nulls(count, kind) if count <= _KEPT_ROWS else _nulls(count, kind)


@lru_cache(maxsize=256)
def _few_nulls(count: int, kind: pa.DataType) -> pa.Array:
    return _nulls(count, kind)


def _nulls(count: int, kind: pa.DataType) -> pa.Array:
    buffers = [pa.py_buffer(bytes((count + 7) // 8))]
    if pa.types.is_struct(kind):
        children = [_nulls(count, field.type) for field in kind]
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        buffers.append(pa.py_buffer(bytes(4 * (count + 1))))  # offsets: each is 0
        children = [_nulls(0, kind.field(0).type)]
    else:
        return pa.nulls(count, kind)
    return pa.Array.from_buffers(kind, count, buffers, count, children=children)


def repeated(number: int, count: int, kind: pa.DataType) -> pa.Array:
    """So many times this number, of a type of 64 bits. Raises OverflowError for one that does not fit into them."""
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(array("q", (number,)) * count)])


def from_numpy(values: npt.NDArray[Any]) -> pa.Array:
    """One-dimensional integers or floats as an array of the same type, without a copy. No value is null."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(_TYPES[values.dtype.name], len(values), [None, pa.py_buffer(values)])


def from_mask(mask: npt.NDArray[np.bool_]) -> pa.Array:
    """Booleans as an array without nulls."""
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, _bitmap(mask)])


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """Booleans, integers or floats as a numpy array that is only read. The number of a null means nothing."""
    dtype = np.dtype(np.uint8) if pa.types.is_boolean(array.type) else _DTYPES[array.type]
    if not len(array):
        return np.empty(0, np.bool_ if pa.types.is_boolean(array.type) else dtype)
    data = array.buffers()[1]
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[array.offset : array.offset + len(array)].view(np.bool_)
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)


def _build(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    types = set(map(type, values))  # exactly: to `isinstance`, True is an int
    valid = None
    if type(None) in types:
        types.discard(type(None))
        if not types:
            return nulls(len(values), kind)
        valid = np.fromiter((value is not None for value in values), np.bool_, len(values))
    if not types:
        return nulls(0, kind)
    for accepted_types, is_kind, build in _BUILDERS:
        if types <= accepted_types and is_kind(kind):
            return build(values, kind, None if valid is None else _bitmap(valid))
    raise _UnknownValuesError(f"{types} as {kind}")


def _bitmap(bits: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


def _bytes(values: Sequence[object], kind: pa.DataType, valid: pa.Buffer | None) -> pa.Array:
    parts = cast("list[bytes]", [b"" if value is None else value for value in values])
    return pa.Array.from_buffers(kind, len(parts), [valid, _offsets(parts), pa.py_buffer(b"".join(parts))])


def _text(values: Sequence[object], kind: pa.DataType, valid: pa.Buffer | None) -> pa.Array:
    texts = cast("Sequence[str | None]", values)
    return _bytes([None if text is None else text.encode() for text in texts], kind, valid)


def _offsets(parts: Iterable[Sized]) -> pa.Buffer:
    """Raises OverflowError where they are too many bytes or elements for one array."""
    return pa.py_buffer(array("i", accumulate(map(len, parts), initial=0)))


def _booleans(values: Sequence[object], kind: pa.DataType, valid: pa.Buffer | None) -> pa.Array:
    bits = np.fromiter((value is True for value in values), np.bool_, len(values))
    return pa.Array.from_buffers(kind, len(values), [valid, _bitmap(bits)])


def _integers(values: Sequence[object], kind: pa.DataType, valid: pa.Buffer | None) -> pa.Array:
    """Raises OverflowError for one that does not fit into 64 bits."""
    numbers = array("q", cast("Sequence[int]", values if valid is None else [value or 0 for value in values]))
    if kind.bit_width == _BITS:
        return pa.Array.from_buffers(kind, len(numbers), [valid, pa.py_buffer(numbers)])
    return _numbers(np.frombuffer(numbers, np.int64), kind, valid)


def _floats(values: Sequence[object], kind: pa.DataType, valid: pa.Buffer | None) -> pa.Array:
    return _numbers(np.array([0.0 if value is None else value for value in values], np.float64), kind, valid)


def _moments(values: Sequence[object], kind: pa.DataType, valid: pa.Buffer | None) -> pa.Array:
    """As for Arrow, a datetime without a zone is UTC."""
    moments = cast("Sequence[datetime | None]", values)
    if is_local_time(kind) and any(moment is not None and moment.tzinfo is not None for moment in moments):
        raise _UnknownValuesError("a local time has no zone")
    return _integers([0 if moment is None else to_us(moment) for moment in moments], kind, valid)


def _numbers(numbers: npt.NDArray[Any], kind: pa.DataType, valid: pa.Buffer | None) -> pa.Array:
    """The cast refuses integers that do not fit."""
    if kind == pa.float32() and (np.isfinite(numbers) & (np.abs(numbers) > FLOAT32_MAX)).any():
        raise _UnknownValuesError("the cast makes them infinite")
    return pa.Array.from_buffers(_TYPES[numbers.dtype.name], len(numbers), [valid, pa.py_buffer(numbers)]).cast(kind)


def _lists(values: Sequence[object], kind: pa.DataType, valid: pa.Buffer | None) -> pa.Array:
    lists = cast("list[Sequence[object]]", [() if value is None else value for value in values])
    elements = array_of([element for values in lists for element in values], kind.value_type)
    return pa.Array.from_buffers(kind, len(lists), [valid, _offsets(lists)], children=[elements])


def _structs(values: Sequence[object], kind: pa.DataType, valid: pa.Buffer | None) -> pa.Array:
    rows = cast("list[dict[str, object]]", [{} if value is None else value for value in values])
    names = {field.name for field in kind}
    if not all(row.keys() <= names for row in rows):
        raise _UnknownValuesError("a name that is not the struct's")
    children = [array_of([row.get(field.name) for row in rows], field.type) for field in kind]
    return pa.Array.from_buffers(kind, len(rows), [valid], children=children)


_BUILDERS: tuple[
    tuple[
        set[type],
        Callable[[pa.DataType], bool],
        Callable[[Sequence[object], pa.DataType, pa.Buffer | None], pa.Array],
    ],
    ...,
] = (
    ({bytes}, pa.types.is_binary, _bytes),
    ({str}, lambda kind: pa.types.is_string(kind) or pa.types.is_binary(kind), _text),
    ({bool}, pa.types.is_boolean, _booleans),
    ({int}, lambda kind: pa.types.is_signed_integer(kind) or kind in _MICROSECONDS, _integers),
    ({float}, lambda kind: pa.types.is_float32(kind) or pa.types.is_float64(kind), _floats),
    ({datetime}, lambda kind: kind in _MICROSECONDS, _moments),
    ({list, tuple}, pa.types.is_list, _lists),
    ({dict}, pa.types.is_struct, _structs),
)
