"""A consumer reads from the first offset of a topic whose older records are only in its Delta table."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_broker import Admin, Consumer, TopicPartition
from spark_broker.errors import (
    InvalidDataError,
    MissingDependencyError,
    NotControllerError,
    OffsetOutOfRangeError,
    RecordNotShowableError,
    SparkBrokerError,
)
from spark_broker.model import ConsumedBatch
from spark_broker.protocol.messages import CallRequest, HistoryMetadata, Message, MetadataRequest
from spark_broker.times import from_us, nearest_to_us
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster
from tests.support.delta_files import table_id
from tests.support.table_rows import with_time

BOUNDARY = 30
LOG_START = 20
END = 50
ABORTED = (7, 8)
"""Offsets without a record."""
EVERYTHING = [n for n in range(END) if n not in ABORTED]
WAIT_S = 30.0
T0 = TopicPartition("t", 0)
SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])


def values(start: int, end: int) -> pa.RecordBatch:
    numbers = range(start, end)
    return pa.record_batch([pa.array(numbers), pa.array(map(str, numbers))], schema=SCHEMA)


def time_of(offset: int) -> int:
    """The timestamp of a record of the table, us. From the boundary on: a moment before those of the log.

    The first ones are just before 1970. The others are no whole milliseconds.
    """
    return offset - 3 if offset < 3 else (APPEND_TIME_MS - max(0, BOUNDARY - offset) * 3_600_000) * 1000 - 1


def rows(start: int, end: int) -> pa.Table:
    offsets = [offset for offset in range(start, end) if offset not in ABORTED]
    log = {
        "_partition": pa.array([0] * len(offsets), pa.int32()),
        "_offset": pa.array(offsets, pa.int64()),
        "_timestamp": pa.array([time_of(offset) for offset in offsets], pa.timestamp("us", "UTC")),
        "_leader_epoch": pa.array([0] * len(offsets), pa.int32()),
    }
    return pa.table({"n": pa.array(offsets), "text": pa.array(map(str, offsets)), **log})


@pytest.fixture
def table(cluster: FakeCluster, tmp_path: Path) -> Path:
    """The topic t of two partitions: offsets 0 to 30 of the first are in its table, and 20 to 50 in its log."""
    path = tmp_path / "table"
    for start, end in ((0, 5), (5, 18), (18, 30)):
        write_deltalake(str(path), rows(start, end), mode="append")
    cluster.create("t", 2, schema=SCHEMA, config={"delta.path": str(path)})
    for start in range(0, END, 10):
        cluster.store("t", 0, values(start, start + 10))
    cluster.topics["t"].partitions[0].log_start_offset = LOG_START
    cluster.topics["t"].history = HistoryMetadata(table_id(path), 2, 2, [0], [BOUNDARY])
    return path


@pytest.fixture
def consumer(cluster: FakeCluster) -> Iterator[Consumer]:
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as client:
        yield client


def read(consumer: Consumer, count: int) -> list[int]:
    """The column n of so many records."""
    found: list[int] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {found} came"
        for batch in consumer.poll(1.0):
            assert batch.data["n"].to_pylist() == list(range(batch.base_offset, batch.next_offset))
            found += batch.data["n"].to_pylist()
    return found


def error_of(consumer: Consumer) -> SparkBrokerError:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            consumer.poll(0.5)
        except SparkBrokerError as error:
            return error
    raise AssertionError("poll raised no error")


@pytest.mark.usefixtures("table")
def test_everything_comes_once_and_in_order(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, topics="t", auto_offset_reset="earliest") as consumer:
        assert read(consumer, len(EVERYTHING)) == EVERYTHING
        cluster.store("t", 0, values(END, END + 5))
        assert read(consumer, 5) == list(range(END, END + 5))
        assert consumer.beginning_offsets([T0]) == {T0: 0}


@pytest.mark.usefixtures("table")
def test_offsets_are_found_in_the_table_and_in_the_log(cluster: FakeCluster, consumer: Consumer) -> None:
    """Most of the table's records are an hour apart. There is no record at 7 and 8. The log's records are later."""
    moments = {0: 0, 1: 1, 2: 2, 7: 9, 19: 19, 29: LOG_START}
    with Admin(cluster.bootstrap) as admin:
        for offset, expected in moments.items():
            moment = from_us(time_of(offset))
            assert consumer.offsets_for_times({T0: moment}) == {T0: expected}
            assert admin.list_offsets({T0: moment}) == {T0: expected}
        assert admin.list_offsets({T0: "earliest"}) == consumer.beginning_offsets([T0]) == {T0: 0}
        assert admin.list_offsets({T0: "latest"}) == consumer.end_offsets([T0]) == {T0: END}


def test_a_table_whose_files_were_rewritten_since_it_was_opened_is_opened_anew(
    cluster: FakeCluster, table: Path, consumer: Consumer
) -> None:
    """Story: after OPTIMIZE and VACUUM, a consumer that had read of the table before was told that it is damaged."""
    consumer.assign([T0])
    assert read(consumer, len(EVERYTHING)) == EVERYTHING
    opened = DeltaTable(str(table))
    opened.optimize.compact()
    opened.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    consumer.seek(T0, 0)
    assert read(consumer, len(EVERYTHING)) == EVERYTHING


def test_a_time_finds_a_record_that_the_log_has_and_the_table_lacks(
    cluster: FakeCluster, table: Path, consumer: Consumer
) -> None:
    """Story: a table had refused rows (a CHECK constraint). A lookup by time named the record behind them, and whoever
    began there passed them over."""
    DeltaTable(str(table)).delete(f"_offset >= {LOG_START} AND _offset < {LOG_START + 3}")
    moment = from_us(time_of(LOG_START - 1) + 1)
    assert consumer.offsets_for_times({T0: moment}) == {T0: LOG_START}
    with Admin(cluster.bootstrap) as admin:
        assert admin.list_offsets({T0: moment}) == {T0: LOG_START}


@pytest.mark.parametrize("start", [0, 19])
def test_what_the_table_has_refused_is_read_where_the_log_has_it(
    cluster: FakeCluster, table: Path, consumer: Consumer, start: int
) -> None:
    """Story: a consumer that began below the log read the table to its end. It never had the record, and its group
    passed it for good."""
    DeltaTable(str(table)).delete(f"_offset = {LOG_START + 4}")
    cluster.topics["t"].history = HistoryMetadata(table_id(table), 2, 2, [0], [BOUNDARY], quarantined=1)
    consumer.assign([T0])
    consumer.seek(T0, start)
    expected = [n for n in EVERYTHING if n >= start]
    assert read(consumer, len(expected)) == expected


def test_a_table_is_read_where_it_was_moved_to_and_no_other_is_taken_for_it(
    cluster: FakeCluster, table: Path, consumer: Consumer
) -> None:
    """So a topic with a history can be given another path. A history stays in the table in which it began."""
    moved = table.rename(table.with_name("moved"))
    cluster.topics["t"].config["delta.path"] = str(moved)
    consumer.assign([T0])
    assert read(consumer, len(EVERYTHING)) == EVERYTHING
    write_deltalake(str(table), rows(0, BOUNDARY))
    cluster.topics["t"].config["delta.path"] = str(table)
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as other:
        other.assign([T0])
        error = error_of(other)
    assert isinstance(error, InvalidDataError)
    assert "it was replaced, or delta.path was changed" in str(error)


@pytest.mark.usefixtures("table")
def test_a_time_finds_no_deleted_record_that_is_still_in_the_table(cluster: FakeCluster, consumer: Consumer) -> None:
    """The tierer's next run deletes the rows. A consumer with auto.offset.reset=latest would go on from there at the
    end, and pass over what is left."""
    cluster.topics["t"].log_starts = [12]
    moment = from_us(time_of(5))
    assert consumer.offsets_for_times({T0: moment}) == {T0: 12}
    with Admin(cluster.bootstrap) as admin:
        assert admin.list_offsets({T0: moment}) == {T0: 12}


@pytest.mark.parametrize("time_us", [1 << 61, -(1 << 61)])
def test_a_time_that_python_cannot_hold_ends_no_consumer(
    cluster: FakeCluster, table: Path, consumer: Consumer, time_us: int
) -> None:
    """Story: one record had milliseconds for seconds. Each consumer that came to it in the table ended, and ended again
    after each restart."""
    write_deltalake(str(table), with_time(rows(0, BOUNDARY), 4, time_us), mode="overwrite")
    consumer.assign([T0])
    batches: list[ConsumedBatch] = []
    while sum(batch.data.num_rows for batch in batches) < len(EVERYTHING):
        batches += consumer.poll(10.0)
    assert [n for batch in batches for n in batch.data["n"].to_pylist()] == EVERYTHING
    (with_far,) = (batch for batch in batches if 4 in batch.offsets)
    assert time_us in with_far.timestamps.cast(pa.int64()).to_pylist()
    assert with_far.append_time == (nearest_to_us(time_us) if time_us > 0 else from_us(time_of(6)))
    with pytest.raises(RecordNotShowableError, match="t-0 offset 4, column timestamp"):
        list(with_far.records())


def test_rows_that_are_none_of_the_topic_stop_their_partition_only(
    cluster: FakeCluster, table: Path, consumer: Consumer
) -> None:
    """A user has rewritten the table."""
    data = rows(0, BOUNDARY)
    words = data.set_column(data.schema.get_field_index("n"), "n", pa.array(["one"] * data.num_rows))
    write_deltalake(str(table), words, mode="overwrite", schema_mode="overwrite")
    cluster.create("u", schema=SCHEMA)
    cluster.store("u", 0, values(0, 5))
    consumer.assign([T0, TopicPartition("u", 0)])
    found: list[int] = []
    error: SparkBrokerError | None = None
    deadline = time.monotonic() + WAIT_S
    while (len(found) < 5 or error is None) and time.monotonic() < deadline:
        try:
            found += [n for batch in consumer.poll(0.5) for n in batch.data["n"].to_pylist()]
        except SparkBrokerError as raised:
            error = raised
    assert found == list(range(5))
    assert isinstance(error, InvalidDataError)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("start", [0, 7, 13, 19, 20, 35])
def test_a_consumer_may_seek_to_any_offset(consumer: Consumer, start: int) -> None:
    consumer.assign([T0])
    consumer.seek(T0, start)
    expected = [n for n in EVERYTHING if n >= start]
    assert read(consumer, len(expected)) == expected


def test_small_buffers_take_the_table_in_parts(cluster: FakeCluster, table: Path) -> None:
    del table
    settings = {"auto_offset_reset": "earliest", "max_partition_fetch_bytes": 1}
    with Consumer(cluster.bootstrap, topics="t", config=None, **settings) as consumer:  # type: ignore[arg-type]
        assert read(consumer, len(EVERYTHING)) == EVERYTHING


@pytest.mark.usefixtures("table")
def test_records_come_one_at_a_time_with_the_columns_asked_for(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, topics="t", auto_offset_reset="earliest", columns=["text"]) as consumer:
        found = list(itertools.islice(consumer, len(EVERYTHING)))
    assert [record.offset for record in found] == EVERYTHING
    assert [record.value for record in found] == [{"text": str(n)} for n in EVERYTHING]


def test_a_group_goes_on_in_the_table_where_it_was(cluster: FakeCluster, table: Path) -> None:
    del table
    settings = {"group_id": "g", "auto_offset_reset": "latest", "enable_auto_commit": False}
    with Consumer(cluster.bootstrap, config=None, **settings) as first:  # type: ignore[arg-type]
        first.assign([T0])
        first.seek(T0, 3)
        assert read(first, 10)[0] == 3
        first.commit({T0: 13})
    with Consumer(cluster.bootstrap, topics="t", config=None, **settings) as second:  # type: ignore[arg-type]
        expected = [n for n in EVERYTHING if n >= 13]
        assert read(second, len(expected)) == expected


def test_the_log_start_moves_while_a_consumer_reads(cluster: FakeCluster, table: Path, consumer: Consumer) -> None:
    consumer.assign([T0])
    consumer.seek(T0, 22)
    assert read(consumer, 1)[0] == 22
    write_deltalake(str(table), rows(30, 45), mode="append")
    cluster.topics["t"].history = HistoryMetadata(table_id(table), 3, 3, [0], [45])
    cluster.topics["t"].partitions[0].log_start_offset = 40
    consumer.seek(T0, 31)
    assert read(consumer, END - 31) == list(range(31, END)), "newer metadata says that the table has it"


def test_deleted_records_are_not_read_from_the_table(cluster: FakeCluster, table: Path, consumer: Consumer) -> None:
    """The consumer's metadata is from before the deletion: it finds out once the table is open."""
    consumer.assign([T0])
    consumer.seek(T0, 25)
    assert read(consumer, 1)[0] == 25
    cluster.topics["t"].log_starts = [12]
    DeltaTable(str(table)).delete("_offset < 12")
    consumer.seek(T0, 3)
    assert read(consumer, END - 12) == list(range(12, END)), "earliest, by the reset policy"
    with Consumer(cluster.bootstrap, auto_offset_reset="none") as strict:
        strict.assign([T0])
        strict.seek(T0, 11)
        assert isinstance(error_of(strict), OffsetOutOfRangeError)
        strict.seek(T0, 12)
        assert read(strict, END - 12) == list(range(12, END))
        assert strict.beginning_offsets([T0]) == {T0: 12}


