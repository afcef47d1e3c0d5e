"""Ranges are resolved once, by the planner: topics, offsets, times, and what is wrong with any of them."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from spark_broker.errors import (
    BootstrapUnreachableError,
    InvalidConfigError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster
from tests.datasource.conftest import MakeRead

SCHEMA = pa.schema([("n", pa.int64())])


def numbers(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": pa.array(values, pa.int64())})


def fill(cluster: FakeCluster, topic: str, partitions: int, rows: int, *, per_batch: int = 10) -> None:
    """Partition p holds p * 1000, p * 1000 + 1, ..."""
    cluster.create(topic, partitions, schema=SCHEMA)
    for partition in range(partitions):
        for start in range(0, rows, per_batch):
            first = partition * 1000 + start
            cluster.store(topic, partition, numbers(*range(first, first + min(per_batch, rows - start))))


def test_explicit_offsets_are_read_exactly_even_inside_batches(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 2, 50)
    query = read(
        subscribe="t",
        startingOffsets=json.dumps({"t": {"0": 23, "1": -2}}),
        endingOffsets=json.dumps({"t": {"0": -1, "1": 7}}),
    )
    assert query.table()["n"].to_pylist() == [*range(23, 50), *range(1000, 1007)]


def test_assign_reads_only_these_partitions(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 3, 5)
    assert read(assign='{"t":[2,0]}').table()["n"].to_pylist() == [*range(5), *range(2000, 2005)]


def test_a_pattern_reads_every_topic_that_matches_as_a_whole(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "trip-a", 1, 2)
    fill(cluster, "trip-b", 1, 3)
    cluster.create("other-trip-a", schema=pa.schema([("x", pa.string())]))
    cluster.create("__trip-a", schema=pa.schema([("x", pa.string())]))
    rows = read(subscribePattern="(__)?trip-.*").table()
    assert rows["_topic"].to_pylist() == ["trip-a"] * 2 + ["trip-b"] * 3
    with pytest.raises(UnknownTopicOrPartitionError, match="nothing-"):
        read(subscribePattern="nothing-.*")


def test_several_topics_need_equal_schemas(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "a", 1, 2)
    fill(cluster, "b", 1, 2)
    cluster.create("c", schema=pa.schema([("n", pa.int32())]))
    assert read(subscribe="a,b").table()["_topic"].to_pylist() == ["a", "a", "b", "b"]
    with pytest.raises(InvalidConfigError, match="'a' and 'c'"):
        read(subscribe="a,c")


def test_what_does_not_exist_is_named(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 1)
    with pytest.raises(UnknownTopicOrPartitionError, match="tt"):
        read(subscribe="tt")
    with pytest.raises(UnknownTopicOrPartitionError, match="t-4"):
        read(assign='{"t":[0,4]}')


def test_offsets_must_name_every_partition_of_the_read_and_no_other(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 2, 5)
    with pytest.raises(InvalidConfigError, match="lacks t-1"):
        read(subscribe="t", startingOffsets='{"t":{"0":1}}')
    with pytest.raises(InvalidConfigError, match="names u-0"):
        read(subscribe="t", startingOffsets='{"t":{"0":1,"1":1},"u":{"0":1}}')


@pytest.mark.parametrize("which", ["startingOffsets", "endingOffsets"])
@pytest.mark.parametrize("offset", [3, 51])
def test_offsets_that_the_partition_does_not_have_are_an_error_unless_loss_is_accepted(
    cluster: FakeCluster, read: MakeRead, which: str, offset: int
) -> None:
    fill(cluster, "t", 1, 50)
    cluster.topics["t"].partitions[0].log_start_offset = 10
    options = {"subscribe": "t", which: json.dumps({"t": {"0": offset}})}
    with pytest.raises(OffsetOutOfRangeError, match="t-0 has offsets 10 to 50"):
        read(**options)
    kept = read(**options, failOnDataLoss="false").table()["n"].to_pylist()
    everything = (which == "startingOffsets") == (offset == 3)
    assert kept == (list(range(10, 50)) if everything else [])


def test_a_start_after_the_end_is_an_error(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 50)
    with pytest.raises(InvalidConfigError, match="after endingOffsets"):
        read(subscribe="t", startingOffsets='{"t":{"0":30}}', endingOffsets='{"t":{"0":20}}')


def test_times_are_looked_up(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 5)
    before, after = str(APPEND_TIME_MS - 1), str(APPEND_TIME_MS + 1)
    assert read(subscribe="t", startingTimestamp=before).table().num_rows == 5
    assert read(subscribe="t", endingTimestamp=before).table().num_rows == 0
    assert read(subscribe="t", endingTimestamp=after).table().num_rows == 5
    each = json.dumps({"t": {"0": int(before)}})
    assert read(subscribe="t", startingOffsetsByTimestamp=each).table().num_rows == 5
    with pytest.raises(OffsetOutOfRangeError, match="no record at or after"):
        read(subscribe="t", startingTimestamp=after)
    latest = read(subscribe="t", startingTimestamp=after, startingOffsetsByTimestampStrategy="latest")
    assert latest.table().num_rows == 0


def test_the_end_is_the_high_watermark_when_the_query_is_planned(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 50)
    cluster.topics["t"].partitions[0].high_watermark = 30
    query = read(subscribe="t")
    cluster.topics["t"].partitions[0].high_watermark = 50
    cluster.store("t", 0, numbers(1, 2))
    assert query.table()["n"].to_pylist() == list(range(30))


def test_min_partitions_splits_and_loses_nothing(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 2, 100)
    query = read(subscribe="t", minPartitions="8")
    assert len(query.partitions) == 8
    assert query.table()["n"].to_pylist() == [*range(100), *range(1000, 1100)]
    assert len(read(subscribe="t", maxRecordsPerPartition="30").partitions) == 8


def test_small_ranges_share_a_task_and_come_in_order(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 4, 100)
    expected = [partition * 1000 + n for partition in range(4) for n in range(100)]
    for options, tasks in (({}, 1), ({"recordsPerTask": "200"}, 2), ({"recordsPerTask": "1"}, 4)):
        query = read(subscribe="t", **options)
        assert len(query.partitions) == tasks
        assert query.table()["n"].to_pylist() == expected
    stored = sum(frame.header.length for part in cluster.topics["t"].partitions for frame in part.log)
    assert len(read(subscribe="t", bytesPerTask=str(stored // 2 + 1)).partitions) == 2
    assert len(read(subscribe="t", maxRecordsPerPartition="150").partitions) == 4


def test_an_unreachable_cluster_names_the_address(read: MakeRead) -> None:
    with pytest.raises(BootstrapUnreachableError, match=r"127\.0\.0\.1:1"):
        read(**{"bootstrap.servers": "127.0.0.1:1"}, subscribe="t")
