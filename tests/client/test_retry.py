"""How long clients wait before they try again."""

from __future__ import annotations

import threading

import pytest

from spark_broker.client.retry import Backoff, Deadline, RecoveryPace, call_with_retries
from spark_broker.errors import BootstrapUnreachableError, LeaderNotAvailableError, NetworkError, SparkBrokerError


def test_the_hundredth_fail_over_is_as_quick_as_the_first() -> None:
    """Ten kills in a row took the gap from 0.2 to 1.3 s: rounds were counted over all fail-overs together."""
    pace = RecoveryPace(fast=20)
    attempts = [pace.after_round(recovered=round_ == 2) for _ in range(100) for round_ in range(3)]
    assert set(attempts) == {0}


def test_a_recovery_that_does_not_end_slows_down_after_its_fast_rounds() -> None:
    pace = RecoveryPace(fast=3)
    assert [pace.after_round(recovered=False) for _ in range(6)] == [0, 0, 0, 1, 2, 3]
    assert pace.after_round(recovered=True) == 0
    assert pace.after_round(recovered=False) == 0


def test_what_is_done_between_two_attempts_may_fail_for_a_while_too() -> None:
    """A refresh of metadata met a broker that had just started: the call ended there, long before its deadline."""
    done: list[str] = []

    def attempt() -> str:
        done.append("attempt")
        if len(done) < 5:
            raise NetworkError("no")
        return "yes"

    def between(error: SparkBrokerError) -> None:
        done.append("between")
        if len(done) < 4:
            raise LeaderNotAvailableError("not yet")

    answer = call_with_retries(
        attempt, deadline=Deadline.after_ms(30_000), backoff=Backoff(1, 1), closing=threading.Event(), between=between
    )
    assert answer == "yes"
    assert done == ["attempt", "between", "between", "between", "attempt"]


def test_what_fails_between_two_attempts_for_good_is_raised() -> None:
    def attempt() -> str:
        raise NetworkError("no")

    def between(error: SparkBrokerError) -> None:
        raise BootstrapUnreachableError("nobody")

    with pytest.raises(BootstrapUnreachableError):
        call_with_retries(
            attempt,
            deadline=Deadline.after_ms(30_000),
            backoff=Backoff(1, 1),
            closing=threading.Event(),
            between=between,
        )
