"""A write without Spark: planned, run as attempts and committed in copies that were pickled between, as Spark does."""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib.util
import pickle  # noqa: TID251 - Spark itself carries writers and messages to its processes this way
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict, WriterCommitMessage
from pyspark.sql.pandas.types import from_arrow_schema

from pyspark_spark_broker import DefaultSource
from spark_broker.client.cluster_view import TopicView
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.partitioner import row_partitions
from spark_broker.client.retry import Deadline
from spark_broker.errors import (
    BootstrapUnreachableError,
    InconsistentTopicIdError,
    InvalidConfigError,
    InvalidDataError,
    InvalidSchemaError,
    InvalidTxnStateError,
    InvariantError,
    MessageTooLargeError,
    SchemaMismatchError,
    SparkBrokerError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.messages import AbortTransactionRequest, CommitTransactionRequest, JoinTransactionRequest
from spark_broker.spark.message_first import HIDE_TRACEBACK
from spark_broker.spark.task_write import GATHERED_BYTES
from spark_broker.spark.writer import ENDING_MODULE, BatchWriter, StreamWriter, Version, Written, write_attempt
from tests.client.fake_broker import FakeCluster
from tests.client.test_transactions import committed
from tests.datasource.conftest import MakeRead

T = TypeVar("T")

FLIGHTS = pa.schema([("dest", pa.string()), ("delay", pa.int32()), pa.field("n", pa.int64(), nullable=False)])


@pytest.fixture(autouse=True)
def traceback_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error hides its frames for the rest of its process: outside of tests, that process is a worker of Spark."""
    monkeypatch.setenv(HIDE_TRACEBACK, "")


def copied(value: T) -> T:
    return pickle.loads(pickle.dumps(value))  # type: ignore[no-any-return]


@dataclass
class Write:
    """A batch write of these rows, as Spark runs it."""

    writer: BatchWriter

    def attempt(self, *batches: pa.RecordBatch) -> WriterCommitMessage:
        return copied(copied(self.writer).write(iter(batches)))

    def commit(self, *messages: WriterCommitMessage) -> None:
        copied(self.writer).commit(list(messages))

    def abort(self) -> None:
        copied(self.writer).abort([None, None])


MakeWrite = Callable[..., Write]


@pytest.fixture
def write(cluster: FakeCluster) -> MakeWrite:
    """`write(schema, topic="t", ...)`: options as keywords; planned."""

    def make(schema: pa.Schema, **options: str) -> Write:
        source = DefaultSource(CaseInsensitiveDict(settings(cluster, **options)))
        writer = copied(source).writer(from_arrow_schema(schema), overwrite=False)
        assert isinstance(writer, BatchWriter)
        return Write(writer)

    return make


def settings(cluster: FakeCluster, **options: str) -> dict[str, str]:
    return {"bootstrap.servers": cluster.bootstrap, "retry.backoff.ms": "5", **options}


def save(write: MakeWrite, rows: pa.RecordBatch, **options: str) -> None:
    planned = write(rows.schema, **options)
    planned.commit(planned.attempt(rows))


def strings(**columns: Iterable[str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: pa.array(list(v), pa.string()) for name, v in columns.items()})


def flights(start: int, end: int) -> pa.RecordBatch:
    numbers = range(start, end)
    rows = {"dest": [f"D{n % 7}" for n in numbers], "delay": [n % 90 for n in numbers], "n": list(numbers)}
    return pa.RecordBatch.from_pydict(rows, schema=FLIGHTS)


def test_kafkas_columns_are_text_or_binary(cluster: FakeCluster, write: MakeWrite, read: MakeRead) -> None:
    cluster.create("t")
    when = dt.datetime(2020, 1, 1, 12, tzinfo=dt.UTC)
    rows = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k", None], pa.binary()),
            "Value": pa.array(["a", None], pa.string()),
            "headers": pa.array(
                [[{"key": "h", "value": b"1"}], None],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
            "timestamp": pa.array([when, when], pa.timestamp("us", tz="Europe/Berlin")),
            "another": pa.array([1, 2]),
        }
    )

    save(write, rows, topic="t")

    stored = read(subscribe="t", includeHeaders="true").table()
    assert stored.select(["key", "value", "headers", "timestamp"]).to_pylist() == [
        {"key": b"k", "value": b"a", "headers": [{"key": "h", "value": b"1"}], "timestamp": when},
        {"key": None, "value": None, "headers": None, "timestamp": when},
    ]


def test_a_record_without_a_timestamp_gets_that_of_its_append(
    cluster: FakeCluster, write: MakeWrite, read: MakeRead
) -> None:
    cluster.create("t")
    before = dt.datetime.now(dt.UTC)
    save(write, strings(value=["a"]), topic="t")
    (when,) = read(subscribe="t").table()["timestamp"].to_pylist()
    assert before <= when <= dt.datetime.now(dt.UTC)


def test_columns_of_a_typed_topic_go_by_name_and_are_widened(
    cluster: FakeCluster, write: MakeWrite, read: MakeRead
) -> None:
    cluster.create("f", schema=FLIGHTS)
    rows = pa.RecordBatch.from_pydict(
        {
            "N": pa.array([1, 2], pa.int32()),
            "dest": pa.array(["BOS", None], pa.large_string()),
            "_offset": pa.array([7, 8], pa.int64()),
        }
    )
    save(write, rows, topic="f")
    stored = read(subscribe="f", columns="dest,delay,n").table()
    assert stored.to_pydict() == {"dest": ["BOS", None], "delay": [None, None], "n": [1, 2]}


def test_rows_go_to_the_partitions_of_the_python_client_and_keep_their_order(
    cluster: FakeCluster, write: MakeWrite
) -> None:
    cluster.create("f", 5, schema=FLIGHTS, config={"key.columns": "dest"})
    rows = flights(0, 1000)
    expected = row_partitions(rows, ("dest",), 5)
    assert expected is not None

    save(write, rows, topic="f")

    for partition in range(5):
        numbers = [row["n"] for row in cluster.rows("f", partition)]
        assert numbers == np.flatnonzero(expected == partition).tolist()


def test_a_row_may_name_its_partition(cluster: FakeCluster, write: MakeWrite) -> None:
    cluster.create("t", 3)
    rows = strings(key=["a", "b", "c", "d"], value=["0", "1", "2", "3"])
    rows = rows.append_column("partition", pa.array([2, None, 0, 2], pa.int32()))
    keyed = row_partitions(strings(key=["b"]), ("key",), 3)
    assert keyed is not None

    save(write, rows, topic="t")

    stored = [[row["value"] for row in cluster.rows("t", partition)] for partition in range(3)]
    expected: list[list[bytes]] = [[b"2"], [], [b"0", b"3"]]
    expected[keyed[0]].append(b"1")
    assert list(map(Counter, stored)) == list(map(Counter, expected))
    with pytest.raises(UnknownTopicOrPartitionError, match="column 'partition' has 3; 't' has partitions 0 to 2"):
        save(write, rows.set_column(2, "partition", pa.array([0, 0, 3, 0], pa.int32())), topic="t")


def test_rows_without_a_key_take_turns_at_partitions_that_have_leaders(cluster: FakeCluster, write: MakeWrite) -> None:
    cluster.create("t", 3)
    cluster.elect("t", 1, -1)
    rows = strings(value=["x" * 1000] * (3 * GATHERED_BYTES // 1000))
    planned = write(rows.schema, topic="t")
    thousands = [rows.slice(start, 1000) for start in range(0, rows.num_rows, 1000)]
    planned.commit(planned.attempt(*thousands))
    counts = [len(cluster.rows("t", partition)) for partition in range(3)]
    assert sum(counts) == rows.num_rows
    assert counts[0]
    assert not counts[1]
    assert counts[2]


def test_each_row_may_name_its_topic(cluster: FakeCluster, write: MakeWrite, read: MakeRead) -> None:
    cluster.create("words", 2)
    cluster.create("typed", schema=pa.schema([("value", pa.string())]))
    rows = strings(topic=["words", "typed", "words"], value=["a", "b", "c"])

    save(write, rows)

    assert sorted(read(subscribe="words").table()["value"].to_pylist()) == [b"a", b"c"]
    assert read(subscribe="typed").table()["value"].to_pylist() == ["b"]
    with pytest.raises(InvalidDataError, match="column 'topic' has 1 nulls"):
        save(write, strings(topic=["words", None], value=["a", "b"]))
    with pytest.raises(UnknownTopicOrPartitionError, match="'elsewhere'"):
        save(write, strings(topic=["elsewhere"], value=["a"]))
    save(write, strings(topic=["elsewhere"], value=["d"]), topic="words")
    assert read(subscribe="words").table().num_rows == 3


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"dest": pa.array(["a"]), "delay": pa.array([1])}, "column 'n' .int64. is missing and is not nullable"),
        ({"n": pa.array([1]), "dset": pa.array(["a"])}, "unknown column 'dset' .*did you mean 'dest'"),
        ({"n": pa.array(["1"])}, "column 'n' is string; the topic's schema has int64"),
        ({"n": pa.array([1]), "N": pa.array([1])}, "two columns named 'N'"),
        ({}, "no columns"),
    ],
)
def test_a_dataframe_that_does_not_fit_is_refused_when_it_is_planned(
    cluster: FakeCluster, write: MakeWrite, columns: dict[str, pa.Array], message: str
) -> None:
    cluster.create("f", schema=FLIGHTS)
    with pytest.raises(SparkBrokerError, match=message):
        write(pa.table(columns).schema, topic="f")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": pa.array(["a"])}, "column 'value' is missing"),
        ({"value": pa.array([1])}, "column 'value' is int64; the topic's schema has binary"),
        ({"value": pa.array(["a"]), "partition": pa.array(["1"])}, "column 'partition' is string"),
        ({"value": pa.array(["a"]), "headers": pa.array(["1"])}, "column 'headers' is string"),
        # Spark would go by its session's zone.
        ({"value": pa.array(["a"]), "timestamp": pa.array([0], pa.timestamp("us"))}, "Convert it, by the zone"),
    ],
)
def test_what_is_no_record_of_kafka_is_refused_when_it_is_planned(
    cluster: FakeCluster, write: MakeWrite, columns: dict[str, pa.Array], message: str
) -> None:
    cluster.create("t")
    with pytest.raises(SchemaMismatchError, match=message):
        write(pa.table(columns).schema, topic="t")


def test_a_topic_must_be_named(cluster: FakeCluster, write: MakeWrite) -> None:
    with pytest.raises(SchemaMismatchError, match="give the option topic, or a column 'topic'"):
        write(strings(value=["a"]).schema)
    with pytest.raises(SchemaMismatchError, match="column 'topic' is int64"):
        write(pa.schema([("topic", pa.int64()), ("value", pa.string())]))


def test_values_that_do_not_fit_fail_the_attempt_and_nothing_is_seen(cluster: FakeCluster, write: MakeWrite) -> None:
    cluster.create("f", schema=FLIGHTS)
    nulls = pa.RecordBatch.from_pydict({"n": pa.array([1, None], pa.int64())})
    with pytest.raises(SchemaMismatchError, match="topic 'f': column 'n' is not nullable and has 1 nulls"):
        save(write, nulls, topic="f")
    large = pa.RecordBatch.from_pydict({"n": pa.array([1]), "delay": pa.array([2**31])})
    with pytest.raises(SchemaMismatchError, match="column 'delay' is int64 and row 0 does not fit the topic's int32"):
        save(write, large, topic="f")
    assert cluster.rows("f", 0) == []


def test_a_topic_that_is_not_there_and_a_dead_address_are_named(cluster: FakeCluster, write: MakeWrite) -> None:
    with pytest.raises(UnknownTopicOrPartitionError, match="'nowhere' does not exist"):
        write(strings(value=["a"]).schema, topic="nowhere")
    with pytest.raises(BootstrapUnreachableError, match=r"127\.0\.0\.1:1"):
        write(strings(value=["a"]).schema, topic="t", **{"bootstrap.servers": "127.0.0.1:1"})


def test_a_batch_is_cut_to_what_the_topic_takes_and_one_large_row_is_refused(
    cluster: FakeCluster, write: MakeWrite
) -> None:
    cluster.create("t", config={"max.message.bytes": "10000"})
    save(write, strings(value=["x" * 500] * 100), topic="t")
    assert len(cluster.rows("t", 0)) == 100
    with pytest.raises(MessageTooLargeError):
        save(write, strings(value=["x" * 20_000]), topic="t")


def test_everything_is_acknowledged_before_an_attempt_ends_and_seen_when_it_is_committed(
    cluster: FakeCluster, write: MakeWrite
) -> None:
    cluster.create("t", 2)
    planned = write(strings(value=["a"]).schema, topic="t")
    first = planned.attempt(strings(value=["a"]))
    lost = planned.attempt(strings(value=["b"]))
    second = planned.attempt(strings(value=["b"]))
    empty = planned.attempt()
    assert sum(len(cluster.rows("t", partition)) for partition in range(2)) == 3
    assert committed(cluster) == [[], []]

    planned.commit(first, second, empty)

    assert sorted(value for part in committed(cluster) for value in part) == ["a", "b"]
    assert isinstance(lost, Written)
    assert lost.rows == 1


def test_an_aborted_write_is_never_seen(cluster: FakeCluster, write: MakeWrite) -> None:
    cluster.create("t")
    planned = write(strings(value=["a"]).schema, topic="t")
    planned.attempt(strings(value=["a"]))
    planned.abort()
    assert committed(cluster) == [[]]
    save(write, strings(value=["b"]), topic="t")
    assert committed(cluster) == [["b"]]


def test_an_abort_after_the_commit_changes_nothing(cluster: FakeCluster, write: MakeWrite) -> None:
    """Spark aborts when a commit raises. A commit also raises when its outcome cannot be known."""
    cluster.create("t")
    planned = write(strings(value=["a"]).schema, topic="t")
    planned.commit(planned.attempt(strings(value=["a"])))
    planned.abort()
    assert committed(cluster) == [["a"]]


def test_an_abort_without_a_cluster_says_so_and_raises_nothing(
    cluster: FakeCluster, write: MakeWrite, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create("t")
    planned = write(strings(value=["a"]).schema, topic="t", **{"delivery.timeout.ms": "200"})
    for broker in range(3):
        cluster.kill(broker, fail_over=False)
    planned.abort()
    assert "was not aborted" in caplog.text


def test_a_version_is_written_once_for_each_topic(cluster: FakeCluster, write: MakeWrite) -> None:
    cluster.create("t")
    cluster.create("u")
    for topic in ("t", "t", "u"):
        for version, value in (("1", "a"), ("3", "b"), ("2", "c")):
            save(write, strings(value=[value]), topic=topic, txnAppId="app", txnVersion=version)
    assert committed(cluster, "t") == [["a", "b"]]
    assert committed(cluster, "u") == [["a", "b"]]
    cluster.create("t")  # created again: what it had is gone
    save(write, strings(value=["a"]), topic="t", txnAppId="app", txnVersion="1")
    assert committed(cluster, "t") == [["a"]]


@pytest.mark.parametrize(("options", "single_use"), [({}, True), ({"txnAppId": "app", "txnVersion": "1"}, False)])
def test_the_name_of_a_write_without_txn_app_id_may_be_forgotten(
    cluster: FakeCluster, write: MakeWrite, options: dict[str, str], single_use: bool
) -> None:
    """Otherwise the coordinator would remember one more name for every write there ever was."""
    cluster.create("t")
    planned = write(strings(value=["a"]).schema, topic="t", **options)
    planned.commit(planned.attempt(strings(value=["a"])))
    save(write, strings(value=["a"]).slice(0, 0), topic="t", **options)
    planned.abort()
    kinds = (JoinTransactionRequest, CommitTransactionRequest, AbortTransactionRequest)
    asked = [request for _, request in cluster.calls if isinstance(request, kinds)]
    assert {type(request) for request in asked} == set(kinds)
    assert {request.single_use for request in asked} == {single_use}


def test_a_topic_that_is_created_again_fails_the_tasks_that_come_later(cluster: FakeCluster, write: MakeWrite) -> None:
    """Story: Spark repeated a task that had failed so. It wrote to the new topic, and the write succeeded without the
    rows of the tasks that had ended before; a rerun with its version wrote the others twice."""
    version = {"topic": "t", "txnAppId": "app", "txnVersion": "1"}
    cluster.create("t")
    planned = write(strings(value=["a"]).schema, **version)
    first = planned.attempt(strings(value=["a"]))
    cluster.create("t")
    for _ in range(2):
        with pytest.raises(InconsistentTopicIdError, match=r"'t' was deleted and created again -> Write everything"):
            planned.attempt(strings(value=["b"]))
    with pytest.raises(InconsistentTopicIdError):
        planned.commit(first)
    planned.abort()
    assert committed(cluster) == [[]]
    save(write, strings(value=["a", "b"]), **version)
    assert committed(cluster) == [["a", "b"]]


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("by_column", [True, False])
def test_a_write_whose_topic_is_deleted_before_its_commit_fails(
    cluster: FakeCluster, write: MakeWrite, by_column: bool, again: bool
) -> None:
    """Also where each row names its topic, and so each task looks for it."""
    cluster.create("t")
    cluster.create("u")
    rows = [strings(topic=[topic], value=[topic]) for topic in ("t", "u")]
    planned = write(rows[0].schema, **({} if by_column else {"topic": "t"}))
    messages = [planned.attempt(part) for part in rows]
    del cluster.topics["t"]
    if again:
        cluster.create("t")
    if again and by_column:
        messages.append(planned.attempt(rows[0]))
    with pytest.raises(InconsistentTopicIdError, match="was deleted"):
        planned.commit(*messages)
    planned.abort()
    assert committed(cluster, "u") == [[]]
    assert not again or committed(cluster, "t") == [[]]


def test_a_task_finds_its_topic_also_where_brokers_lag_behind(
    cluster: FakeCluster, write: MakeWrite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker that it asks shows the topic that was deleted; the controller knows the one of the plan."""
    old = cluster.create("t")
    new = cluster.create("t")
    planned = write(strings(value=["a"]).schema, topic="t")
    real = ClusterMetadata.topic
    lagging = ["t"]

    def topic(metadata: ClusterMetadata, name: str, deadline: Deadline, *, partition: int = 0) -> TopicView:
        view = real(metadata, name, deadline, partition=partition)
        if name not in lagging:
            return view
        lagging.remove(name)
        return dataclasses.replace(view, topic_id=old.topic_id)

    monkeypatch.setattr(ClusterMetadata, "topic", topic)
    planned.commit(planned.attempt(strings(value=["a"])))
    assert lagging == []
    assert cluster.topics["t"] is new
    assert committed(cluster) == [["a"]]


def test_a_version_over_several_topics_is_written_once(cluster: FakeCluster, write: MakeWrite) -> None:
    cluster.create("t")
    cluster.create("u")
    for _ in range(2):
        save(write, strings(topic=["t", "u"], value=["a", "b"]), txnAppId="app", txnVersion="0")
    assert (committed(cluster, "t"), committed(cluster, "u")) == ([["a"]], [["b"]])


def test_without_a_transaction_rows_are_seen_at_once(cluster: FakeCluster, write: MakeWrite) -> None:
    cluster.create("t")
    planned = write(strings(value=["a"]).schema, topic="t", transactional="false")
    message = planned.attempt(strings(value=["a"]))
    assert committed(cluster) == [["a"]]
    planned.commit(message)
    planned.abort()
    assert cluster.transactions.by_id == {}


def test_an_append_that_fails_fails_the_attempt_with_its_own_error(cluster: FakeCluster, write: MakeWrite) -> None:
    cluster.create("t")
    for transactional in ("true", "false"):
        planned = write(strings(value=["a"]).schema, topic="t", transactional=transactional)
        cluster.append_hook = lambda broker, request, header: InvalidDataError("not today")
        with pytest.raises(InvalidDataError, match="not today"):
            planned.attempt(strings(value=["a"]))


def test_only_appending_is_offered(cluster: FakeCluster) -> None:
    source = DefaultSource(CaseInsensitiveDict(settings(cluster, topic="t")))
    with pytest.raises(InvalidConfigError, match=r'use mode\("append"\)'):
        source.writer(from_arrow_schema(FLIGHTS), overwrite=True)


def test_a_topic_is_created_with_the_dataframes_columns(cluster: FakeCluster, write: MakeWrite, read: MakeRead) -> None:
    options = {"createTopic": "true", "topic.partitions": "4", "topic.key.columns": "dest"}
    for start in (0, 10):
        save(write, flights(start, start + 10), topic="f", **options)
    created = cluster.topics["f"]
    assert len(created.partitions) == 4
    assert created.config == {"key.columns": "dest"}
    assert created.parsed_schemas == [FLIGHTS]
    assert sorted(read(subscribe="f").table()["n"].to_pylist()) == list(range(20))


@pytest.mark.parametrize("exists", [True, False])
def test_a_topic_is_copied_to_one_that_exists_or_is_created(
    cluster: FakeCluster, write: MakeWrite, read: MakeRead, exists: bool
) -> None:
    """The read adds columns whose names no topic may have."""
    save(write, flights(0, 10), topic="from", createTopic="true")
    copied_rows = read(subscribe="from", includeLeaderEpoch="true").table().combine_chunks().to_batches()[0]
    added = ["_topic", "_partition", "_offset", "_timestamp", "_leader_epoch"]
    assert copied_rows.schema.names == [*FLIGHTS.names, *added]
    if exists:
        cluster.create("to", schema=FLIGHTS)
    save(write, copied_rows, topic="to", createTopic="true")
    assert cluster.topics["to"].parsed_schemas == [FLIGHTS]
    assert read(subscribe="to", columns="n").table()["n"].to_pylist() == list(range(10))


def test_a_topic_is_not_created_of_nothing_but_columns_of_a_read(write: MakeWrite) -> None:
    with pytest.raises(InvalidSchemaError, match="at least one column"):
        write(pa.schema([("_Offset", pa.int64())]), topic="t", createTopic="true")


STRUCT = pa.struct([("value", pa.binary()), ("metadata", pa.binary())])
VARIANT = pa.struct(
    [("value", pa.binary()), pa.field("metadata", pa.binary(), metadata={"variant": "true"})],
)


def test_a_variant_is_not_written_as_a_struct(cluster: FakeCluster, write: MakeWrite) -> None:
    schema = pa.schema([("n", pa.int64()), ("v", VARIANT)])
    with pytest.raises(InvalidSchemaError, match=r"column 'v' has the type variant.*to_json"):
        write(schema, topic="new", createTopic="true")
    assert "new" not in cluster.topics
    cluster.create(
        "t",
        schema=pa.schema([("n", pa.int64()), ("v", STRUCT)]),
    )
    with pytest.raises(InvalidSchemaError, match="column 'v' has the type variant"):
        write(schema, topic="t")


def test_a_variant_beside_kafkas_columns_is_not_written_and_so_not_refused(
    cluster: FakeCluster, write: MakeWrite, read: MakeRead
) -> None:
    cluster.create("t")
    rows = pa.record_batch(
        [pa.array(["a"]), pa.nulls(1, VARIANT)], schema=pa.schema([("value", pa.string()), ("v", VARIANT)])
    )
    save(write, rows, topic="t")
    assert read(subscribe="t").table()["value"].to_pylist() == [b"a"]


def test_a_variant_for_the_topic_that_a_row_names_fails_its_task(cluster: FakeCluster, write: MakeWrite) -> None:
    cluster.create("t", schema=pa.schema([("v", STRUCT)]))
    schema = pa.schema([("topic", pa.string()), ("v", VARIANT)])
    planned = write(schema)
    with pytest.raises(InvalidSchemaError, match="column 'v' has the type variant"):
        planned.attempt(pa.record_batch([pa.array(["t"]), pa.nulls(1, VARIANT)], schema=schema))


def stream(cluster: FakeCluster, **options: str) -> StreamWriter:
    """The planner's writer of a micro-batch."""
    source = DefaultSource(CaseInsensitiveDict(settings(cluster, topic="t", checkpointLocation="/c", **options)))
    writer = copied(source).streamWriter(from_arrow_schema(strings(value=[]).schema), overwrite=False)
    assert isinstance(writer, StreamWriter)
    return writer


def stream_attempt(writer: StreamWriter, version: Version, *values: str) -> Written:
    """What `StreamWriter.write` does, for a query and batch that the test names."""
    assert writer.plan is not None
    return copied(write_attempt(writer.plan, version, iter([strings(value=values)])))


def test_a_micro_batch_that_is_run_again_is_stored_once(cluster: FakeCluster) -> None:
    cluster.create("t")
    for execution in ("first", "second"):
        writer = stream(cluster)
        messages = [stream_attempt(writer, Version("query", 0, execution), value) for value in ("a", "b")]
        stream(cluster).commit([*messages], 0)
    assert committed(cluster) == [["a", "b"]]


def test_a_micro_batch_is_ended_without_a_look_at_its_topic(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic was deleted while the query ran. An error of the abort would be shown instead of the task's."""
    cluster.create("t")
    attempt = stream_attempt(stream(cluster), Version("query", 0, "first"), "a")
    assert importlib.util.find_spec(ENDING_MODULE) is not None, "Spark ends micro-batches in another module now"
    monkeypatch.setitem(sys.modules, ENDING_MODULE, ModuleType(ENDING_MODULE))
    stream(cluster).commit([attempt], 0)
    assert committed(cluster) == [["a"]]
    del cluster.topics["t"]
    stream(cluster).abort([attempt, None], 0)
    with pytest.raises(InvariantError, match="that commits"):
        stream(cluster).write(iter([]))


def test_a_micro_batch_whose_first_run_was_not_committed_is_stored_once(cluster: FakeCluster) -> None:
    cluster.create("t")
    first = stream_attempt(stream(cluster), Version("query", 0, "first"), "a")
    second = stream_attempt(stream(cluster), Version("query", 0, "second"), "a")
    with pytest.raises(SparkBrokerError, match="INVALID_TXN_STATE"):
        stream(cluster).commit([first], 0)
    stream(cluster).commit([second], 0)
    assert committed(cluster) == [["a"]]


def run_batch(cluster: FakeCluster, number: int, execution: str, *values: str) -> None:
    """Run a micro-batch of the query, with these rows."""
    version = Version("query", number, execution)
    rows = [strings(value=values)] if values else []
    writer = stream(cluster)
    assert writer.plan is not None
    stream(cluster).commit([copied(write_attempt(writer.plan, version, iter(rows)))], number)


@pytest.mark.parametrize("values", [(), ("c", "d", "e", "f")])
def test_a_stream_whose_checkpoint_is_an_older_copy_fails_and_loses_no_rows(
    cluster: FakeCluster, values: tuple[str, ...]
) -> None:
    """Its batch 2 has what came since, too. It was taken for the old batch 2, and passed over."""
    cluster.create("t")
    for number, value in enumerate("abcde"):
        run_batch(cluster, number, f"first-{number}", value)
    with pytest.raises(InvalidTxnStateError, match=r"micro-batch 2 .* older than micro-batch 4.* -> Put the newest"):
        run_batch(cluster, 2, "restored", *values)
    run_batch(cluster, 4, "again", "e")
    run_batch(cluster, 5, "next", "f")
    assert committed(cluster) == [list("abcdef")]


def test_a_run_that_another_run_of_the_query_has_passed_is_told_so(cluster: FakeCluster) -> None:
    """A driver that was taken for dead commits its batch when the new one has written it, and then the next."""
    cluster.create("t")
    old = stream_attempt(stream(cluster), Version("query", 0, "old"), "a")
    run_batch(cluster, 0, "new", "a")
    stream(cluster).commit([old], 0)
    run_batch(cluster, 1, "newer", "b")
    with pytest.raises(InvalidTxnStateError, match="another run of the query is ahead"):
        stream(cluster).commit([old], 0)
    assert committed(cluster) == [["a", "b"]]


def test_an_abort_that_knows_nothing_does_nothing(cluster: FakeCluster) -> None:
    cluster.create("t")
    stream(cluster).abort([None, None], 0)
    assert cluster.transactions.by_id == {}
    message = stream_attempt(stream(cluster), Version("query", 0, "first"), "a")
    stream(cluster).abort([None, message], 0)
    assert not cluster.transactions.by_id["query"].open
    assert committed(cluster) == [[]]


def test_an_attempt_that_comes_after_the_abort_is_refused(cluster: FakeCluster) -> None:
    """When a query is stopped, Spark may abort while tasks still begin to write."""
    cluster.create("t")
    writer = stream(cluster)
    message = stream_attempt(writer, Version("query", 0, "first"), "a")
    stream(cluster).abort([message, None], 0)
    with pytest.raises(InvalidTxnStateError):
        stream_attempt(writer, Version("query", 0, "first"), "b")
    assert committed(cluster) == [[]]


def test_a_stream_is_its_own_application(cluster: FakeCluster) -> None:
    with pytest.raises(InvalidConfigError, match="a stream is its own application"):
        stream(cluster, txnAppId="a", txnVersion="1")
