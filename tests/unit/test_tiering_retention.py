"""Before which offsets the rows of a topic's table are too old, or too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_broker.history.retention import MARKS_MAX, HistoryMark, HistoryRetention, expired_before, with_mark

HOUR_MS = 3_600_000
MARKS = (
    HistoryMark(0, (10, 0), (100, 0)),
    HistoryMark(HOUR_MS, (20, 5), (100, 50)),
    HistoryMark(2 * HOUR_MS, (20, 9), (0, 50)),
    HistoryMark(3 * HOUR_MS, (40, 9), (300, 0)),
)


def expired(retention: HistoryRetention, now_ms: int = 0, log_starts: tuple[int, ...] = ()) -> tuple[int, ...]:
    return expired_before(MARKS, retention, now_ms, log_starts, 3)


def test_a_topic_that_says_nothing_keeps_everything() -> None:
    assert HistoryRetention.of_topic({"segment.ms": "1"}) == HistoryRetention()
    assert expired(HistoryRetention(), 10**15) == (0, 0, 0)
    assert HistoryRetention.of_topic({"retention.ms": "5", "retention.bytes": "7"}) == HistoryRetention(5, 7)
    assert HistoryRetention.of_topic({"retention.ms": "5", "cleanup.policy": "compact"}) == HistoryRetention()
    assert HistoryRetention.of_topic({"retention.ms": "5", "cleanup.policy": "compact,delete"}) == HistoryRetention(5)


def test_a_commit_goes_when_it_is_older_than_retention_ms() -> None:
    keep = HistoryRetention(ms=HOUR_MS)
    assert expired(keep, HOUR_MS) == (0, 0, 0)
    assert expired(keep, HOUR_MS + 1) == (10, 0, 0)
    assert expired(keep, 3 * HOUR_MS + 1) == (20, 9, 0)
    assert expired(keep, 10 * HOUR_MS) == (40, 9, 0)
    assert expired(HistoryRetention(ms=0), 3 * HOUR_MS) == (20, 9, 0), "a commit is not older than itself"


def test_the_oldest_commits_go_as_long_as_enough_bytes_are_left() -> None:
    assert expired(HistoryRetention(size_bytes=501)) == (0, 0, 0)
    assert expired(HistoryRetention(size_bytes=400)) == (10, 0, 0)
    assert expired(HistoryRetention(size_bytes=300)) == (20, 0, 0)
    assert expired(HistoryRetention(size_bytes=50)) == (20, 5, 0)
    assert expired(HistoryRetention(size_bytes=0)) == (40, 9, 0)


def test_what_is_deleted_already_does_not_come_back_and_counts_no_more() -> None:
    assert expired(HistoryRetention(), log_starts=(15, 3)) == (15, 3, 0)
    assert expired(HistoryRetention(size_bytes=300), log_starts=(20,)) == (20, 0, 0)
    assert expired(HistoryRetention(size_bytes=301), log_starts=(50,)) == (50, 0, 0)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, HOUR_MS), st.integers(0, 9), st.integers(0, 100)), min_size=1, max_size=3 * MARKS_MAX
    ),
    age_ms=st.integers(0, 200 * HOUR_MS),
    size_bytes=st.integers(-1, 10_000),
)
def test_many_commits_are_told_apart_as_few_and_nothing_goes_too_early(
    steps: list[tuple[int, int, int]], age_ms: int, size_bytes: int
) -> None:
    all_marks: list[HistoryMark] = []
    marks: tuple[HistoryMark, ...] = ()
    now_ms, end = 0, 0
    for wait_ms, offsets, size in steps:
        now_ms, end = now_ms + wait_ms, end + offsets
        mark = HistoryMark(now_ms, (end,), (size,))
        all_marks.append(mark)
        marks = with_mark(marks, mark)
    assert len(marks) <= MARKS_MAX
    assert marks[-1].ends == (end,)
    assert sum(mark.sizes[0] for mark in marks) == sum(size for *_, size in steps)
    for retention in (HistoryRetention(ms=age_ms), HistoryRetention(size_bytes=size_bytes)):
        (few,) = expired_before(marks, retention, now_ms, (), 1)
        (exact,) = expired_before(all_marks, retention, now_ms, (), 1)
        assert few <= exact
