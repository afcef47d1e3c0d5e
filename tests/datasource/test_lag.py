"""How far a query or a group is behind."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from pyspark.sql.streaming.listener import SourceProgress

from spark_broker import Admin, Consumer, PartitionLag, TopicPartition, group_lag, lag
from spark_broker.errors import GroupIdNotFoundError
from spark_broker.protocol.messages import HistoryMetadata
from tests.client.fake_broker import FakeCluster
from tests.datasource.conftest import MakeStream
from tests.datasource.test_planning import fill


@dataclass
class Progress:
    sources: list[SourceProgress]


@dataclass
class Query:
    """What `lag` asks of a streaming query."""

    lastProgress: Progress | None  # noqa: N815 - as Spark names it


def source(end: object, latest: object) -> SourceProgress:
    end_text, latest_text = (offsets if isinstance(offsets, str) else json.dumps(offsets) for offsets in (end, latest))
    return SourceProgress("a source", "None", end_text, latest_text, 0, 0.0, 0.0, {})


def test_a_query_is_behind_by_what_it_has_not_read(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 2, 50)
    query = stream(subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger="20")
    query.trigger()
    ours = source(query.offset_log[-1], query.reader.reportLatestOffset())
    kafkas = source({"other": {"0": 5}}, {"other": {"0": 9}})
    lags = lag(Query(Progress([kafkas, ours])))  # type: ignore[arg-type]
    assert lags == [PartitionLag("t", 0, 10, 50, 40), PartitionLag("t", 1, 10, 50, 40)]


def test_a_query_without_progress_has_no_lag_yet() -> None:
    assert lag(Query(None)) == []  # type: ignore[arg-type]
    assert lag(Query(Progress([source("None", "None")]))) == []  # type: ignore[arg-type]


def test_a_group_is_behind_by_what_came_since_its_query_was_asked(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 50)
    query = stream(subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger="20", group="reports")
    query.trigger()
    query.trigger()
    assert group_lag(cluster.bootstrap, "reports") == [PartitionLag("t", 0, 20, 50, 30)]


def commit(cluster: FakeCluster, *positions: tuple[str, int, int]) -> None:
    with Consumer(cluster.bootstrap, group_id="reports", enable_auto_commit=False) as consumer:
        consumer.assign([TopicPartition(topic, partition) for topic, partition, _ in positions])
        for topic, partition, offset in positions:
            consumer.seek(TopicPartition(topic, partition), offset)
        consumer.commit()


def test_a_partition_of_which_a_group_has_read_nothing_is_behind_by_all_of_it(cluster: FakeCluster) -> None:
    """Story: a group that had read one partition of two was "0 behind"."""
    fill(cluster, "t", 2, 50)
    fill(cluster, "other", 1, 50)
    commit(cluster, ("t", 0, 50))
    assert group_lag(cluster.bootstrap, "reports") == [PartitionLag("t", 0, 50, 50, 0), PartitionLag("t", 1, 0, 50, 50)]


def test_what_a_group_has_not_read_begins_at_the_log_start_or_in_the_table(cluster: FakeCluster) -> None:
    fill(cluster, "cut", 2, 50)
    fill(cluster, "tiered", 2, 50)
    cluster.topics["tiered"].config = {"delta.path": "/lake/tiered"}
    cluster.topics["tiered"].history = HistoryMetadata("a-table", 4, 7, [0, 5], [20, 20])
    for name in ("cut", "tiered"):
        cluster.topics[name].partitions[1].log_start_offset = 20
    commit(cluster, ("cut", 0, 50), ("tiered", 0, 50))
    behind = {(lag.topic, lag.partition): (lag.position, lag.lag) for lag in group_lag(cluster.bootstrap, "reports")}
    assert behind == {("cut", 0): (50, 0), ("cut", 1): (20, 30), ("tiered", 0): (50, 0), ("tiered", 1): (5, 45)}


def test_partitions_that_were_added_later_count(cluster: FakeCluster) -> None:
    fill(cluster, "t", 1, 50)
    commit(cluster, ("t", 0, 50))
    with Admin(cluster.bootstrap) as admin:
        admin.create_partitions("t", 3)
    assert [(lag.partition, lag.lag) for lag in group_lag(cluster.bootstrap, "reports")] == [(0, 0), (1, 0), (2, 0)]


def test_a_commit_of_an_earlier_topic_of_the_name_counts_for_nothing(cluster: FakeCluster) -> None:
    fill(cluster, "t", 1, 50)
    with Consumer(cluster.bootstrap, topics=["t"], group_id="reports", auto_offset_reset="earliest") as consumer:
        assert consumer.poll(timeout=30.0)
    del cluster.topics["t"]
    fill(cluster, "t", 1, 30)
    assert group_lag(cluster.bootstrap, "reports") == [PartitionLag("t", 0, 0, 30, 30)]


@pytest.mark.parametrize("name", ["nobody", "report"])
def test_a_group_that_is_not_there_is_an_error(cluster: FakeCluster, name: str) -> None:
    """Story: of a misspelt name the lag was `[]`, as if all had been read."""
    fill(cluster, "t", 1, 50)
    commit(cluster, ("t", 0, 50))
    with pytest.raises(GroupIdNotFoundError, match=f"group '{name}' .* -> Compare the group's name"):
        group_lag(cluster.bootstrap, name)


def test_what_a_query_read_of_an_earlier_topic_of_the_name_counts_for_nothing() -> None:
    end = {"topics": {"t": {"id": "old", "offsets": {"0": 40}, "ends": {}}}}
    latest = {"topics": {"t": {"id": "new", "offsets": {"0": 30}, "ends": {}}}}
    assert lag(Query(Progress([source(end, latest)]))) == [PartitionLag("t", 0, 0, 30, 30)]  # type: ignore[arg-type]


def test_a_deleted_topic_has_no_lag(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 50)
    stream(subscribe="t", group="reports").trigger()
    del cluster.topics["t"]
    assert group_lag(cluster.bootstrap, "reports") == []
