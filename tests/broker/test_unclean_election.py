"""Real processes: the last complete replica is lost, the loss is accepted, and all readers of lost records learn it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from spark_broker import Admin, ConsumedBatch, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import LogTruncationError, PreferredLeaderNotAvailableError
from spark_broker.model import PartitionInfo
from spark_broker.storage.checkpoints import LEADER_EPOCHS_FILE, write_checkpoint
from spark_broker.storage.directory_meta import META_FILE, DirectoryMeta, read_meta
from spark_broker.storage.slots import SLOT_PREFIX
from spark_broker.testing.replicas import compare_replicas
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

BROKERS = 3
GROUP = "readers"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = {"broker.session.timeout.ms": 3000, "offsets.topic.num.partitions": 2}
    with ProcessCluster(tmp_path_factory.mktemp("cluster"), BROKERS, config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


def meta_of(directory: Path) -> DirectoryMeta:
    meta = read_meta(directory)
    assert meta is not None
    return meta


def directory_of(cluster: ProcessCluster, broker: int) -> Path:
    """The log directory of a broker. A launch claims the free one with the lowest number."""
    for path in sorted((cluster.base / "logs").glob(SLOT_PREFIX + "*")):
        if meta_of(path).broker_id == broker:
            return path
    raise AssertionError(f"broker {broker} has no directory")


def kill(cluster: ProcessCluster, admin: Admin, broker: int, *, fenced: bool = True) -> int:
    """SIGKILL; returns the slot whose process it was, once the broker is `fenced`, or at once."""
    pid = next(info.pid for info in admin.describe_cluster().brokers if info.id == broker)
    slot = next(slot for slot in range(BROKERS) if cluster.pid(slot) == pid)
    os.kill(pid, signal.SIGKILL)
    if fenced:
        eventually(lambda: broker not in live(admin), what=f"broker {broker} is fenced")
    return slot


def live(admin: Admin) -> list[int]:
    return [info.id for info in admin.describe_cluster().brokers]


def start(cluster: ProcessCluster, admin: Admin, slot: int, broker: int) -> None:
    cluster.launch(slot)
    eventually(lambda: broker in live(admin), 60.0, f"broker {broker} is back")


def state(admin: Admin, tp: TopicPartition) -> PartitionInfo:
    return admin.describe_topic(tp.topic).partitions[tp.partition]


def append(cluster: ProcessCluster, tp: TopicPartition, values: str, acks: str | int = "all") -> None:
    """Append one record at a time, each acknowledged, by default by the whole ISR."""
    idempotent = {"enable.idempotence": acks == "all"}
    with Producer(cluster.bootstrap_servers, acks=acks, config=idempotent) as producer:
        for value in values:
            producer.send(tp.topic, value=value.encode(), partition=tp.partition).result(30)


def read(consumer: Consumer, rows: int) -> str:
    polled: list[ConsumedBatch] = []

    def enough() -> bool:
        polled.extend(consumer.poll(0.2))
        return bool(sum(batch.data.num_rows for batch in polled) >= rows)

    eventually(enough, what=f"{rows} records")
    return "".join(value.decode() for batch in polled for value in batch.data["value"].to_pylist())


def truncation(consumer: Consumer) -> LogTruncationError:
    """The truncation error that poll eventually raises."""
    caught: list[LogTruncationError] = []

    def poll() -> bool:
        try:
            consumer.poll(0.2)
        except LogTruncationError as error:
            caught.append(error)
        return bool(caught)

    eventually(poll, what="a truncation error")
    return caught[0]


@pytest.mark.full
def test_a_follower_that_lags_leads_on_demand_and_consumers_learn_what_is_lost(
    cluster: ProcessCluster, admin: Admin
) -> None:
    """The follower is killed, then the leader that went on alone; only the follower restarts."""
    admin.create_topic(NewTopic("t", partitions=6, replication_factor=2))
    # The launch claims the lower of the two directories that are free then, which must be the follower's.
    parts = admin.describe_topic("t").partitions
    number = next(
        p.partition for p in parts if directory_of(cluster, p.replicas[1]) < directory_of(cluster, p.replicas[0])
    )
    tp = TopicPartition("t", number)
    leader, follower = parts[number].replicas
    append(cluster, tp, "ab")
    with Consumer(cluster.bootstrap_servers, group_id=GROUP, auto_offset_reset="earliest") as consumer:
        consumer.assign([tp])
        assert read(consumer, 2) == "ab"
        follower_slot = kill(cluster, admin, follower)
        append(cluster, tp, "cde")
        assert read(consumer, 3) == "cde"
        consumer.commit()
        leader_slot = kill(cluster, admin, leader)
        start(cluster, admin, follower_slot, follower)
        before = state(admin, tp)
        assert (before.leader, before.isr, before.elr) == (None, (leader,), ())
        refused = admin.elect_leaders([tp])[tp]
        assert isinstance(refused, PreferredLeaderNotAvailableError)
        assert admin.elect_leaders([tp], unclean=True) == {tp: None}
        eventually(lambda: state(admin, tp).leader == follower, what="the election")
        assert state(admin, tp).leader_epoch > before.leader_epoch
        append(cluster, tp, "wxyz")
        assert truncation(consumer).divergent_offset == 2
        assert read(consumer, 4) == "wxyz"
    start(cluster, admin, leader_slot, leader)
    eventually(lambda: set(state(admin, tp).isr) == {leader, follower}, 60.0, "the old leader follows")
    eventually(lambda: state(admin, tp).high_watermark == 6, what="everything is committed")
    assert compare_replicas(cluster.base / "logs", tp, [leader, follower], up_to_offset=6) == ()


def test_a_group_that_goes_on_from_a_lost_offset_is_told(cluster: ProcessCluster, admin: Admin) -> None:
    """The only replica's log was damaged. It leads again, empty, once the loss is accepted."""
    admin.create_topic(NewTopic("single", partitions=1, replication_factor=1))
    tp = TopicPartition("single", 0)
    append(cluster, tp, "abc")
    with Consumer(cluster.bootstrap_servers, group_id=GROUP, auto_offset_reset="earliest") as consumer:
        consumer.assign([tp])
        assert read(consumer, 3) == "abc"
        consumer.commit()
    (leader,) = state(admin, tp).replicas
    log = directory_of(cluster, leader) / str(tp)
    slot = kill(cluster, admin, leader)
    (log / LEADER_EPOCHS_FILE).write_bytes(b"garbage")
    start(cluster, admin, slot, leader)
    offline = state(admin, tp)
    assert (offline.leader, offline.isr, offline.last_known_elr) == (None, (), (leader,))
    assert [path.name for path in log.parent.glob("single-0.*")] == ["single-0.0.damaged"]
    assert admin.elect_leaders([tp], unclean=True) == {tp: None}
    eventually(lambda: state(admin, tp).leader == leader, what="the election")
    cluster.restart_controller()
    eventually(lambda: state(admin, tp).leader == leader, what="the leader stays after the damage was accepted")
    append(cluster, tp, "vwxyz")
    with Consumer(cluster.bootstrap_servers, group_id=GROUP, auto_offset_reset="earliest") as consumer:
        consumer.assign([tp])
        assert truncation(consumer).divergent_offset == 0
        assert read(consumer, 5) == "vwxyz"


def test_the_only_replica_leads_again_by_itself_after_a_machine_crash(cluster: ProcessCluster, admin: Admin) -> None:
    """No other replica can have more than what is left of its log."""
    admin.create_topic(NewTopic("alone", partitions=1, replication_factor=1))
    tp = TopicPartition("alone", 0)
    append(cluster, tp, "abc")
    before = state(admin, tp)
    (leader,) = before.replicas
    directory = directory_of(cluster, leader)
    slot = kill(cluster, admin, leader)
    write_checkpoint(directory / META_FILE, asdict(replace(meta_of(directory), boot_id="another run of the machine")))
    start(cluster, admin, slot, leader)
    eventually(lambda: state(admin, tp).leader == leader, what="the leader is back")
    after = state(admin, tp)
    assert after.leader_epoch > before.leader_epoch
    assert (after.isr, after.elr, after.last_known_elr) == ((leader,), (), ())
    append(cluster, tp, "d")
    with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([tp])
        assert read(consumer, 4) == "abcd"
