"""Reads of a topic whose older records are only in its Delta table, by batch and by stream, without a JVM."""

from __future__ import annotations

import datetime as dt
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_broker.client import history_reader
from spark_broker.client.cluster_view import TopicView
from spark_broker.client.delta_rows import DeltaRows
from spark_broker.errors import (
    InconsistentTopicIdError,
    InvalidConfigError,
    InvalidDataError,
    MissingDependencyError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.messages import CallRequest, HistoryMetadata
from spark_broker.protocol.schema import DEFAULT_SCHEMA, LOG_COLUMNS
from spark_broker.spark import history_scan
from spark_broker.spark.history_split import HistoryRange, Split
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster, FakePartition
from tests.datasource.conftest import MakeRead, MakeStream, Read
from tests.datasource.test_planning import SCHEMA, fill, numbers
from tests.support.delta_files import table_id
from tests.support.table_rows import with_time

BOUNDARY = 30
"""The history has the offsets before it."""
LOG_START = 20
END = 50
ABORTED = (7, 8)
"""Offsets without a record."""
HOUR_MS = 3_600_000

EVERYTHING = [n for n in range(END) if n not in ABORTED]


def rows(start: int, end: int, schema: pa.Schema = SCHEMA) -> pa.Table:
    """Rows of the table: value n at offset n, an hour apart, the newest an hour before the log's records."""
    offsets = [offset for offset in range(start, end) if offset not in ABORTED]
    times = [(APPEND_TIME_MS - (BOUNDARY - offset) * HOUR_MS) * 1000 for offset in offsets]
    data = [pa.array(offsets).cast(field.type) if field.name == "n" else None for field in schema]
    columns = {
        field.name: pa.nulls(len(offsets), field.type) if array is None else array
        for field, array in zip(schema, data, strict=True)
    }
    log = {
        "_partition": pa.array([0] * len(offsets), pa.int32()),
        "_offset": pa.array(offsets, pa.int64()),
        "_timestamp": pa.array(times, pa.timestamp("us", "UTC")),
        "_leader_epoch": pa.array([int(offset >= 10) for offset in offsets], pa.int32()),
    }
    return pa.table({**columns, **log})


@pytest.fixture
def table(cluster: FakeCluster, tmp_path: Path) -> Path:
    """The topic t: offsets 0 to 30 in its table, in several files, and 20 to 50 in its log."""
    path = tmp_path / "table"
    for start, end in ((0, 5), (5, 18), (18, 30)):
        write_deltalake(str(path), rows(start, end), mode="append")
    fill(cluster, "t", 1, END)
    cluster.topics["t"].config["delta.path"] = str(path)
    cluster.topics["t"].partitions[0].log_start_offset = LOG_START
    cluster.topics["t"].history = HistoryMetadata(table_id(path), 2, 2, [0], [BOUNDARY])
    return path


def offsets(number: int) -> str:
    return json.dumps({"t": {"0": number}})


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("tasks", ["1", "7"])
def test_table_and_log_are_read_as_one(read: MakeRead, tasks: str) -> None:
    found = read(subscribe="t", minPartitions=tasks, includeLeaderEpoch="true").table()
    assert found["n"].to_pylist() == found["_offset"].to_pylist() == EVERYTHING
    epochs = dict(zip(found["_offset"].to_pylist(), found["_leader_epoch"].to_pylist(), strict=True))
    assert [epochs[offset] for offset in (0, 9, 10, 19)] == [0, 0, 1, 1]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("start", "end"), [(3, 12), (7, 9), (19, 20), (19, 21), (0, 50), (25, 40), (30, 31)])
def test_any_range_has_its_records(read: MakeRead, start: int, end: int) -> None:
    found = read(subscribe="t", startingOffsets=offsets(start), endingOffsets=offsets(end)).table()
    assert found["n"].to_pylist() == [n for n in EVERYTHING if start <= n < end]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("first", [1, 6, 19, LOG_START])
def test_a_time_is_found_where_its_record_is(read: MakeRead, first: int) -> None:
    moment = str(APPEND_TIME_MS - (BOUNDARY - first) * HOUR_MS)
    assert (
        read(subscribe="t", startingTimestamp=moment).table()["n"].to_pylist() == EVERYTHING[EVERYTHING.index(first) :]
    )
    assert read(subscribe="t", endingTimestamp=moment).table()["n"].to_pylist() == EVERYTHING[: EVERYTHING.index(first)]


