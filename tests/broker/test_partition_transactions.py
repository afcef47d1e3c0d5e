"""Transactions and producers of one partition on real files, with shell, log and snapshots.

The test is the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from spark_broker.broker.append import AwaitedTransaction
from spark_broker.broker.maintenance import Maintenance
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.room import Room
from spark_broker.config import ClusterConfig, TopicConfig
from spark_broker.core.replica import Replica
from spark_broker.errors import (
    DamagedLogError,
    InvalidProducerEpochError,
    InvalidRequestError,
    InvalidTxnStateError,
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
)
from spark_broker.storage.filesystem import LOCAL, LocalFileSystem
from spark_broker.storage.start_kind import StartKind
from tests.broker.lone_partition import BIG, LonePartition
from tests.broker.rig import Rig

every_start = pytest.mark.parametrize("start", list(StartKind))


@pytest.fixture
def lone(tmp_path: Path) -> LonePartition:
    return LonePartition(tmp_path / "t-0")


def small(tmp_path: Path, **config: object) -> LonePartition:
    """Two values of BIG bytes fill a segment."""
    settings = {key.replace("_", "."): str(value) for key, value in config.items()}
    return LonePartition(tmp_path / "t-0", {"segment.bytes": "4096", **settings})


def big(number: int) -> bytes:
    return b"%d:" % number + b"x" * BIG


def numbers(values: list[bytes]) -> list[int]:
    return [int(value.split(b":")[0]) for value in values]


def test_a_transactions_first_batch_waits_until_its_coordinator_has_the_partition(lone: LonePartition) -> None:
    awaited = lone.offer(b"a")
    assert isinstance(awaited, AwaitedTransaction)
    assert lone.partition.replica.log_end_offset == 0
    lone.partition.confirm(awaited)
    assert lone.offer(b"a") == 0
    assert lone.offer(b"b", sequence=1) == 1, "confirmed once, it is not asked again"


def test_after_the_marker_the_coordinator_is_asked_again(lone: LonePartition) -> None:
    lone.write(b"a")
    lone.end(1, committed=True)
    assert isinstance(lone.offer(b"b", epoch=1), AwaitedTransaction)


def test_a_confirmation_that_comes_after_the_marker_admits_nothing(lone: LonePartition) -> None:
    """24: the leader asked before the transaction ended, and the answer came after."""
    awaited = lone.offer(b"a")
    assert isinstance(awaited, AwaitedTransaction)
    lone.end(1, committed=False)
    lone.partition.confirm(awaited)
    with pytest.raises(InvalidProducerEpochError):
        lone.offer(b"a")


def test_a_confirmation_of_an_earlier_leader_epoch_admits_nothing(lone: LonePartition) -> None:
    awaited = lone.offer(b"a")
    assert isinstance(awaited, AwaitedTransaction)
    lone.reopen(StartKind.CLEAN)
    lone.partition.confirm(awaited)
    assert isinstance(lone.offer(b"a"), AwaitedTransaction)


def test_a_transactional_batch_without_producer_or_acks_all_is_refused(lone: LonePartition) -> None:
    with pytest.raises(InvalidRequestError):
        lone.offer(b"a", pid=-1, epoch=-1, sequence=-1)


def test_readers_of_committed_records_see_a_transaction_whole_once_it_is_committed(lone: LonePartition) -> None:
    lone.write(b"before", pid=1, transactional=False)
    lone.write(b"a")
    lone.write(b"after", pid=1, sequence=1, transactional=False)
    assert (lone.read(), lone.read(read_committed=False)) == ([b"before"], [b"before", b"a", b"after"])
    assert lone.last_stable_offset() == 1
    assert lone.end(1, committed=True) == 3
    assert lone.read() == lone.read(read_committed=False) == [b"before", b"a", b"after"]
    assert lone.last_stable_offset() == 4


def test_aborted_batches_are_for_readers_of_everything_alone(lone: LonePartition) -> None:
    lone.write(b"a")
    lone.write(b"other", pid=8)
    lone.end(1, committed=False)
    lone.end(1, committed=True, pid=8)
    assert lone.read() == [b"other"]
    assert lone.read(read_committed=False) == [b"a", b"other"]


def test_a_marker_is_written_once(lone: LonePartition) -> None:
    lone.write(b"a")
    lone.end(1, committed=True)
    log_end = lone.partition.replica.log_end_offset
    lone.end(1, committed=True)
    assert lone.partition.replica.log_end_offset == log_end


def test_a_lookup_by_time_passes_over_what_its_reader_does_not_see(lone: LonePartition) -> None:
    lone.write(b"aborted")
    lone.end(1, committed=False)
    lone.write(b"seen", epoch=1)
    lone.end(2, committed=True)
    committed = lone.partition.reader.offset_at(lone.leader_epoch, 0, read_committed=True)
    everything = lone.partition.reader.offset_at(lone.leader_epoch, 0, read_committed=False)
    assert committed is not None
    assert everything is not None
    assert (committed[0], everything[0]) == (2, 0)


def test_a_number_used_again_after_an_abort_is_a_new_batch(lone: LonePartition) -> None:
    """23."""
    assert lone.write(b"aborted") == 0
    lone.end(1, committed=False)
    assert lone.write(b"again", epoch=1) == 2
    lone.end(2, committed=True)
    assert lone.read() == [b"again"]


def test_a_late_batch_and_a_late_marker_join_no_newer_transaction(lone: LonePartition) -> None:
    """24."""
    lone.write(b"a")
    lone.end(1, committed=False)
    with pytest.raises(InvalidProducerEpochError):
        lone.offer(b"late", sequence=1)
    lone.write(b"b", epoch=1)
    with pytest.raises(InvalidProducerEpochError):
        lone.end(1, committed=False)
    with pytest.raises(InvalidTxnStateError):
        lone.offer(b"c", epoch=2)
    lone.end(2, committed=True)
    assert lone.read() == [b"b"]


@every_start
def test_an_open_transaction_goes_on_after_a_restart(lone: LonePartition, start: StartKind) -> None:
    lone.write(b"a")
    lone.reopen(start)
    assert lone.last_stable_offset() == 0
    assert lone.write(b"a") == 0, "a retry has its original offset"
    assert lone.write(b"b", sequence=1) == 1
    lone.end(1, committed=True)
    assert lone.read() == [b"a", b"b"]


@every_start
def test_aborted_transactions_are_known_after_a_restart(tmp_path: Path, start: StartKind) -> None:
    lone = small(tmp_path)
    for epoch in range(6):
        lone.write(big(epoch), epoch=epoch)
        lone.end(epoch + 1, committed=epoch % 2 == 0)
    assert len(lone.segments()) > 2
    before = lone.partition.replica.producers
    lone.reopen(start)
    assert lone.partition.replica.producers == before
    assert numbers(lone.read()) == [0, 2, 4]


@every_start
@pytest.mark.parametrize("checkpoint", [0, 2, 5, 100])
def test_whatever_the_high_watermarks_checkpoint_the_state_is_the_logs(
    tmp_path: Path, start: StartKind, checkpoint: int
) -> None:
    lone = small(tmp_path)
    for number in range(8):
        lone.write(big(number), sequence=number)
    before = lone.partition.replica.producers
    lone.reopen(start, high_watermark=checkpoint)
    assert lone.partition.replica.producers == before
    assert lone.last_stable_offset() == 0


def test_a_transaction_whose_marker_is_not_known_to_be_committed_stays_undecided(tmp_path: Path) -> None:
    """Snapshots after the marker do not know the end, so one below the high watermark is taken."""
    lone = small(tmp_path)
    lone.write(big(0))
    lone.end(1, committed=True)
    for number in range(4):
        lone.write(big(number), pid=8, sequence=number, transactional=False)
    assert any(offset > 2 for offset in lone.snapshots())
    lone.close()
    log = ReplicaLog(lone.directory, lone.topic, StartKind.PROCESS_CRASH)
    assert [
        Replica(0, log.state(high_watermark=mark), min_insync_replicas=1, lag_max_ms=1).last_stable_offset
        for mark in (0, 1, 2, 3)
    ] == [0, 0, 2, 3]
    log.close(clean=False)


@every_start
def test_retention_takes_records_away_but_not_what_is_known_of_their_producer(tmp_path: Path, start: StartKind) -> None:
    """20 and 22: a retry of a batch whose segment was deleted has its original offset."""
    lone = small(tmp_path, retention_bytes=4096)
    offsets = [lone.write(big(n), sequence=n, transactional=False) for n in range(3)]
    for number in range(6):
        lone.write(big(number), pid=8, sequence=number, transactional=False)
    lone.partition.apply_retention()
    assert lone.partition.replica.log_start_offset > offsets[-1]
    assert min(lone.segments()) > offsets[-1]
    before = lone.partition.replica.producers
    lone.reopen(start)
    assert lone.partition.replica.producers == before
    assert [lone.write(big(n), sequence=n, transactional=False) for n in range(3)] == offsets
    with pytest.raises(OutOfOrderSequenceNumberError):
        lone.offer(b"gap", sequence=5, transactional=False)


def test_retention_keeps_what_is_undecided(tmp_path: Path) -> None:
    """A deleted one would hold back the last stable offset of the next leader, whose log starts earlier (KIP-207)."""
    lone = small(tmp_path, retention_bytes=4096)
    for number in range(4):
        lone.write(big(number), pid=8, sequence=number, transactional=False)
    for number in range(8):
        lone.write(big(number), sequence=number)
    lone.partition.apply_retention()
    lone.partition.advance_log_start(10)
    assert lone.partition.replica.log_start_offset == lone.last_stable_offset() == 4
    lone.end(1, committed=True)
    lone.partition.apply_retention()
    assert lone.partition.replica.log_start_offset > 4


@every_start
def test_what_retention_leaves_of_an_aborted_transaction_stays_aborted(tmp_path: Path, start: StartKind) -> None:
    lone = small(tmp_path, retention_bytes=8192)
    for number in range(8):
        lone.write(big(number), sequence=number)
    lone.end(1, committed=False)
    lone.partition.apply_retention()
    log_start = lone.partition.replica.log_start_offset
    assert 0 < log_start < 7
    lone.reopen(start)
    assert lone.last_stable_offset() == lone.partition.replica.log_end_offset
    assert (lone.read(), numbers(lone.read(read_committed=False))) == ([], list(range(log_start, 8)))


def test_what_is_removed_leaves_no_snapshot_below_the_log_start(tmp_path: Path) -> None:
    lone = small(tmp_path, retention_bytes=4096)
    for number in range(10):
        lone.write(big(number), sequence=number, transactional=False)
    assert lone.snapshots() == lone.segments()[1:]
    lone.partition.apply_retention()
    assert lone.snapshots() == lone.segments()
    assert lone.snapshots()[0] == lone.partition.replica.log_start_offset


def test_a_log_start_within_a_segment_has_a_snapshot_of_its_own(lone: LonePartition) -> None:
    for number in range(4):
        lone.write(b"x", sequence=number, transactional=False)
    lone.partition.advance_log_start(3)
    lone.write(b"y", sequence=4, transactional=False)
    before = lone.partition.replica.producers
    lone.reopen(StartKind.PROCESS_CRASH)
    assert lone.snapshots() == [3]
    assert lone.partition.replica.producers == before
    assert lone.write(b"x", sequence=0, transactional=False) == 0


def test_a_read_that_retention_overtakes_shows_no_aborted_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames are read; then retention deletes them and forgets that they were aborted."""
    lone = small(tmp_path, retention_bytes=4096)
    lone.write(big(0))
    lone.end(1, committed=False)
    for number in range(6):
        lone.write(big(number), pid=8, sequence=number, transactional=False)
    read = ReplicaLog.read

    def overtaken(self: ReplicaLog, offset: int, max_bytes: int, end_offset: int) -> object:
        frames = read(self, offset, max_bytes, end_offset)
        lone.partition.apply_retention()
        return frames

    monkeypatch.setattr(ReplicaLog, "read", overtaken)
    fetched = lone.partition.reader.read(lone.leader_epoch, 0, 1 << 20, read_committed=True)
    assert lone.partition.replica.log_start_offset > 1
    assert (fetched.frames, fetched.next_offset) == ([], 0)


