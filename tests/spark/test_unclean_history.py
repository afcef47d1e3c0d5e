"""An unclean election cuts records that are in the table already, before the controller knows of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from spark_broker import Admin, Consumer, NewTopic, TopicPartition
from tests.broker.test_unclean_election import BROKERS, append, directory_of, kill, read, start, state
from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import TiererProcess
from tests.support.waiting import eventually

TOPICS = 6


@pytest.mark.full
@pytest.mark.timeout(400)
def test_what_the_table_has_of_a_lost_log_is_deleted_and_the_offsets_that_come_again_are_tiered(tmp_path: Path) -> None:
    table = tmp_path / "table"
    with (
        ProcessCluster(tmp_path / "cluster", BROKERS, {"broker.session.timeout.ms": 3000}) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
        TiererProcess(tmp_path, "tierer") as tierer,
    ):
        tp = TopicPartition(a_topic_whose_follower_restarts_first(cluster, admin), 0)
        admin.alter_topic_config(tp.topic, {"delta.path": str(table)})
        leader, follower = state(admin, tp).replicas
        append(cluster, tp, "a")
        assert tierer.tier(cluster.bootstrap_servers, tp.topic)["ends"] == [1]
        append(cluster, tp, "b")
        follower_slot = kill(cluster, admin, follower)
        append(cluster, tp, "cdef")
        tierer.begin(cluster.bootstrap_servers, tp.topic, stop_at="before the controller knows")
        tierer.await_stopped()
        assert values(table) == "abcdef"
        kill(cluster, admin, leader)
        start(cluster, admin, follower_slot, follower)
        assert admin.elect_leaders([tp], unclean=True) == {tp: None}
        eventually(lambda: state(admin, tp).leader == follower, what="the election")
        append(cluster, tp, "XYZ")
        tierer.go_on()
        answer = tierer.ended()
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


def a_topic_whose_follower_restarts_first(cluster: ProcessCluster, admin: Admin) -> str:
    """A launch claims the free directory with the lowest number, which must be the follower's."""
    for number in range(TOPICS):
        admin.create_topic(NewTopic(f"t{number}", partitions=1, replication_factor=2))
        leader, follower = state(admin, TopicPartition(f"t{number}", 0)).replicas
        if directory_of(cluster, follower) < directory_of(cluster, leader):
            return f"t{number}"
    raise AssertionError(f"none of {TOPICS} topics is placed so")


def values(table: Path) -> str:
    rows = DeltaTable(str(table)).to_pyarrow_table(columns=["_offset", "value"]).sort_by("_offset")
    return "".join(value.decode() for value in rows.column("value").to_pylist())
