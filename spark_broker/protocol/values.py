"""Which values a column takes, and what each of them means: the one place that says so.

Arrow takes nearly every value, and keeps what it can of it: the whole part of a number, the date of a time, the fields
of a named tuple by their positions. So Arrow sees no value as it was given. A value is brought to the normal form of
its type, of which there is only one reading, or it is refused:

| Type | Normal form |
|---|---|
| boolean, integer | bool, int |
| floating point | float; or int, which Arrow refuses where no float is equal to it |
| decimal | Decimal with exactly the digits after the point that the type has |
| text, bytes | str or bytes: text is stored as UTF-8 |
| date, time of day, timestamp, duration | the int that is stored |
| list | list of normal forms; or a numpy array of the very type of the elements |
| struct | dict of normal forms, by name |
| map | list of pairs of normal forms |

None is null. So is what stands for a missing value in numpy (a masked value, NaT) and pandas (NaT, NA), but not NaN,
which is a float. Types that the log does not store are left to Arrow.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, Inexact, InvalidOperation
from functools import lru_cache, partial
from typing import Any, NoReturn, cast

import numpy as np
import pyarrow as pa

from spark_broker.times import to_us
from spark_broker.visible import shown

DAY_US = 86_400_000_000
FLOAT32_MAX = float(np.finfo(np.float32).max)

_DECIMAL_BITS = 128
_INT64_DIGITS = 19
_FIRST_DAY = date(1970, 1, 1).toordinal()
_NULL = type(None)
_LETTERS = (str, bytes, bytearray, memoryview, np.void)
_EXACT = Context(prec=1, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""For what rounds to no number of digits. The caller's own context may have any precision, and may raise anything."""

_ENTRY = ("key", "value")
"""What Arrow and polars call the two of an entry of a map."""


class UnfitValueError(ValueError):
    """A value that its type does not hold; `str` is the reason."""

    def __init__(self, value: object, reason: str) -> None:
        super().__init__(reason)
        self._value = value
        self._place = ""

    def lies_in(self, step: str) -> None:
        """One more step of the way to the value, known where the error passes: `.name` or `[number]`."""
        self._place = step + self._place

    def told(self, column: str) -> str:
        """What is wrong with the value of this column: `s.lines[1].n: 1.5 does not fit: int64 has no fractions`."""
        where = f"{column}{self._place}: " if self._place else ""
        return f"{where}{shown(self._value)} does not fit: {self}"


class UnknownFieldError(UnfitValueError):
    """A name that a struct does not have: its value would be dropped."""

    def __init__(self, value: object, name: object, names: Iterable[str]) -> None:
        self._name, self._names = name if isinstance(name, str) else shown(name), ", ".join(names)
        super().__init__(value, f"it has no field {self._name}")

    def told(self, column: str) -> str:
        place = f"{column}{self._place}"
        return f"unknown field {place}.{self._name}; {place} has {self._names}"


@dataclass(frozen=True)
class NormalForm:
    """Of the values of one type. Values of exactly the types `kept` are in it as they are; `convert` makes the others.

    `convert` gets no missing value. It raises UnfitValueError.
    """

    kind: pa.DataType
    kept: frozenset[type]
    convert: Callable[[object], object]

    def of(self, value: object) -> object:
        """Raises UnfitValueError, and whatever methods of the value raise."""
        if type(value) in self.kept:
            return value
        if isinstance(value, pa.Scalar):
            value = self._of_scalar(value)
        elif getattr(value, "ndim", None) == 0 and not isinstance(value, np.generic) and value is not np.ma.masked:
            value = value[()] if isinstance(value, np.ndarray) else np.asarray(value)[()]
        return None if is_missing(value) else self.convert(value)

    def of_elements(self, values: Sequence[object]) -> list[object]:
        if self.kept.issuperset(map(type, values)):
            return list(values)
        normal: list[object] = []
        try:
            for value in values:
                normal.append(self.of(value))
        except UnfitValueError as error:
            error.lies_in(f"[{len(normal)}]")
            raise
        return normal

    def _of_scalar(self, value: pa.Scalar) -> object:
        """Of another type it would lose something as a value of Python: nanoseconds of a time of day."""
        if value.is_valid and value.type != self.kind:
            raise UnfitValueError(value, f"Arrow's {value.type} is no {self.kind}")
        return value.as_py()


