"""Columns of the values that a caller gives, in rows or in a frame of pandas: an error names the row of its value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from spark_broker.errors import SchemaMismatchError
from spark_broker.protocol.arrays import array_of
from spark_broker.protocol.schema import nearest
from spark_broker.protocol.values import UnfitValueError, is_missing
from spark_broker.visible import shown


def column_of(values: Sequence[object], field: pa.Field) -> pa.Array:
    """The values as an array of the field's type. Raises SchemaMismatchError."""
    try:
        return array_of(values, field.type)
    except MemoryError:
        raise
    except Exception as error:  # The values are anybody's, and their methods raise anything.
        _check_each(values, field)
        raise SchemaMismatchError(f"{_shown(field)}: {error}") from error


def _check_each(values: Sequence[object], field: pa.Field) -> None:
    """Raises SchemaMismatchError for the first value that does not fit by itself."""
    for number, value in enumerate(values):
        try:
            array_of([value], field.type)
        except MemoryError:
            raise
        except UnfitValueError as unfit:
            raise SchemaMismatchError(f"{_shown(field)}, row {number}: {unfit.told(field.name)}") from None
        except Exception as error:
            told = f"{shown(value)} does not fit: {error}"
            raise SchemaMismatchError(f"{_shown(field)}, row {number}: {told}") from error


def _shown(field: pa.Field) -> str:
    return f"column {field.name!r} ({field.type})"


def from_frame(frame: Any, schema: pa.Schema) -> pa.Table:
    """A frame of pandas as a table, without its index.

    Arrow would look for a type that all objects of a column can be given, and take from them what that type does not
    have: the zones of times, nanoseconds, the time of day. So objects become values of the topic's type, as those of
    rows do. Raises SchemaMismatchError, and errors of Arrow and pandas.
    """
    objects = [number for number, dtype in enumerate(frame.dtypes) if not _has_a_type(frame, number, dtype)]
    if not objects:
        return pa.Table.from_pandas(frame, preserve_index=False)
    others = [number for number in range(frame.shape[1]) if number not in set(objects)]
    table = pa.Table.from_pandas(frame.iloc[:, others], preserve_index=False)
    arrays, names = list(table.columns), list(table.column_names)
    for number in objects:
        name = str(frame.columns[number])
        index = schema.get_field_index(name)
        if index < 0:
            raise SchemaMismatchError(f"unknown column {name!r}" + nearest(name, schema.names))
        arrays.append(_of_objects(frame.iloc[:, number], schema.field(index)))
        names.append(name)
    return pa.Table.from_arrays(arrays, names=names)


def _has_a_type(frame: Any, number: int, dtype: Any) -> bool:
    """Whether its values have one type, which Arrow need not look for."""
    if isinstance(dtype, np.dtype):
        return dtype != np.dtype(object)
    categories = getattr(dtype, "categories", None)
    if categories is not None:
        return bool(categories.dtype != np.dtype(object))
    return hasattr(frame.iloc[:, number].array, "__arrow_array__")


def _of_objects(column: Any, field: pa.Field) -> pa.Array:
    """What pandas calls missing is null."""
    is_text = pa.types.is_string(field.type) or pa.types.is_binary(field.type)
    if is_text and _are_texts(getattr(column.dtype, "categories", column)):
        with suppress(pa.ArrowException, ValueError):  # one of them is no UTF-8: which row has it?
            return pa.array(column, from_pandas=True).cast(field.type)
    return column_of([None if _is_absent(value) else value for value in column], field)


def _is_absent(value: object) -> bool:
    """As `isna` of pandas has it, which fails for a signaling NaN."""
    if isinstance(value, Decimal):
        return value.is_nan()
    return math.isnan(value) if isinstance(value, float | np.floating) else is_missing(value)


def _are_texts(values: Any) -> bool:
    """Whether each is text, or missing. The look at all of them takes less than their conversion one by one."""
    from pandas.api.types import infer_dtype

    return bool(infer_dtype(values, skipna=True) == "string")
