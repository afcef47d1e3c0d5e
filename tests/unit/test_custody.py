"""Who looks after a broker's process, and when it must leave: the rules, without a process."""

from __future__ import annotations

import pytest

from spark_broker.broker.custody import (
    EXECUTOR_GONE_MS,
    NEVER,
    TRANSITIONS,
    Custody,
    CustodyEvent,
    CustodyState,
    LeaveRequest,
)
from spark_broker.errors import InvariantError

ADOPTION_MS = 5000
SHUTDOWN_MS = 2000


def custody(adoption_timeout_ms: int = ADOPTION_MS) -> Custody:
    return Custody(0, adoption_timeout_ms=adoption_timeout_ms, shutdown_timeout_ms=SHUTDOWN_MS)


def state(of: Custody) -> CustodyState:
    """Its state now. The call keeps type checkers from narrowing the attribute past the next event."""
    return of.state


def test_a_kept_broker_stays_for_ever() -> None:
    kept = custody()
    kept.keeper_came()

    kept.tick(10**12)

    assert (kept.state, kept.deadline_ms) == (CustodyState.KEPT, None)


def test_a_broker_whose_keeper_went_waits_for_another_one_and_stays() -> None:
    kept = custody()
    kept.keeper_came()
    kept.keeper_went(1000)
    kept.tick(1000 + ADOPTION_MS - 1)
    assert state(kept) is CustodyState.ALONE

    kept.keeper_came()
    kept.tick(10**12)

    assert state(kept) is CustodyState.KEPT


def test_a_broker_that_nobody_adopts_leaves_in_order_and_by_force_after_that() -> None:
    alone = custody()
    alone.keeper_came()
    alone.keeper_went(1000)

    alone.tick(1000 + ADOPTION_MS)
    assert state(alone) is CustodyState.LEAVING
    assert "broker.adoption.timeout.ms" in alone.why
    assert alone.deadline_ms == 1000 + ADOPTION_MS + SHUTDOWN_MS

    alone.tick(1000 + ADOPTION_MS + SHUTDOWN_MS)
    assert state(alone) is CustodyState.OVER


def test_a_broker_that_never_had_a_keeper_leaves_too() -> None:
    alone = custody()

    alone.tick(ADOPTION_MS)

    assert state(alone) is CustodyState.LEAVING


def test_without_an_adoption_timeout_a_broker_waits_for_ever() -> None:
    alone = custody(NEVER)

    alone.tick(10**12)

    assert (alone.state, alone.deadline_ms) == (CustodyState.ALONE, None)


@pytest.mark.parametrize("keepers", [0, 1, 2])
def test_when_the_executor_ends_so_does_the_broker_whoever_keeps_it(keepers: int) -> None:
    kept = custody()
    for _ in range(keepers):
        kept.keeper_came()

    kept.executor_ended(100, "its JVM has ended")
    assert (kept.state, kept.why) == (CustodyState.LEAVING, "its JVM has ended")
    for _ in range(keepers):
        kept.keeper_went(101)

    kept.tick(100 + EXECUTOR_GONE_MS)
    assert state(kept) is CustodyState.OVER


def test_a_broker_that_leaves_anyway_must_be_quick_once_its_executor_has_ended() -> None:
    alone = custody()
    alone.tick(ADOPTION_MS)

    alone.executor_ended(ADOPTION_MS + 10, "its JVM has ended")

    assert alone.deadline_ms == ADOPTION_MS + 10 + EXECUTOR_GONE_MS


def test_an_ending_executor_gives_no_more_time_than_was_left() -> None:
    alone = custody()
    alone.tick(ADOPTION_MS)
    almost = ADOPTION_MS + SHUTDOWN_MS - 1

    alone.executor_ended(almost, "its JVM has ended")

    assert alone.deadline_ms == ADOPTION_MS + SHUTDOWN_MS


def test_the_last_of_several_keepers_counts() -> None:
    kept = custody()
    kept.keeper_came()
    kept.keeper_came()

    kept.keeper_went(10)
    assert state(kept) is CustodyState.KEPT

    kept.keeper_went(20)
    assert (kept.state, kept.deadline_ms) == (CustodyState.ALONE, 20 + ADOPTION_MS)


def test_a_broker_that_leaves_is_not_kept_back_by_a_late_keeper() -> None:
    alone = custody()
    alone.tick(ADOPTION_MS)

    alone.keeper_came()

    assert state(alone) is CustodyState.LEAVING
    assert alone.deadline_ms is not None


def test_a_keeper_that_never_came_cannot_go() -> None:
    with pytest.raises(InvariantError):
        custody().keeper_went(0)


def test_nothing_follows_the_end_and_every_state_but_it_hears_of_the_executors_end() -> None:
    ends = {state for state, event in TRANSITIONS if event is CustodyEvent.EXECUTOR_ENDED}

    assert ends == set(CustodyState) - {CustodyState.OVER}
    assert not any(state is CustodyState.OVER for state, _ in TRANSITIONS)


def test_a_request_to_leave_reaches_one_who_subscribes_late_and_only_once() -> None:
    heard: list[str] = []
    request = LeaveRequest()
    request.send("first")
    request.send("second")

    request.subscribe(heard.append)

    assert heard == ["first"]