@lru_cache(maxsize=1024)
def normal_form(kind: pa.DataType) -> NormalForm:
    """Of values of this type."""
    form = partial(_form_of, kind)
    if pa.types.is_boolean(kind):
        return form(_boolean, bool)
    if pa.types.is_signed_integer(kind):
        return form(partial(_whole, kind), int)
    if pa.types.is_float64(kind):
        return form(partial(_floating, kind), float, int)
    if pa.types.is_float32(kind):
        return form(partial(_floating, kind), int)
    if pa.types.is_decimal128(kind):
        return form(_decimals(kind))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return form(partial(_text, kind), str, bytes)
    if pa.types.is_date32(kind):
        return form(partial(_date, kind), date, int)
    if kind == pa.time64("us"):
        return form(partial(_time_of_day, kind))
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return form(partial(_timestamp, kind), int)
    if kind == pa.duration("us"):
        return form(partial(_duration, kind), int)
    if pa.types.is_list(kind):
        return form(_lists(kind))
    if pa.types.is_struct(kind):
        return form(_structs(kind))
    if pa.types.is_map(kind):
        return form(_maps(kind))
    return form(_as_it_is)


def _form_of(kind: pa.DataType, convert: Callable[[object], object], *kept: type) -> NormalForm:
    return NormalForm(kind, frozenset({_NULL, *kept}), convert)


def is_missing(value: object) -> bool:
    """Whether it stands for no value, to Python, numpy or pandas (which is not imported)."""
    if value is None or value is np.ma.masked:
        return True
    if isinstance(value, np.datetime64 | np.timedelta64):
        return bool(np.isnat(value))
    kind = type(value)
    return kind.__name__ in ("NaTType", "NAType") and kind.__module__.partition(".")[0] == "pandas"


def _as_it_is(value: object) -> object:
    return value


def _refuse(value: object, kind: pa.DataType) -> NoReturn:
    raise UnfitValueError(value, f"{type(value).__name__} is no {kind}")


def _boolean(value: object) -> object:
    return bool(value) if isinstance(value, bool | np.bool_) else _refuse(value, pa.bool_())


def _whole(kind: pa.DataType, value: object) -> int:
    """Arrow refuses an integer that is too large for the type."""
    if isinstance(value, Decimal):
        return _whole_decimal(kind, value)
    if isinstance(value, float | np.floating):
        _check_number(value, kind)
        if not value.is_integer():
            raise UnfitValueError(value, f"{kind} has no fractions")
        return int(value)
    return _index(kind, value)


def _index(kind: pa.DataType, value: object) -> int:
    if not isinstance(value, bool):
        with suppress(TypeError):  # Booleans, complex numbers and times of numpy are no index.
            return operator.index(value)  # type: ignore[arg-type]
    _refuse(value, kind)


def _check_number(value: float | np.floating[Any] | Decimal, kind: pa.DataType) -> None:
    if isinstance(value, Decimal):  # As a float it may be infinite, or an error.
        is_finite, is_nan = value.is_finite(), value.is_nan()
    else:
        is_finite, is_nan = math.isfinite(value), math.isnan(value)
    if not is_finite:
        raise UnfitValueError(value, f"{kind} has no such number" + ("; null is None" if is_nan else ""))


def _whole_decimal(kind: pa.DataType, value: Decimal) -> int:
    """The integer of a large exponent, that of zero too, has as many digits: nobody computes it."""
    if value.is_zero():
        return 0
    _check_number(value, kind)
    if value.adjusted() >= _INT64_DIGITS:
        raise UnfitValueError(value, f"it is too large for {kind}")
    whole = value.to_integral_value(context=_EXACT)
    if whole != value:
        raise UnfitValueError(value, f"{kind} has no fractions")
    return int(whole)


