"""A column is cast without a change of its values: also where Arrow's own cast makes others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.protocol.casts import cast
from spark_broker.protocol.schema import conform, normalize_schema

LISTS = st.lists(st.none() | st.lists(st.none() | st.floats(width=32, allow_nan=False), max_size=3), max_size=5)
SHAPES = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


@pytest.mark.parametrize("shape", SHAPES)
@given(LISTS, st.integers(0, 5))
def test_lists_of_every_shape_keep_their_values(shape: Any, rows: list[list[float | None] | None], cut: int) -> None:
    """Arrow 24 casts a list view to an invalid list, and some to one with other values."""
    column = pa.array(rows, shape(pa.float64())).slice(min(cut, len(rows)))
    for values in (pa.float64(), pa.float32()):
        made = cast(column, pa.list_(values))
        made.validate(full=True)
        assert made.to_pylist() == rows[cut:]


@given(LISTS, st.integers(0, 5))
def test_list_views_within_others_keep_their_values(rows: list[list[float | None] | None], cut: int) -> None:
    view, stored = pa.list_view(pa.float64()), pa.list_(pa.float32())
    cut = min(cut, len(rows))
    for kind, target, nested in (
        (pa.struct([("x", view)]), pa.struct([("x", stored)]), [None if r is None else {"x": r} for r in rows]),
        (pa.map_(pa.string(), view), pa.map_(pa.string(), stored), [None if r is None else [("k", r)] for r in rows]),
        (pa.list_view(view), pa.list_(stored), [None if r is None else [r, None] for r in rows]),
    ):
        made = cast(pa.array(nested, kind).slice(cut), target)
        made.validate(full=True)
        assert made.to_pylist() == nested[cut:]


def test_a_view_whose_values_lie_in_another_order() -> None:
    offsets, sizes = pa.array([2, 0], pa.int32()), pa.array([1, 2], pa.int32())
    column = pa.ListViewArray.from_arrays(offsets, sizes, pa.array([1.0, 2.0, 3.0]))
    assert cast(column, pa.list_(pa.float32())).to_pylist() == [[3.0], [1.0, 2.0]]


UUIDS = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef", None], pa.binary(16)))
EXTENSIONS = [
    UUIDS,
    pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", None])),
    pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), UUIDS),
    pa.StructArray.from_arrays([UUIDS], ["id"]),
    pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((2, 3, 2))),
]


@pytest.mark.parametrize("column", EXTENSIONS, ids=lambda column: str(column.type))
def test_a_topic_takes_what_its_schema_was_made_of(column: pa.Array) -> None:
    """Story: a topic that was created with the schema of a table with uuids refused the table."""
    table = pa.table({"c": column})
    schema = normalize_schema(table.schema)
    (batch,) = table.to_batches()
    made = conform(batch, schema)
    made.validate(full=True)
    assert made.schema == schema
    assert conform(batch.slice(1), schema).column(0).to_pylist() == made.column(0).to_pylist()[1:]
