"""`spark-broker perf`: it measures what it says, and counts right. No time is asserted."""

from __future__ import annotations

import pytest

from spark_broker.cli.measure import latency_of, random_records
from spark_broker.errors import InvalidDataError
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster


def stored(cluster: FakeCluster, topic: str) -> int:
    return sum(part.log_end_offset for part in cluster.topics[topic].partitions)


def test_perf_produce_appends_the_records_and_the_warm_up(cluster: FakeCluster, run: Run) -> None:
    ended = run("perf", "produce", "--records", 1000, "--batch-records", 100, "--warmup", 300, "-o", "json")
    assert ended.status == 0
    assert (ended.json["records"], ended.json["batches"], ended.json["latency"]["count"]) == (1000, 10, 10)
    assert stored(cluster, "perf") == 1300
    assert 0 < ended.json["latency"]["p50_ms"] <= ended.json["latency"]["max_ms"]
    assert ended.json["records_per_s"] > 0


def test_perf_consume_reads_what_is_there(cluster: FakeCluster, run: Run) -> None:
    run("perf", "produce", "--records", 1000, "--batch-records", 100, "--warmup", 0)
    assert run("perf", "consume", "-o", "json").json["records"] == 1000
    assert "1,000" in run("perf", "consume").out


def test_an_existing_topic_is_measured_as_it_is(cluster: FakeCluster, run: Run) -> None:
    cluster.create("mine", 1)
    ended = run("perf", "produce", "--topic", "mine", "--records", 10, "--warmup", 0, "--acks", 1)
    assert ended.status == 0
    assert "acks=1, 100-byte records" in ended.out
    assert stored(cluster, "mine") == 10


def test_acks_that_are_none_are_refused(cluster: FakeCluster, run: Run) -> None:
    ended = run("perf", "produce", "--acks", "2", "--records", 10)
    assert ended.status == 1
    assert "must be one of 0, 1, all" in ended.err


def test_records_have_the_size_that_was_asked_for() -> None:
    batch = random_records(7, 100)
    assert [len(value) for value in batch.column("value").to_pylist()] == [100] * 7
    assert batch.column("key").null_count == 7
    with pytest.raises(InvalidDataError):
        random_records(0, 100)


@pytest.mark.parametrize(("count", "size"), [(2200, 1_000_000), (1, 3_000_000_000), (2**31, 0)])
def test_a_batch_of_which_arrow_cannot_say_where_values_end_is_refused(
    cluster: FakeCluster, run: Run, count: int, size: int
) -> None:
    """Story: offsets of 32 bits wrapped around, and pages of a traceback followed, beside a topic that stayed."""
    ended = run("perf", "produce", "--records", count, "--batch-records", count, "--record-size", size)
    assert ended.status == 1
    assert "[INVALID_DATA] a batch of" in ended.err
    assert "their values may have 2,147,483,647 bytes together" in ended.err
    assert cluster.topics == {}


def test_percentiles_are_in_milliseconds() -> None:
    latency = latency_of([0.001 * i for i in range(101)])
    assert (latency.count, latency.p50_ms, latency.p95_ms, latency.p99_ms, latency.max_ms) == (
        101,
        50.0,
        95.0,
        99.0,
        100.0,
    )
    assert latency_of([]).count == 0
