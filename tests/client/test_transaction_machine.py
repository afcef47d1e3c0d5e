"""The client's transaction by itself: the table, and what each answer of the coordinator means."""

from __future__ import annotations

import pytest

from spark_broker.client.transaction_machine import TRANSITIONS, Phase, ProducerTransactionEvent, TransactionMachine
from spark_broker.errors import (
    BootstrapUnreachableError,
    CoordinatorNotAvailableError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    ProducerFencedError,
    RequestTimedOutError,
    SparkBrokerError,
    TransactionAbortableError,
    UnknownServerError,
)

LATE = RequestTimedOutError("not acknowledged in time")


def machine_in(phase: Phase) -> TransactionMachine:
    """A machine that has gone the usual way to this phase."""
    machine = TransactionMachine()
    if phase is Phase.UNINITIALIZED:
        return machine
    machine.identified()
    if phase is Phase.READY:
        return machine
    machine.begin()
    machine.admit()
    match phase:
        case Phase.ABORTABLE:
            machine.append_failed(LATE)
        case Phase.FLUSHING | Phase.COMMITTING:
            machine.close(committing=True)
        case Phase.DISCARDING | Phase.ABORTING:
            machine.close(committing=False)
        case Phase.FAILED:
            machine.fail(ProducerFencedError("a newer one"))
        case _:
            assert phase is Phase.OPEN
    if phase in (Phase.COMMITTING, Phase.ABORTING):
        machine.end()
    assert machine.phase is phase
    return machine


STEPS = {
    ProducerTransactionEvent.IDENTITY: TransactionMachine.identified,
    ProducerTransactionEvent.BEGIN: TransactionMachine.begin,
    ProducerTransactionEvent.COMMIT: lambda machine: machine.close(committing=True),
    ProducerTransactionEvent.ABORT: lambda machine: machine.close(committing=False),
    ProducerTransactionEvent.QUIET: TransactionMachine.end,
}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", STEPS)
def test_a_step_is_taken_where_the_table_has_it_and_refused_elsewhere(
    phase: Phase, event: ProducerTransactionEvent
) -> None:
    machine = machine_in(phase)
    after = TRANSITIONS.get((phase, event))
    if phase is Phase.FAILED and event is ProducerTransactionEvent.IDENTITY:
        machine.identified()
        assert machine.phase is Phase.FAILED, "an answer that comes late revives nothing"
    elif after is not None:
        STEPS[event](machine)
        assert machine.phase is after
    else:
        refusal = {Phase.FAILED: ProducerFencedError, Phase.ABORTABLE: TransactionAbortableError}
        with pytest.raises(refusal.get(phase, InvalidTxnStateError)):
            STEPS[event](machine)
        assert machine.phase is phase


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.OPEN])
def test_appends_are_admitted_only_while_it_is_open(phase: Phase) -> None:
    with pytest.raises(SparkBrokerError):
        machine_in(phase).admit()


@pytest.mark.parametrize("phase", [Phase.OPEN, Phase.FLUSHING])
def test_a_failed_append_forbids_the_commit(phase: Phase) -> None:
    machine = machine_in(phase)
    refusal = machine.append_failed(LATE)
    assert isinstance(refusal, TransactionAbortableError)
    assert "not acknowledged in time" in refusal.message
    assert machine.phase is Phase.ABORTABLE
    assert machine.append_failed(LATE) is None
    machine.close(committing=False)
    machine.end()
    machine.identified()
    assert (machine.phase, machine.cause, machine.touched) == (Phase.READY, None, False)


@pytest.mark.parametrize("phase", [Phase.DISCARDING, Phase.ABORTING, Phase.READY])
def test_an_append_that_fails_while_it_is_aborted_changes_nothing(phase: Phase) -> None:
    machine = machine_in(phase)
    assert machine.append_failed(LATE) is None
    assert machine.phase is phase


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.FAILED])
def test_a_fenced_append_ends_the_producer(phase: Phase) -> None:
    machine = machine_in(phase)
    fenced = ProducerFencedError("a newer one")
    assert machine.append_failed(fenced) is fenced
    with pytest.raises(ProducerFencedError):
        machine.raise_failure()


def test_an_end_that_was_interrupted_can_be_asked_for_again() -> None:
    flushing, discarding = machine_in(Phase.FLUSHING), machine_in(Phase.DISCARDING)
    flushing.reopen()
    discarding.reopen()
    assert (flushing.phase, discarding.phase) == (Phase.OPEN, Phase.ABORTABLE)
    asked = machine_in(Phase.COMMITTING)
    asked.reopen()
    assert asked.phase is Phase.COMMITTING, "the outcome is the coordinator's"


@pytest.mark.parametrize(
    ("phase", "error", "raised", "after"),
    [
        (Phase.COMMITTING, CoordinatorNotAvailableError("moving"), None, Phase.COMMITTING),
        (Phase.ABORTING, BootstrapUnreachableError("nobody"), None, Phase.ABORTING),
        (Phase.COMMITTING, TransactionAbortableError("timed out"), TransactionAbortableError, Phase.ABORTABLE),
        (Phase.ABORTING, TransactionAbortableError("a bug"), TransactionAbortableError, Phase.FAILED),
        (Phase.COMMITTING, InvalidProducerEpochError("old"), ProducerFencedError, Phase.FAILED),
        (Phase.ABORTING, ProducerFencedError("old"), ProducerFencedError, Phase.FAILED),
        (Phase.COMMITTING, UnknownServerError("a bug"), UnknownServerError, Phase.FAILED),
    ],
)
def test_what_the_coordinators_errors_mean(
    phase: Phase, error: SparkBrokerError, raised: type[SparkBrokerError] | None, after: Phase
) -> None:
    machine = machine_in(phase)
    answer = machine.refused(error)
    assert machine.phase is after
    assert answer is None if raised is None else type(answer) is raised
