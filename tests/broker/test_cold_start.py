"""The cost of a start that opens many logs, and when a broker reports that it is ready."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.lease import Lease
from spark_broker.broker.log_opener import InThreads
from spark_broker.broker.membership import Membership, SessionEvents
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.replica_manager import Outward, ReplicaManager
from spark_broker.config import load_cluster_settings
from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage, PartitionRegistration, TopicState
from spark_broker.core.replica import RecoveredLog
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.frame import ENTRY_BYTES
from spark_broker.protocol.messages import RegisterBrokerResponse
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.storage import log
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.filesystem import LocalFileSystem
from spark_broker.storage.start_kind import StartKind
from tests.broker.rig import CLUSTER_ID, FAR_FUTURE_MS, TOPIC_ID, Outcome, batch

PARTITIONS = 200
NEXT_OFFSET = 5
A_FEW = 10
"""Syncs of the broker's own files."""


class Watched(LocalFileSystem):
    """Counts syncs; while there is a `gate`, each listing of a partition's directory waits for it."""

    def __init__(self) -> None:
        self.syncs = 0
        self.written = 0  # bytes
        self.gate: threading.Event | None = None
        self.held_up = threading.Event()
        self._lock = threading.Lock()

    def _count(self) -> None:
        with self._lock:
            self.syncs += 1

    def fsync(self, fd: int, /) -> None:
        self._count()
        super().fsync(fd)

    def pwritev(self, fd: int, views: Any, position: int, /, *flags: int) -> int:
        written = super().pwritev(fd, views, position, *flags)
        with self._lock:
            self.written += written
        return written

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)

    def list_directory(self, path: Path) -> list[str]:
        if self.gate is not None and path.name.startswith("t-"):
            self.held_up.set()
            assert self.gate.wait(20)
        return super().list_directory(path)


class Started:
    """One start of a broker on its directory; the test is its controller."""

    def __init__(self, base: Path, launch: int = 1) -> None:
        self.fs = Watched()
        self.failures: list[object] = []
        self.directory = LogDirectory.claim(base, cluster_id=CLUSTER_ID, launch=launch, fs=self.fs)
        self.lease = Lease()
        self.lease.extend(SYSTEM_CLOCK.boottime_ms(), FAR_FUTURE_MS)
        outward = Outward(lambda *_: None, lambda key, error: self.failures.append(error), self.failures.append)
        self.manager = ReplicaManager(
            load_cluster_settings({}), self.directory, self.lease, outward, map_all=InThreads(4)
        )
        self.manager.registered(0, 1)

    def append_to_all(self, value: bytes = b"x") -> None:
        for partition in self.manager.partitions():
            outcome = Outcome()
            deadline_ms = SYSTEM_CLOCK.boottime_ms() + FAR_FUTURE_MS
            partition.append(Append(encode_batch(batch(value)), partition.leader_epoch(), 1, 0, deadline_ms), outcome)
            assert outcome.future.result(10) >= 0

    def crash(self) -> None:
        self.manager.stop(clean=False)
        self.directory.release()
        assert not self.failures


def image(partitions: int = PARTITIONS, *, leader: int = 0, epoch: int = 3) -> MetadataImage:
    """One topic, whose partitions are all on broker 0."""
    state = PartitionRegistration((0,), (0,), leader=leader, leader_epoch=epoch, partition_epoch=epoch)
    schemas = (schema_to_bytes(DEFAULT_SCHEMA),)
    topic = TopicState("t", TOPIC_ID, MappingProxyType({}), schemas=schemas, partitions=(state,) * partitions)
    return dataclasses.replace(
        EMPTY_IMAGE,
        cluster_id=CLUSTER_ID,
        next_offset=NEXT_OFFSET,
        topics=MappingProxyType({TOPIC_ID: topic}),
        topic_ids=MappingProxyType({"t": TOPIC_ID}),
    )


def test_new_partitions_are_synced_as_files_and_their_names_all_at_once(tmp_path: Path) -> None:
    broker = Started(tmp_path)
    before = broker.fs.syncs
    broker.manager.apply(image())
    assert broker.fs.syncs - before <= 2 * PARTITIONS + A_FEW  # each partition's description, and the name of that file
    before = broker.fs.syncs
    broker.append_to_all()
    assert broker.fs.syncs == before
    broker.crash()


def test_leaderships_that_come_and_go_wait_for_no_sync(tmp_path: Path) -> None:
    """They are applied in the thread that keeps the lease. Each one that had written nothing cost two syncs when it was
    given back: a thousand of them were longer than the lease.
    """
    broker = Started(tmp_path)
    broker.manager.apply(image())
    broker.append_to_all()
    broker.manager.apply(image(epoch=4))
    for partition in broker.manager.partitions():
        partition.flush()
    before = broker.fs.syncs
    broker.manager.apply(image(leader=-1, epoch=5))
    broker.manager.apply(image(epoch=6))
    assert broker.fs.syncs - before <= A_FEW
    broker.append_to_all()
    broker.crash()

    second = Started(tmp_path, launch=2)
    second.manager.apply(image(leader=-1, epoch=7))
    histories = {tuple(partition.replica.epochs.to_pairs()) for partition in second.manager.partitions()}
    assert histories == {((3, 0), (6, 1))}
    second.crash()


