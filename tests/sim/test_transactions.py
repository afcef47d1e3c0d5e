"""Schedules with transactions: they break no rule, and what they are about does happen."""

from __future__ import annotations

from spark_broker.testing.simulation.schedule import run_schedule
from spark_broker.testing.simulation.transaction_draw import SHARE, TransactionDraw

SEEDS = range(400)


def _transactional() -> list[int]:
    return [seed for seed in SEEDS if TransactionDraw.draw(seed) is not None]


def test_a_share_of_the_schedules_has_transactions() -> None:
    assert len(SEEDS) * SHARE * 0.7 < len(_transactional()) < len(SEEDS) * SHARE * 1.3


def test_a_story_with_transactions_is_the_same_each_time() -> None:
    seed = _transactional()[0]
    first, second = (run_schedule(seed, 300, story=True)[0].digest for _ in range(2))
    assert first == second
