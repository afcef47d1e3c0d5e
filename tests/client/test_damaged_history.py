"""The table of a topic's history is damaged, or an older one: readers get the right records or an error, and no gap."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from spark_broker import Consumer, TopicPartition
from spark_broker.client.cluster_view import TopicView
from spark_broker.client.delta_rows import DeltaRows
from spark_broker.client.history_reader import HistoryReader
from spark_broker.client.table_file import TableFile
from spark_broker.errors import InvalidDataError
from spark_broker.protocol.messages import HistoryMetadata
from spark_broker.protocol.schema import schema_to_bytes
from tests.client.fake_broker import FakeCluster
from tests.support.delta_files import append_file, table_id

FILES = 2
ROWS = 400
"""Of each file."""
END = FILES * ROWS
SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
T0, OTHER = TopicPartition("t", 0), TopicPartition("other", 0)
RANDOM = random.Random(7)
TEXTS = [RANDOM.randbytes(8).hex() for _ in range(END + 10)]


def rows(start: int, end: int) -> pa.Table:
    offsets = pa.array(range(start, end))
    return pa.table(
        {
            "n": offsets,
            "text": TEXTS[start:end],
            "_partition": pa.array([0] * len(offsets), pa.int32()),
            "_offset": offsets,
            "_timestamp": pa.array(range(start, end), pa.timestamp("us", "UTC")),
            "_leader_epoch": pa.array([0] * len(offsets), pa.int32()),
        }
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two files: 0.parquet and 1.parquet."""
    path = tmp_path / "table"
    for number in range(FILES):
        append_file(path, f"{number}.parquet", rows(number * ROWS, (number + 1) * ROWS), row_group_rows=100)
    return path


def topic_of(table: Path, schema: pa.Schema = SCHEMA, end: int = END) -> TopicView:
    history = HistoryMetadata(table_id(table), 1, DeltaTable(str(table)).version(), [0], [end])
    return TopicView("t", "t" * 32, (), (schema_to_bytes(schema),), {"delta.path": str(table)}, history)


def read(topic: TopicView) -> pa.Table:
    return pa.Table.from_batches([batch.data for batch in HistoryReader(topic).batches(0, 0, END)], SCHEMA)


def flips(content: bytes, step: int) -> Iterator[int]:
    """Positions: a few of the pages, and more of the end, where the statistics and the schema are."""
    yield from range(0, len(content), 997)
    yield from range(len(content) - 4000, len(content), step)


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(97, marks=pytest.mark.quick), pytest.param(7, marks=pytest.mark.full)])
def test_a_flipped_bit_changes_no_record_and_hides_none(table: Path, step: int) -> None:
    topic, file = topic_of(table), table / "0.parquet"
    right, content = read(topic), file.read_bytes()
    assert right.column("text").to_pylist() == TEXTS[:END]
    refusals = []
    for position, bit in ((position, 1 << bit) for position in flips(content, step) for bit in (0, 5)):
        file.write_bytes(content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :])
        try:
            assert read(topic).equals(right), f"bit {bit} of byte {position}"
        except InvalidDataError as error:
            refusals.append(str(error))
    assert len(refusals) > 20, "most bits matter"
    assert all(str(table) in said for said in refusals)
    assert sum("0.parquet" in said for said in refusals) > 0.9 * len(refusals)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def another(file: Path) -> None:
    shutil.copy(file.with_name("other.parquet"), file)


