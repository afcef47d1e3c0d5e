"""Which columns a Delta table can have: fewer than a topic."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

REFUSED_CHARACTERS = " ,;{}()\n\t=\0"
"""Delta takes none of these in a name unless the table has column mapping; the last one nobody takes."""


def why_not_in_table(schema: pa.Schema) -> str:
    """Why no Delta table can have these columns, of stored types; empty: one can."""
    return next((why for field in schema for why in _reasons(field, field.name)), "")


def _reasons(field: pa.Field, path: str) -> Iterator[str]:
    kind = field.type
    refused = next((character for character in field.name if character in REFUSED_CHARACTERS), None)
    if refused is not None:
        yield f"a Delta table takes no {refused!r} in the name of a column, and the topic has {path!r}"
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        yield f"a Delta table has no type for {kind}, which column {path!r} has"
    if pa.types.is_decimal(kind) and not 0 <= kind.scale <= kind.precision:
        yield f"a Delta table has no decimals of {kind.precision} digits with scale {kind.scale}, as column {path!r}"
    for number in range(kind.num_fields):
        child = kind.field(number)
        yield from _reasons(child, f"{path}.{child.name}")