def test_a_time_finds_a_record_that_the_log_has_and_the_table_lacks(table: Path, read: MakeRead) -> None:
    """The table has refused it, or a user has deleted it there."""
    DeltaTable(str(table)).delete(f"_offset >= {LOG_START} AND _offset < {LOG_START + 3}")
    moment = str(APPEND_TIME_MS - (BOUNDARY - LOG_START + 1) * HOUR_MS + 1)
    assert read(subscribe="t", startingTimestamp=moment).table()["n"].to_pylist()[:2] == [LOG_START, LOG_START + 1]


@pytest.mark.usefixtures("table")
def test_a_time_finds_no_deleted_record_that_is_still_in_the_table(
    cluster: FakeCluster, read: MakeRead, stream: MakeStream
) -> None:
    """The tierer's next run deletes the rows. Offset 3 would be out of range for the read."""
    cluster.topics["t"].log_starts = [12]
    moment = str(APPEND_TIME_MS - (BOUNDARY - 3) * HOUR_MS)
    assert read(subscribe="t", startingTimestamp=moment).table()["n"].to_pylist() == list(range(12, END))
    assert stream(subscribe="t", startingTimestamp=moment).numbers() == list(range(12, END))


def test_the_end_at_a_time_is_no_deleted_record(cluster: FakeCluster, table: Path, read: MakeRead) -> None:
    """Times of events are in no order: the first record is the latest. As the end, it would leave nothing to read."""
    data = rows(0, BOUNDARY)
    times = data["_timestamp"].to_pylist()
    at = data.schema.get_field_index("_timestamp")
    times[0] = times[-1]
    late = data.set_column(at, "_timestamp", pa.array(times, data.schema.field(at).type))
    write_deltalake(str(table), late, mode="overwrite")
    cluster.topics["t"].log_starts = [12]
    end = str(APPEND_TIME_MS - (BOUNDARY - 17) * HOUR_MS)
    assert read(subscribe="t", endingTimestamp=end).table()["n"].to_pylist() == list(range(12, 17))


def test_a_time_finds_no_row_beyond_the_recorded_history(table: Path, read: MakeRead) -> None:
    """A run of the tierer may have died before the controller recorded it: only the log has these offsets."""
    data = rows(BOUNDARY, 40)
    times = pa.array([(APPEND_TIME_MS + 10) * 1000] * 10, pa.timestamp("us", "UTC"))
    stray = data.set_column(data.schema.get_field_index("_timestamp"), "_timestamp", times)
    write_deltalake(str(table), stray, mode="append")
    with pytest.raises(OffsetOutOfRangeError, match="no record at or after"):
        read(subscribe="t", startingTimestamp=str(APPEND_TIME_MS + 5))


@pytest.mark.usefixtures("table")
def test_some_columns_are_enough(read: MakeRead) -> None:
    found = read(subscribe="t", columns="_timestamp,_offset").table()
    assert found.column_names == ["_timestamp", "_offset"]
    assert found["_offset"].to_pylist() == EVERYTHING
    first = dt.datetime.fromtimestamp((APPEND_TIME_MS - BOUNDARY * HOUR_MS) / 1000, dt.UTC)
    assert found["_timestamp"].to_pylist()[0] == first


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("limit", [{}, {"maxOffsetsPerTrigger": "7"}])
def test_a_stream_begins_in_the_table_and_goes_on_in_the_log(stream: MakeStream, limit: dict[str, str]) -> None:
    query = stream(subscribe="t", startingOffsets="earliest", **limit)
    found: list[int] = []
    while batch := query.numbers():
        found += batch
    assert found == EVERYTHING


def test_the_log_start_moves_during_a_stream(cluster: FakeCluster, table: Path, stream: MakeStream) -> None:
    query = stream(subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger="22")
    found = query.numbers()
    write_deltalake(str(table), rows(30, 45), mode="append")
    cluster.topics["t"].history = HistoryMetadata(table_id(table), 3, 3, [0], [45])
    cluster.topics["t"].partitions[0].log_start_offset = 40
    while batch := query.numbers():
        found += batch
    assert found == EVERYTHING


