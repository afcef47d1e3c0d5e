"""Replicas of a compacted topic: each compacts for itself, and what one lacks no other takes for something it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from spark_broker.broker.append import Append, Marker
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.log_cleaner import LogCleaner, LogCleanerThread
from spark_broker.config import TopicConfig
from spark_broker.errors import InvalidRequestError, StorageFullError
from spark_broker.protocol.arrow_message import encode_batch, row_deltas
from spark_broker.protocol.frame import TRANSACTIONAL
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from spark_broker.storage.cleaner import Cleaner
from spark_broker.storage.segment_swap import COMPACTION_FILE
from tests.broker.compacted_partition import RowsOfKeys
from tests.broker.rig import KEY, Outcome, Rig, RigBroker
from tests.broker.test_damage import make_unreadable

WaitUntil = Callable[..., None]
Row = tuple[int, bytes, bytes | None]


class CompactedRig(Rig):
    """Two brokers. The second one is on its own until `connect`, and again after `disconnect`."""

    def __init__(self, base: Path, **topic: object) -> None:
        settings = {"cleanup_policy": ("compact",), "min_cleanable_dirty_ratio": 0.0, "segment_bytes": 4096, **topic}
        super().__init__(base, brokers=2, topic=TopicConfig(**settings))  # type: ignore[arg-type]
        self.epoch = 0
        self.publish(0, isr=(0,))

    @property
    def leader(self) -> RigBroker:
        return self.brokers[0]

    @property
    def follower(self) -> RigBroker:
        return self.brokers[1]

    def connect(self) -> None:
        """The follower copies what the leader has."""
        self.publish(1)
        log = self.leader.partition.log

        def same() -> bool:
            partition = self.follower.manager.find(*self.leader.partition.key)
            return partition is not None and partition.replica.high_watermark == log.log_end_offset

        self._wait(same, "the follower to have caught up")

    def disconnect(self) -> None:
        """The follower knows of no leader any more."""
        self._next_epoch(1, leader=-1)
        self._next_epoch(0, leader=0)

    def refuse_isr(self) -> None:
        """The controller refuses the leader's proposal to let the follower in: the leader goes on alone."""
        self.leader.partition.isr_refused(self.epoch, self.state.partition_epoch, InvalidRequestError.code)

    def fail_over(self) -> None:
        """The follower leads, and the leader follows it."""
        self._next_epoch(0, 1, leader=1, isr=(1,))

    def _next_epoch(self, *to: int, **changes: object) -> None:
        self.epoch += 1
        self.publish(*to, leader_epoch=self.epoch, partition_epoch=self.epoch, **changes)

    _wait: WaitUntil

    def put(self, *rows: tuple[bytes, bytes | None], pid: int = -1, sequence: int = -1, epoch: int = 0) -> int:
        """Append at whoever leads."""
        return self.offer(list(rows), pid, sequence, epoch, 0)

    def offer(self, rows: RowsOfKeys, pid: int, sequence: int, epoch: int, attributes: int) -> int:
        broker = self.brokers[self.state.leader]
        outcome = Outcome()
        batch = pa.RecordBatch.from_pylist([{"key": k, "value": v} for k, v in rows], schema=DEFAULT_SCHEMA)
        producer_epoch = epoch if pid >= 0 else -1
        message = encode_batch(
            batch, producer_id=pid, producer_epoch=producer_epoch, base_sequence=sequence, attributes=attributes
        )
        append = Append(message, self.epoch, -1, 0, SYSTEM_CLOCK.boottime_ms() + 30_000)
        awaited = broker.partition.append(append, outcome)
        if awaited is not None:
            broker.partition.confirm(awaited)
            broker.partition.append(append, outcome)
        return outcome.future.result(20)

    def roll(self) -> None:
        for _ in range(2):
            self.put((b"filler", bytes(3000)))

    def compact(self, broker: RigBroker) -> None:
        cleaner = LogCleaner(broker.manager, self.settings.cluster)
        for _ in range(20):
            partition = cleaner.next_pass()
            if partition is None:
                return
            for _ in cleaner.steps(partition):
                pass
        raise AssertionError("passes without an end")

    def rows(self, broker: RigBroker) -> list[Row]:
        """Offset, key and value of every row in a broker's files, without the fillers."""
        log, offset = broker.partition.log, 0
        rows: list[Row] = []
        while offset < log.log_end_offset:
            for frame in log.read(offset, 1 << 20, log.log_end_offset):
                batch = broker.partition.reader.decode(frame)
                offsets = (frame.header.base_offset + row_deltas(*frame)).tolist()
                rows += zip(offsets, batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
                offset = frame.header.next_offset
        return [row for row in rows if row[1] != b"filler"]

    def consumed(self, broker: RigBroker) -> list[Row]:
        """What a consumer is given by a leader, without the fillers."""
        rows: list[Row] = []
        offset = 0
        while True:
            read = broker.partition.reader.read(self.epoch, offset, 1 << 20, read_committed=True)
            for frame in read.frames:
                batch = broker.partition.reader.decode(frame)
                offsets: list[int] = np.add(frame.header.base_offset, row_deltas(*frame)).tolist()
                rows += zip(offsets, batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
            if read.next_offset == offset:
                return [row for row in rows if row[1] != b"filler"]
            offset = read.next_offset


MakeRig = Callable[..., CompactedRig]


@pytest.fixture
def make_rig(tmp_path: Path, wait_until: WaitUntil) -> Iterator[MakeRig]:
    rigs: list[CompactedRig] = []

    def make(**topic: object) -> CompactedRig:
        rigs.append(CompactedRig(tmp_path, **topic))
        rigs[-1]._wait = wait_until
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.stop()


def test_a_new_follower_copies_what_is_left_and_the_producers(make_rig: MakeRig) -> None:
    rig = make_rig()
    offsets = [rig.put((b"k", b"%d" % n), pid=7, sequence=n) for n in range(8)]
    rig.put((b"other", b"v"))
    rig.roll()
    rig.compact(rig.leader)
    assert [row[2] for row in rig.rows(rig.leader)] == [b"7", b"v"]
    rig.connect()
    assert rig.rows(rig.follower) == rig.rows(rig.leader)
    rig.fail_over()
    for sequence in range(3, 8):
        assert rig.put((b"k", b"%d" % sequence), pid=7, sequence=sequence) == offsets[sequence]
    assert rig.consumed(rig.follower) == rig.rows(rig.follower)


def test_a_follower_whose_log_ends_within_a_gap_of_the_leader_goes_on_there(make_rig: MakeRig) -> None:
    rig = make_rig()
    for n in range(5):
        rig.put((b"k", b"%d" % n))
    rig.connect()
    rig.disconnect()
    for n in range(5, 12):
        rig.put((b"k", b"%d" % n))
    rig.roll()
    rig.compact(rig.leader)
    gap = next(iter(rig.leader.partition.log.headers(0)))
    assert (gap.base_offset, gap.next_offset, gap.row_count) == (0, 5, 0), "epochs are not joined"
    assert rig.follower.partition.log.log_end_offset == 5
    rig.disconnect()
    rig.publish(1)
    rig.put((b"k", b"newest"))
    rig.roll()
    rig.compact(rig.leader)
    rig.connect()
    assert rig.rows(rig.follower)[-1] == rig.rows(rig.leader)[-1]
    rig.compact(rig.follower)
    assert rig.rows(rig.follower) == rig.rows(rig.leader)


def test_a_gap_is_cut_where_the_follower_ends(make_rig: MakeRig, wait_until: WaitUntil) -> None:
    """One leader epoch, in which the follower stops and goes on: its fetch lies within the leader's gap."""
    rig = make_rig()
    for n in range(3):
        rig.put((b"k", b"%d" % n))
    rig.connect()
    fetchers = dict(rig.follower.manager._fetchers._fetchers)
    for fetcher in fetchers.values():
        fetcher.stop()
    wait_until(lambda: not any(f.is_alive() for f in fetchers.values()), "the fetcher to stop")  # type: ignore[attr-defined]
    rig.refuse_isr()
    for n in range(3, 12):
        rig.put((b"k", b"%d" % n))
    rig.roll()
    ended = rig.follower.partition.log.log_end_offset
    assert ended < 12
    rig.compact(rig.leader)
    gap = next(iter(rig.leader.partition.log.headers(0)))
    assert gap.base_offset == 0 < ended < gap.next_offset
    rig.follower.manager._fetchers._fetchers.clear()
    rig.follower.manager._follow_leaders()
    wait_until(
        lambda: rig.follower.partition.log.log_end_offset == rig.leader.partition.log.log_end_offset,
        "the follower to catch up",
    )
    headers = list(rig.follower.partition.log.headers(0))
    assert (headers[3].base_offset, headers[3].next_offset, headers[3].row_count) == (ended, gap.next_offset, 0)
    rig.compact(rig.follower)
    assert rig.rows(rig.follower) == rig.rows(rig.leader)


def test_a_key_that_was_deleted_does_not_come_back_by_a_fail_over(make_rig: MakeRig) -> None:
    rig = make_rig(delete_retention_ms=0)
    rig.put((b"deleted", b"v"))
    rig.put((b"kept", b"v"))
    rig.connect()
    rig.disconnect()
    rig.put((b"deleted", None))
    rig.roll()
    rig.compact(rig.leader)  # the value goes, and then the tombstone
    assert [row[1] for row in rig.rows(rig.leader)] == [b"kept"]
    assert [row[1] for row in rig.rows(rig.follower)] == [b"deleted", b"kept"]
    rig.connect()
    assert rig.rows(rig.follower) == rig.rows(rig.leader)
    assert rig.follower.partition.replica.purge_offset == rig.leader.partition.replica.purge_offset
    rig.fail_over()
    assert [row[1] for row in rig.consumed(rig.follower)] == [b"kept"]


def test_an_aborted_record_does_not_come_back_by_a_fail_over(make_rig: MakeRig) -> None:
    """The follower copied the beginning of a transaction; its marker is gone when it comes back."""
    rig = make_rig(delete_retention_ms=0)
    rig.offer([(b"k", b"aborted")], 7, 0, 0, TRANSACTIONAL)
    rig.connect()
    rig.disconnect()
    outcome = Outcome()
    rig.leader.partition.append_marker(Marker(7, 1, False, SYSTEM_CLOCK.boottime_ms() + 30_000), outcome)
    outcome.future.result(20)
    rig.offer([(b"other", b"v")], 7, 0, 1, 0)
    rig.roll()
    rig.compact(rig.leader)
    rig.connect()
    rig.fail_over()
    assert [row[1] for row in rig.consumed(rig.follower)] == [b"other"]
    replica = rig.follower.partition.replica
    assert replica.last_stable_offset == replica.log_end_offset


def test_a_follower_that_copies_from_the_beginning_is_not_sent_back(make_rig: MakeRig, wait_until: WaitUntil) -> None:
    rig = make_rig(delete_retention_ms=0)
    for n in range(5):
        rig.put((b"%d" % n, b"v"))
        rig.put((b"%d" % n, None))
    rig.roll()
    rig.compact(rig.leader)
    purged = rig.leader.partition.replica.purge_offset
    assert purged > 0
    rig.connect()
    log = rig.follower.partition.log
    assert log.cleaned.purge_offset == purged
    # It restarts, and has its part of the log and of what is known of it.
    rig.follower.stop(clean=True)
    rig.brokers[1] = RigBroker(rig.base, 1, rig.settings)
    rig.follower.manager.registered(1, 1)
    rig.refuse_isr()
    rig.put((b"new", b"v"))
    rig.connect()
    assert rig.follower.partition.log.cleaned.purge_offset == purged
    assert rig.rows(rig.follower) == rig.rows(rig.leader)


def test_a_leader_keeps_the_tombstones_that_a_copying_follower_has_not_got(make_rig: MakeRig) -> None:
    rig = make_rig(delete_retention_ms=0)
    rig.put((b"k", b"v"))
    rig.put((b"k", None))
    rig.roll()
    rig.connect()
    replica = rig.leader.partition.replica
    now_ms = SYSTEM_CLOCK.boottime_ms()
    progress = replica.followers[1]
    assert replica.purgeable_to(100, now_ms) == progress.log_end_offset
    progress.log_end_offset = 1
    assert replica.purgeable_to(100, now_ms) == 1
    assert replica.purgeable_to(100, now_ms + 60_000) == 100, "it has not fetched for a long time"


def test_the_dirtiest_log_comes_first(tmp_path: Path, make_rig: MakeRig) -> None:
    del tmp_path
    rig = make_rig(min_cleanable_dirty_ratio=0.5)
    cleaner = LogCleaner(rig.leader.manager, rig.settings.cluster)
    assert cleaner.next_pass() is None
    rig.roll()
    assert cleaner.next_pass() is rig.leader.partition
    rig.compact(rig.leader)
    assert cleaner.next_pass() is None


def test_a_log_for_which_there_is_no_room_keeps_no_other_from_being_compacted(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: its compaction was refused, it was the dirtiest again, and the round was over: for all logs, for good."""
    large, small = make_rig(), CompactedRig(tmp_path / "other")
    for rig, count in ((large, 6), (small, 2)):
        for number in range(count):
            rig.put((b"k", b"%d" % number))
        rig.roll()
    partitions = [large.leader.partition, small.leader.partition]
    check_room = Cleaner._check_room

    def refuse(self: Cleaner, size_bytes: int) -> None:
        if tmp_path / "other" not in self._directory.parents:
            raise StorageFullError("no room")
        check_room(self, size_bytes)

    monkeypatch.setattr(Cleaner, "_check_room", refuse)
    manager = SimpleNamespace(partitions=lambda: partitions)
    bugs: list[BaseException] = []
    LogCleanerThread(manager, small.settings.cluster, bugs.append)._clean_all()  # type: ignore[arg-type]
    assert bugs == []
    assert caplog.text.count("no room") == 1
    assert [row[2] for row in small.rows(small.leader)] == [b"1"]
    assert len(large.rows(large.leader)) == 6
    small.stop()


def test_a_pass_that_meets_what_cannot_be_read_has_the_replica_fetched_again(make_rig: MakeRig) -> None:
    """Story: nobody read that part of a follower's log but compaction, which ended its broker at each start."""
    rig = make_rig()
    rig.put((b"k", b"v"))
    rig.roll()
    rig.connect()
    make_unreadable(rig.follower.directory.path / "t-0")
    rig.compact(rig.follower)
    rig.follower.manager.quarantine_damaged()
    assert rig.follower.manager.damage_reports == [(*KEY, 1)]


def test_the_only_copy_is_not_compacted_where_it_cannot_be_read(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.put((b"k", b"v"))
    rig.roll()
    make_unreadable(rig.leader.directory.path / "t-0")
    rig.compact(rig.leader)
    rig.compact(rig.leader)
    assert rig.leader.manager.damage_reports == []
    assert rig.leader.manager.offline == {}
    assert caplog.text.count("a part cannot be read, and no other replica has it") == 1
    assert rig.put((b"k", b"w")) > 0


def test_a_leader_that_has_lost_what_is_known_of_its_compaction_leads_no_longer(make_rig: MakeRig) -> None:
    """Its followers would keep what was deleted."""
    rig = make_rig(delete_retention_ms=0)
    rig.put((b"deleted", b"v"))
    rig.put((b"deleted", None))
    rig.roll()
    rig.compact(rig.leader)
    assert rig.leader.partition.replica.purge_offset > 0
    rig.leader.stop(clean=True)
    (rig.leader.directory.path / "t-0" / COMPACTION_FILE).unlink()
    rig.brokers[0] = RigBroker(rig.base, 0, rig.settings)
    rig.leader.manager.registered(0, 1)
    rig.publish(0)
    assert rig.leader.manager.find(*KEY) is None
    assert rig.leader.manager.damage_reports == [(*KEY, 1)]
