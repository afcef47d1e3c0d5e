"""A streaming read: every record once, across restarts, limits, failures and changes of the topic."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_broker.client.retry import Deadline
from spark_broker.errors import (
    BootstrapUnreachableError,
    InconsistentTopicIdError,
    InvalidConfigError,
    LogTruncationError,
    OffsetOutOfRangeError,
    SchemaMismatchError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import TopicPartition
from spark_broker.protocol.schema import schema_to_bytes
from spark_broker.spark import stream_session
from spark_broker.spark.stream_session import StreamSession
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster, FakePartition
from tests.datasource.conftest import MakeRead, MakeStream, Stream
from tests.datasource.test_planning import SCHEMA, fill, numbers

EARLIEST = {"startingOffsets": "earliest"}


def add(cluster: FakeCluster, partition: int, *values: int, topic: str = "t") -> None:
    cluster.store(topic, partition, numbers(*values))


def progress(query: Stream) -> dict[str, dict[str, int]]:
    """How far each partition is read, as the checkpoint has it."""
    state: dict[str, Any] = json.loads(query.offset_log[-1])["topics"]
    return {topic: topic_state["offsets"] for topic, topic_state in state.items()}


def test_each_batch_has_what_came_since_the_last(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 2, 20)
    query = stream(subscribe="t", **EARLIEST)
    assert query.numbers() == [*range(20), *range(1000, 1020)]
    assert query.trigger() is None
    add(cluster, 1, 7, 8)
    assert query.numbers() == [7, 8]
    assert progress(query) == {"t": {"0": 20, "1": 22}}


def test_a_new_query_starts_at_the_latest_and_its_first_batch_says_so(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 2, 20)
    query = stream(subscribe="t")
    first = query.trigger()
    assert first is not None
    assert first.num_rows == 0
    add(cluster, 0, 5)
    assert query.numbers() == [5]


@pytest.mark.parametrize("start", ["latest", '{"t":{"0":-1}}'])
def test_records_that_came_before_a_crash_of_the_first_batch_are_not_lost(
    cluster: FakeCluster, stream: MakeStream, start: str
) -> None:
    """The trap: Spark asks for the initial offset again, and `latest` has moved by then."""
    fill(cluster, "t", 1, 20)
    query = stream(subscribe="t", startingOffsets=start, maxOffsetsPerTrigger="10")
    assert query.plan()
    add(cluster, 0, 1, 2, 3)
    repeated = query.restart()
    assert repeated is not None
    assert repeated.num_rows == 0
    assert query.numbers() == [1, 2, 3]


def test_a_repeated_first_batch_reads_what_it_was_planned_to_read(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 20)
    query = stream(subscribe="t", startingOffsets='{"t":{"0":5}}')
    assert query.plan()
    add(cluster, 0, 1, 2, 3)
    cluster.topics["t"].partitions.append(FakePartition(0))  # startingOffsets lack it now
    repeated = query.restart()
    assert repeated is not None
    assert repeated["n"].to_pylist() == list(range(5, 20))
    assert query.numbers() == [1, 2, 3]


def test_a_later_batch_that_was_not_committed_is_repeated_as_it_was(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 20)
    query = stream(subscribe="t", **EARLIEST)
    query.trigger()
    add(cluster, 0, 1, 2)
    assert query.plan()
    add(cluster, 0, 3)
    repeated = query.restart()
    assert repeated is not None
    assert repeated["n"].to_pylist() == [1, 2]
    assert query.numbers() == [3]


def test_max_offsets_limits_a_batch_and_is_shared(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 2, 50)
    query = stream(subscribe="t", maxOffsetsPerTrigger="20", **EARLIEST)
    batches = [query.numbers() for _ in range(6)]
    assert [len(batch) for batch in batches] == [20, 20, 20, 20, 20, 0]
    assert sorted(n for batch in batches for n in batch) == [*range(50), *range(1000, 1050)]
    assert batches[0] == [*range(10), *range(1000, 1010)]


def test_no_limit_holds_when_spark_wants_all(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 50)
    query = stream(subscribe="t", maxOffsetsPerTrigger="20", maxBytesPerTrigger="1", **EARLIEST)
    table = query.trigger(unlimited=True)
    assert table is not None
    assert table.num_rows == 50


def test_max_bytes_limits_a_batch_to_whole_stored_batches(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 60)
    batch_bytes = cluster.topics["t"].partitions[0].log[0].header.length
    query = stream(subscribe="t", maxBytesPerTrigger=str(2 * batch_bytes + batch_bytes // 2), **EARLIEST)
    assert [len(query.numbers()) for _ in range(4)] == [20, 20, 20, 0]
    tiny = stream(subscribe="t", maxBytesPerTrigger="1", **EARLIEST)
    assert [len(tiny.numbers()) for _ in range(3)] == [10, 10, 10], "one stored batch at least"


def test_of_two_limits_the_smaller_holds(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 60)
    batch_bytes = cluster.topics["t"].partitions[0].log[0].header.length
    query = stream(subscribe="t", maxBytesPerTrigger=str(2 * batch_bytes), maxOffsetsPerTrigger="15", **EARLIEST)
    assert [len(query.numbers()) for _ in range(2)] == [15, 15]


def test_a_batch_waits_for_min_offsets_until_the_delay_is_over(
    cluster: FakeCluster, stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("spark_broker.spark.stream.time.monotonic", lambda: now_s)
    fill(cluster, "t", 1, 5)
    query = stream(subscribe="t", minOffsetsPerTrigger="10", maxTriggerDelay="60s", **EARLIEST)
    assert len(query.numbers()) == 5, "the first batch does not wait"
    add(cluster, 0, 1)
    assert query.trigger() is None
    add(cluster, 0, *range(2, 11))
    assert query.numbers() == list(range(1, 11))
    add(cluster, 0, 11)
    assert query.trigger() is None
    now_s += 60
    assert query.numbers() == [11]


def test_small_ranges_of_a_batch_share_a_task(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 3, 50)
    for options, tasks in (({}, 1), ({"recordsPerTask": "1"}, 3)):
        query = stream(subscribe="t", **EARLIEST, **options)
        assert query.plan()
        start, end = json.loads(json.dumps(query.reader.initialOffset())), json.loads(query.offset_log[-1])
        assert len(query.reader.partitions(start, end)) == tasks
    again = stream(subscribe="t", bytesPerTask="1", **EARLIEST)
    assert sorted(again.numbers()) == sorted(partition * 1000 + n for partition in range(3) for n in range(50))
    add(cluster, 0, 1, 2)
    add(cluster, 2, 3)
    assert again.plan()
    assert len(again.reader.partitions(*map(json.loads, again.offset_log[-2:]))) == 2, "the bytes of these are known"


def test_available_now_reads_in_limited_batches_what_there_was_and_ends(
    cluster: FakeCluster, stream: MakeStream
) -> None:
    fill(cluster, "t", 1, 50)
    query = stream(subscribe="t", maxOffsetsPerTrigger="20", minOffsetsPerTrigger="20", available_now=True, **EARLIEST)
    assert query.numbers() == list(range(20))
    add(cluster, 0, *range(500, 600))
    cluster.topics["t"].partitions.append(FakePartition(0))
    add(cluster, 1, 7)
    assert query.numbers() == list(range(20, 40))
    assert query.numbers() == list(range(40, 50)), "the last batch does not wait for minOffsetsPerTrigger"
    assert query.trigger() is None
    assert query.restart() is None
    rest = [n for _ in range(6) for n in query.numbers()]
    assert sorted(rest) == [7, *range(500, 600)]


def test_new_partitions_and_topics_are_read_from_their_first_record(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t-a", 1, 5)
    query = stream(subscribePattern="t-.*")
    query.trigger()
    cluster.topics["t-a"].partitions.append(FakePartition(1))
    add(cluster, 1, 1, 2, topic="t-a")
    assert query.numbers() == [1, 2]
    fill(cluster, "t-b", 1, 3)
    assert query.numbers() == [0, 1, 2]
    assert progress(query) == {"t-a": {"0": 5, "1": 2}, "t-b": {"0": 3}}


def test_an_assigned_stream_reads_no_other_partition(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 3, 5)
    query = stream(assign='{"t":[1]}', **EARLIEST)
    assert query.numbers() == list(range(1000, 1005))
    add(cluster, 0, 1)
    assert query.trigger() is None


def test_times_say_where_a_stream_starts(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 5)
    assert stream(subscribe="t", startingTimestamp=str(APPEND_TIME_MS - 1)).numbers() == list(range(5))
    late = stream(subscribe="t", startingTimestamp=str(APPEND_TIME_MS + 1), startingOffsetsByTimestampStrategy="latest")
    assert late.numbers() == []
    with pytest.raises(OffsetOutOfRangeError, match="no record at or after"):
        stream(subscribe="t", startingTimestamp=str(APPEND_TIME_MS + 1)).trigger()


def test_tasks_are_split_as_in_a_batch(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 2, 50)
    query = stream(subscribe="t", maxRecordsPerPartition="20", **EARLIEST)
    assert query.plan()
    initial = query.reader.initialOffset()
    assert len(query.reader.partitions(initial, json.loads(query.offset_log[-1]))) == 6


def test_a_query_goes_on_under_another_leader(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 3, 20)
    query = stream(subscribe="t", **EARLIEST)
    assert len(query.numbers()) == 60
    cluster.kill(0)
    for partition in range(3):
        add(cluster, partition, partition)
    assert query.numbers() == [0, 1, 2]
    add(cluster, 0, 9)
    query.restart()
    assert query.numbers() == [9]


def test_lost_records_fail_the_query_with_their_range_unless_loss_is_accepted(
    cluster: FakeCluster, stream: MakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    fill(cluster, "t", 1, 50)
    options = {"subscribe": "t", "maxOffsetsPerTrigger": "10", **EARLIEST}
    strict, lenient = stream(**options), stream(**options, failOnDataLoss="false")
    assert strict.numbers() == lenient.numbers() == list(range(10))
    delete_before(cluster, 30)
    with pytest.raises(OffsetOutOfRangeError, match=r"t-0: records 10 to 30 \(exclusive\) were deleted"):
        strict.trigger()
    with caplog.at_level(logging.WARNING):
        assert lenient.numbers() == list(range(30, 40))
    assert "t-0: records 10 to 30 (exclusive) were deleted" in caplog.text
    assert lenient.numbers() == list(range(40, 50))


def test_records_that_are_lost_before_a_batch_is_repeated_are_named_too(
    cluster: FakeCluster, stream: MakeStream
) -> None:
    fill(cluster, "t", 1, 50)
    strict, lenient = stream(subscribe="t", **EARLIEST), stream(subscribe="t", failOnDataLoss="false", **EARLIEST)
    assert strict.plan()
    assert lenient.plan()
    delete_before(cluster, 30)
    with pytest.raises(OffsetOutOfRangeError, match=r"t-0: records 0 to 30 \(exclusive\) were deleted"):
        strict.restart()
    repeated = lenient.restart()
    assert repeated is not None
    assert repeated["n"].to_pylist() == list(range(30, 50))


def delete_before(cluster: FakeCluster, offset: int) -> None:
    part = cluster.topics["t"].partitions[0]
    part.log_start_offset = offset
    part.log = [frame for frame in part.log if frame.header.base_offset >= offset]


def test_a_recreated_topic_is_noticed_even_where_its_offsets_fit(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 20)
    strict, lenient = stream(subscribe="t", **EARLIEST), stream(subscribe="t", failOnDataLoss="false", **EARLIEST)
    strict.trigger()
    lenient.trigger()
    del cluster.topics["t"]
    fill(cluster, "t", 1, 30)
    with pytest.raises(InconsistentTopicIdError, match="t-0: the topic was deleted and created again"):
        strict.trigger()
    assert lenient.numbers() == list(range(30))
    add(cluster, 0, 5)
    assert lenient.numbers() == [5]


def test_a_batch_of_a_topic_that_was_recreated_is_not_repeated_on_the_new_one(
    cluster: FakeCluster, stream: MakeStream
) -> None:
    fill(cluster, "t", 1, 20)
    strict, lenient = stream(subscribe="t", **EARLIEST), stream(subscribe="t", failOnDataLoss="false", **EARLIEST)
    assert strict.plan()
    assert lenient.plan()
    del cluster.topics["t"]
    fill(cluster, "t", 1, 30)
    with pytest.raises(InconsistentTopicIdError):
        strict.restart()
    repeated = lenient.restart()
    assert repeated is not None
    assert repeated.num_rows == 0
    assert lenient.numbers() == list(range(30))


def test_a_deleted_topic_is_data_loss_and_its_neighbours_are_read_on(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "a", 1, 5)
    fill(cluster, "b", 1, 5)
    options = {"subscribe": "a,b", **EARLIEST}
    strict, lenient = stream(**options), stream(**options, failOnDataLoss="false")
    strict.trigger()
    lenient.trigger()
    del cluster.topics["a"]
    add(cluster, 0, 7, topic="b")
    with pytest.raises(UnknownTopicOrPartitionError, match="a-0: it was deleted"):
        strict.trigger()
    assert lenient.numbers() == [7]
    assert progress(lenient) == {"b": {"0": 6}}


GONE = {"failOnDataLoss": "false", "default.api.timeout.ms": "5000"}


def planned_twice(cluster: FakeCluster, stream: MakeStream) -> tuple[Stream, Stream]:
    """A strict and a lenient query of the topics `a` and `b`, each of which has planned a batch of all 40 records."""
    fill(cluster, "a", 1, 20)
    fill(cluster, "b", 1, 20)
    strict, lenient = stream(subscribe="a,b", **EARLIEST), stream(subscribe="a,b", **EARLIEST, **GONE)
    assert strict.plan()
    assert lenient.plan()
    return strict, lenient


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("anew", [None, SCHEMA, pa.schema([("other", pa.string())])])
def test_a_topic_that_goes_before_the_tasks_of_a_batch_is_passed_over(
    cluster: FakeCluster, stream: MakeStream, caplog: pytest.LogCaptureFixture, anew: pa.Schema | None
) -> None:
    """As in Spark's KafkaDontFailOnDataLossSuite. A restart of the query passes over it, too."""
    strict, lenient = planned_twice(cluster, stream)
    replace_topic(cluster, anew)
    with pytest.raises(UnknownTopicOrPartitionError if anew is None else InconsistentTopicIdError):
        strict.run()
    with caplog.at_level(logging.WARNING):
        assert lenient.run()["n"].to_pylist() == list(range(20)), "those of b"
    assert "passing over what was planned of a-0" in caplog.text
    if anew is SCHEMA:
        assert lenient.numbers() == [900], "the new topic, from its first record"


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("anew", [None, SCHEMA, pa.schema([("other", pa.string())])])
def test_a_topic_that_goes_between_offsets_and_ranges_is_passed_over(
    cluster: FakeCluster, stream: MakeStream, anew: pa.Schema | None
) -> None:
    """The planner has newer metadata than the plan of the offsets."""
    strict, lenient = planned_twice(cluster, stream)
    replace_topic(cluster, anew)
    for query in (strict, lenient):
        session = query.reader._connected()  # type: ignore[attr-defined]
        session._metadata.refresh(Deadline.after_ms(5000))
    with pytest.raises(UnknownTopicOrPartitionError if anew is None else InconsistentTopicIdError):
        strict.run()
    assert lenient.run()["n"].to_pylist() == list(range(20))


