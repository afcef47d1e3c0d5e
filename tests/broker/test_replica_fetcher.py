"""The rules for when a follower opens a fetch session with a leader, and when the next, without a stream."""

from __future__ import annotations

from typing import Any, cast

import pytest

from spark_broker.broker.clock import SystemClock
from spark_broker.broker.fetch_session import FetcherSettings, FetchSession
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_fetcher import BACK_OFF_MS, TRANSITIONS, FetcherEvent, FetcherState, ReplicaFetcher
from spark_broker.errors import NetworkError, NotLeaderOrFollowerError, SparkBrokerError

KEY: PartitionKey = ("t", 0)
PARTITIONS = {KEY: cast("Partition", object())}
SETTINGS = FetcherSettings(1, 1, max_wait_ms=100, max_bytes=1 << 20, request_timeout_ms=1000)


class SteppedClock(SystemClock):
    """Boot time passes only when a test changes it."""

    now_ms = 1_000

    def boottime_ms(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def fetcher(clock: SteppedClock) -> ReplicaFetcher:
    fetcher = ReplicaFetcher("host:1", SETTINGS, clock)
    fetcher.follow(PARTITIONS, {KEY: 1})
    return fetcher


def session_of(fetcher: ReplicaFetcher) -> FetchSession:
    assert fetcher.session is not None
    return fetcher.session


def state(of: Any) -> FetcherState:
    """Its state now. The call keeps type checkers from narrowing the attribute past the next event."""
    return cast("FetcherState", of.state)


def test_what_is_followed_already_does_not_interrupt_the_session(fetcher: ReplicaFetcher) -> None:
    session = session_of(fetcher)
    assert not fetcher.follow(dict(PARTITIONS), {KEY: 1})
    assert fetcher.session is session


def test_another_leader_epoch_begins_another_session(fetcher: ReplicaFetcher) -> None:
    """KAFKA-7164: the logs may differ even if the leader is the same broker."""
    session = session_of(fetcher)
    assert fetcher.follow(PARTITIONS, {KEY: 2})
    assert session_of(fetcher) is not session


def test_a_leader_of_nothing_is_left_alone(fetcher: ReplicaFetcher) -> None:
    assert fetcher.follow({}, {})
    assert (state(fetcher), fetcher.session) == (FetcherState.IDLE, None)


@pytest.mark.parametrize("error", [NetworkError("broken"), NotLeaderOrFollowerError("the broker is shutting down")])
def test_a_session_that_fails_is_followed_by_another_one_after_a_moment(
    fetcher: ReplicaFetcher, clock: SteppedClock, error: SparkBrokerError
) -> None:
    session = session_of(fetcher)
    fetcher.failed(session, error)
    assert (state(fetcher), fetcher.session) == (FetcherState.BACKING_OFF, None)

    clock.now_ms += BACK_OFF_MS - 1
    fetcher.tick()
    assert state(fetcher) is FetcherState.BACKING_OFF

    clock.now_ms += 1
    fetcher.tick()
    assert session_of(fetcher) is not session


def test_what_changes_during_the_pause_does_not_wait_for_its_end(fetcher: ReplicaFetcher) -> None:
    fetcher.failed(session_of(fetcher), NetworkError("broken"))
    fetcher.follow(PARTITIONS, {KEY: 2})
    assert (state(fetcher), fetcher.deadline_ms) == (FetcherState.FETCHING, None)


def test_the_end_of_an_earlier_session_is_nothing_to_the_one_after_it(fetcher: ReplicaFetcher) -> None:
    """The stream that `follow` closed breaks under the thread that waits on it."""
    earlier = session_of(fetcher)
    fetcher.follow(PARTITIONS, {KEY: 2})
    session = session_of(fetcher)
    fetcher.failed(earlier, NetworkError("the stream is closed"))
    assert fetcher.session is session


def test_a_fetcher_that_was_stopped_stays_so_whatever_the_metadata_says(fetcher: ReplicaFetcher) -> None:
    fetcher.stop()
    fetcher.follow(PARTITIONS, {KEY: 3})
    fetcher.tick()
    assert (state(fetcher), fetcher.session) == (FetcherState.STOPPED, None)
    assert {after for (before, _), after in TRANSITIONS.items() if before is FetcherState.STOPPED} == {
        FetcherState.STOPPED
    }
    assert {before for before, event in TRANSITIONS if event is FetcherEvent.STOP} == set(FetcherState)
