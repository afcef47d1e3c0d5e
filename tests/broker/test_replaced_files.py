"""Segments that are deleted, an index that is cut, a directory from an older copy: such a log never leads."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from tests.conftest import WaitUntil
from tests.support.live_copies import copy_live
from tests.support.process_cluster import LOOPBACK, Place, ProcessCluster

SETTINGS = {
    "broker.session.timeout.ms": 2000,
    "replica.high.watermark.checkpoint.interval.ms": 100,
    "auto.leader.rebalance.enable": False,
}
RECORDS = 300
T0 = TopicPartition("t", 0)


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[ProcessCluster]:
    places = [Place(LOOPBACK)] * 3
    with ProcessCluster(tmp_path, 3, SETTINGS, places=places, output=tmp_path) as cluster:
        yield cluster


def create(brokers: ProcessCluster, min_insync_replicas: int) -> None:
    with Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic(NewTopic("t", 1, 3, config={"min.insync.replicas": min_insync_replicas}))


def append(brokers: ProcessCluster) -> None:
    with Producer(brokers.bootstrap_servers) as producer:
        producer.append("t", [{"value": b"%d" % n} for n in range(RECORDS)], partition=0).result(60)


def kill(brokers: ProcessCluster, slot: int) -> None:
    os.kill(brokers.pid(slot), signal.SIGKILL)


def read_all(brokers: ProcessCluster) -> int:
    with Consumer(brokers.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        seen = 0
        while batches := consumer.poll(3.0):
            seen += sum(batch.data.num_rows for batch in batches)
        return seen


def directory(brokers: ProcessCluster, slot: int) -> Path:
    (path,) = (brokers.log_dirs_of(slot)).glob("broker-*")
    return path


def delete_segments(path: Path) -> None:
    for file in [*path.glob("t-0/*.arrow"), *path.glob("t-0/*.index")]:
        file.unlink()


def cut_index(path: Path) -> None:
    (index,) = path.glob("t-0/*.index")
    os.truncate(index, 0)


def delete_segments_and_marks(path: Path) -> None:
    delete_segments(path)
    (path / "high-watermarks.json").unlink()


def delete_segments_and_damage_marks(path: Path) -> None:
    delete_segments(path)
    (path / "high-watermarks.json").write_bytes(b"")


def slot_of_leader(brokers: ProcessCluster, admin: Admin) -> tuple[int, int]:
    """The leader's id and slot."""
    leader = admin.describe_topic("t").partitions[0].leader
    pid = next(broker.pid for broker in brokers.controller.status().brokers if broker.id == leader)
    slot = brokers.slot_of(pid)
    assert leader is not None
    assert slot is not None
    return leader, slot


def has_saved(path: Path, mark: int) -> bool:
    """Whether the checkpoint of high watermarks has this one."""
    marks = path / "high-watermarks.json"
    return marks.exists() and b",%d]" % mark in marks.read_bytes()


def leave_one_in_sync_and_end_it(brokers: ProcessCluster, admin: Admin, wait_until: WaitUntil) -> int:
    """Kill the followers, and then the leader, which is the last of the ISR. Returns its slot."""
    leader, last = slot_of_leader(brokers, admin)
    others = [slot for slot in range(3) if slot != last]
    for slot in others:
        kill(brokers, slot)
    wait_until(lambda: tuple(admin.describe_topic("t").partitions[0].isr) == (leader,), "the leader alone in the ISR")
    kill(brokers, last)
    wait_until(lambda: brokers.live_count() == 0, "all brokers to be fenced")
    return last


@pytest.mark.full
@pytest.mark.parametrize(
    ("lose", "min_insync_replicas"),
    [
        (delete_segments, 2),
        (cut_index, 2),
        (delete_segments, 1),
    ],
)
def test_the_last_member_of_the_isr_comes_back_without_its_records(
    brokers: ProcessCluster, lose: Callable[[Path], None], min_insync_replicas: int, wait_until: WaitUntil
) -> None:
    """Story: it opened empty and led, and both others dropped 300 acknowledged records, which they had.

    With min.insync.replicas=1 the lost log may have had more than the others: an operator decides, and is not deceived.
    """
    create(brokers, min_insync_replicas)
    append(brokers)
    with Admin(brokers.bootstrap_servers) as admin:
        for slot in range(3):
            wait_until(partial(has_saved, directory(brokers, slot), RECORDS), "the checkpoint")
        last = leave_one_in_sync_and_end_it(brokers, admin, wait_until)
    lose(directory(brokers, last))
    for slot in range(3):
        brokers.launch(slot)
    brokers.await_live(3)
    if min_insync_replicas == 1:
        with Admin(brokers.bootstrap_servers) as admin:
            assert admin.describe_topic("t").partitions[0].leader is None
            admin.elect_leaders([T0], unclean=True)
    assert read_all(brokers) == RECORDS
    assert list(directory(brokers, last).glob("t-0.*.damaged")), "it is kept aside"
    append(brokers)
    assert read_all(brokers) == 2 * RECORDS


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(delete_segments_and_marks, marks=pytest.mark.full),
        pytest.param(delete_segments_and_damage_marks, marks=pytest.mark.full),
    ],
)
def test_what_was_committed_is_not_known_either(
    brokers: ProcessCluster, lose: Callable[[Path], None], wait_until: WaitUntil
) -> None:
    """Story: two of three directories lost segments together with their high watermarks. One of them was elected."""
    create(brokers, 2)
    append(brokers)
    with Admin(brokers.bootstrap_servers) as admin:
        for slot in range(3):
            wait_until(partial(has_saved, directory(brokers, slot), RECORDS), "the checkpoint")
        _, whole = slot_of_leader(brokers, admin)
    for slot in range(3):
        kill(brokers, slot)
    wait_until(lambda: brokers.live_count() == 0, "all brokers to be fenced")
    others = [slot for slot in range(3) if slot != whole]
    for slot in others:
        lose(directory(brokers, slot))
    for slot in (*others, whole):
        brokers.launch(slot)
    brokers.await_live(3)
    assert read_all(brokers) == RECORDS
    append(brokers)
    assert read_all(brokers) == 2 * RECORDS


def test_a_directory_that_was_restored_from_an_older_copy(
    brokers: ProcessCluster, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Story: it led with what it had, and what the others had beyond was dropped."""
    create(brokers, 2)
    append(brokers)
    with Admin(brokers.bootstrap_servers) as admin:
        _, last = slot_of_leader(brokers, admin)
        copy_live(directory(brokers, last), tmp_path / "copy")
        kill(brokers, last)
        wait_until(lambda: brokers.live_count() == 2, "the broker to be fenced")
        brokers.launch(last)
        brokers.await_live(3)
        append(brokers)
        wait_until(lambda: len(admin.describe_topic("t").partitions[0].isr) == 3, "all in sync")
        for slot in range(3):
            kill(brokers, slot)
        wait_until(lambda: brokers.live_count() == 0, "all brokers to be fenced")
    place = directory(brokers, last)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "copy", place)
    for slot in (last, *(slot for slot in range(3) if slot != last)):
        brokers.launch(slot)
    brokers.await_live(3)
    assert read_all(brokers) == 2 * RECORDS
    with Admin(brokers.bootstrap_servers) as admin:
        wait_until(lambda: len(admin.describe_topic("t").partitions[0].isr) == 3, "all in sync")
