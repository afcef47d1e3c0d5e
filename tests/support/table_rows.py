"""Rows of a topic's table as a test wants them."""

from __future__ import annotations

import pyarrow as pa


def with_time(rows: pa.Table, at: int, time_us: int) -> pa.Table:
    """These rows; that at this place has another time (UTC microseconds, also one that Python cannot hold)."""
    times = rows["_timestamp"].cast(pa.int64()).to_pylist()
    times[at] = time_us
    column = rows.schema.get_field_index("_timestamp")
    return rows.set_column(column, "_timestamp", pa.array(times, pa.int64()).cast(rows.schema.field(column).type))
