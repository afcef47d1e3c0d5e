"""How large answers may be: answers that no client reads never use up the room of the others."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from spark_broker.broker.answer_budget import FLOOR_BYTES, AnswerBudget

MB = 1 << 20


def test_an_answer_gets_what_it_asks_for_while_there_is_enough() -> None:
    budget = AnswerBudget(128 * MB)
    with budget.share(50 * MB) as share:
        assert share.bytes == 50 * MB
    assert budget.used_bytes == 0


def test_what_an_answer_does_not_need_is_given_back_at_once() -> None:
    budget = AnswerBudget(128 * MB)
    with budget.share(50 * MB) as first:
        first.keep(1000)
        assert budget.used_bytes == 1000
        with budget.share(50 * MB) as second:
            assert second.bytes == 50 * MB
    assert budget.used_bytes == 0


def test_a_batch_that_is_larger_than_the_share_counts_whole() -> None:
    budget = AnswerBudget(MB)
    with budget.share(100) as share:
        share.keep(3 * MB)
        assert budget.used_bytes == 3 * MB
        with budget.share(MB) as other:
            assert other.bytes == FLOOR_BYTES
    assert budget.used_bytes == 0


@given(st.integers(1, 60))
def test_however_many_stall_the_next_one_gets_something_and_all_stay_within_bounds(stalled: int) -> None:
    budget = AnswerBudget(32 * MB)
    with ExitStack() as held:
        shares = [held.enter_context(budget.share(50 * MB)).bytes for _ in range(stalled)]
        assert shares[0] == 16 * MB
        assert all(share >= FLOOR_BYTES for share in shares)
        assert budget.used_bytes <= 32 * MB + stalled * FLOOR_BYTES
    assert budget.used_bytes == 0
