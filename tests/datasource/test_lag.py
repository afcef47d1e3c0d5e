"""How far a query or a group is behind."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyspark.sql.streaming.listener import SourceProgress

from spark_broker import PartitionLag, group_lag, lag
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
    assert group_lag(cluster.bootstrap, "nobody") == []


def test_a_deleted_topic_has_no_lag(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 50)
    stream(subscribe="t", group="reports").trigger()
    del cluster.topics["t"]
    assert group_lag(cluster.bootstrap, "reports") == []