def spoil(lone: LonePartition, offset: int) -> None:
    path = lone.directory / f"{offset:020d}.snapshot"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", ["spoil", "remove", "empty"])
def test_a_lost_snapshot_is_made_good_by_an_older_one_and_the_log(tmp_path: Path, harm: str) -> None:
    lone = small(tmp_path)
    for number in range(9):
        lone.write(big(number), sequence=number)
    before = lone.partition.replica.producers
    newest = lone.snapshots()[-1]
    if harm == "spoil":
        spoil(lone, newest)
    elif harm == "remove":
        (lone.directory / f"{newest:020d}.snapshot").unlink()
    else:
        (lone.directory / f"{newest:020d}.snapshot").write_bytes(b"")
    lone.reopen(StartKind.PROCESS_CRASH)
    assert lone.partition.replica.producers == before


def test_a_log_whose_every_snapshot_is_lost_is_replayed_while_it_begins_at_0(tmp_path: Path) -> None:
    lone = small(tmp_path)
    for number in range(9):
        lone.write(big(number), sequence=number)
    before = lone.partition.replica.producers
    for offset in lone.snapshots():
        spoil(lone, offset)
    lone.reopen(StartKind.PROCESS_CRASH)
    assert lone.partition.replica.producers == before


@pytest.mark.parametrize("harm", ["spoil", "remove"])
def test_a_lost_snapshot_at_the_log_start_is_damage(tmp_path: Path, harm: str) -> None:
    """28: the state of deleted records is in no other file, so the replica is fetched again, not repaired."""
    lone = small(tmp_path, retention_bytes=4096)
    for number in range(9):
        lone.write(big(number), sequence=number, transactional=False)
    lone.partition.apply_retention()
    lone.close()
    log_start = lone.partition.replica.log_start_offset
    if harm == "spoil":
        spoil(lone, log_start)
    else:
        (lone.directory / f"{log_start:020d}.snapshot").unlink()
    with pytest.raises(DamagedLogError):
        ReplicaLog(lone.directory, lone.topic, StartKind.PROCESS_CRASH)