def test_records_that_are_deleted_during_a_stream_are_an_error_or_passed_over(
    cluster: FakeCluster, table: Path, stream: MakeStream
) -> None:
    strict = stream(subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger="5")
    lenient = stream(subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger="5", failOnDataLoss="false")
    assert strict.numbers() == lenient.numbers() == EVERYTHING[:5]
    cluster.topics["t"].log_starts = [12]
    DeltaTable(str(table)).delete("_offset < 12")
    with pytest.raises(OffsetOutOfRangeError):
        strict.numbers()
    found: list[int] = []
    while batch := lenient.numbers():
        found += batch
    assert found == list(range(12, END))


def test_a_user_may_rewrite_the_files_and_add_rows(table: Path, read: MakeRead) -> None:
    history = DeltaTable(str(table))
    history.optimize.z_order(["n"])
    older = rows(0, 5).set_column(2, "_offset", pa.nulls(5, pa.int64()))
    write_deltalake(str(table), older, mode="append")
    assert read(subscribe="t").table()["n"].to_pylist() == EVERYTHING


def test_small_windows_give_the_same(table: Path, read: MakeRead, monkeypatch: pytest.MonkeyPatch) -> None:
    del table
    monkeypatch.setattr(history_reader, "WINDOW_BYTES", 1)
    assert read(subscribe="t").table()["n"].to_pylist() == EVERYTHING


def test_kafkas_record_comes_from_the_table_too(cluster: FakeCluster, read: MakeRead, tmp_path: Path) -> None:
    record = {
        "key": b"k",
        "value": b"v",
        "headers": [{"key": "h", "value": b"x"}],
        "timestamp": dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
    }
    data = pa.Table.from_pylist([record, {"value": b"w"}], DEFAULT_SCHEMA)
    for name, values in (("_partition", [0, 0]), ("_offset", [0, 1]), ("_leader_epoch", [0, 0])):
        data = data.append_column(name, pa.array(values, pa.int64() if name == "_offset" else pa.int32()))
    data = data.append_column("_timestamp", pa.array([record["timestamp"]] * 2, pa.timestamp("us", "UTC")))
    write_deltalake(str(tmp_path / "table"), data)
    cluster.create("k", config={"delta.path": f"file:{tmp_path / 'table'}"})
    cluster.topics["k"].partitions[0].log_start_offset = 2
    cluster.topics["k"].history = HistoryMetadata(table_id(tmp_path / "table"), 0, 0, [0], [2])
    first, second = read(subscribe="k", includeHeaders="true").table().to_pylist()
    assert first == {
        "key": b"k",
        "value": b"v",
        "topic": "k",
        "partition": 0,
        "offset": 0,
        "timestamp": record["timestamp"],
        "timestampType": 0,
        "headers": record["headers"],
    }
    assert (second["key"], second["value"], second["offset"]) == (None, b"w", 1)


FAR = 1 << 61
"""Microseconds: 73,000 years."""


@pytest.mark.parametrize("time_us", [FAR, -FAR])
def test_a_time_that_python_cannot_hold_stays_what_it_is(
    cluster: FakeCluster, table: Path, read: MakeRead, stream: MakeStream, time_us: int
) -> None:
    """Milliseconds that were taken for seconds are after the year 9999. The task failed with a bare OverflowError."""
    write_deltalake(str(table), with_time(rows(0, BOUNDARY), 4, time_us), mode="overwrite")
    found = read(subscribe="t").table()
    assert found["n"].to_pylist() == EVERYTHING
    assert found["_timestamp"].cast(pa.int64()).to_pylist()[4] == time_us
    assert stream(subscribe="t", startingOffsets="earliest").numbers() == EVERYTHING


def test_rows_that_are_none_of_the_topic_are_a_typed_error(table: Path, read: MakeRead) -> None:
    """A user has rewritten the table."""
    data = rows(0, BOUNDARY)
    words = data.set_column(data.schema.get_field_index("n"), "n", pa.array(["one"] * data.num_rows))
    write_deltalake(str(table), words, mode="overwrite", schema_mode="overwrite")
    with pytest.raises(InvalidDataError, match=r"the history of t, cannot be read: .*one"):
        read(subscribe="t").table()


@pytest.mark.parametrize("prefix", ["", "file:", "file://"])
def test_a_table_is_found_by_its_literal_path(
    cluster: FakeCluster, table: Path, read: MakeRead, tmp_path: Path, prefix: str
) -> None:
    """What `delta.path` takes, `test_topics.py` says. Spark has the same directory."""
    odd = tmp_path / "é +&=:*[]{}'\"`|^<>,;@!$()"
    table.rename(odd)
    cluster.topics["t"].config["delta.path"] = f"{prefix}{odd}"
    assert read(subscribe="t").table()["n"].to_pylist() == EVERYTHING