def _floating(kind: pa.DataType, value: object) -> object:
    if isinstance(value, float | np.floating):
        number = float(value)
        if number != value and not math.isnan(number):
            raise UnfitValueError(value, f"it has more digits than {kind}")
        if pa.types.is_float32(kind) and FLOAT32_MAX < abs(number) < math.inf:
            raise UnfitValueError(value, "it is too large for a float of 32 bits")
        return number
    return _index(kind, value)


def _decimals(kind: pa.DataType) -> Callable[[object], object]:
    """Arrow gets exactly the digits of the type: it loses some where it has to find them over more than 38 places, and
    crashes where there are millions.
    """
    unit = Decimal((0, (1,), -kind.scale))
    context = Context(prec=kind.precision, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[Inexact, InvalidOperation])

    def convert(value: object) -> object:
        number = value if isinstance(value, Decimal) else _decimal_of_integer(kind, value)
        _check_number(number, kind)
        try:
            return context.quantize(number, unit)
        except Inexact:
            raise UnfitValueError(value, f"{kind} has {kind.scale} digits after the point") from None
        except InvalidOperation:
            raise UnfitValueError(value, f"it is too large for {kind}") from None

    return convert


def _decimal_of_integer(kind: pa.DataType, value: object) -> Decimal:
    number = _index(kind, value)
    if number.bit_length() >= _DECIMAL_BITS:
        raise UnfitValueError(value, f"it is too large for {kind}")
    return Decimal(number)


def _text(kind: pa.DataType, value: object) -> object:
    """Arrow refuses bytes that are no UTF-8 in a column of text."""
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return value if isinstance(value, str | bytes) else _refuse(value, kind)


def _date(kind: pa.DataType, value: object) -> object:
    if isinstance(value, datetime) and (value.tzinfo is not None or value.time() != time() or _has_nanoseconds(value)):
        raise UnfitValueError(value, "a date has no time of day and no zone")
    if isinstance(value, date):
        return value.toordinal() - _FIRST_DAY
    return _whole(kind, value)


def _time_of_day(kind: pa.DataType, value: object) -> object:
    if isinstance(value, time):
        if value.tzinfo is not None:
            raise UnfitValueError(value, "a time of day has no zone")
        return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
    number = _whole(kind, value)
    if not 0 <= number < DAY_US:
        raise UnfitValueError(value, f"a time of day is from 0 to {DAY_US - 1} microseconds")
    return number


def _timestamp(kind: pa.DataType, value: object) -> object:
    if isinstance(value, datetime):
        if value.tzinfo is not None and kind.tz is None:
            raise UnfitValueError(value, "a local time has no zone")
        _check_nanoseconds(value, kind)
        return int(to_us(value))
    return _microseconds(value, "datetimes", kind) if isinstance(value, np.datetime64) else _whole(kind, value)


def _duration(kind: pa.DataType, value: object) -> object:
    if isinstance(value, timedelta):
        _check_nanoseconds(value, kind)
        return int(value // timedelta.resolution)
    return _microseconds(value, "timedeltas", kind) if isinstance(value, np.timedelta64) else _whole(kind, value)


def _microseconds(value: np.datetime64 | np.timedelta64, instead: str, kind: pa.DataType) -> int:
    if np.datetime_data(value.dtype) != ("us", 1):
        raise UnfitValueError(value, f"{value.dtype} is not {kind}: give {instead}, or numpy's times of this unit")
    return int(value.astype(np.int64))


def _check_nanoseconds(value: datetime | timedelta, kind: pa.DataType) -> None:
    if _has_nanoseconds(value):
        raise UnfitValueError(value, f"{kind} has no nanoseconds")


def _has_nanoseconds(value: datetime | timedelta) -> bool:
    """Only pandas' own times have some."""
    return bool(getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0))


