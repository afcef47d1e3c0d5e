"""Committed offsets as a function of the records of `__consumer_offsets`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.core.group_offsets import CommittedOffsets, OffsetKey, OffsetRecord, offset_record
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


def replayed(records: list[OffsetRecord]) -> CommittedOffsets:
    offsets = CommittedOffsets()
    for at, commit_record in enumerate(records):
        offsets.replay([commit_record], at + 1)
    return offsets


@given(commits)
def test_the_last_commit_of_a_partition_counts(made: list[Commit]) -> None:
    """Known bug 17: a commit has the leader epoch of the last record read, which is checked on resume."""
    offsets = replayed([offset_record(group, committed) for group, committed in made])
    for group in ("a", "b"):
        last = {(c.topic, c.partition): c for g, c in made if g == group}
        assert offsets.committed(group, None) == [last[key] for key in sorted(last)]
        asked = [("u", 1), ("t", 0), ("nowhere", 0)]
        assert offsets.committed(group, asked) == [last[key] for key in asked if key in last]


@given(commits, st.integers(0, 20))
def test_a_snapshot_and_what_follows_it_rebuild_the_state(made: list[Commit], cut: int) -> None:
    records = [offset_record(group, committed) for group, committed in made]
    cut = min(cut, len(records))
    again = CommittedOffsets()
    assert again.replay(replayed(records[:cut]).snapshot(), cut + 1) is (cut > 0)
    for at, commit_record in enumerate(records[cut:], cut + 1):
        assert not again.replay([commit_record], at + 1)
    whole = replayed(records)
    assert len(again) == len(whole)
    for group in ("a", "b"):
        assert again.committed(group, None) == whole.committed(group, None)


@pytest.mark.parametrize("key", [b"", b"\xc1", b"\x93\xa1a\xa1t", None])
def test_a_record_that_is_none_of_ours_is_corrupt(key: bytes | None) -> None:
    """A record without a key is corrupt, too, although the topic's schema allows it."""
    good = offset_record("a", CommittedOffset("t", 0, 5, 1, ""))
    with pytest.raises(CorruptMessageError):
        replayed([good, OffsetRecord(key, good.value)])  # type: ignore[arg-type]


def record(group: str, offset: int) -> OffsetRecord:
    return offset_record(group, CommittedOffset("t", 0, offset))


def committed(offsets: CommittedOffsets, group: str = "a") -> list[int]:
    return [committed_offset.offset for committed_offset in offsets.committed(group, None)]


def test_a_transactions_offsets_count_from_its_commit_marker_on() -> None:
    offsets = replayed([record("a", 1)])
    offsets.replay_undecided(7, 10, [record("a", 2)], 11)
    offsets.replay_undecided(8, 11, [record("a", 9)], 12)
    offsets.replay_undecided(7, 12, [record("a", 3)], 13)
    assert committed(offsets) == [1]
    offsets.replay_marker(8, committed=False)
    assert committed(offsets) == [1]
    offsets.replay_marker(7, committed=True)
    assert committed(offsets) == [3]


def test_an_open_transaction_holds_up_no_other_commit() -> None:
    offsets = CommittedOffsets()
    offsets.replay_undecided(7, 0, [record("a", 2)], 1)
    offsets.replay([record("a", 5), record("b", 6)], 3)
    assert (committed(offsets), committed(offsets, "b")) == ([5], [6])


def test_a_transactions_offset_ranks_where_it_was_written_and_not_where_it_was_decided() -> None:
    """Known bug 36: compaction keeps the last record of each key, so after it another rank would count differently."""
    offsets = CommittedOffsets()
    offsets.replay_undecided(7, 0, [record("a", 2)], 1)
    offsets.replay_undecided(8, 1, [record("b", 7)], 2)
    offsets.replay([record("a", 5)], 3)
    offsets.replay_marker(7, committed=True)
    offsets.replay_marker(8, committed=True)
    assert (committed(offsets), committed(offsets, "b")) == ([5], [7])


def test_a_group_is_unstable_while_a_transaction_may_move_one_of_its_partitions() -> None:
    offsets = replayed([record("a", 1)])
    assert offsets.undecided("a", None) is None
    offsets.replay_undecided(7, 1, [record("a", 2)], 2)
    assert offsets.undecided("a", None) == offsets.undecided("a", [("u", 0), ("t", 0)]) == OffsetKey("a", "t", 0)
    assert offsets.undecided("a", [("t", 1), ("u", 0)]) is offsets.undecided("b", None) is None
    offsets.replay_marker(7, committed=False)
    assert offsets.undecided("a", None) is None