def replace_topic(cluster: FakeCluster, anew: pa.Schema | None) -> None:
    """Delete the topic `a`, and create another one of this schema (None: not)."""
    del cluster.topics["a"]
    if anew is not None:
        cluster.create("a", 1, schema=anew)
        values = pa.array([900], pa.int64()).cast(anew.field(0).type)
        cluster.store("a", 0, pa.record_batch([values], schema=anew))


@pytest.mark.usefixtures("short_grace")
def test_a_topic_that_goes_while_the_next_batch_is_planned_is_passed_over(
    cluster: FakeCluster, stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cluster, "a", 1, 20)
    fill(cluster, "b", 1, 20)
    queries = [stream(subscribe="a,b", maxBytesPerTrigger="1", **EARLIEST, **options) for options in ({}, GONE)]
    sizes = StreamSession.sizes

    def deleting(session: StreamSession, begin: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        cluster.topics.pop("a", None)
        session._metadata.refresh(Deadline.after_ms(5000))
        return sizes(session, begin)

    for query in queries:
        query.trigger()
    monkeypatch.setattr(StreamSession, "sizes", deleting)
    with pytest.raises(UnknownTopicOrPartitionError, match="a-0 does not exist"):
        queries[0].trigger()
    fill(cluster, "a", 1, 20)
    assert queries[1].numbers() == list(range(10, 20))


def test_a_log_that_was_cut_is_noticed_whether_it_has_grown_again_or_not(
    cluster: FakeCluster, stream: MakeStream
) -> None:
    fill(cluster, "t", 1, 50)
    queries = [stream(subscribe="t", **EARLIEST) for _ in range(2)]
    lenient = stream(subscribe="t", failOnDataLoss="false", **EARLIEST)
    for query in (*queries, lenient):
        query.trigger()
    cluster.cut("t", 0, 3)
    with pytest.raises(LogTruncationError, match="t-0: it was read up to 50"):
        queries[0].trigger()
    add(cluster, 0, *range(900, 930))
    with pytest.raises(LogTruncationError, match="t-0: it was read up to 50"):
        queries[1].trigger()
    assert lenient.numbers() == list(range(920, 930)), "what took the offsets of what was read is not told apart"


@pytest.mark.parametrize("limit", [{"maxOffsetsPerTrigger": "40"}, {"maxBytesPerTrigger": "FOUR"}])
def test_a_cut_is_noticed_where_a_batch_was_limited(
    cluster: FakeCluster, stream: MakeStream, limit: dict[str, str]
) -> None:
    fill(cluster, "t", 1, 50)
    four_batches = 4 * cluster.topics["t"].partitions[0].log[0].header.length
    limits = {name: value.replace("FOUR", str(four_batches)) for name, value in limit.items()}
    queries = [stream(subscribe="t", **limits, **EARLIEST) for _ in range(2)]
    for query in queries:
        assert query.numbers() == list(range(40))
    assert queries[1].plan(), "up to 50"
    cluster.cut("t", 0, 3)
    add(cluster, 0, *range(900, 940))
    for query in queries:
        with pytest.raises(LogTruncationError):
            query.restart() if query is queries[1] else query.trigger()


def test_a_cut_of_what_a_limited_batch_does_not_read_is_no_loss(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 50)
    query = stream(subscribe="t", maxOffsetsPerTrigger="20", **EARLIEST)
    assert query.plan()
    cluster.cut("t", 0, 3)
    add(cluster, 0, 900)
    repeated = query.restart()
    assert repeated is not None
    assert repeated["n"].to_pylist() == list(range(20))
    assert query.numbers() == [*range(20, 30), 900]


def test_a_group_has_the_epoch_of_a_limited_batch(cluster: FakeCluster, stream: MakeStream) -> None:
    """A consumer that goes on from there compares it with the log."""
    fill(cluster, "t", 1, 20)
    query = stream(subscribe="t", group="reports", maxOffsetsPerTrigger="15", **EARLIEST)
    query.trigger()
    query.trigger()
    (offset,) = cluster.committed.values()
    assert (offset.offset, offset.leader_epoch) == (15, 0)


def test_what_is_not_committed_yet_waits(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 20)
    query = stream(subscribe="t", **EARLIEST)
    query.trigger()
    cluster.topics["t"].partitions[0].high_watermark = 20
    add(cluster, 0, 1)
    assert query.trigger() is None
    cluster.topics["t"].partitions[0].high_watermark = 21
    assert query.numbers() == [1]


def test_a_column_that_is_added_while_a_query_runs_is_left_out(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 5)
    query = stream(subscribe="t", **EARLIEST)
    query.trigger()
    wider = pa.schema([*SCHEMA, pa.field("note", pa.string())])
    cluster.topics["t"].schemas.append(schema_to_bytes(wider))
    cluster.store("t", 0, pa.RecordBatch.from_pydict({"n": [7], "note": ["new"]}, schema=wider), schema_id=1)
    assert query.numbers() == [7]
    again = stream(subscribe="t", **EARLIEST).trigger()
    assert again is not None
    assert again["note"].to_pylist() == [None] * 5 + ["new"], "a query that starts now has it"


def test_a_column_whose_type_changed_fails_the_query_with_both_types(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 5)
    query = stream(subscribe="t", **EARLIEST)
    query.trigger()
    other = pa.schema([pa.field("n", pa.float64())])
    cluster.topics["t"].schemas.append(schema_to_bytes(other))
    cluster.store("t", 0, pa.RecordBatch.from_pydict({"n": [7.0]}, schema=other), schema_id=1)
    with pytest.raises(SchemaMismatchError, match=r"'n' as int64; in the topic it is double"):
        query.trigger()


def test_columns_and_a_users_schema_project(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 5)
    table = stream(subscribe="t", columns="_offset", **EARLIEST).trigger()
    assert table is not None
    assert table.to_pydict() == {"_offset": list(range(5))}
    schema = StructType([StructField("n", LongType())])
    assert stream(schema=schema, subscribe="t", **EARLIEST).numbers() == list(range(5))


def test_a_checkpoint_of_another_source_is_refused(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 5)
    query = stream(subscribe="t")
    for foreign in ({"t": {"0": 5}}, {"topics": {"t": {"id": "x", "offsets": {"0": -1}, "ends": {}}}}):
        with pytest.raises(InvalidConfigError, match="not this source's"):
            query.reader.latestOffset(foreign, query.reader.getDefaultReadLimit())


def test_a_dead_address_is_an_error_in_time(stream: MakeStream) -> None:
    schema = StructType([StructField("n", LongType())])
    dead = {"bootstrap.servers": "127.0.0.1:1", "default.api.timeout.ms": "500"}
    with pytest.raises(BootstrapUnreachableError, match=r"127\.0\.0\.1:1"):
        stream(schema=schema, subscribe="t", **dead).trigger()


def test_a_group_has_the_progress_of_the_query_up_to_its_last_batch(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 2, 20)
    query = stream(subscribe="t", group="reports", maxOffsetsPerTrigger="20", **EARLIEST)
    while query.trigger() is not None:
        pass
    committed = {key: offset.offset for key, offset in cluster.committed.items()}
    assert committed == {("reports", "t", 0): 20, ("reports", "t", 1): 20}
    before = len(cluster.commits)
    assert query.trigger() is None
    assert len(cluster.commits) == before, "nothing moved"


def test_the_progress_of_a_quiet_query_is_published_again(
    cluster: FakeCluster, stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: no record came for a week. The coordinator forgot the group of a query that was running."""
    fill(cluster, "t", 1, 20)
    query = stream(subscribe="t", group="reports", **EARLIEST)
    while query.trigger() is not None:
        pass
    before = len(cluster.commits)
    monkeypatch.setattr(stream_session, "RENEW_S", 0.0)
    assert query.trigger() is None
    assert len(cluster.commits) > before


def test_a_batch_that_was_not_committed_is_not_published(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 20)
    query = stream(subscribe="t", group="reports", **EARLIEST)
    assert query.plan()
    assert {offset.offset for offset in cluster.committed.values()} == {0}


def test_a_running_stream_keeps_its_columns_while_the_topic_gets_more(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 3)
    query = stream(subscribe="t", **EARLIEST)
    assert query.numbers() == [0, 1, 2]
    topic = cluster.topics["t"]
    wider = SCHEMA.append(pa.field("later", pa.string()))
    topic.schemas.append(schema_to_bytes(wider))
    rows = pa.RecordBatch.from_pylist([{"n": 7, "later": "x"}], schema=wider)
    cluster.store("t", 0, rows, schema_id=1)
    batch = query.trigger()
    assert batch is not None
    assert batch["n"].to_pylist() == [7]
    assert "later" not in batch.column_names
    anew = stream(subscribe="t", **EARLIEST).trigger()
    assert anew is not None
    assert anew["later"].to_pylist() == [None, None, None, "x"]


def test_a_stream_ends_with_an_error_when_a_column_of_it_becomes_wider(
    cluster: FakeCluster, stream: MakeStream
) -> None:
    narrow = pa.schema([("n", pa.int32())])
    cluster.create("t", 1, schema=narrow)
    cluster.store("t", 0, pa.record_batch([pa.array([1], pa.int32())], schema=narrow))
    query = stream(subscribe="t", **EARLIEST)
    assert query.numbers() == [1]
    wide = pa.schema([("n", pa.int64())])
    cluster.topics["t"].schemas.append(schema_to_bytes(wide))
    cluster.store("t", 0, pa.record_batch([pa.array([2**40])], schema=wide), schema_id=1)
    with pytest.raises(SchemaMismatchError, match="'n' as int32; in the topic it is int64"):
        query.trigger()
    assert stream(subscribe="t", **EARLIEST).numbers() == [1, 2**40]


def test_a_stream_of_ranges_has_a_row_for_each_range(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 2, 20)
    query = stream(subscribe="t", ranges="true", maxOffsetsPerTrigger="10", **EARLIEST)
    topic_id = cluster.topics["t"].topic_id
    first, second = query.trigger(), query.trigger()
    assert first is not None
    assert first.to_pylist() == [
        {"topic": "t", "topicId": topic_id, "partition": number, "startOffset": 0, "endOffset": 5} for number in (0, 1)
    ]
    assert second is not None
    assert [(row["startOffset"], row["endOffset"]) for row in second.to_pylist()] == [(5, 10), (5, 10)]


def test_a_batch_of_ranges_that_is_repeated_has_the_same_rows(cluster: FakeCluster, stream: MakeStream) -> None:
    fill(cluster, "t", 1, 20)
    query = stream(subscribe="t", ranges="true", **EARLIEST)
    assert query.plan()
    add(cluster, 0, 1, 2, 3)
    repeated = query.restart()
    assert repeated is not None
    assert [(row["startOffset"], row["endOffset"]) for row in repeated.to_pylist()] == [(0, 20)]


def test_a_batch_query_reads_no_ranges(cluster: FakeCluster, read: MakeRead) -> None:
    fill(cluster, "t", 1, 20)
    with pytest.raises(InvalidConfigError, match="ranges = true is for streams"):
        read(subscribe="t", ranges="true")
