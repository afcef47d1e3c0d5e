"""Directories that may not be written, go away, or turn read-only: errors are clear, and others are not disturbed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.broker.executor import is_running
from spark_broker.broker.maintenance import Maintenance
from spark_broker.config import TopicConfig
from spark_broker.errors import KafkaStorageError, LogDirectoryNotUsableError, NotLeaderOrFollowerError
from spark_broker.protocol.crc32c import Buffer
from spark_broker.storage.checkpoints import HIGH_WATERMARKS_FILE
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.filesystem import LOCAL, LocalFileSystem
from spark_broker.testing.replicas import compare_replicas
from tests.broker.rig import KEY, Rig, RigBroker
from tests.broker.test_unclean_election import directory_of, read, state
from tests.chaos.disks import failing_ext4
from tests.support.process_cluster import Place, ProcessCluster
from tests.support.waiting import eventually

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
LATER_S = 1e9
CONFIG = {"replica.high.watermark.checkpoint.interval.ms": 200, "replica.reassignment.delay.ms": 1000}


CLAIM = """
import os, pathlib, sys
from spark_broker.errors import SparkBrokerError
from spark_broker.storage.checkpoints import HIGH_WATERMARKS_FILE
from spark_broker.storage.directory import LogDirectory
os.setgid({nobody}); os.setuid({nobody})
try:
    LogDirectory.claim(pathlib.Path(sys.argv[1]), cluster_id="c", launch=1)