def test_an_offset_before_the_history_is_out_of_range(cluster: FakeCluster, table: Path, read: MakeRead) -> None:
    cluster.topics["t"].history = HistoryMetadata(table_id(table), 2, 2, [5], [BOUNDARY])
    with pytest.raises(OffsetOutOfRangeError, match="has offsets 5 to 50"):
        read(subscribe="t", startingOffsets=offsets(3))
    assert read(subscribe="t").table()["n"].to_pylist()[0] == 5


def test_a_topic_that_has_no_table_any_more_begins_where_its_log_begins(
    cluster: FakeCluster, table: Path, read: MakeRead
) -> None:
    del table
    cluster.topics["t"].config["delta.path"] = ""
    assert read(subscribe="t").table()["n"].to_pylist()[0] == LOG_START


def test_what_cannot_be_read_is_a_clear_error_and_no_gap(
    cluster: FakeCluster, table: Path, read: MakeRead, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(str(table), rows(3, 4), mode="append")
    with pytest.raises(InvalidDataError, match="twice"):
        read(subscribe="t").table()
    cluster.topics["t"].config["delta.path"] = str(table / "nowhere")
    with pytest.raises(InvalidDataError, match="cannot be read"):
        read(subscribe="t").table()
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(MissingDependencyError, match="deltalake"):
        read(subscribe="t").table()


Reach = Mapping[int, tuple[int, int]]


def test_a_column_of_the_first_records_that_the_table_lacks_was_renamed(table: Path, read: MakeRead) -> None:
    """Story: it was null in all records that only the table had."""
    write_deltalake(str(table), rows(0, BOUNDARY).rename_columns({"n": "m"}), mode="overwrite", schema_mode="overwrite")
    with pytest.raises(InvalidDataError, match="it has no column n any more, which was renamed or dropped"):
        read(subscribe="t").table()


class DeltaSession:
    """Stands for a session with Delta. It notes what a read takes from the log, and which version of the table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_log: list[Reach] = []
        self.of_table: list[Mapping[int, HistoryRange]] = []
        self.options: dict[str, str] = {}
        self.when_opened: Callable[[], None] = lambda: None
        of_log = history_scan._of_log

        def log(
            spark: object, topic: TopicView, options: Mapping[str, str], reach: Reach, others: str = "none"
        ) -> object:
            of_log(self, topic, options, reach, others=others)  # type: ignore[arg-type]
            self.of_log.append(reach)
            return self

        monkeypatch.setattr(history_scan, "_has_delta", lambda spark: True)
        monkeypatch.setattr(history_scan, "_of_log", log)
        monkeypatch.setattr(history_scan._HistoryScan, "_table", lambda scan: self.when_opened())
        monkeypatch.setattr(history_scan._HistoryScan, "_rows", lambda scan, frame, parts, log: self._rows(parts))

    @property
    def read(self) -> SimpleNamespace:
        """A reader of the source, whose options are noted."""

        reader = SimpleNamespace()

        def options(**given: str) -> SimpleNamespace:
            self.options.update(given)
            return reader

        reader.format, reader.options, reader.load = lambda name: reader, options, lambda: self
        return reader

    def _rows(self, parts: Split) -> DeltaSession:
        self.of_table.append(parts.table)
        return self

    def unionByName(self, other: object) -> DeltaSession:
        assert other is self
        return self


@pytest.fixture
def delta(monkeypatch: pytest.MonkeyPatch) -> DeltaSession:
    return DeltaSession(monkeypatch)


def batch_of(cluster: FakeCluster, delta: DeltaSession, start: int, end: int, **options: str) -> object:
    """A micro-batch of `stream_history` that was planned with the topic as it is now."""
    topic_id = cluster.topics["t"].topic_id
    given = {"bootstrap.servers": cluster.bootstrap, **options}
    return history_scan.ranges_with_history(delta, "t", topic_id, {0: (start, end)}, given)  # type: ignore[arg-type]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("late", [False, True], ids=["known", "when the table is open"])
def test_delta_does_not_scan_past_what_was_deleted_since_the_plan(
    cluster: FakeCluster, delta: DeltaSession, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    def delete() -> None:
        cluster.topics["t"].log_starts = [12]

    if late:
        delta.when_opened = delete
    else:
        delete()
    with pytest.raises(OffsetOutOfRangeError, match=r"t-0: records 3 to 12 \(exclusive\) were deleted"):
        batch_of(cluster, delta, 3, 40)
    cluster.topics["t"].log_starts = [] if late else [12]
    assert batch_of(cluster, delta, 3, 40, failOnDataLoss="false") is delta
    assert (delta.of_table, delta.of_log) == ([{0: HistoryRange(12, 30)}], [{0: (30, 40)}])
    assert "t-0: records 3 to 12 (exclusive) were deleted" in caplog.text
    assert batch_of(cluster, delta, 12, 40) is delta


def test_delta_scans_one_version_in_every_query(
    cluster: FakeCluster, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would scan the newest one in each, from which rows may have been deleted."""
    snapshot = SimpleNamespace(metadata=lambda: SimpleNamespace(id=lambda: table_id(table)), version=lambda: 2)
    monkeypatch.setattr(history_scan, "delta_snapshot", lambda spark, path: snapshot)
    monkeypatch.setattr(history_scan, "why_incomplete", lambda found: "")
    monkeypatch.setattr(history_scan, "transactions_of", lambda found: {})
    monkeypatch.setattr(history_scan, "_has_delta", lambda spark: True)
    monkeypatch.setattr(history_scan._HistoryScan, "_rows", lambda scan, frame, parts, log: frame)
    monkeypatch.setattr(history_scan, "_of_log", lambda *_, **__: None)

    def reader(name: str) -> SimpleNamespace:
        def loaded(*option: object) -> SimpleNamespace:
            return SimpleNamespace(columns=[*LOG_COLUMNS, "n"], read_as=name, by=option)

        return SimpleNamespace(option=lambda *option: SimpleNamespace(load=lambda path: loaded(*option)))

    session = SimpleNamespace(read=SimpleNamespace(format=reader))
    topic_id, given = cluster.topics["t"].topic_id, {"bootstrap.servers": cluster.bootstrap}
    frame = history_scan.ranges_with_history(session, "t", topic_id, {0: (3, 20)}, given)  # type: ignore[arg-type]
    assert vars(frame) == {"columns": [*LOG_COLUMNS, "n"], "read_as": "delta", "by": ("versionAsOf", 2)}


@pytest.mark.parametrize(("log_start", "table_end"), [(LOG_START, LOG_START), (40, BOUNDARY), (0, 0)])
def test_what_the_table_has_refused_comes_from_the_log(
    cluster: FakeCluster, table: Path, delta: DeltaSession, log_start: int, table_end: int
) -> None:
    """Story: read_topic had 97 of 100 records without a word, and a consumer had all."""
    topic = cluster.topics["t"]
    topic.history = HistoryMetadata(table_id(table), 2, 2, [0], [BOUNDARY], quarantined=3)
    topic.partitions[0].log_start_offset = log_start
    batch_of(cluster, delta, 3, 50)
    options = {"bootstrap.servers": cluster.bootstrap}
    history_scan.with_history(delta, delta, "t", options)  # type: ignore[arg-type]
    first = table_end
    if not table_end:
        assert delta.of_table == []
        assert delta.of_log == [{0: (3, 50)}]
        return
    assert delta.of_table == [{0: HistoryRange(3, table_end)}, {0: HistoryRange(0, table_end)}]
    assert delta.of_log == [{0: (first, 50)}, {0: (max(first, log_start), -1)}]


TIMEOUT_MS = 1000


@pytest.fixture
def slow_table(cluster: FakeCluster, table: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It takes longer to open than brokers may take to answer. They do so after a moment."""

    def open_slowly(topic: TopicView) -> DeltaRows:
        threading.Event().wait(1.2 * TIMEOUT_MS / 1000)
        return DeltaRows(topic)

    def answer_later(broker: int, request: CallRequest) -> None:
        del broker, request
        threading.Event().wait(0.02)

    cluster.call_hook = answer_later
    monkeypatch.setattr(history_reader, "DeltaRows", open_slowly)
    return table


@pytest.mark.usefixtures("slow_table")
def test_a_table_that_opens_slowly_is_no_fault_of_a_broker(
    cluster: FakeCluster, read: MakeRead, stream: MakeStream
) -> None:
    """Story: a table of ten thousand commits on S3. Each try failed, and named a broker that had answered at once."""
    patience = {"default.api.timeout.ms": str(TIMEOUT_MS)}
    whole = read(subscribe="t", **patience)
    lenient = read(subscribe="t", failOnDataLoss="false", **patience)
    assert whole.table()["n"].to_pylist() == EVERYTHING
    assert stream(subscribe="t", startingOffsets="earliest", **patience).numbers() == EVERYTHING
    cluster.topics["t"].log_starts = [12]
    assert lenient.table()["n"].to_pylist() == list(range(12, END))


@pytest.mark.usefixtures("slow_table")
def test_times_are_found_in_a_table_that_opens_slowly(read: MakeRead) -> None:
    first, end = (str(APPEND_TIME_MS - (BOUNDARY - offset) * HOUR_MS) for offset in (3, 12))
    options = {"startingTimestamp": first, "endingTimestamp": end, "default.api.timeout.ms": str(TIMEOUT_MS)}
    assert read(subscribe="t", **options).table()["n"].to_pylist() == [n for n in EVERYTHING if 3 <= n < 12]


@pytest.fixture
def refused(cluster: FakeCluster, table: Path) -> int:
    """A record that the table has refused, and the log still has."""
    offset = LOG_START + 4
    DeltaTable(str(table)).delete(f"_offset = {offset}")
    topic = cluster.topics["t"]
    topic.history = HistoryMetadata(table_id(table), 2, 2, [0], [BOUNDARY], quarantined=1)
    return offset


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("start", [0, 19])
def test_what_the_table_has_refused_is_read_where_the_log_has_it(
    read: MakeRead, stream: MakeStream, start: int
) -> None:
    """Story: who began below the log read the table to its end, and never had the record."""
    expected = [n for n in EVERYTHING if n >= start]
    assert read(subscribe="t", startingOffsets=offsets(start)).table()["n"].to_pylist() == expected
    assert stream(subscribe="t", startingOffsets=offsets(start)).numbers() == expected


def test_what_the_table_has_refused_is_missing_once_the_log_has_it_no_more(
    cluster: FakeCluster, refused: int, read: MakeRead
) -> None:
    cluster.topics["t"].partitions[0].log_start_offset = 40
    expected = [n for n in EVERYTHING if n != refused and not BOUNDARY <= n < 40]
    assert read(subscribe="t", failOnDataLoss="false").table()["n"].to_pylist() == expected


def log_part(cluster: FakeCluster, delta: DeltaSession, read: MakeRead, **options: str) -> Callable[[], Read]:
    """What `read_topic` reads from the log: planned when the frame is first used."""
    given = {"bootstrap.servers": cluster.bootstrap, **options}
    history_scan.with_history(delta, delta, "t", given)  # type: ignore[arg-type]
    return lambda: read(**delta.options)


@pytest.mark.usefixtures("table")
def test_a_view_of_a_topic_that_was_made_anew_since_mixes_no_records_of_both(
    cluster: FakeCluster, delta: DeltaSession, read: MakeRead
) -> None:
    """Story: it had the table of the old topic, and of the new one the records behind the table's end."""
    of_log = log_part(cluster, delta, read)
    assert of_log().table()["n"].to_pylist() == list(range(BOUNDARY, END))
    del cluster.topics["t"]
    fill(cluster, "t", 1, 40)
    with pytest.raises(InconsistentTopicIdError, match="created again"):
        of_log()


@pytest.mark.usefixtures("table")
def test_a_view_of_a_topic_that_has_grown_since_has_the_new_partitions(
    cluster: FakeCluster, delta: DeltaSession, read: MakeRead
) -> None:
    whole = log_part(cluster, delta, read)
    grow(cluster)
    assert whole().table()["n"].to_pylist() == [*range(BOUNDARY, END), 1000, 1001]


@pytest.mark.usefixtures("table")
def test_a_range_of_a_topic_that_has_grown_since_is_refused(
    cluster: FakeCluster, delta: DeltaSession, read: MakeRead
) -> None:
    part = log_part(cluster, delta, read, startingTimestamp=str(APPEND_TIME_MS - 2 * HOUR_MS))
    grow(cluster)
    with pytest.raises(InvalidConfigError, match="make the DataFrame again"):
        part()


@pytest.mark.usefixtures("table")
def test_a_range_that_is_wholly_in_the_table_for_one_partition_is_read(
    cluster: FakeCluster, delta: DeltaSession, read: MakeRead
) -> None:
    """Story: the first partition had nothing new, and the read said that the topic had grown."""
    grow(cluster)
    cluster.topics["t"].partitions[0].high_watermark = BOUNDARY
    ends = json.dumps({"t": {"0": BOUNDARY, "1": 2}})
    part = log_part(cluster, delta, read, endingOffsets=ends)
    assert delta.of_log == [{1: (0, 2)}]
    assert part().table()["n"].to_pylist() == [1000, 1001]


def grow(cluster: FakeCluster) -> None:
    topic = cluster.topics["t"]
    topic.partitions.append(FakePartition(leader=0))
    cluster.store("t", 1, numbers(1000, 1001))


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("position", [0, 15, 25])
def test_what_is_deleted_after_the_plan_is_passed_over_and_nothing_else(
    cluster: FakeCluster, read: MakeRead, position: int
) -> None:
    """Story: the metadata of the task did not have the deletion yet, and nothing was read at all."""
    cluster.metadata_offset = 7
    lenient = read(subscribe="t", failOnDataLoss="false", startingOffsets=offsets(position))
    before = read(subscribe="t", failOnDataLoss="false", startingOffsets=offsets(position))
    assert before.table()["n"].to_pylist() == [n for n in EVERYTHING if n >= position]
    cluster.topics["t"].log_starts = [12]
    cluster.metadata_offset = 8
    assert lenient.table()["n"].to_pylist() == [n for n in EVERYTHING if n >= max(12, position)]


@pytest.mark.usefixtures("table")
def test_a_gap_between_table_and_log_is_passed_over_and_nothing_behind_it(cluster: FakeCluster, read: MakeRead) -> None:
    """Retention was faster than the tierer, after the read was planned."""
    lenient = read(subscribe="t", failOnDataLoss="false")
    cluster.topics["t"].partitions[0].log_start_offset = 40
    assert lenient.table()["n"].to_pylist() == [n for n in EVERYTHING if n < BOUNDARY or n >= 40]


@pytest.mark.usefixtures("table")
def test_what_is_deleted_as_a_whole_the_source_reads(cluster: FakeCluster, delta: DeltaSession) -> None:
    """It says what is gone, or passes it over."""
    cluster.topics["t"].log_starts = [12]
    assert batch_of(cluster, delta, 3, 12) is delta
    assert (delta.of_table, delta.of_log) == ([], [{0: (3, 12)}])


@pytest.mark.usefixtures("table")
def test_a_table_is_scanned_up_to_where_it_was_known_to_reach_when_it_was_opened(
    cluster: FakeCluster, delta: DeltaSession
) -> None:
    """The version that is open lacks what a tierer appends later."""

    def tier() -> None:
        topic = cluster.topics["t"]
        assert topic.history is not None
        topic.history = HistoryMetadata(topic.history.table_id, 3, 3, [0], [45])

    delta.when_opened = tier
    batch_of(cluster, delta, 3, 50)
    assert (delta.of_table, delta.of_log) == ([{0: HistoryRange(3, 30)}], [{0: (30, 50)}])


@pytest.mark.usefixtures("table", "short_grace")
@pytest.mark.parametrize("anew", [True, False])
def test_a_batch_for_delta_of_a_topic_that_is_gone_is_an_error_or_passed_over(
    cluster: FakeCluster, delta: DeltaSession, anew: bool
) -> None:
    topic_id = cluster.topics["t"].topic_id
    del cluster.topics["t"]
    if anew:
        fill(cluster, "t", 1, END)
    servers = {"bootstrap.servers": cluster.bootstrap}
    error = InconsistentTopicIdError if anew else UnknownTopicOrPartitionError
    with pytest.raises(error):
        history_scan.ranges_with_history(delta, "t", topic_id, {0: (3, 40)}, servers)  # type: ignore[arg-type]
    lenient = {**servers, "failOnDataLoss": "false"}
    assert history_scan.ranges_with_history(delta, "t", topic_id, {0: (3, 40)}, lenient) is None  # type: ignore[arg-type]
    if not anew:
        assert history_scan.ranges_with_history(delta, "t", None, {}, lenient) is None  # type: ignore[arg-type]
