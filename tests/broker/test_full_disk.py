"""A broker with a full disk refuses what it would have to store, and goes on."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from spark_broker.broker.process import Broker
from spark_broker.broker.replica_log import from_wire
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.replica import LeaderAndIsr
from spark_broker.errors import StorageFullError
from spark_broker.storage.checkpoints import read_leader_epochs
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.start_kind import StartKind
from tests.broker.lone_partition import BIG, LonePartition

WRITE = "spark_broker.broker.replica_log.write_leader_epochs"


def _is_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def elect_again(lone: LonePartition) -> None:
    lone.leader_epoch += 1
    assignment = LeaderAndIsr(0, lone.leader_epoch, lone.leader_epoch, (0,), (0,))
    lone.partition.assign(assignment, lone.topic, {0: 1})


def test_an_election_and_the_appends_after_it_wait_for_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches carry their epochs, so the file may lag until the next flush, on a full disk, too."""
    lone = LonePartition(tmp_path / "t-0")
    lone.write(b"a", sequence=0, transactional=False)
    lone.partition.flush()
    with monkeypatch.context() as patch:
        patch.setattr(WRITE, _is_full)
        elect_again(lone)
        lone.write(b"b", sequence=1, transactional=False)
        lone.partition.flush()
        assert read_leader_epochs(lone.directory) == [(0, 0)]
    lone.partition.flush()
    assert read_leader_epochs(lone.directory) == [(0, 0), (1, 1)]
    assert (lone.read(), lone.failures) == ([b"a", b"b"], [])


def test_a_history_that_takes_an_epoch_back_is_saved_before_the_next_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = LonePartition(tmp_path / "t-0")
    lone.write(b"a", sequence=0, transactional=False)
    elect_again(lone)
    lone.write(b"b", sequence=1, transactional=False)
    lone.partition.flush()
    with monkeypatch.context() as patch:
        patch.setattr(WRITE, _is_full)
        lone.partition.log.save_epochs(EpochHistory.from_pairs([(0, 0)]))
        with pytest.raises(StorageFullError):
            lone.write(b"c", sequence=2, transactional=False)
        assert read_leader_epochs(lone.directory) == [(0, 0), (1, 1)]
    lone.write(b"c", sequence=2, transactional=False)
    assert read_leader_epochs(lone.directory) == [(0, 0)]
    assert lone.failures == []


def test_an_epoch_that_was_never_saved_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lone = LonePartition(tmp_path / "t-0")
    lone.write(b"a", sequence=0, transactional=False)
    with monkeypatch.context() as patch:
        patch.setattr(WRITE, _is_full)
        elect_again(lone)
    lone.reopen(StartKind.PROCESS_CRASH)
    lone.write(b"b", sequence=1, transactional=False)
    assert lone.partition.replica.epochs.to_pairs() == [(0, 0), (2, 1)]
    assert lone.read() == [b"a", b"b"]


def test_a_stop_in_order_during_which_a_log_is_refused_something_is_one_and_leaves_no_marker() -> None:
    broker, marked = Broker.__new__(Broker), list[str]()

    def stop(*, clean: bool) -> None:
        assert clean
        raise StorageFullError("no room")

    broker._manager = cast(ReplicaManager, SimpleNamespace(stop=stop, broker_id=0))
    broker._directory = cast(LogDirectory, SimpleNamespace(mark_clean=lambda: marked.append("clean")))
    broker._stop_in_order()
    assert marked == []


def test_a_follower_that_begins_where_a_full_disk_keeps_files_below_gets_the_producers_of_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulator with seed 760001069: it got those of where the files began. As a leader it refused the
    producer's next batch, and would have stored a late retry twice.
    """
    lone = LonePartition(tmp_path / "t-0", {"segment.bytes": "4096", "retention.bytes": "1"})
    for number in range(6):
        lone.write(b"x" * BIG, sequence=number, transactional=False)
    monkeypatch.setattr("spark_broker.storage.log.write_log_state", _is_full)
    lone.partition.apply_retention()
    begins = lone.partition.replica.log_start_offset
    assert lone.partition.log._log.log_start_offset < begins
    state = lone.partition.replica_state(lone.leader_epoch)
    assert state.log_start_offset == begins
    ((_, entry),) = from_wire(state.producers).entries()
    assert [batch.sequence for batch in entry.batches] == list(range(max(0, begins - 5), begins))
    assert lone.failures == []