def test_a_start_after_a_crash_of_the_process_syncs_each_partitions_names_and_nothing_else(tmp_path: Path) -> None:
    first = Started(tmp_path)
    first.manager.apply(image())
    first.append_to_all()
    first.crash()

    second = Started(tmp_path, launch=2)
    assert second.directory.start_kind is StartKind.PROCESS_CRASH
    second.manager.apply(image(leader=-1, epoch=4))
    second.manager.apply(image(epoch=5))
    assert len(list(second.manager.partitions())) == PARTITIONS
    assert second.fs.syncs <= PARTITIONS + A_FEW
    assert all(partition.log.log_end_offset == 1 for partition in second.manager.partitions())
    second.crash()


def test_a_start_after_a_kill_writes_no_more_again_than_is_worth_saying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All since the last roll was written again, up to a gigabyte of each partition, although it was synced."""
    monkeypatch.setattr(log, "UNSAID_BYTES_MAX", 10_000)
    first = Started(tmp_path)
    first.manager.apply(image(1))
    (partition,) = first.manager.partitions()
    for _ in range(50):
        first.append_to_all(bytes(1000))
        partition.flush()
    first.append_to_all(bytes(1000))
    first.crash()

    second = Started(tmp_path, launch=2)
    second.manager.apply(image(1, epoch=4))
    assert second.fs.written <= 15_000
    (partition,) = second.manager.partitions()
    assert partition.log.log_end_offset == 51
    second.crash()


def test_a_broker_is_ready_when_its_logs_are_open_and_not_before(tmp_path: Path) -> None:
    """If it were elected sooner, it would lead partitions that it cannot serve for seconds."""
    first = Started(tmp_path)
    first.manager.apply(image())
    first.crash()

    second = Started(tmp_path, launch=2)
    events = SessionEvents(lambda _: None, second.failures.append, second.failures.append, second.failures.append)
    membership = Membership(second.manager, second.lease, events)
    membership.connects()
    membership.received(RegisterBrokerResponse(CLUSTER_ID, 1, 0, 1, 9000, 500))
    second.fs.gate = threading.Event()
    opening = threading.Thread(target=second.manager.apply, args=(image(epoch=4),))
    opening.start()
    assert second.fs.held_up.wait(20)
    early = membership.heartbeat()
    second.fs.gate.set()
    opening.join(20)
    late = membership.heartbeat()
    assert (early.ready, late.ready) == (False, True)
    assert early.metadata_offset < late.metadata_offset == NEXT_OFFSET
    second.crash()


@pytest.mark.parametrize("allowed", [0, 2])
def test_where_threads_cannot_be_started_logs_are_opened_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """Story: a topic was made while the brokers were at their limit of threads. All brokers with more than eight of its
    partitions ended at the same moment.
    """
    started = 0
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        nonlocal started
        if thread.name.startswith("recovery"):
            started += 1
            if started > allowed:
                raise RuntimeError("can't start new thread")
        start(thread)

    broker = Started(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    broker.manager.apply(image(12))
    assert started > 0
    assert sorted(partition.key[1] for partition in broker.manager.partitions()) == list(range(12))
    broker.append_to_all()
    broker.crash()


HUGE = ENTRY_BYTES << 36
"""Bytes, more than any memory has. Damage to a file system may leave a file with such a size."""


@pytest.mark.parametrize(
    "name", ["leader-epochs.json", "partition.json", "log-state.json", "compaction.json", f"{0:020d}.index"]
)
@pytest.mark.parametrize("clean", [False, True], ids=["killed", "clean"])
def test_a_file_whose_size_is_beyond_any_memory_is_damage_to_its_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, clean: bool
) -> None:
    """Story: the read of one replica's file raised MemoryError, and its broker ended at each start."""
    first = Started(tmp_path)
    first.manager.apply(image(2))
    first.append_to_all()
    first.manager.stop(clean=clean)
    if clean:
        first.directory.mark_clean()
    first.directory.release()
    path = first.directory.path / "t-0" / name
    path.touch()
    os.truncate(path, HUGE)

    second = Started(tmp_path, launch=2)
    second.manager.apply(image(2, leader=-1, epoch=4))
    second.manager.apply(image(2, epoch=5))
    assert [partition.key[1] for partition in second.manager.partitions()] == [1]
    assert (second.directory.path / "t-0.0.damaged").is_dir()
    assert f"{name} has {HUGE:,} bytes" in caplog.text
    second.append_to_all()
    second.crash()


@pytest.mark.parametrize("error", [MemoryError(), ValueError("not foreseen")])
def test_whatever_goes_wrong_with_one_log_concerns_that_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    state = ReplicaLog.state

    def fail(log: ReplicaLog, *, high_watermark: int) -> RecoveredLog:
        if log.directory.name == "t-0":
            raise error
        return state(log, high_watermark=high_watermark)

    broker = Started(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ReplicaLog, "state", fail)
        broker.manager.apply(image(2))
        for _ in range(3):
            broker.manager.retry()
        assert broker.manager.offline == {TOPIC_ID: [0]}
        assert [partition.key[1] for partition in broker.manager.partitions()] == [1]
    assert caplog.text.count("t-0 is offline, and tried again") == 1, "however often it is tried"
    broker.manager.retry()
    assert broker.manager.offline == {}
    broker.append_to_all()
    broker.crash()
