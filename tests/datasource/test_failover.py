"""A task goes on through elections, frozen brokers and broken streams, and stops where going on would be wrong."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pyarrow as pa
import pytest

from spark_broker.errors import (
    InconsistentTopicIdError,
    LeaderNotAvailableError,
    LogTruncationError,
    OffsetOutOfRangeError,
    RequestTimedOutError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.messages import MetadataResponse
from spark_broker.spark.range_reader import RangeReader
from tests.client.fake_broker import FakeCluster
from tests.conftest import WaitUntil
from tests.datasource.conftest import MakeRead, Read
from tests.datasource.test_planning import SCHEMA, fill, numbers

SMALL_FETCHES = {"max.partition.fetch.bytes": "1024"}
"""A batch or two for each answer, so that there is something left to read when the leader goes."""


def test_a_new_leader_goes_on_where_the_old_one_stopped(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 20_000, per_batch=10_000)
    batches = read(subscribe="t", **SMALL_FETCHES).batches()
    first = next(batches)
    cluster.kill(cluster.topics["t"].partitions[0].leader)
    rest = list(batches)
    assert rest
    assert pa.Table.from_batches([first, *rest])["n"].to_pylist() == list(range(20_000))


def test_a_leader_that_is_gone_before_the_task_starts_is_not_waited_for(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 3, 100)
    query = read(subscribe="t")
    cluster.kill(0)
    assert query.table().num_rows == 300


def test_a_fenced_epoch_is_refreshed_unseen(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 20_000, per_batch=10_000)
    batches = read(subscribe="t", **SMALL_FETCHES).batches()
    first = next(batches)
    cluster.elect("t", 0, (cluster.topics["t"].partitions[0].leader + 1) % 3)
    assert pa.Table.from_batches([first, *batches])["n"].to_pylist() == list(range(20_000))


def test_records_that_are_gone_fail_the_task_unless_loss_is_accepted(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 50)
    strict, lenient = read(subscribe="t"), read(subscribe="t", failOnDataLoss="false")
    part = cluster.topics["t"].partitions[0]
    part.log_start_offset = 20
    del part.log[:2]
    with pytest.raises(OffsetOutOfRangeError, match="records from offset 0 on are gone"):
        strict.table()
    assert lenient.table()["n"].to_pylist() == list(range(20, 50))


@pytest.mark.parametrize("again", [0, 50])
def test_a_log_that_was_cut_since_the_plan_fails_every_task_unless_loss_is_accepted(
    cluster: FakeCluster, read: MakeRead, again: int
) -> None:
    """KIP-320: also when other records have taken the same offsets, and in tasks whose own range is still there."""
    fill(cluster, "t", 1, 50)
    split = {"subscribe": "t", "minPartitions": "5"}
    strict, lenient = read(**split), read(**split, failOnDataLoss="false")
    cluster.cut("t", 0, 2)
    kept = cluster.topics["t"].partitions[0].log_end_offset
    assert 0 < kept < 50
    if again:
        cluster.store("t", 0, numbers(*range(900, 900 + again)))
    with pytest.raises(LogTruncationError, match="t-0: since the query was planned"):
        strict.table()
    values = lenient.table()["n"].to_pylist()
    assert values == [*range(kept), *range(900, 950 - kept)] if again else values == list(range(kept))


def test_an_election_that_lost_nothing_of_the_plan_is_not_noticed(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 50)
    query = read(subscribe="t", minPartitions="3")
    fill_more = numbers(*range(900, 910))
    cluster.elect("t", 0, 1)
    cluster.store("t", 0, fill_more)
    assert sorted(query.table()["n"].to_pylist()) == list(range(50))


@pytest.mark.usefixtures("short_grace")
def test_a_topic_that_was_made_anew_is_never_read_in_the_old_ones_place(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 5)
    query, lenient = read(subscribe="t"), read(subscribe="t", failOnDataLoss="false")
    del cluster.topics["t"]
    cluster.create("t", schema=SCHEMA)
    cluster.store("t", 0, numbers(*range(900, 905)))
    with pytest.raises(InconsistentTopicIdError, match="'t'"):
        query.table()
    assert lenient.table().num_rows == 0


@pytest.mark.usefixtures("short_grace")
def test_a_topic_that_was_deleted_is_reported(
    cluster: FakeCluster, read: MakeRead, caplog: pytest.LogCaptureFixture
) -> None:
    fill(cluster, "t", 1, 5)
    query, lenient = read(subscribe="t"), read(subscribe="t", failOnDataLoss="false")
    del cluster.topics["t"]
    with pytest.raises(UnknownTopicOrPartitionError, match="'t'"):
        query.table()
    with caplog.at_level(logging.WARNING):
        assert lenient.table().num_rows == 0
    assert "passing over what was planned of t-0" in caplog.text


@pytest.mark.usefixtures("short_grace")
def test_a_topic_that_is_deleted_during_a_task_is_passed_over_from_there_on(
    cluster: FakeCluster, read: MakeRead
) -> None:
    fill(cluster, "t", 1, 60_000, per_batch=10_000)
    strict, lenient = (
        read(subscribe="t", failOnDataLoss=fail, **SMALL_FETCHES).batches() for fail in ("true", "false")
    )
    first = [next(strict), next(lenient)][1]
    del cluster.topics["t"]
    with pytest.raises(UnknownTopicOrPartitionError, match="'t'"):
        list(strict)
    rest = pa.Table.from_batches([first, *lenient])["n"].to_pylist()
    assert rest == list(range(len(rest)))
    assert len(rest) < 60_000


@pytest.fixture
def denied(cluster: FakeCluster, read: MakeRead, monkeypatch: pytest.MonkeyPatch) -> Read:
    """A lenient read of a topic that metadata shows, and that brokers deny once it is planned."""
    fill(cluster, "t", 1, 5)
    lenient = read(subscribe="t", failOnDataLoss="false", **{"default.api.timeout.ms": "300"})

    def deny(*_: object) -> NoReturn:
        raise UnknownTopicOrPartitionError("not here")

    monkeypatch.setattr(cluster, "_read", deny)
    return lenient


def test_a_topic_that_brokers_deny_and_metadata_shows_is_not_passed_over(denied: Read) -> None:
    """A broker that lags behind may answer so."""
    with pytest.raises(UnknownTopicOrPartitionError, match="not here"):
        denied.table()


def test_what_went_wrong_is_told_and_not_that_the_time_is_over(denied: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the time was over between two answers, and the task failed with `no answer in time`."""
    times_ms = iter([1000])

    def time_left(_: RangeReader) -> int:
        for time_ms in times_ms:
            return time_ms
        raise RequestTimedOutError("no answer in time")

    monkeypatch.setattr(RangeReader, "_answer_timeout_ms", time_left)
    with pytest.raises(UnknownTopicOrPartitionError, match="not here"):
        denied.table()


