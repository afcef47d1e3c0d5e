"""An unclean election cuts records that are in the table already, before the controller knows of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from deltalake import DeltaTable

from spark_broker import Admin, Consumer, NewTopic, TopicPartition
from tests.broker.test_unclean_election import BROKERS, append, directory_of, kill, read, start, state
from tests.spark.history import History
from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import TiererProcess
from tests.support.waiting import eventually

TOPICS = 6

CONFIG = {"broker.session.timeout.ms": 3000, "replica.reassignment.delay.ms": -1}
"""While Spark works, nobody gives a killed broker's replicas to the third one."""


class Running(NamedTuple):
    """`table`: where the topic's table is to be."""

    cluster: ProcessCluster
    admin: Admin
    tierer: TiererProcess
    table: Path


@pytest.fixture
def running(history: History, tmp_path: Path) -> Iterator[Running]:
    tierer = history.tierer  # Its Spark starts in the background.
    with (
        ProcessCluster(tmp_path / "cluster", BROKERS, CONFIG) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        yield Running(cluster, admin, tierer, tmp_path / "table")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_what_the_table_has_of_a_lost_log_is_deleted_and_the_offsets_that_come_again_are_tiered(
    running: Running,
) -> None:
    cluster, admin, tierer, table = running
    tp = TopicPartition(a_topic_whose_follower_restarts_first(cluster, admin), 0)
    admin.alter_topic_config(tp.topic, {"delta.path": str(table)})
    # Delta refuses any value for such a column, also where no row has one: the cut failed at each run.
    tierer.sql(f"CREATE TABLE delta.`{table}` (row BIGINT GENERATED ALWAYS AS IDENTITY) USING delta")
    leader, follower = state(admin, tp).replicas
    append(cluster, tp, "a")
    assert tierer.tier(cluster.bootstrap_servers, tp.topic)["ends"] == [1]
    append(cluster, tp, "b")
    follower_slot = kill(cluster, admin, follower)
    append(cluster, tp, "cdef")
    run = tierer.begin(cluster.bootstrap_servers, tp.topic, stop_at="before the controller knows")
    run.await_stopped()
    assert values(table) == "abcdef"
    kill(cluster, admin, leader)
    start(cluster, admin, follower_slot, follower)
    assert admin.elect_leaders([tp], unclean=True) == {tp: None}
    eventually(lambda: state(admin, tp).leader == follower, what="the election")
    append(cluster, tp, "XYZ")
    run.go_on()
    answer = run.ended()
    assert answer.get("message") is None
    assert answer["ends"] == [5]
    assert values(table) == "abXYZ"
    append(cluster, tp, "!")
    assert tierer.tier(cluster.bootstrap_servers, tp.topic)["records"] == 1
    assert values(table) == "abXYZ!"
    history = admin.describe_topic(tp.topic).history
    assert history is not None
    assert history.stopped is None
    with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([tp])
        assert read(consumer, 6) == "abXYZ!"


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_leader_with_other_records_than_the_table_begins_where_the_table_ends(running: Running) -> None:
    """The first leader dies with records that nobody else has. The second one gives their offsets again, and all of its
    records are tiered. Then it dies, and the first one leads again, with a log that nobody has truncated.
    """
    cluster, admin, tierer, table = running
    tp = TopicPartition(a_topic_whose_leader_restarts_first(cluster, admin), 0)
    admin.alter_topic_config(tp.topic, {"delta.path": str(table)})
    first, second = state(admin, tp).replicas
    append(cluster, tp, "ab")
    with frozen(admin, second):
        append(cluster, tp, "QRSTUVWXYZ", acks=1)
        slot = kill(cluster, admin, first, fenced=False)
    eventually(lambda: state(admin, tp).leader == second, what="the election")
    append(cluster, tp, "cde")
    tierer.tier(cluster.bootstrap_servers, tp.topic)
    recorded = values(table)
    assert recorded.startswith("ab")
    assert recorded.endswith("cde")
    assert len(recorded) < len("abQRSTUVWXYZ"), "of the other log, only what was on its way"
    kill(cluster, admin, second)
    start(cluster, admin, slot, first)
    assert admin.elect_leaders([tp], unclean=True) == {tp: None}
    eventually(lambda: state(admin, tp).leader == first, what="the unclean election")
    append(cluster, tp, "!")
    with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([tp])
        assert read(consumer, len(recorded) + 1) == recorded + "!"
    assert tierer.tier(cluster.bootstrap_servers, tp.topic)["records"] == 1
    assert values(table) == recorded + "!"


@contextmanager
def frozen(admin: Admin, broker: int) -> Iterator[None]:
    """The broker's process is stopped, for less time than its session takes to end."""
    pid = next(info.pid for info in admin.describe_cluster().brokers if info.id == broker)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def a_topic_whose_follower_restarts_first(cluster: ProcessCluster, admin: Admin) -> str:
    return _topic(cluster, admin, first=1)


def a_topic_whose_leader_restarts_first(cluster: ProcessCluster, admin: Admin) -> str:
    return _topic(cluster, admin, first=0)


def _topic(cluster: ProcessCluster, admin: Admin, first: int) -> str:
    """A launch claims the free directory with the lowest number, which must be that of this one of two replicas."""
    for number in range(TOPICS):
        admin.create_topic(NewTopic(f"t{number}", partitions=1, replication_factor=2))
        replicas = state(admin, TopicPartition(f"t{number}", 0)).replicas
        if directory_of(cluster, replicas[first]) < directory_of(cluster, replicas[1 - first]):
            return f"t{number}"
    raise AssertionError(f"none of {TOPICS} topics is placed so")


def values(table: Path) -> str:
    rows = DeltaTable(str(table)).to_pyarrow_table(columns=["_offset", "value"]).sort_by("_offset")
    return "".join(value.decode() for value in rows.column("value").to_pylist())
