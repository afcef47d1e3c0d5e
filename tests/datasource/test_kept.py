"""What a worker process keeps for its next task, and when it does not rely on it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from spark_broker.client.cluster_view import ClusterView
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.spark import kept
from spark_broker.transport.client import Connection
from tests.client.fake_broker import FakeCluster
from tests.conftest import WaitUntil
from tests.datasource.conftest import MakeRead
from tests.datasource.test_planning import fill


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    kept.KEPT.close()
    yield
    kept.KEPT.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every stream of fetches that is opened, and every cluster that is connected to."""
    told: list[str] = []
    open_stream, connect = Connection.open_stream, ClusterMetadata.connect

    def noted_stream(self: Connection, kind: str) -> object:
        told.append(kind)
        return open_stream(self, kind)

    def noted_connect(config: object) -> ClusterMetadata:
        told.append("cluster")
        return connect(config)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "open_stream", noted_stream)
    monkeypatch.setattr(ClusterMetadata, "connect", noted_connect)
    return told


def test_the_next_task_opens_nothing(cluster: FakeCluster, read: MakeRead, opened: list[str]) -> None:
    fill(cluster, "t", 3, 100)
    query = read(subscribe="t")
    assert query.table().num_rows == 300
    assert opened.count("fetch") == 3
    opened.clear()
    for _ in range(3):
        assert query.table().num_rows == 300
    assert opened == []


def test_ranges_of_one_leader_share_a_stream(cluster: FakeCluster, read: MakeRead, opened: list[str]) -> None:
    fill(cluster, "t", 9, 100)
    assert read(subscribe="t").table().num_rows == 900
    assert opened.count("fetch") == 3


def test_a_stream_that_its_leader_has_ended_is_not_used(
    cluster: FakeCluster, read: MakeRead, wait_until: WaitUntil
) -> None:
    fill(cluster, "t", 3, 100)
    query = read(subscribe="t")
    query.table()
    streams = list(kept.KEPT._streams.values())
    cluster.move(0)
    wait_until(lambda: sum(stream.is_quiet for stream in streams) == 2, "the stream is ended")
    assert query.table().num_rows == 300


def test_a_task_that_ends_early_leaves_no_answer_to_the_next(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 20_000, per_batch=10_000)
    query = read(subscribe="t", **{"max.partition.fetch.bytes": "1024"})
    batches = query.batches()
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not kept.KEPT._streams
    assert query.table()["n"].to_pylist() == list(range(20_000))


def test_a_topic_that_was_created_again_is_read_as_it_is_now(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 100)
    assert read(subscribe="t").table().num_rows == 100
    del cluster.topics["t"]
    fill(cluster, "t", 1, 50)
    assert read(subscribe="t").table().num_rows == 50


def test_a_cluster_that_was_made_anew_is_read_as_it_is_now(cluster: FakeCluster, read: MakeRead) -> None:
    """A worker process lives as long as the session: a notebook that makes another cluster goes on with it."""
    fill(cluster, "t", 1, 100)
    assert read(subscribe="t").table().num_rows == 100
    cluster.make_anew()
    fill(cluster, "t", 1, 50)
    assert read(subscribe="t").table().num_rows == 50


def test_metadata_that_is_older_than_the_plan_is_fetched_anew(
    cluster: FakeCluster, read: MakeRead, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.metadata_offset = 7
    fill(cluster, "t", 1, 100)
    query = read(subscribe="t")
    refreshed: list[int] = []
    refresh = ClusterMetadata.refresh

    def noted(self: ClusterMetadata, deadline: Deadline) -> ClusterView:
        refreshed.append(cluster.metadata_offset)
        return refresh(self, deadline)

    monkeypatch.setattr(ClusterMetadata, "refresh", noted)
    assert query.table().num_rows == 100
    assert refreshed == [7]
    assert query.table().num_rows == 100
    assert refreshed == [7], "it knows as much as the plan"
    cluster.metadata_offset = 8
    later = read(subscribe="t")
    refreshed.clear()
    assert later.table().num_rows == 100
    assert refreshed == [8], "the plan knows more"


def test_what_was_imported_is_no_part_of_the_collection_after_each_task(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 100)
    query = read(subscribe="t")
    kept.spare_collections.cache_clear()
    gc.unfreeze()
    try:
        query.table()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