except SparkBrokerError as error:
    print(error)
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory of root's that every user may list."""
    path = Path(tempfile.mkdtemp(prefix="spark-broker-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def claim_as_nobody(log_dirs: Path) -> str:
    command = [sys.executable, "-c", CLAIM.format(nobody=NOBODY), str(log_dirs)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@as_root
def test_a_directory_that_cannot_be_made_is_named_with_the_user_and_what_to_do(public: Path) -> None:
    told = claim_as_nobody(public / "logs")
    assert told.startswith("[LOG_DIRECTORY_NOT_USABLE]")
    assert f"{public / 'logs'}: Permission denied for user nobody (uid {NOBODY})" in told
    assert "Give that user the rights there" in told
    assert not (public / "logs").exists()


@as_root
def test_a_slot_of_another_user_is_named_and_stays_as_it_is(public: Path) -> None:
    log_dirs = public / "logs"
    LogDirectory.claim(log_dirs, cluster_id="c", launch=1).release()
    log_dirs.chmod(0o777)
    (log_dirs / "broker-0").chmod(0o700)
    told = claim_as_nobody(log_dirs)
    assert f"log.dirs {log_dirs}: {log_dirs / 'broker-0' / 'meta.json'}: Permission denied for user nobody" in told
    assert [path.name for path in log_dirs.iterdir()] == ["broker-0"]


def test_a_file_where_the_directory_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogDirectoryNotUsableError, match=f"{tmp_path}/file/logs: Not a directory for user"):
        LogDirectory.claim(tmp_path / "file" / "logs", cluster_id="c", launch=1)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, brokers=2)
    rig.publish()
    rig.brokers[0].append(b"a", epoch=0).result(20)
    yield rig
    rig.stop()


def maintain(rig: Rig, broker: int) -> None:
    """Run all maintenance twice, because damage is quarantined only after it was found."""
    maintenance = Maintenance(rig.brokers[broker].manager, rig.settings.cluster, rig.brokers[broker].bugs.append)
    maintenance.begin(0)
    maintenance.run_due(LATER_S)
    maintenance.run_due(2 * LATER_S)


def test_a_partition_whose_directory_was_removed_is_damaged_and_the_broker_goes_on(rig: Rig) -> None:
    leader = rig.brokers[0]
    shutil.rmtree(leader.directory.path / "t-0")
    maintain(rig, 0)
    assert leader.manager.damaged == [KEY]
    assert leader.bugs == []
    with pytest.raises(NotLeaderOrFollowerError):
        leader.append(b"b", epoch=0)


def crash_without_directory(rig: Rig) -> RigBroker:
    """The partition's directory is removed, and the leader's process ends before it notices."""
    leader = rig.brokers[0]
    maintain(rig, 0)
    assert leader.directory.read_high_watermarks() == {KEY: leader.partition.replica.high_watermark}
    saved = (leader.directory.path / HIGH_WATERMARKS_FILE).read_bytes()
    leader.stop()
    (leader.directory.path / HIGH_WATERMARKS_FILE).write_bytes(saved)
    shutil.rmtree(leader.directory.path / "t-0")
    again = rig.brokers[0] = RigBroker(rig.base, 0, rig.settings)
    again.manager.registered(0, 2)
    return again


def test_a_directory_that_was_removed_just_before_a_crash_is_damage_to_the_next_process(rig: Rig) -> None:
    """An empty log in its place could be elected, and the others would truncate their records."""
    again = crash_without_directory(rig)
    rig.publish(0)
    assert again.manager.damaged == [KEY]


def test_where_the_replica_is_not_electable_it_is_fetched_again(rig: Rig) -> None:
    """It is treated as a replica that was moved away, with its directory, and back."""
    again = crash_without_directory(rig)
    rig.publish(0, leader=1, leader_epoch=1, isr=(1,))
    assert again.manager.damaged == []
    assert again.partition.log.log_end_offset == 0


def test_a_roll_in_a_directory_that_was_removed_stores_nothing_and_is_damage(tmp_path: Path) -> None:
    rig = Rig(tmp_path, brokers=1, topic=TopicConfig(segment_bytes=4096))
    rig.publish()
    try:
        leader = rig.brokers[0]
        leader.append(bytes(3000), epoch=0).result(20)
        shutil.rmtree(leader.directory.path / "t-0")
        with pytest.raises(NotLeaderOrFollowerError, match="was removed under the live broker"):
            leader.append(bytes(3000), epoch=0)
        maintain(rig, 0)
        assert (leader.manager.damaged, leader.bugs) == ([KEY], [])
    finally:
        rig.stop()


def test_a_broker_whose_directory_was_removed_ends_and_says_why(rig: Rig) -> None:
    leader = rig.brokers[0]
    shutil.rmtree(leader.directory.path)
    maintain(rig, 0)
    failures, leader.bugs = leader.bugs, []
    assert failures
    for failure in failures:
        assert isinstance(failure, KafkaStorageError)
        assert f"{leader.directory.path} was removed under the live broker" in failure.message


def test_a_write_into_a_directory_that_was_removed_says_so(rig: Rig) -> None:
    """The high watermarks may be saved, or a partition made, just when the directory goes, before any check."""
    manager, directory = rig.brokers[0].manager, rig.brokers[0].directory
    shutil.rmtree(directory.path)
    with pytest.raises(KafkaStorageError, match=f"{directory.path} was removed under the live broker"):
        manager.save_high_watermarks()
    with pytest.raises(KafkaStorageError, match=f"{directory.path} was removed under the live broker"):
        directory.partition_directory("new", "new topic's id", 0)


class BadFile(LocalFileSystem):
    """A disk that answers EIO to writes to one partition's files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._bad: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        (self._bad.add if path.parent == self._directory else self._bad.discard)(fd)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:  # type: ignore[override]
        if fd in self._bad:
            raise OSError(errno.EIO, "Input/output error")
        return super().pwritev(fd, buffers, position)


def test_a_follower_whose_disk_fails_for_one_file_goes_on_with_the_others(tmp_path: Path) -> None:
    """The replica is offline, named to the controller, and opened when its disk is well."""
    rig = Rig(tmp_path, brokers=3)
    bad = rig.brokers[1]
    bad.directory.fs = BadFile(bad.directory.path / "t-0")
    try:
        rig.publish()
        rig.brokers[0].append(b"a", epoch=0)
        eventually(lambda: rig.brokers[2].values() == [b"a"], what="the other follower has it")
        assert bad.manager.offline == {KEY[0]: [KEY[1]]}
        with pytest.raises(KafkaStorageError, match=r"tries again: .*t-0: \[Errno 5\] Input/output error"):
            bad.manager.partition(*KEY)
        assert rig.brokers[0].partition.replica.high_watermark == 0, "nothing is committed that a member lacks"
        bad.manager.retry()
        assert bad.manager.offline == {KEY[0]: [KEY[1]]}
        bad.directory.fs = LOCAL
        bad.manager.retry()
        assert bad.manager.offline == {}
        eventually(lambda: bad.values() == [b"a"], what="the replica is complete")
        assert [broker.bugs for broker in rig.brokers.values()] == [[], [], []]
    finally:
        rig.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path, 3, CONFIG, output=tmp_path) as cluster, Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(NewTopic("t", 3, 3, config={"min.insync.replicas": 2}))
        yield cluster


def said(cluster: ProcessCluster, slot: int) -> str:
    return (cluster.base / f"slot-{slot}.log").read_text()


def write(producer: Producer, values: range) -> None:
    """Write to every partition, one record at a time, each acknowledged by the ISR."""
    for value in values:
        for partition in range(3):
            producer.send("t", value=b"%d" % value, partition=partition).result(60)


def is_in_sync(admin: Admin, tp: TopicPartition) -> bool:
    return len(state(admin, tp).isr) == 3


def await_in_sync(cluster: ProcessCluster) -> list[tuple[int, ...]]:
    """The replicas of each partition, once all of them are in sync."""
    with Admin(cluster.bootstrap_servers) as admin:
        partitions = [TopicPartition("t", number) for number in range(3)]
        for tp in partitions:
            eventually(partial(is_in_sync, admin, tp), 60, f"all replicas of {tp} are in sync")
        return [tuple(state(admin, tp).replicas) for tp in partitions]


def is_same(cluster: ProcessCluster, tp: TopicPartition, replicas: tuple[int, ...], count: int) -> bool:
    return compare_replicas(cluster.log_dirs, tp, replicas, up_to_offset=count) == ()


def check_nothing_is_lost(cluster: ProcessCluster, count: int) -> None:
    """Every replica has every record."""
    for number, replicas in enumerate(await_in_sync(cluster)):
        tp = TopicPartition("t", number)
        with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
            consumer.assign([tp])
            assert read(consumer, count) == "".join(map(str, range(count)))
        eventually(partial(is_same, cluster, tp, replicas, count), what=f"the replicas of {tp} are the same")


def remove_at_once(directory: Path, base: Path) -> None:
    """Remove a directory that a process writes to: file by file, the process could make a new one in the meantime."""
    shutil.rmtree(directory.rename(base / "removed"))


def slot_of_broker(cluster: ProcessCluster, broker: int) -> int:
    pid = next(status.pid for status in cluster.controller.status().brokers if status.id == broker)
    slot = cluster.slot_of(pid)
    assert slot is not None
    return slot


@pytest.mark.full
def test_a_partitions_directory_that_is_removed_is_fetched_again_and_the_broker_stays(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    slot = slot_of_broker(cluster, 0)
    pid, directory = cluster.pid(slot), directory_of(cluster, 0) / "t-0"
    with Producer(cluster.bootstrap_servers, acks="all") as producer:
        write(producer, range(3))
        remove_at_once(directory, tmp_path)
        eventually(directory.exists, 60, "the replica begins anew")
        write(producer, range(3, 6))
    check_nothing_is_lost(cluster, 6)
    assert cluster.pid(slot) == pid
    assert is_running(pid)
    lines = said(cluster, slot)
    assert "t-0: is damaged and quarantined in leader epoch" in lines
    assert f"[DAMAGED_LOG] {directory} was removed under the live" in lines


def test_a_broker_whose_directory_is_removed_ends_others_go_on_and_it_comes_back_empty(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    slot = slot_of_broker(cluster, 0)
    directory = directory_of(cluster, 0)
    with Producer(cluster.bootstrap_servers, acks="all") as producer:
        write(producer, range(3))
        remove_at_once(directory, tmp_path)
        write(producer, range(3, 6))
        eventually(lambda: not is_running(cluster.pid(slot)), 60, "the broker ends")
        write(producer, range(6, 9))
        assert cluster.launch_ended() == [slot]
        cluster.await_live(3)
        write(producer, range(9, 10))
    check_nothing_is_lost(cluster, 10)
    words = said(cluster, slot)
    assert f"{directory} was removed under the live broker: its meta.json is gone" in words
    assert "a bug" not in words


@pytest.mark.full
@as_root
def test_a_disk_that_turns_read_only_ends_its_broker_alone_which_comes_back_when_it_is_mounted_again(
    tmp_path: Path,
) -> None:
    places = [Place()] * 3
    with failing_ext4(tmp_path / "logs" / "slot-0") as disk:
        if isinstance(disk, str):
            pytest.skip(disk)
        with ProcessCluster(tmp_path, 3, CONFIG, places=places, output=tmp_path) as cluster:
            with Admin(cluster.bootstrap_servers) as admin:
                admin.create_topic(NewTopic("t", 3, 3, config={"min.insync.replicas": 2}))
            with Producer(cluster.bootstrap_servers, acks="all") as producer:
                write(producer, range(3))
                disk.turn_read_only()
                write(producer, range(3, 6))
                eventually(lambda: not is_running(cluster.pid(0)), 60, "the broker ends")
                launched = cluster.launch(0)
                outcome = launched.wait(60)
                assert outcome is not None
                assert "Read-only file system for user root" in outcome.error_message
                write(producer, range(6, 9))
                disk.mount_again()
                cluster.launch(0)
                cluster.await_live(3)
                write(producer, range(9, 10))
            await_in_sync(cluster)
            assert "Read-only file system" in said(cluster, 0)
            assert "a bug" not in said(cluster, 0)