def test_retention_renews_a_damaged_snapshot_before_it_stands_alone(tmp_path: Path) -> None:
    lone = small(tmp_path, retention_bytes=4096)
    for number in range(9):
        lone.write(big(number), sequence=number, transactional=False)
    for offset in lone.snapshots():
        spoil(lone, offset)
    lone.partition.apply_retention()
    before = lone.partition.replica.producers
    lone.reopen(StartKind.PROCESS_CRASH)
    assert lone.partition.replica.log_start_offset > 0
    assert lone.partition.replica.producers == before


def test_a_snapshot_past_the_end_of_a_recovered_log_is_dropped(tmp_path: Path) -> None:
    """A machine crash lost the log's end, and other records are written there afterwards."""
    lone = small(tmp_path)
    for number in range(4):
        lone.write(big(number), sequence=number, transactional=False)
    lone.write(big(4), sequence=4, transactional=False)
    assert lone.snapshots() == [2, 4]
    lone.close()
    for path in (path for base in (2, 4) for path in lone.directory.glob(f"{base:020d}.[ai]*")):
        path.unlink()
    first = lone.directory / f"{0:020d}.arrow"
    first.write_bytes(first.read_bytes()[:-BIG])
    (lone.directory / "log-state.json").unlink()
    log = ReplicaLog(lone.directory, lone.topic, StartKind.MACHINE_CRASH)
    assert log.log_end_offset == 1
    assert lone.snapshots() == []
    log.close(clean=False)


