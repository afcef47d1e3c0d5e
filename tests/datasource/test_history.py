"""Reads of a topic whose older records are only in its Delta table, by batch and by stream, without a JVM."""

from __future__ import annotations

import datetime as dt
import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_broker.client import history_reader
from spark_broker.errors import InvalidDataError, MissingDependencyError, OffsetOutOfRangeError
from spark_broker.protocol.messages import HistoryMetadata
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster
from tests.datasource.conftest import MakeRead, MakeStream
from tests.datasource.test_planning import SCHEMA, fill
from tests.support.delta_files import table_id

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
@pytest.mark.parametrize("first", [1, 6, 19, 21])
def test_a_time_is_found_where_its_record_is(read: MakeRead, first: int) -> None:
    moment = str(APPEND_TIME_MS - (BOUNDARY - first) * HOUR_MS)
    assert (
        read(subscribe="t", startingTimestamp=moment).table()["n"].to_pylist() == EVERYTHING[EVERYTHING.index(first) :]
    )
    assert read(subscribe="t", endingTimestamp=moment).table()["n"].to_pylist() == EVERYTHING[: EVERYTHING.index(first)]


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
