"""A broken invariant names its machine, the state, and the events before; checks cost little."""

from __future__ import annotations

from typing import cast

import pytest

from spark_broker.controller.events import ControllerStarted, LaunchRequested, Tick
from spark_broker.core.batch import NO_PRODUCER, BatchInfo
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.events import LeaderAndIsr, RecoveredLog
from spark_broker.core.machine import EVENTS_KEPT
from spark_broker.core.producers import ProducerStates
from spark_broker.core.replica import ACKS_ALL, Replica
from spark_broker.core.transaction_coordinator import Resources, TransactionShard
from spark_broker.errors import InvariantError, NotLeaderOrFollowerError, SparkBrokerError, invariant
from tests.unit.controller.cluster import Cluster

EPOCHS = {1: 1, 2: 1}


def leader() -> Replica:
    log = RecoveredLog(0, 0, 0, EpochHistory(), ProducerStates())
    replica = Replica(1, log, min_insync_replicas=1, lag_max_ms=100, name="orders-3")
    replica.assign(LeaderAndIsr(1, 4, 9, (1, 2), (1, 2)), EPOCHS, 10)
    return replica


def batch(offset: int) -> BatchInfo:
    return BatchInfo(offset, offset + 1, 4, 0, NO_PRODUCER, -1, -1)


def append(replica: Replica, count: int) -> None:
    for _ in range(count):
        granted = replica.prepare_append(4, ACKS_ALL, NO_PRODUCER, -1, -1)
        replica.appended(batch(replica.log_end_offset), 11)
        assert granted is not None


def test_a_broken_invariant_says_of_whom_with_the_state_and_the_last_events() -> None:
    replica = leader()
    append(replica, 1)
    with pytest.raises(InvariantError) as raised:
        replica.appended(batch(7), 12)
    error = raised.value
    assert error.message == "appended elsewhere than granted"
    assert error.whose == "orders-3 on broker 1"
    assert "leader" in error.state
    assert "leader_epoch=4" in error.state
    assert "log end 1" in error.state
    first, *_, last = error.last_events
    assert first.startswith("1 assign(LeaderAndIsr(leader=1, leader_epoch=4, partition_epoch=9")
    assert first.endswith("-> leader in leader epoch 4, partition epoch 9, offsets [0, 0, 0]")
    assert last.startswith("4 appended(BatchInfo(base_offset=7")
    assert last.endswith("an invariant broke")
    for said in (error.message, error.whose, error.state, *error.last_events):
        assert said in str(error)


def test_the_last_events_are_bounded_and_hours_of_appends_do_not_hide_the_election() -> None:
    replica = leader()
    append(replica, 1000)
    events = replica.last_events.lines()
    assert len(events) == EVENTS_KEPT + 1
    assert events[0].startswith("1 assign(")
    assert events[-1].startswith("2001 appended(")


def test_what_an_event_was_refused_with_is_remembered_and_ticks_without_effect_are_not() -> None:
    replica = leader()
    replica.stop(NotLeaderOrFollowerError("the broker is shutting down"))
    with pytest.raises(NotLeaderOrFollowerError):
        replica.prepare_append(4, ACKS_ALL, NO_PRODUCER, -1, -1)
    for now_ms in range(100):
        replica.tick(EPOCHS, now_ms)
    assert [line.rsplit(" -> ")[-1] for line in replica.last_events.lines()][2:] == ["NotLeaderOrFollowerError"]


def test_tokens_and_batches_are_not_kept_alive_by_the_last_events() -> None:
    replica = leader()
    append(replica, 1)
    replica.await_commit(object(), 0, 1, 99)
    assert "await_commit(object, 0, 1, 99)" in replica.last_events.lines()[-1]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("high_watermark", 5, "log start 0, high watermark 5, log end 1"),
        ("log_start_offset", -1, "log start -1, high watermark 0, log end 1"),
        ("leadership", None, "a leadership without the role"),
        ("epochs", EpochHistory.from_pairs([(4, 8)]), "an epoch begins past the log end 1"),
    ],
)
def test_a_state_that_contradicts_itself_is_found_by_the_next_event(name: str, value: object, said: str) -> None:
    replica = leader()
    append(replica, 1)
    setattr(replica, name, value)
    with pytest.raises(InvariantError, match=said):
        replica.tick(EPOCHS, 20)


def test_a_log_that_ends_elsewhere_than_its_replica_is_found() -> None:
    replica = leader()
    append(replica, 2)
    replica.check_log_end(2)
    with pytest.raises(InvariantError, match="the log ends at 1, the replica at 2") as raised:
        replica.check_log_end(1)
    assert raised.value.whose == "orders-3 on broker 1"


def test_the_controller_says_the_same_of_itself() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    controller = cluster.controller
    for session in controller.sessions.all():
        session.broker_epoch += 1
    with pytest.raises(InvariantError, match="is of no registered epoch") as raised:
        controller.handle(Tick(), cluster.now_ms)
    error = raised.value
    assert error.whose == "the controller"
    assert "live brokers [0, 1]" in error.state
    assert any("registers launch 1" in event for event in error.last_events)


def test_a_controller_remembers_what_it_decided_and_not_each_tick() -> None:
    cluster = Cluster()
    controller = cluster.controller
    controller.handle(ControllerStarted("w" * 32, "id", "host", 1, 0), 0)
    controller.handle(LaunchRequested(1), 0)
    before = controller.last_events.lines()
    for now_ms in range(0, 10_000, 50):
        controller.handle(Tick(), now_ms)
    assert controller.last_events.lines() == before


def test_a_transaction_shard_says_whose_it_is() -> None:
    shard = TransactionShard(cast("Resources", None), name="__transaction_state-2")
    with pytest.raises(InvariantError, match="commits of what was not appended") as raised:
        shard.committed(1)
    assert raised.value.whose == "coordinator of __transaction_state-2"
    assert "0 appended, 0 committed, 0 ids" in raised.value.state


def test_a_broken_invariant_is_no_refusal_and_its_text_is_made_only_then() -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("nobody reads it")

    invariant(True, "%s", Costly())
    assert not issubclass(InvariantError, SparkBrokerError)
    with pytest.raises(InvariantError, match="7 of 8"):
        invariant(False, "%d of %d", 7, 8)
    with pytest.raises(InvariantError, match="100%"):
        invariant(False, "100%")
