"""Random schedules of the transaction coordinator, which also find bugs that are put in on purpose."""

from __future__ import annotations

import pytest

from spark_broker.core import transaction_producers
from spark_broker.core.transaction_coordinator import AnswerRequest, AppendRecords, Effect, TransactionShard
from spark_broker.core.transaction_decision import Answered, Decision, Resources
from spark_broker.core.transaction_state import ProducerIdentity, TransactionMetadata, TransactionState
from spark_broker.errors import InvariantError
from spark_broker.protocol.messages import EndTransactionRequest, InitProducerIdResponse, InitTransactionsRequest
from tests.unit.core.transaction_world import ViolationError, run_schedule

SCHEDULES = 150


@pytest.mark.slow
def test_random_schedules_keep_every_promise() -> None:
    committed = aborted = versions = 0
    for seed in range(SCHEDULES):
        world = run_schedule(seed)
        committed += sum(world.fates.values())
        aborted += len(world.fates) - sum(world.fates.values())
        versions += len(world.commits)
    assert min(committed, aborted, versions) > SCHEDULES // 4, "the schedules do too little to prove anything"


def finds(seeds: int = 1000) -> bool:
    for seed in range(seeds):
        try:
            run_schedule(seed)
        except (ViolationError, InvariantError):
            return True
    return False


def test_an_empty_abort_that_keeps_the_epoch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known bug 24: a late batch joins the next transaction."""
    right = transaction_producers.end

    def wrong(found: TransactionMetadata, request: EndTransactionRequest, resources: Resources) -> Decision:
        identity = ProducerIdentity(request.producer_id, request.producer_epoch)
        if found.state is TransactionState.EMPTY and identity == found.identity:
            return Answered(InitProducerIdResponse(request.producer_id, request.producer_epoch))
        return right(found, request, resources)

    monkeypatch.setattr(transaction_producers, "end", wrong)
    assert finds()


@pytest.mark.slow
def test_markers_before_the_decision_is_committed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TransactionShard.appended

    def wrong(self: TransactionShard, append: AppendRecords, now_ms: int) -> list[Effect]:
        effects = right(self, append, now_ms)
        for held in [decision for decision in self._held if not hasattr(decision, "waiting")]:
            self._held.remove(held)
            effects += self._mark(held.transactional_id)
        return effects

    monkeypatch.setattr(TransactionShard, "appended", wrong)
    assert finds()


def test_a_new_producer_without_an_epoch_of_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would share its epoch with a zombie that waited for the abort."""
    right = transaction_producers.initialize

    def wrong(found: TransactionMetadata | None, request: InitTransactionsRequest, resources: Resources) -> Decision:
        if found is not None and found.state is TransactionState.EMPTY and found.last_outcome is not None:
            return Answered(InitProducerIdResponse(found.identity.producer_id, found.identity.producer_epoch))
        return right(found, request, resources)

    monkeypatch.setattr(transaction_producers, "initialize", wrong)
    assert finds()


def test_answers_before_their_records_are_committed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TransactionShard, "_answer", lambda self, waiting, answer: [AnswerRequest(waiting.token, answer)]
    )
    assert finds()
