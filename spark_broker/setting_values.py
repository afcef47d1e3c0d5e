"""Values of settings: what a user hands in as text or as a Python value becomes one type, and text again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TypeVar

from spark_broker.errors import InvalidConfigError
from spark_broker.visible import shown

T = TypeVar("T")


def to_text(value: object) -> str:
    """A value as it is written in a file or on the command line. Raises InvalidConfigError where nothing says how."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return listed(to_text(item) for item in value)
    try:
        return str(value)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (an integer of more than 4,300 digits; a `__str__` that raises anything)
        raise InvalidConfigError(
            f"{shown(value)} cannot be written as text: {error}", hint="Give text, a number, true or false."
        ) from None


def in_error(value: object) -> str:
    """A value of a setting's type, in the error that refuses it. Python may have no text for a long integer."""
    return shown(value) if isinstance(value, int) and value.bit_length() > 64 else repr(to_text(value))


def listed(names: Iterable[str]) -> str:
    """The names as one text, parted by commas. Raises InvalidConfigError for one that would be read as others."""
    names = list(names)
    for name in names:
        if "," in name or name != name.strip() or not name:
            raise InvalidConfigError(
                f"{name!r} cannot be in a list: commas part names, and spaces around them do not count",
                hint="Give it another name.",
            )
    return ",".join(names)


def converted(kind: type, value: object, name: str) -> object:
    """The value in this type. Raises InvalidConfigError, which names the setting."""
    try:
        return _CONVERTERS[kind](value)
    except (ValueError, TypeError, OverflowError):
        raise InvalidConfigError(f"{name} = {shown(value)} is not {KIND_NAMES[kind]}") from None


def named_once(settings: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The settings by name. One that is repeated counts once. Raises InvalidConfigError for one with two values: nobody
    can say which is meant.
    """
    values: dict[str, T] = {}
    for name, value in settings:
        if name in values and values[name] != value:
            raise InvalidConfigError(
                f"{name} has two values, {shown(values[name])} and {shown(value)}", hint="Say once what it is to be."
            )
        values[name] = value
    return values


def truth(value: object) -> bool | None:
    """True or False, also numpy's. None: it is neither."""
    if isinstance(value, bool):
        return value
    if getattr(getattr(value, "dtype", None), "kind", "") == "b" and getattr(value, "ndim", 1) == 0:
        return bool(value)
    return None


def _to_bool(value: object) -> bool:
    found = truth(value)
    if found is not None:
        return found
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ValueError(value)


def _to_int(value: object) -> int:
    if isinstance(value, bool):
        raise ValueError(value)
    return int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]


def _to_str(value: object) -> str:
    if isinstance(value, bool):
        raise ValueError(value)
    if not isinstance(value, str):
        return str(operator.index(value))  # type: ignore[arg-type]
    value.encode()  # Messages are UTF-8.
    return str.__str__(value)


def _to_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    return float(value)


def _to_tuple(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    if isinstance(value, list | tuple):
        return tuple(_to_str(item) for item in value)
    raise ValueError(value)


_CONVERTERS: dict[type, Callable[[object], object]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    tuple: _to_tuple,
}
KIND_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
}
