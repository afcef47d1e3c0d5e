"""How a column of Arrow becomes one of the topic's type, or is refused: no value is changed on the way.

Arrow's safe casts change some: they round a float to a decimal, and a decimal to a float, make a float infinite, and
take the time of day from an instant that becomes a date. Its cast of a list view makes an invalid list, or one with
other values (Arrow 24). It makes a time of day of any number, and calls it invalid when somebody asks: a broker does.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_broker.protocol.arrays import from_numpy, to_numpy

_VALUES_MAX = 2**31 - 1


def is_any_list(kind: pa.DataType) -> bool:
    tests = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    return any(test(kind) for test in tests)


def cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column cast. Raises ArrowInvalid for a value that the type does not hold, however deep it is."""
    result = column
    if column.type != kind:
        plain = _plain(column)
        result = plain.cast(kind, safe=True)
        _check_values(plain, result)
    return _with_times_of_day(result) if has_times_of_day(kind) else result


@lru_cache(maxsize=1024)
def has_times_of_day(kind: pa.DataType) -> bool:
    """Whether the type is one, or has one within."""
    fields = (kind.field(index).type for index in range(kind.num_fields))
    return pa.types.is_time(kind) or any(map(has_times_of_day, fields))


def _with_times_of_day(column: pa.Array) -> pa.Array:
    """The column. Raises ArrowInvalid for a time of day that is not from 00:00 to 24:00 (exclusive)."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        # A slice of a list has all its values, also those of other rows.
        column = column.take(from_numpy(np.arange(len(column))))
        column.validate(full=True)
    return column


def _plain(column: pa.Array) -> pa.Array:
    """The same values, however deep they are: in lists instead of list views, and as an extension type stores them."""
    kind = column.type
    if not _is_wrapped(kind):
        return column
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(column.storage)
    absent = column.is_null()
    if pa.types.is_struct(kind):
        fields = [_plain(values) for values in column.flatten()]
        return pa.StructArray.from_arrays(fields, names=[field.name for field in kind], mask=absent)
    if pa.types.is_map(kind):
        bounds = to_numpy(column.offsets)
        first, count = bounds[0], bounds[-1] - bounds[0]
        items = _plain(column.items.slice(first, count))
        return pa.MapArray.from_arrays(from_numpy(bounds - first), column.keys.slice(first, count), items, mask=absent)
    lengths = to_numpy(pc.fill_null(pc.list_value_length(column), 0))
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > _VALUES_MAX:
        raise pa.ArrowInvalid(f"{offsets[-1]} values are more than the lists of one batch take")
    return pa.ListArray.from_arrays(from_numpy(offsets.astype(np.int32)), _plain(column.flatten()), mask=absent)


def _is_wrapped(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return True
    return any(_is_wrapped(kind.field(index).type) for index in range(kind.num_fields))


def _check_values(before: pa.Array, after: pa.Array) -> None:
    """Raises ArrowInvalid where a cast has made another value."""
    if before.type == after.type:
        return
    if pa.types.is_dictionary(before.type):
        before = before.dictionary_decode()
    source, target = before.type, after.type
    if pa.types.is_struct(source):
        made = {field.name: values for field, values in zip(target, after.flatten(), strict=True)}
        for field, values in zip(source, before.flatten(), strict=True):
            _check_values(values, made[field.name])
    elif pa.types.is_map(source):
        _check_values(_entries(before), _entries(after))
    elif is_any_list(source):
        _check_values(before.flatten(), after.flatten())
    elif (changed := _changed(before, after)) is not None and pc.any(changed).as_py():
        raise pa.ArrowInvalid(f"{target} cannot hold the value")


def _entries(column: pa.MapArray) -> pa.Array:
    """Keys and values of all maps, in their order."""
    pairs = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
    return pa.ListArray.from_arrays(column.offsets, pairs).flatten()


def _changed(before: pa.Array, after: pa.Array) -> pa.Array | None:
    """Which values a safe cast has changed; None: Arrow refuses them itself."""
    source, target = before.type, after.type
    if pa.types.is_floating(source) and pa.types.is_float32(target):
        return pc.and_(pc.is_inf(after), pc.is_finite(before))
    kinds = (source, target)
    rounds = any(map(pa.types.is_floating, kinds)) and any(map(pa.types.is_decimal, kinds))
    if rounds or (pa.types.is_timestamp(source) and pa.types.is_date(target)):
        return pc.not_equal(after.cast(source), before)
    return None


def first_refused(column: pa.Array, kind: pa.DataType) -> int:
    """The first row that the cast refuses, in a column that it refuses."""
    low, high = 0, len(column)  # rows before `low` can be cast; one from `low` to `high` (exclusive) cannot
    while high - low > 1:
        middle = (low + high) // 2
        try:
            # A slice of a list has all its values, also those of other rows, and Arrow casts them all.
            cast(column.take(pa.array(range(low, middle))), kind)
            low = middle
        except (pa.ArrowException, ValueError):
            high = middle
    return low
