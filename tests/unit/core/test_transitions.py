"""A transition that the tables lack is our own bug, and the error names the state."""

from __future__ import annotations

import pytest

from spark_broker.core.batch import BatchInfo
from spark_broker.core.events import LeaderAndIsr
from spark_broker.core.roles import TRANSITIONS, ReplicaEvent, Role
from spark_broker.core.transaction_changes import (
    AnyChange,
    Ended,
    Ending,
    ExecutionStarted,
    Initialized,
    Opened,
    PartitionAdded,
    WriterJoined,
)
from spark_broker.core.transaction_state import MANY_WRITERS, ONE_WRITER, TransactionMetadata, TransactionState
from spark_broker.errors import InvariantError, NotLeaderOrFollowerError
from tests.unit.core.harness import Cluster


def test_every_role_has_an_end_and_nothing_follows_it() -> None:
    stops = {role for role, event in TRANSITIONS if event is ReplicaEvent.STOPPED}
    after = {to for (role, _), to in TRANSITIONS.items() if role is Role.STOPPED}
    assert (stops, after) == (set(Role), {Role.STOPPED})


def test_only_a_leader_appends() -> None:
    cluster = Cluster()
    with pytest.raises(InvariantError, match="APPENDED of a follower on broker 2, epoch 0, log end 0"):
        cluster.replica(2).appended(BatchInfo(0, 1, 0, 0), 0)


def test_only_a_follower_copies() -> None:
    cluster = Cluster()
    with pytest.raises(InvariantError, match="FOLLOWER_APPENDED of a leader on broker 1"):
        cluster.replica(1).follower_appended([], 0)


def test_a_leader_epoch_has_one_leader() -> None:
    cluster = Cluster()
    with pytest.raises(InvariantError, match="another leader in the same leader epoch"):
        cluster.replica(2).assign(LeaderAndIsr(3, 0, 1, (1, 2, 3), (1, 2, 3)), {1: 1, 2: 1, 3: 1}, 0)


def test_a_replica_that_was_stopped_takes_no_answer() -> None:
    cluster = Cluster()
    cluster.replica(2).stop(NotLeaderOrFollowerError("the broker is shutting down"))
    with pytest.raises(InvariantError, match="FOLLOWER_APPENDED of a stopped"):
        cluster.replica(2).follower_appended([], 0)


OPEN_ONE: tuple[AnyChange, ...] = (Initialized(7, 0, 1000), PartitionAdded(7, "t", 0))
OPEN_MANY: tuple[AnyChange, ...] = (ExecutionStarted("a"), Opened(0, "a", 1000), WriterJoined(7))
DECIDED = (Ending(committed=False),)


@pytest.mark.parametrize(
    ("grouped", "before", "change"),
    [
        pytest.param(False, OPEN_ONE, Initialized(7, 1, 1000), id="a new producer inside a transaction"),
        pytest.param(False, OPEN_ONE, Ended(), id="an end without a decision"),
        pytest.param(False, OPEN_ONE + DECIDED, Ending(committed=True), id="a second decision"),
        pytest.param(False, OPEN_ONE + DECIDED, PartitionAdded(7, "t", 1), id="a partition after the decision"),
        pytest.param(False, OPEN_ONE[:1], Opened(0, "a", 1000), id="a version of one writer"),
        pytest.param(True, OPEN_MANY, Opened(1, "a", 1000), id="a version inside another"),
        pytest.param(True, OPEN_MANY + DECIDED, WriterJoined(8), id="a writer after the decision"),
        pytest.param(True, OPEN_MANY[:1], WriterJoined(7), id="a writer of no version"),
        pytest.param(True, OPEN_MANY[:1], Ending(committed=True), id="a decision about nothing"),
        pytest.param(True, OPEN_MANY, Initialized(7, 0, 1000), id="one producer of many writers"),
    ],
)
def test_a_record_that_cannot_follow_is_refused(
    grouped: bool, before: tuple[AnyChange, ...], change: AnyChange
) -> None:
    transactions = TransactionMetadata("id", grouped)
    for earlier in before:
        transactions.apply(earlier)
    with pytest.raises(InvariantError, match=f"id: .* while {transactions.state.value}"):
        transactions.apply(change)


@pytest.mark.parametrize("transitions", [ONE_WRITER, MANY_WRITERS])
def test_a_decision_is_followed_by_its_end_and_by_nothing_else_but_a_new_execution(
    transitions: dict[tuple[TransactionState, object], TransactionState],
) -> None:
    for prepared in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT):
        after = {to for (state, _), to in transitions.items() if state is prepared}
        assert after <= {TransactionState.EMPTY, prepared}
        assert TransactionState.EMPTY in after