@pytest.mark.usefixtures("short_grace")
def test_a_topic_that_only_the_controller_knows_is_not_passed_over(
    cluster: FakeCluster, read: MakeRead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's process is new, and the brokers that it asks lag behind those of the plan."""
    fill(cluster, "t", 1, 5)
    lenient = read(subscribe="t", failOnDataLoss="false")
    shown = cluster.metadata

    def lagging(names: list[str] | None, *, certain: bool = False) -> MetadataResponse:
        return shown(names if certain else [], certain=certain)

    monkeypatch.setattr(cluster, "metadata", lagging)
    with pytest.raises(UnknownTopicOrPartitionError, match="'t' does not exist"):
        lenient.table()


def test_a_frozen_leader_is_left_for_the_next_one(
    cluster: FakeCluster, read: MakeRead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_broker.spark.range_reader.FIRST_ANSWER_TIMEOUT_MS", 200)
    fill(cluster, "t", 1, 40_000, per_batch=10_000)
    batches = read(subscribe="t", **SMALL_FETCHES).batches()
    first = next(batches)
    leader = cluster.topics["t"].partitions[0].leader
    cluster.brokers[leader].proxy.freeze()
    cluster.fence(leader)
    assert pa.Table.from_batches([first, *batches])["n"].to_pylist() == list(range(40_000))


def test_a_high_watermark_that_a_new_leader_has_yet_to_reach_is_waited_for(
    cluster: FakeCluster, read: MakeRead, wait_until: WaitUntil
) -> None:
    fill(cluster, "t", 1, 100)
    query = read(subscribe="t", **{"fetch.max.wait.ms": "50"})
    part = cluster.topics["t"].partitions[0]
    part.high_watermark = 30
    with ThreadPoolExecutor(1) as pool:
        table = pool.submit(query.table)
        # Three fetches from the same offset: it has come to the high watermark and asks again.
        wait_until(
            lambda: len([request for request in cluster.fetches if request.partitions[0].offset == 30]) >= 3,
            "asked again",
        )
        assert not table.done()
        part.high_watermark = 100
        assert table.result(30)["n"].to_pylist() == list(range(100))


def test_a_partition_without_a_leader_fails_the_task_in_time(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 10)
    query = read(subscribe="t", **{"default.api.timeout.ms": "300"})
    cluster.elect("t", 0, -1)
    with pytest.raises(LeaderNotAvailableError, match="t-0"):
        query.table()