@pytest.mark.parametrize("damage", [Path.unlink, cut, emptied, another])
def test_a_damaged_file_is_named_and_stops_its_partition_alone(
    cluster: FakeCluster, table: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copy(append_file(tmp_path / "elsewhere", "other.parquet", rows(0, 5)), table)
    kept = shutil.copytree(table, tmp_path / "backup")
    cluster.create("t", 1, schema=SCHEMA, config={"delta.path": str(table)})
    cluster.topics["t"].partitions[0].log_start_offset = END
    cluster.topics["t"].history = topic_of(table).history
    cluster.create("other", 1, schema=SCHEMA)
    cluster.store("other", 0, pa.RecordBatch.from_pydict({"n": [1], "text": ["x"]}, SCHEMA))
    damage(table / "1.parquet")
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([T0, OTHER])
        for tp in (T0, OTHER):
            consumer.seek(tp, 0)
        found: dict[TopicPartition, int] = dict.fromkeys((T0, OTHER), 0)

        def read_on() -> None:
            for batch in consumer.poll(0.5):
                assert batch.data.column("n")[0].as_py() in (batch.base_offset, 1)
                found[TopicPartition(batch.topic, batch.partition)] += batch.data.num_rows

        with pytest.raises(InvalidDataError) as refused:  # noqa: PT012 (whichever poll raises it)
            while found[T0] < END:
                read_on()
        assert found[OTHER] == 1
        assert found[T0] <= ROWS, "nothing of the damaged file"
        for said in (str(table), "1.parquet", "Put the file back", "seek"):
            assert said in str(refused.value)
        shutil.copy(kept / "1.parquet", table)
        consumer.seek(T0, found[T0])
        while found[T0] < END:
            read_on()


def test_an_older_copy_of_the_table_is_no_silent_gap(table: Path, tmp_path: Path) -> None:
    older = shutil.copytree(table, tmp_path / "backup")
    append_file(table, "2.parquet", rows(END, END + 10))
    topic = topic_of(table)
    shutil.rmtree(table)
    older.rename(table)
    with pytest.raises(InvalidDataError, match=r"taken back to version 2, and the history needs version 3") as refused:
        read(topic)
    assert "backup" in refused.value.hint


@pytest.mark.parametrize(("transaction", "is_older"), [(3, True), (4, False), (5, False)])
def test_an_older_copy_to_which_others_have_written_is_no_silent_gap(
    table: Path, transaction: int, is_older: bool
) -> None:
    """A backup was put back, and OPTIMIZE ran: Delta's version is no older than the history needs."""
    topic = replace(topic_of(table), cluster_id="c")
    assert topic.history is not None
    topic = replace(topic, history=msgspec.structs.replace(topic.history, version=4))
    tierers = CommitProperties(app_transactions=[Transaction(f"spark-broker/c/{topic.topic_id}", transaction)])
    write_deltalake(str(table), rows(0, 0), mode="append", commit_properties=tierers)
    if not is_older:
        assert read(topic).num_rows == END
        return
    with pytest.raises(InvalidDataError, match="taken back to transaction 3, and the history needs 4"):
        read(topic)


def test_another_table_in_its_place_is_refused(table: Path) -> None:
    topic = topic_of(table)
    shutil.rmtree(table)
    for _ in range(5):
        write_deltalake(str(table), rows(0, 10), mode="append")
    with pytest.raises(InvalidDataError, match="it was replaced"):
        read(topic)


def test_a_table_whose_columns_are_gone_is_refused(table: Path) -> None:
    without = DeltaTable(str(table)).to_pyarrow_table().drop_columns(["_offset"])
    write_deltalake(str(table), without, mode="overwrite", schema_mode="overwrite")
    with pytest.raises(InvalidDataError, match="no column _offset"):
        read(topic_of(table))


def test_files_of_a_user_are_neither_read_nor_keep_from_being_checked_what_is_beside_them(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the table was a user's before the topic came. Each reader read all of it, and counted nothing."""
    users = pa.table({"n": pa.array(range(ROWS)), "text": ["theirs"] * ROWS}, SCHEMA)
    write_deltalake(str(table), users, mode="append", schema_mode="merge")
    checked: list[str] = []
    check = TableFile._check_group

    def noted(file: TableFile, parquet: pq.ParquetFile, group: int, columns: set[str]) -> None:
        checked.append(file.path)
        check(file, parquet, group, columns)

    monkeypatch.setattr(TableFile, "_check_group", noted)
    topic = topic_of(table)
    assert read(topic).column("text").to_pylist() == TEXTS[:END]
    assert set(checked) == {"0.parquet", "1.parquet"}
    monkeypatch.setattr(DeltaRows, "_query", lambda rows, query, *rest: iter(()))  # as if statistics hid all rows
    with pytest.raises(InvalidDataError, match=f"a query found 0 records .* and its files have {END}"):
        read(topic)


@pytest.mark.parametrize("content", ["{garbage", "", None])
def test_a_damaged_log_of_the_table_is_an_error(table: Path, content: str | None) -> None:
    topic, entry = topic_of(table), table / "_delta_log" / "00000000000000000001.json"
    if content is None:
        entry.unlink()
    else:
        entry.write_text(content)
    with pytest.raises(InvalidDataError) as refused:
        read(topic)
    assert str(table) in str(refused.value)


AT_THE_LIMIT = """
import resource, socket, sys
from pathlib import Path
from spark_broker.errors import SparkBrokerError
from tests.client.test_damaged_history import END, HistoryReader, read, topic_of

topic = topic_of(Path(sys.argv[1]))
assert read(topic).num_rows == END
reader = HistoryReader(topic)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True:
        taken.append(socket.socket())
except OSError:
    pass
for begin in (lambda: HistoryReader(topic), lambda: list(reader.batches(0, 0, END))):
    try:
        begin()
    except SparkBrokerError as error:
        print(error.retriable, error)
taken.clear()
assert read(topic).num_rows == END
"""


@pytest.mark.slow
def test_a_reader_without_descriptors_calls_no_table_damaged(table: Path) -> None:
    """Story: the hint was to put the table back from a backup, or to seek behind its records."""
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_LIMIT, str(table)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2
    for line in said:
        assert line.startswith(f"True [PROCESS_LIMIT] the table {table}, the history of t, cannot be read now: ")
        assert "Too many open files" in line
