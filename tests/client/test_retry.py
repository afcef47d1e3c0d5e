"""How long clients wait before they try again."""

from __future__ import annotations

from spark_broker.client.retry import RecoveryPace


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
