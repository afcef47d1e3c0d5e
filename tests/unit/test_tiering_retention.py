"""Before which offsets the rows of a topic's table are too old, or too many."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
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
    now_ms, end = 0, 1
    for wait_ms, offsets, size in steps:
        now_ms, end = now_ms + wait_ms, end + offsets
        mark = HistoryMark(now_ms, (end,), (size,))
        all_marks.append(mark)
        marks = with_mark(marks, mark, (), HistoryRetention(ms=1))
    assert len(marks) <= MARKS_MAX
    assert marks[-1].ends == (end,)
    assert sum(mark.sizes[0] for mark in marks) == sum(size for *_, size in steps)
    for retention in (HistoryRetention(ms=age_ms), HistoryRetention(size_bytes=size_bytes)):
        (few,) = expired_before(marks, retention, now_ms, (), 1)
        (exact,) = expired_before(all_marks, retention, now_ms, (), 1)
        assert few <= exact


MINUTE_MS = 60_000
DAY_MS = 24 * HOUR_MS
LATE = 1 / 8
"""How much longer, or how much more, at most is kept than was asked for."""

COMMITS = 2000


def steady(rng: random.Random) -> Iterator[tuple[int, int]]:
    """When commits are made after the one before, ms, and how many bytes they have."""
    for _ in range(COMMITS):
        yield MINUTE_MS, 1000


def jittery(rng: random.Random) -> Iterator[tuple[int, int]]:
    for _ in range(COMMITS):
        yield round(MINUTE_MS * rng.uniform(0.9, 1.2)), rng.randrange(1, 2000)


def in_bursts(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Commits of a minute for some hours, and then none for some hours."""
    for number in range(COMMITS):
        yield (MINUTE_MS if number % 200 else rng.randrange(HOUR_MS, 9 * HOUR_MS)), rng.randrange(500, 1500)


def light_then_heavy(rng: random.Random) -> Iterator[tuple[int, int]]:
    for number in range(COMMITS):
        yield 6 * MINUTE_MS, (1 if number < COMMITS // 2 else 1_000_000)


def seldom_then_often(rng: random.Random) -> Iterator[tuple[int, int]]:
    for number in range(COMMITS):
        yield (30 if number < 100 else 2) * MINUTE_MS, 1000


@pytest.mark.parametrize("commits", [steady, jittery, in_bursts, light_then_heavy, seldom_then_often])
@pytest.mark.parametrize("retention", [HistoryRetention(ms=DAY_MS), HistoryRetention(size_bytes=1_000_000)])
def test_what_is_too_old_or_too_much_goes_not_much_later(commits: object, retention: HistoryRetention) -> None:
    """Story: of a topic with a commit each minute, all that came after the first hours was one group, with the time of
    the newest commit. Nothing of that was ever deleted.
    """
    assert callable(commits)
    marks: tuple[HistoryMark, ...] = ()
    kept: list[HistoryMark] = []  # commits of which something is left
    now_ms, start = 0, 0
    for wait_ms, size in commits(random.Random(1)):
        now_ms += wait_ms
        mark = HistoryMark(now_ms, (1 + (kept[-1].ends[0] if kept else 0),), (size,))
        marks = with_mark(marks, mark, (start,), retention)
        kept.append(mark)
        assert len(marks) <= MARKS_MAX
        assert marks[-1] == mark
        if mark.ends[0] % 20:  # Retention is looked at now and then.
            continue
        (exact,) = expired_before(kept, retention, now_ms, (start,), 1)
        (start,) = expired_before(marks, retention, now_ms, (start,), 1)
        assert start <= exact, "not too early"
        kept = [each for each in kept if each.ends[0] > start] or [mark]
        if retention.ms >= 0:
            assert now_ms - kept[0].time_ms <= DAY_MS * (1 + LATE)
        else:
            left = sum(each.sizes[0] for each in kept)
            assert left <= retention.size_bytes * (1 + LATE) + 2 * max(size, 2000)


def test_a_partition_that_keeps_everything_has_no_other_keep_more() -> None:
    """Story: its first commit counted for ever, and with it the bytes that others had long deleted."""
    retention = HistoryRetention(size_bytes=100)
    marks: tuple[HistoryMark, ...] = (HistoryMark(0, (0, 1), (0, 1)),)
    start = 0
    for end in range(1, COMMITS):
        marks = with_mark(marks, HistoryMark(end * MINUTE_MS, (end, 1), (1, 0)), (start, 0), retention)
        start, idle = expired_before(marks, retention, end * MINUTE_MS, (start, 0), 2)
        assert idle == 0
        assert end - start <= 100 * (1 + LATE) + 2


def test_a_commit_of_many_partitions_carries_fewer_marks() -> None:
    limited = HistoryRetention(ms=DAY_MS)
    assert [limited.marks_max(partitions) for partitions in (1, 150, 300, 10_000)] == [64, 64, 33, 16]
    assert HistoryRetention(size_bytes=0).marks_max(1) == 64
    assert HistoryRetention().marks_max(1) == 16


def test_marks_of_what_was_deleted_are_dropped() -> None:
    newest = HistoryMark(4 * HOUR_MS, (50, 9), (10, 0))
    assert with_mark(MARKS, newest, (20, 5)) == (*MARKS[2:], newest)
    assert [mark.ends for mark in with_mark(MARKS, newest, (20,))] == [(20, 5), (20, 9), (40, 9), (50, 9)]
    assert with_mark(MARKS, newest, (40, 9)) == (newest,)
    assert with_mark(MARKS, newest, (20, 0))[0].sizes == (0, 50), "what is left of it"
