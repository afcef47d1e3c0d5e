"""What a start finds and the metadata does not have: it is deleted if the metadata says so, and else set aside."""

from __future__ import annotations

import errno
import logging
import threading

import pytest

from spark_broker.storage.strays import bring_back
from spark_broker.testing.simulation.operations import Fault, Operation
from tests.broker.test_offline_replicas import Broker

WEEK_MS = 7 * 24 * 3_600_000


@pytest.fixture
def first() -> Broker:
    """A process that has ended. It had a topic with one record."""
    broker = Broker()
    broker.topics["t"] = 1
    broker.apply()
    broker.write("t", b"a")
    return broker


def next_process(before: Broker) -> Broker:
    return Broker(before.fs.crash_process(), before)


def forget(broker: Broker) -> None:
    """The metadata does not know the topic."""
    del broker.topics["t"]


def strays(broker: Broker) -> list[str]:
    return [stray.replica.topic for stray in broker.directory.strays()]


def test_a_replica_of_an_unknown_topic_is_set_aside(first: Broker, caplog: pytest.LogCaptureFixture) -> None:
    broker = next_process(first)
    forget(broker)
    with caplog.at_level(logging.WARNING):
        broker.apply()
        broker.work()
    assert strays(broker) == ["t"]
    assert "t-0 is set aside" in caplog.text
    assert "log-dirs" in caplog.text


def test_a_replica_of_a_topic_with_a_tombstone_is_deleted(first: Broker) -> None:
    broker = next_process(first)
    forget(broker)
    broker.deleted = [first.id_of("t")]
    broker.apply()
    broker.work()
    assert broker.directories() == []


@pytest.mark.parametrize(("raised", "kept"), [(1, []), (-1, ["t"])])
def test_a_replica_that_was_moved_away_is_deleted_only_by_a_newer_decision(
    first: Broker, raised: int, kept: list[str]
) -> None:
    first.epoch += 5
    first.apply()
    first.write("t", b"b")
    broker = next_process(first)
    broker.elsewhere.add("t")
    broker.epoch += raised - 1
    broker.apply()
    broker.work()
    assert strays(broker) == kept
    assert broker.directories() == [stray.replica.path.name for stray in broker.directory.strays()]


def test_a_stray_that_cannot_be_renamed_stays_and_is_tried_again(first: Broker) -> None:
    broker = next_process(first)
    forget(broker)
    broker.fs.on_operation = lambda operation: _refused_rename(operation)
    broker.apply()
    broker.work()
    assert broker.directories() == ["t-0"]
    broker.fs.heal()
    broker.retry()
    assert strays(broker) == ["t"]


def _refused_rename(operation: Operation) -> Fault | None:
    return Fault(errno.ENOSPC) if operation.kind == "rename" and "t-0" in operation.path else None


def test_a_stray_is_deleted_after_a_while_by_a_broker_whose_clock_is_believed(first: Broker) -> None:
    broker = next_process(first)
    forget(broker)
    broker.apply()
    broker.work()

    def stays_after(ms: int) -> bool:
        broker.manager.delete_old_strays(WEEK_MS if ms else -1)
        broker.work()
        return strays(broker) == ["t"]

    assert stays_after(1), "it is young"
    broker.ahead_ms = WEEK_MS + 1
    assert stays_after(0), "-1: never"
    broker.lease.session_lost()
    assert stays_after(1), "nobody has checked the clock of a broker without a session"
    broker.lease.extend(broker.boottime_ms(), 10_000)
    assert not stays_after(1)
    assert broker.directories() == []


def test_a_stray_is_kept_as_long_when_the_clock_was_behind_as_it_was_set_aside(first: Broker) -> None:
    """Story: a machine began a month behind, with older metadata. Its clock was set, and the replicas, perhaps the only
    ones, counted as a month old.
    """
    broker = next_process(first)
    forget(broker)
    broker.lease.session_lost()
    broker.apply()
    broker.work()
    assert strays(broker) == ["t"]
    broker.ahead_ms = 5 * WEEK_MS
    broker.lease.extend(broker.boottime_ms(), 10_000)
    for passed_ms, kept in ((0, ["t"]), (WEEK_MS - 1000, ["t"]), (1001, [])):
        broker.ahead_ms += passed_ms
        broker.manager.delete_old_strays(WEEK_MS)
        broker.work()
        assert strays(broker) == kept


def test_old_strays_wait_while_files_are_worked_on(first: Broker) -> None:
    """Story: maintenance waited for all work on files, and with it slow followers stayed in their ISRs."""
    broker = next_process(first)
    forget(broker)
    broker.apply()
    broker.work()
    broker.ahead_ms = WEEK_MS + 1
    works, done = threading.Event(), threading.Event()

    def work() -> None:
        with broker.manager._work_lock:
            works.set()
            assert done.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert works.wait(30)
    broker.manager.delete_old_strays(WEEK_MS)
    done.set()
    thread.join()
    broker.work()
    assert strays(broker) == ["t"]
    broker.manager.delete_old_strays(WEEK_MS)
    broker.work()
    assert strays(broker) == []


def test_a_stray_that_is_brought_back_is_the_replica_again(first: Broker) -> None:
    broker = next_process(first)
    forget(broker)
    broker.apply()
    broker.work()
    (stray,) = broker.directory.strays()
    broker.directory.release()
    again_fs = broker.fs.crash_process()
    bring_back(stray, fs=again_fs)
    again = Broker(again_fs.another_process(), first)
    again.apply()
    again.work()
    assert again.rows("t") == 1