@pytest.mark.parametrize("warm", [False, True])
def test_a_deletion_that_brokers_do_not_know_yet_is_no_silent_gap(
    cluster: FakeCluster, table: Path, warm: bool
) -> None:
    """The rows are gone from the table, and only the controller knows it. A reader from 3 would go on with 12.

    `warm`: the consumer has the table open, because it has read another partition of it.
    """
    topic = cluster.topics["t"]
    topic.history = HistoryMetadata(table_id(table), 2, 2, [0, 0], [BOUNDARY, 5])
    topic.before_the_lag, topic.lagging = (topic.history, []), 10_000
    topic.log_starts = [12]
    DeltaTable(str(table)).delete("_offset < 12")
    with Consumer(cluster.bootstrap, auto_offset_reset="none") as strict:
        strict.assign([T0, TopicPartition("t", 1)] if warm else [T0])
        if warm:
            strict.seek(TopicPartition("t", 1), 0)
            strict.pause(T0)
            assert strict.poll(1.0) == []
            strict.resume(T0)
        strict.seek(T0, 3)
        assert isinstance(error_of(strict), OffsetOutOfRangeError)
        strict.seek(T0, 12)
        assert read(strict, END - 12) == list(range(12, END))


@pytest.mark.usefixtures("table")
def test_a_table_is_read_once_the_controller_answers(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """It is away for longer than one request waits for it."""
    answers_from = time.monotonic() + 2

    def refuse(broker: int, request: CallRequest) -> Message | None:
        del broker
        if isinstance(request, MetadataRequest) and request.certain and time.monotonic() < answers_from:
            raise NotControllerError("the controller cannot be reached")
        return None

    cluster.call_hook = refuse
    with Consumer(cluster.bootstrap, topics="t", auto_offset_reset="earliest", request_timeout_ms=500) as consumer:
        assert read(consumer, len(EVERYTHING)) == EVERYTHING
    assert "t-0: the topic's table is read later, from offset 0" in caplog.text


@pytest.mark.usefixtures("table")
def test_a_consumer_that_learns_of_the_history_late_still_begins_with_it(cluster: FakeCluster) -> None:
    """Its metadata is from before the first tiering. The log begins where the history ends by now: nothing is there
    to tell it that earlier records exist, but the leader's answer.
    """
    cluster.topics["t"].lagging = 4
    with Consumer(cluster.bootstrap, topics="t", auto_offset_reset="earliest") as consumer:
        assert read(consumer, len(EVERYTHING)) == EVERYTHING
    cluster.topics["t"].lagging = 3
    with Consumer(cluster.bootstrap) as consumer:
        assert consumer.beginning_offsets([T0]) == {T0: 0}
    cluster.topics["t"].lagging = 3
    with Admin(cluster.bootstrap) as admin:
        assert admin.list_offsets({T0: "earliest"}) == {T0: 0}


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
def test_an_offset_that_was_tiered_is_not_out_of_range_whatever_the_metadata_shows(
    cluster: FakeCluster, reset: str
) -> None:
    with Consumer(cluster.bootstrap, auto_offset_reset=reset) as consumer:
        consumer.assign([T0])
        cluster.topics["t"].lagging = 5
        consumer.seek(T0, 13)
        expected = [n for n in EVERYTHING if n >= 13]
        assert read(consumer, len(expected)) == expected


def test_the_last_record_of_the_table_says_nothing_of_the_epoch_where_the_history_ends(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """Found by the simulator with seed 10287: a leader of epoch 1 wrote the offsets from 25 to 30, and their
    transaction was aborted. The consumer claimed to have read 29 in epoch 0, so the log seemed to have been cut.
    """
    path = tmp_path / "table"
    write_deltalake(str(path), rows(0, 25))
    cluster.create("t", 1, schema=SCHEMA, config={"delta.path": str(path)})
    cluster.store("t", 0, values(0, 25))
    cluster.elect("t", 0, leader=1)
    cluster.store("t", 0, values(25, 30))
    cluster.store("t", 0, values(30, END))
    cluster.topics["t"].partitions[0].log_start_offset = LOG_START
    cluster.topics["t"].history = HistoryMetadata(table_id(path), 0, 0, [0], [30])
    with Consumer(cluster.bootstrap, topics="t", auto_offset_reset="earliest") as consumer:
        expected = [n for n in range(25) if n not in ABORTED] + list(range(30, END))
        assert read(consumer, len(expected)) == expected


def test_without_a_history_an_offset_that_is_gone_resets_the_position(
    cluster: FakeCluster, table: Path, consumer: Consumer
) -> None:
    del table
    cluster.topics["t"].history = None
    consumer.assign([T0])
    consumer.seek(T0, 3)
    assert read(consumer, END - LOG_START) == list(range(LOG_START, END))


def test_a_table_that_cannot_be_read_is_an_error_of_poll_and_no_gap(
    cluster: FakeCluster, table: Path, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(str(table), rows(3, 4), mode="append")
    consumer.assign([T0])
    consumer.seek(T0, 0)
    error = error_of(consumer)
    assert isinstance(error, InvalidDataError)
    assert "twice" in str(error)
    consumer.seek(T0, 4)
    expected = [n for n in EVERYTHING if n >= 4]
    assert read(consumer, len(expected)) == expected, "a seek leaves the error behind"
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with Consumer(cluster.bootstrap) as other:
        other.assign([T0])
        other.seek(T0, 0)
        assert isinstance(error_of(other), MissingDependencyError)