def test_the_log_keeps_what_is_undecided() -> None:
    offsets = CommittedOffsets()
    offsets.replay_undecided(7, 10, [record("a", 2)], 11)
    offsets.replay_undecided(8, 20, [record("b", 2)], 21)
    offsets.replay_undecided(7, 30, [record("a", 3)], 31)
    kept = [offsets.first_undecided]
    for producer_id, outcome in ((7, False), (8, True), (9, True)):  # producer 9 has no transaction here
        offsets.replay_marker(producer_id, committed=outcome)
        kept.append(offsets.first_undecided)
    assert kept == [10, 20, None, None]


events = st.lists(
    st.one_of(
        st.tuples(st.just("plain"), st.sampled_from([-1]), st.sampled_from("ab"), st.integers(0, 99)),
        st.tuples(st.just("batch"), st.sampled_from([1, 2]), st.sampled_from("ab"), st.integers(0, 99)),
        st.tuples(st.just("marker"), st.sampled_from([1, 2]), st.just(""), st.integers(0, 1)),
    ),
    max_size=30,
)


def replay_events(offsets: CommittedOffsets, made: list[tuple[str, int, str, int]], start: int) -> None:
    for at, (kind, producer_id, group, number) in enumerate(made, start):
        if kind == "plain":
            offsets.replay([record(group, number)], at + 1)
        elif kind == "batch":
            offsets.replay_undecided(producer_id, at, [record(group, number)], at + 1)
        else:
            offsets.replay_marker(producer_id, committed=bool(number))


@given(events, st.integers(0, 30), st.integers(0, 30))
def test_a_log_that_begins_at_a_snapshot_or_the_first_undecided_batch_gives_the_same(
    made: list[tuple[str, int, str, int]], cut: int, late: int
) -> None:
    """The snapshot covers what lies below `cut`. It is appended after `late` more commits, made while it is written.

    Then the log start advances to `cut`, or to the first undecided batch before it.
    """
    cut = min(cut, len(made))
    appended = min(cut + late, len(made))
    before = CommittedOffsets()
    replay_events(before, made[:cut], 0)
    snapshot, start = before.snapshot(), before.first_undecided
    live = CommittedOffsets()
    replay_events(live, made, 0)
    again = CommittedOffsets()
    start = cut if start is None else start
    replay_events(again, made[start:appended], start)
    again.replay(snapshot, appended + 1)
    replay_events(again, made[appended:], appended + 1)
    for group in ("a", "b"):
        assert committed(again, group) == committed(live, group)


def test_a_snapshot_takes_nothing_back_that_was_committed_while_it_was_written() -> None:
    """Two snapshots may overlap: each commit of them has its own rank."""
    offsets = replayed([record("a", 1), record("b", 1), record("a", 2)])
    older, newer = replayed([record("a", 1)]).snapshot(), offsets.snapshot()
    for end_offset, snapshot in ((4, older), (5, newer), (6, older)):
        assert offsets.replay(snapshot, end_offset)
        assert (committed(offsets), committed(offsets, "b")) == ([2], [1])
    from_the_log_start = CommittedOffsets()
    for end_offset, snapshot in ((4, older), (5, newer)):
        from_the_log_start.replay(snapshot, end_offset)
    assert (committed(from_the_log_start), committed(from_the_log_start, "b")) == ([2], [1])


def test_an_offset_is_of_one_topic_and_goes_with_it() -> None:
    offsets = CommittedOffsets()
    records = [
        offset_record("g", CommittedOffset(name, 0, 7, topic_id=topic_id))
        for name, topic_id in (("t", "a"), ("u", "b"))
    ]
    offsets.replay(records, 2)
    again = CommittedOffsets()
    again.replay(offsets.snapshot(), 4)
    for of in (offsets, again):
        assert {c.topic: c.topic_id for c in of.committed("g", None)} == {"t": "a", "u": "b"}
        of.drop({"a"})
        assert [c.topic for c in of.committed("g", None)] == ["u"]
