"""The micro-batches of `send` have exactly the records that were given, and are made without pandas."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.client import record_builder
from spark_broker.client.record_builder import RecordBuilder, to_bytes, to_pairs
from spark_broker.client.unseen import Unseen
from spark_broker.errors import InvalidDataError, MessageTooLargeError
from spark_broker.protocol.schema import DEFAULT_SCHEMA

data = st.none() | st.binary(max_size=9)
records = st.tuples(
    data,
    data,
    st.none() | st.lists(st.tuples(st.text(max_size=5), data), max_size=3),
    st.integers(-(10**15), 10**15),
)


@given(st.lists(records, min_size=1, max_size=20))
def test_a_batch_has_the_records_that_were_added(
    rows: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None, int]],
) -> None:
    builder = RecordBuilder(1000, Unseen())
    for key, value, headers, timestamp_us in rows:
        builder.add(key, value, None if headers is None else to_pairs(headers)[0], timestamp_us, 10)
    batch = builder.build()
    batch.validate(full=True)
    assert batch.schema == DEFAULT_SCHEMA
    assert batch.to_pylist() == [
        {
            "key": key,
            "value": value,
            "headers": None
            if headers is None
            else [{"key": name, "value": header_value} for name, header_value in headers],
            "timestamp": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=timestamp_us),
        }
        for key, value, headers, timestamp_us in rows
    ]
    assert builder.room_bytes == 1000 - 10 * len(rows)


def test_a_column_that_arrow_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_builder, "_MAX_COLUMN_BYTES", 9)
    builder = RecordBuilder(0, Unseen())
    builder.add(None, b"x" * 10, None, 0, 42)
    with pytest.raises(MessageTooLargeError, match="10 bytes"):
        builder.build()


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidDataError, match="value is not Unicode"):
        to_bytes("\ud800", "value")
    with pytest.raises(InvalidDataError, match="name of a header is not Unicode"):
        to_pairs({"\ud800": b"x"})


def test_what_send_does_with_a_batch_imports_no_pandas() -> None:
    """The first `pa.array` imports it, which takes longer than everything else that a small client does."""
    code = """
import sys
from spark_broker.client.partitioner import partition_batch
from spark_broker.client.record_builder import RecordBuilder, to_pairs
from spark_broker.client.unseen import Unseen
builder = RecordBuilder(1000, Unseen())
builder.add(b"a", b"x", to_pairs({"h": b"x"})[0], 0, 10)
builder.add(b"b", None, None, 0, 10)
assert len(partition_batch(builder.build(), ["key"], 50)) == 2
sys.exit("pandas" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
