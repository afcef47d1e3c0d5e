"""Appends that wait, and what a leader concludes from followers' fetches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_broker.core.pending import PendingAppend, PendingAppends
from spark_broker.core.progress import FollowerProgress

LAG_MAX_MS = 100

appends = st.lists(
    st.builds(PendingAppend, st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.uuids()), max_size=20
)


def pending(waiting: list[PendingAppend]) -> PendingAppends:
    queue = PendingAppends()
    for append in waiting:
        queue.add(append)
    return queue


@given(appends, st.integers(0, 20))
def test_exactly_what_is_committed_is_taken_in_order_of_offset(waiting: list[PendingAppend], offset: int) -> None:
    """Appends for one offset (a batch and its retry) keep their order."""
    queue = pending(waiting)
    in_order = sorted(waiting, key=lambda append: append.required_offset)
    taken = [append for append in in_order if append.required_offset <= offset]
    assert queue.take_committed(offset) == taken
    assert queue.take_all() == in_order[len(taken) :]
    assert len(queue) == 0


@given(appends, st.integers(0, 20))
def test_an_append_expires_at_its_deadline_wherever_it_stands(waiting: list[PendingAppend], now_ms: int) -> None:
    queue = pending(waiting)
    assert all(append.deadline_ms <= now_ms for append in queue.take_expired(now_ms))
    left = queue.take_all()
    assert sorted(map(id, left)) == sorted(id(append) for append in waiting if append.deadline_ms > now_ms)


def follower() -> FollowerProgress:
    return FollowerProgress(broker_epoch=1, last_caught_up_ms=0)


def test_a_follower_at_the_log_end_never_lags() -> None:
    progress = follower()
    progress.fetched(5, 5, 10)
    assert not progress.is_lagging(5, 10_000, LAG_MAX_MS)


def test_a_follower_that_has_what_was_there_at_its_last_fetch_keeps_up() -> None:
    """Under a steady stream of appends it is never at the log end, but it is healthy."""
    progress = follower()
    for n in range(1, 50):
        progress.fetched(n * 10, n * 10 + 10, n * 60)
        assert not progress.is_lagging(n * 10 + 10, n * 60, LAG_MAX_MS)


def test_a_follower_that_falls_further_behind_lags_although_it_fetches() -> None:
    progress = follower()
    for n in range(1, 50):
        progress.fetched(n * 5, n * 10, n * 60)
    assert progress.is_lagging(500, 50 * 60, LAG_MAX_MS)


def test_a_follower_that_never_fetched_lags_after_the_time_and_not_before() -> None:
    """This holds on an empty partition, too."""
    progress = follower()
    assert not progress.is_lagging(0, LAG_MAX_MS, LAG_MAX_MS)
    assert progress.is_lagging(0, LAG_MAX_MS + 1, LAG_MAX_MS)


def test_a_follower_lacks_data_only_by_its_own_word() -> None:
    progress = follower()
    assert not progress.lacks(5)
    progress.fetched(4, 9, 0)
    assert progress.lacks(5)
    assert not progress.lacks(4)
