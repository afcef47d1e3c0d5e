"""The map from keys to their newest offsets says the same as a dictionary does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.storage import offset_map
from spark_broker.storage.offset_map import OffsetMap

KEYS = st.one_of(st.none(), st.binary(max_size=2))


def offsets_from(start: int, count: int, step: int = 1) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(start, start + count * step, step, dtype=np.int64)


@pytest.mark.parametrize("join_rows", [1, 3, 1000])
@given(st.lists(st.tuples(st.lists(KEYS, max_size=6), st.integers(1, 4)), max_size=12))
def test_the_last_offset_of_each_key_counts(join_rows: int, batches: list[tuple[list[bytes | None], int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offset_map, "_JOIN_ROWS", join_rows)
        newest: dict[bytes, int] = {}
        map_, at = OffsetMap(1 << 20), 0
        seen: list[tuple[int, bytes | None]] = []
        for keys, step in batches:
            offsets = offsets_from(at, len(keys), step)
            map_.add(pa.array(keys, pa.binary()), offsets)
            seen += zip(offsets.tolist(), keys, strict=True)
            newest |= {key: offset for offset, key in zip(offsets.tolist(), keys, strict=True) if key is not None}
            at += len(keys) * step
        assert len(map_) == len(newest)
        answer = map_.superseded(pa.array([k for _, k in seen], pa.binary()), np.array([o for o, _ in seen], np.int64))
        assert answer.tolist() == [key is not None and newest[key] > offset for offset, key in seen]


def test_a_key_that_is_not_known_is_not_superseded() -> None:
    map_ = OffsetMap(1000)
    assert map_.superseded(pa.array([b"x"]), offsets_from(0, 1)).tolist() == [False]
    map_.add(pa.array([b"a", b""], pa.binary()), offsets_from(10, 2))
    asked = pa.array([b"a", b"x", b"", None], pa.binary())
    assert map_.superseded(asked, offsets_from(0, 4)).tolist() == [True, False, True, False]


def test_it_is_full_by_its_distinct_keys_and_not_by_its_rows() -> None:
    map_ = OffsetMap(10_000)
    for at in range(0, 100_000, 1000):
        map_.add(pa.array([b"the same key"] * 1000, pa.binary()), offsets_from(at, 1000))
    assert not map_.is_full
    map_.add(pa.array([b"%d" % n for n in range(1000)], pa.binary()), offsets_from(100_000, 1000))
    assert map_.is_full


def test_keys_are_copied_from_the_messages_they_lie_in() -> None:
    """A view of a few keys would keep a whole chunk of a log in memory."""
    before = pa.total_allocated_bytes()
    map_ = OffsetMap(1 << 30)

    def add(at: int) -> None:
        chunk = pa.array([b"%d" % at * 1000 for _ in range(1000)], pa.binary())
        map_.add(chunk.slice(0, 1), offsets_from(at, 1))

    for at in range(20):
        add(at)
    assert pa.total_allocated_bytes() - before < 1_000_000
