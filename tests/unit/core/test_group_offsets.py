"""Committed offsets as a function of the records of `__consumer_offsets`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.core.group_offsets import GroupOffsets, OffsetRecord, offset_record
from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.messages import CommittedOffset

Commit = tuple[str, CommittedOffset]

commits = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.builds(
            CommittedOffset,
            st.sampled_from(["t", "u"]),
            st.integers(0, 2),
            st.integers(0, 2**62),
            st.integers(-1, 9),
            st.text(max_size=3),
        ),
    ),
    max_size=20,
)


def replayed(records: list[OffsetRecord]) -> GroupOffsets:
    offsets = GroupOffsets()
    offsets.replay(records)
    return offsets


@given(commits)
def test_the_last_commit_of_a_partition_counts(made: list[Commit]) -> None:
    """KNOWN_BUGS 17: with the leader epoch of the last record read, which is checked on resume."""
    offsets = replayed([offset_record(group, committed) for group, committed in made])
    for group in ("a", "b"):
        last = {(c.topic, c.partition): c for g, c in made if g == group}
        assert offsets.committed(group, None) == [last[key] for key in sorted(last)]
        asked = [("u", 1), ("t", 0), ("nowhere", 0)]
        assert offsets.committed(group, asked) == [last[key] for key in asked if key in last]


@given(commits, st.integers(0, 20))
def test_a_snapshot_and_what_follows_it_rebuild_the_state(made: list[Commit], cut: int) -> None:
    records = [offset_record(group, committed) for group, committed in made]
    snapshot = replayed(records[:cut]).snapshot()
    again = replayed(snapshot + records[cut:])
    whole = replayed(records)
    assert len(again) == len(whole)
    for group in ("a", "b"):
        assert again.committed(group, None) == whole.committed(group, None)


@pytest.mark.parametrize("key", [b"", b"\xc1", b"\x93\xa1a\xa1t", None])
def test_a_record_that_is_none_of_ours_is_corrupt(key: bytes | None) -> None:
    """Also one without a key, which the topic's schema allows."""
    good = offset_record("a", CommittedOffset("t", 0, 5, 1, ""))
    with pytest.raises(CorruptMessageError):
        replayed([good, OffsetRecord(key, good.value)])  # type: ignore[arg-type]