def _lists(kind: pa.DataType) -> Callable[[object], object]:
    form = normal_form(kind.value_type)
    numbers = pa.types.is_signed_integer(form.kind) or pa.types.is_float32(form.kind) or pa.types.is_float64(form.kind)
    dtype = np.dtype(form.kind.to_pandas_dtype()) if numbers else None

    def convert(value: object) -> object:
        if type(value) is np.ndarray and dtype is not None and value.dtype == dtype and value.ndim == 1:
            return value
        return form.of_elements(_elements(value, kind))

    return convert


def _elements(value: object, kind: pa.DataType) -> Sequence[object]:
    """Of a list or a map. An array is never read by its labels, nor are its masked values."""
    if isinstance(value, _LETTERS):
        raise UnfitValueError(value, "its letters, or bytes, would be the list")
    if isinstance(value, Sequence | Set):
        return value if isinstance(value, list | tuple) else list(value)
    if isinstance(value, pa.Array | pa.ChunkedArray):
        if value.type != kind.field(0).type:
            raise UnfitValueError(value, f"Arrow's {value.type} is no {kind.field(0).type}")
        return cast("list[object]", value.to_pylist())
    if not hasattr(value, "__array__") or not isinstance(value, Iterable):
        _refuse(value, kind)
    if not isinstance(value, np.ndarray) and len(getattr(value, "shape", ())) == 1:
        return list(value)
    array = value if isinstance(value, np.ndarray) else np.asarray(value)  # A data frame iterates over its names.
    if isinstance(array, np.ma.MaskedArray) or array.dtype.kind not in "biuf":
        return list(array)  # `tolist` makes integers of times
    return cast("list[object]", array.tolist())


def _structs(kind: pa.DataType) -> Callable[[object], object]:
    forms = {field.name: normal_form(field.type) for field in kind}

    def convert(value: object) -> object:
        name, normal = "", {}
        fields = _by_name(value, forms, kind)
        try:
            for name, inner in fields.items():
                normal[name] = forms[name].of(inner)
        except UnfitValueError as error:
            error.lies_in(f".{name}")
            raise
        return normal

    return convert


def _by_name(value: object, names: Collection[str], kind: pa.DataType) -> dict[str, object]:
    """The fields of a struct: of a dict, a list of pairs, a named tuple or Spark's Row, or a tuple with all of them."""
    pairs: Iterable[tuple[object, object]]
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, tuple):
        own = getattr(value, "__fields__", None) or getattr(value, "_fields", None) or names
        if len(own) != len(value):
            raise UnfitValueError(value, f"it has {len(value)} values for {len(own)} fields")
        pairs = zip(own, value, strict=True)
    elif isinstance(value, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        pairs = value
    else:
        _refuse(value, kind)
    fields: dict[str, object] = {}
    for given, inner in pairs:
        name = given.decode(errors="replace") if isinstance(given, bytes) else given
        if not isinstance(name, str) or name not in names:
            raise UnknownFieldError(value, name, names)
        if name in fields:
            raise UnfitValueError(value, f"it has {name!r} twice")
        fields[name] = inner
    return fields


def _maps(kind: pa.DataType) -> Callable[[object], object]:
    keys, items = normal_form(kind.key_type), normal_form(kind.item_type)

    def convert(value: object) -> object:
        return [entry(*pair) for pair in _entries(value, kind)]

    def entry(key: object, item: object) -> tuple[object, object]:
        try:
            normal_key = keys.of(key)
            if normal_key is None:
                raise UnfitValueError(key, "a map has no key that is null")
            return normal_key, items.of(item)
        except UnfitValueError as error:
            error.lies_in(f"[{shown(key)}]")
            raise

    return convert


def _entries(value: object, kind: pa.DataType) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        return value.items()
    fields = (_by_name(entry, _ENTRY, kind) for entry in _elements(value, kind))
    return [(entry.get("key"), entry.get("value")) for entry in fields]
