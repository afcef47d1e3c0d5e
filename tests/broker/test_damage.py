"""Damage at run time: it is not served, and the replica is quarantined and fetched again (known bug 28)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.broker.partition import Partition
from spark_broker.config import TopicConfig
from spark_broker.errors import NotLeaderOrFollowerError
from spark_broker.testing.replicas import compare_replicas
from tests.broker.rig import KEY, Rig, RigBroker
from tests.broker.test_unclean_election import directory_of, state
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

WaitUntil = Callable[..., None]
VALUES = [b"%04d" % number + bytes(1000) for number in range(12)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Three replicas of a log of several segments; broker 0 leads."""
    rig = Rig(tmp_path, topic=TopicConfig(segment_bytes=4096, min_insync_replicas=2))
    rig.publish()
    for value in VALUES:
        rig.brokers[0].append(value, epoch=0).result(20)
    yield rig
    rig.stop()


def flip(directory: Path, suffix: str = ".arrow") -> Path:
    """Flip one bit in the middle of a replica's first segment, which is sealed."""
    path = min(directory.glob(f"*{suffix}"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    return path


def make_unreadable(directory: Path, suffix: str = ".arrow") -> Path:
    """A disk that fails has some error for each open of that file. This one says ELOOP."""
    path = min(directory.glob(f"*{suffix}"))
    path.unlink()
    path.symlink_to(path.name)
    return path


def left(path: Path) -> bytes | Path:
    return path.readlink() if path.is_symlink() else path.read_bytes()


def replica_directory(broker: RigBroker) -> Path:
    return broker.directory.path / "t-0"


def consume(partition: Partition) -> object:
    return partition.reader.read(0, 0, 1 << 20, read_committed=True)


def replicate(partition: Partition) -> object:
    return partition.read_for_follower(0, 0, 1 << 20)


def replay(partition: Partition) -> object:
    return partition.reader.read_all(0, 0, 1 << 20, read_committed=False)


def look_up_time(partition: Partition) -> object:
    return partition.reader.offset_at(0, 0, read_committed=False)


@pytest.mark.parametrize(
    ("read", "suffix"),
    [(consume, ".arrow"), (replicate, ".arrow"), (replay, ".arrow"), (look_up_time, ".index"), (consume, ".index")],
)
@pytest.mark.parametrize("damage", [flip, pytest.param(make_unreadable, marks=pytest.mark.full)])
def test_a_replica_that_meets_damage_is_set_aside_and_fetched_again(
    rig: Rig,
    wait_until: WaitUntil,
    read: Callable[[Partition], object],
    suffix: str,
    damage: Callable[[Path, str], Path],
) -> None:
    """Story: one sector of one segment could not be read. The broker ended at each read of it, with all its replicas,
    and the good copies on other brokers were of no use.
    """
    damaged, new = rig.brokers[0], rig.brokers[1]
    partition, manager = damaged.partition, damaged.manager
    path = damage(replica_directory(damaged), suffix)
    rotten = left(path)
    with pytest.raises(NotLeaderOrFollowerError, match="damaged"):
        read(partition)
    with pytest.raises(NotLeaderOrFollowerError):
        damaged.append(b"more", epoch=0)
    assert manager.damage_reports == []
    manager.quarantine_damaged()
    assert (manager.damage_reports, manager.find(*KEY)) == ([(*KEY, 1)], None)
    aside = damaged.directory.path / "t-0.0.damaged"
    assert left(aside / path.name) == rotten
    rig.publish(leader=1, leader_epoch=1, partition_epoch=1, isr=(1, 2))
    manager.damage_heard(1)
    new.await_proposal({0, 1, 2})
    wait_until(lambda: damaged.values() == VALUES, "the replica to be fetched again")
    rig.publish(partition_epoch=2, isr=(0, 1, 2))
    assert (manager.damaged, damaged.bugs) == ([], [])
    assert new.append(b"more", epoch=1).result(20) == len(VALUES)


def test_appends_that_wait_for_their_commit_are_refused_when_the_leader_is_damaged(rig: Rig) -> None:
    for follower in (1, 2):
        rig.brokers[follower].manager.stop(clean=False)
    waiting = rig.brokers[0].append(b"more", epoch=0)
    flip(replica_directory(rig.brokers[0]))
    with pytest.raises(NotLeaderOrFollowerError):
        consume(rig.brokers[0].partition)
    with pytest.raises(NotLeaderOrFollowerError):
        waiting.result(20)


def test_nothing_comes_in_the_place_of_a_damaged_replica_before_the_controller_has_heard(rig: Rig) -> None:
    """If an empty replica were elected while its report is under way, all others would truncate their records."""
    damaged, manager = rig.brokers[2], rig.brokers[2].manager
    flip(replica_directory(damaged))
    with pytest.raises(NotLeaderOrFollowerError):
        damaged.partition.read_log(0, 1 << 20, 12)
    manager.quarantine_damaged()
    rig.publish(leader=2, leader_epoch=1, partition_epoch=1, isr=(1, 2))
    manager.damage_heard(0)
    assert manager.find(*KEY) is None
    assert not replica_directory(damaged).exists()
    assert rig.brokers[1].values() == VALUES
    rig.publish(leader=1, leader_epoch=2, partition_epoch=2, isr=(1,))
    manager.damage_heard(1)
    assert manager.find(*KEY) is not None


def test_a_late_reader_of_a_replica_that_was_set_aside_does_no_harm_to_the_next(rig: Rig) -> None:
    """It holds the closed log of the earlier replica."""
    damaged, manager = rig.brokers[0], rig.brokers[0].manager
    old = damaged.partition
    flip(replica_directory(damaged))
    for _ in range(2):
        with pytest.raises(NotLeaderOrFollowerError):
            consume(old)
    manager.quarantine_damaged()
    rig.publish(leader=1, leader_epoch=1, partition_epoch=1, isr=(1, 2))
    manager.damage_heard(1)
    with pytest.raises(Exception, match=r"lead|closed"):
        old.read_log(0, 1 << 20, 12)
    manager.quarantine_damaged()
    assert manager.damage_reports == [(*KEY, 1)]
    assert damaged.bugs == []


def read_all(cluster: ProcessCluster, tp: TopicPartition, count: int) -> list[bytes]:
    values: list[bytes] = []
    with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([tp])

        def poll() -> bool:
            values.extend(v for batch in consumer.poll(0.2) for v in batch.data["value"].to_pylist())
            return len(values) >= count

        eventually(poll, what=f"{count} records")
    return values


@pytest.mark.parametrize("damage", [flip, pytest.param(make_unreadable, marks=pytest.mark.full)])
def test_a_consumer_reads_every_record_of_a_log_whose_leader_is_damaged(
    process_cluster: ProcessCluster, damage: Callable[[Path], Path]
) -> None:
    cluster, tp = process_cluster, TopicPartition(damage.__name__, 0)
    with Admin(cluster.bootstrap_servers) as admin:
        config = {"segment.bytes": "4096", "min.insync.replicas": "2"}
        admin.create_topic(NewTopic(tp.topic, partitions=1, replication_factor=3, config=config))
        with Producer(cluster.bootstrap_servers) as producer:
            for value in VALUES:
                producer.send(tp.topic, value=value, partition=0).result(30)
        before = state(admin, tp)
        assert before.leader is not None
        processes = [cluster.pid(slot) for slot in range(3)]
        log = directory_of(cluster, before.leader) / str(tp)
        damage(log)
        assert read_all(cluster, tp, len(VALUES)) == VALUES
        after = state(admin, tp)
        assert after.leader_epoch > before.leader_epoch
        assert [path.name for path in log.parent.glob(f"{tp}.*")] == [f"{tp}.0.damaged"]
        eventually(lambda: set(state(admin, tp).isr) == set(before.replicas), what="everybody is in sync again")
        replicas = sorted(before.replicas)
        assert compare_replicas(cluster.base / "logs", tp, replicas, up_to_offset=len(VALUES)) == ()
        assert processes == [cluster.pid(slot) for slot in range(3)]
        assert cluster.launch_ended() == []
