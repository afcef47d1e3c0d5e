"""Numbers that users write as text."""

from __future__ import annotations

_DIGITS_MAX = 20
"""More than any number of 64 bits has. Python refuses to convert some thousands, with a ValueError."""


def digits(text: str) -> int | None:
    """The number that a text of ASCII digits says. None: it has others, none, or more than any number here has."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else None