class CountingFileSystem(LocalFileSystem):
    """Notes which files are read whole."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def read_bytes(self, path: Path) -> bytes:
        self.read.append(path.suffix)
        return super().read_bytes(path)


def test_a_log_of_many_segments_is_opened_by_its_last_snapshot_and_what_follows(tmp_path: Path) -> None:
    lone = small(tmp_path)
    for number in range(40):
        lone.write(big(number), sequence=number)
    high_watermark = lone.close()
    fs = CountingFileSystem()
    log = ReplicaLog(lone.directory, lone.topic, StartKind.PROCESS_CRASH, fs=fs)
    state = log.state(high_watermark=high_watermark)
    assert state.producers == lone.partition.replica.producers
    assert len(lone.segments()) == 20
    assert (fs.read.count(".snapshot"), fs.read.count(".index")) == (1, 0)
    log.close(clean=False)


def test_a_cut_takes_the_snapshots_with_it(tmp_path: Path) -> None:
    """KAFKA-5435: they do not describe the records that are written after the truncation."""
    lone = small(tmp_path)
    for number in range(8):
        lone.write(big(number), sequence=number)
    log = lone.partition.log
    log.truncate_to(3)
    assert max(lone.snapshots()) <= 3
    ((producer_id, entry),) = log.rebuild_producers(0).entries()
    assert (producer_id, [stored.sequence for stored in entry.batches]) == (7, [0, 1, 2])
    assert log.rebuild_producers(3) == log.rebuild_producers(0)


def test_an_idle_producer_is_forgotten_and_does_not_begin_anew_by_itself(lone: LonePartition) -> None:
    """20: only its client can begin a new epoch."""
    lone.write(b"a", transactional=False)
    lone.write(b"b", sequence=1, transactional=False)
    lone.partition.expire_producers(-10_000, -10_000)
    assert lone.partition.replica.producers.entries() == []
    with pytest.raises(UnknownProducerIdError):
        lone.offer(b"c", sequence=2, transactional=False)
    assert lone.write(b"c", epoch=1, transactional=False) == 2


def test_a_producer_with_an_open_transaction_is_not_forgotten(lone: LonePartition) -> None:
    lone.write(b"a")
    lone.partition.expire_producers(-10_000, -10_000)
    assert lone.write(b"a") == 0
    lone.end(1, committed=True)
    lone.partition.expire_producers(-10_000, -10_000)
    assert lone.partition.replica.producers.entries() == []


@dataclass
class OnePartition:
    """The part of a replica manager that maintenance uses."""

    partition: Partition
    room: Room

    def partitions(self) -> Iterator[Partition]:
        return iter([self.partition])

    def broker_epochs(self) -> dict[int, int]:
        return {0: 1}

    def take_waiting(self) -> list[Partition]:
        return []

    def quarantine_damaged(self) -> None:
        """No replica is damaged."""

    def retry(self) -> None:
        """No replica is offline."""

    def check_directory(self) -> None:
        """The directory exists."""

    def save_high_watermarks(self) -> None:
        """They are not saved."""

    def delete_old_strays(self, retention_ms: int) -> None:
        """There are none."""


def test_maintenance_forgets_idle_producers_when_it_is_time_to_look(lone: LonePartition) -> None:
    lone.write(b"a", transactional=False)
    lone.write(b"open", pid=8)
    bugs: list[BaseException] = []
    manager = OnePartition(lone.partition, Room(lone.directory, LOCAL, 0, lambda: None))
    maintenance = Maintenance(cast("ReplicaManager", manager), ClusterConfig(), bugs.append)
    maintenance.begin(0.0)
    lone.clock.ahead_ms = 86_400_000 + 60_000
    maintenance.run_due(600.0)
    assert [pid for pid, _ in lone.partition.replica.producers.entries()] == [7, 8], "clocks may differ by 2 minutes"
    lone.clock.ahead_ms += 120_000
    maintenance.run_due(1199.0)
    assert [pid for pid, _ in lone.partition.replica.producers.entries()] == [7, 8]
    maintenance.run_due(1200.0)
    assert [pid for pid, _ in lone.partition.replica.producers.entries()] == [8]
    assert bugs == []


def test_a_writer_of_one_transaction_is_forgotten_soon_after_its_end(lone: LonePartition) -> None:
    """Each attempt of a Spark task is a producer of its own. A day of them took gigabytes of each broker."""
    manager = OnePartition(lone.partition, Room(lone.directory, LOCAL, 0, lambda: None))
    maintenance = Maintenance(cast("ReplicaManager", manager), ClusterConfig(), lambda error: None)
    maintenance.begin(0.0)
    for pid in range(100, 150):
        lone.write(b"x", pid=pid)
        lone.end(1, pid=pid, committed=pid % 2 == 0)
    lone.write(b"retried", pid=7, transactional=False)
    lone.clock.ahead_ms = 120_000
    maintenance.run_due(600.0)
    assert len(lone.partition.replica.producers.entries()) == 51, "clocks may differ by 2 minutes"
    lone.clock.ahead_ms += 121_000
    maintenance.run_due(1200.0)
    assert [pid for pid, _ in lone.partition.replica.producers.entries()] == [7]
    assert isinstance(lone.offer(b"late", pid=101), AwaitedTransaction), "its coordinator refuses it"


WaitUntil = Callable[..., None]


def test_a_follower_that_begins_at_the_log_start_knows_the_transactions_that_were_open_there(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    rig = Rig(tmp_path, brokers=2, topic=TopicConfig(segment_bytes=4096, retention_bytes=4096))
    rig.publish(0, isr=(0,))
    lone = LonePartition.__new__(LonePartition)
    lone.partition, lone.leader_epoch = rig.brokers[0].partition, 0
    lone.write(big(0), pid=9)
    for number in range(8):
        lone.write(big(number), sequence=number)
    lone.end(1, committed=False, pid=9)
    lone.end(1, committed=False)
    lone.write(b"open", pid=9, epoch=1)
    lone.partition.apply_retention()
    assert 1 < lone.partition.replica.log_start_offset < 9
    rig.publish(1, isr=(0,))
    rig.brokers[0].await_proposal({0, 1})
    leader, follower = rig.brokers[0].partition.replica, rig.brokers[1].partition.replica
    wait_until(lambda: follower.high_watermark == leader.high_watermark, "the follower to catch up")
    assert follower.producers == leader.producers
    assert follower.last_stable_offset == leader.last_stable_offset == 11
    # When the follower leads, the transactions end as they would have, and aborted ones stay aborted.
    rig.publish(leader=1, leader_epoch=1, partition_epoch=1, isr=(1,))
    lone.partition, lone.leader_epoch = rig.brokers[1].partition, 1
    assert lone.read() == []
    lone.end(2, committed=True, pid=9)
    assert lone.last_stable_offset() == follower.log_end_offset
    assert lone.read() == [b"open"]
    rig.stop()
