"""A topic's table is damaged, or an older copy of it: whoever reads the topic gets an error, and no changed record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker import Admin
from spark_broker.errors import InvalidDataError
from tests.spark.history import History
from tests.spark.tables.typed import Row, append, by_spark, consumed, create, in_table, tier
from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import TiererProcess
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

SCHEMA = pa.schema([("id", pa.int32()), ("text", pa.string())])
ROWS: list[Row] = [{"id": n, "text": f"{n:08} is text"} for n in range(1000)]


def test_a_table_that_is_damaged_or_older_gives_no_wrong_record(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, history: History, tmp_path: Path
) -> None:
    table, older, columns = tmp_path / "table", tmp_path / "older", ["id", "text"]
    create(admin, "damaged", table, SCHEMA, segment_ms=100)
    append(brokers, "damaged", *ROWS[:10])
    tier(brokers, admin, spark, "damaged")
    shutil.copytree(table, older)
    append(brokers, "damaged", *ROWS[10:])
    tier(brokers, admin, spark, "damaged")
    last: Row = {"id": -1, "text": "in the log alone"}
    append(brokers, "damaged", last)
    rows = [*ROWS, last]

    def dropped() -> bool:
        (partition,) = admin.describe_topic("damaged").partitions
        return (partition.local_log_start_offset or 0) == len(ROWS)

    eventually(dropped, 60, "only the table has the records")
    assert consumed(brokers, "damaged", len(rows)) == by_spark(brokers, spark, "damaged", columns) == rows

    (file,) = (file for file in table.glob("*.parquet") if file.stat().st_size > 4000)
    content = file.read_bytes()
    place = len(content) // 2
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    file.with_name(f".{file.name}.crc").unlink()  # Hadoop's own checksum. Object stores have none.
    with pytest.raises(InvalidDataError, match=f"file {file.name} of the table {table}.*is gone or damaged"):
        consumed(brokers, "damaged", len(rows))
    with pytest.raises(RuntimeError, match=file.name):
        by_spark(brokers, spark, "damaged", columns)
    file.write_bytes(content)
    assert consumed(brokers, "damaged", len(rows)) == by_spark(brokers, spark, "damaged", columns) == rows

    entry = table / "_delta_log" / f"{1:020}.json"
    commit = entry.read_bytes()
    entry.write_bytes(b"")
    entry.with_name(f".{entry.name}.crc").unlink()
    another_spark, emptied = history.other, f"the entry {entry.name} of its log is empty"
    with pytest.raises(RuntimeError, match=f"INVALID_DATA.*{emptied}"):
        by_spark(brokers, another_spark, "damaged", columns)
    answer = another_spark.tier(brokers.bootstrap_servers, "damaged")
    assert answer["error"] == "HISTORY_NOT_FOUND"
    assert emptied in answer["message"]
    with pytest.raises(InvalidDataError, match=emptied):
        consumed(brokers, "damaged", len(rows))
    entry.write_bytes(commit)

    table.rename(tmp_path / "newer")
    older.rename(table)
    why = "taken back to version 0, and the history needs version 1"
    with pytest.raises(InvalidDataError, match=why):
        consumed(brokers, "damaged", len(rows))
    with pytest.raises(RuntimeError, match=f"INVALID_DATA.*{why}"):
        by_spark(brokers, spark, "damaged", columns)
    shutil.rmtree(table)
    with pytest.raises(InvalidDataError, match=f"the table {table}, the history of damaged, cannot be read"):
        consumed(brokers, "damaged", len(rows))
    with pytest.raises(RuntimeError, match=f"INVALID_DATA: the table {table}, the history of damaged, cannot be read"):
        by_spark(brokers, spark, "damaged", columns)


def test_a_table_is_not_written_anew_without_a_file_that_is_gone(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, tmp_path: Path
) -> None:
    """The session passes over files that are gone: a rewrite of the table lost their records for good."""
    table, setting = tmp_path / "table", "spark.sql.files.ignoreMissingFiles"
    create(admin, "rewritten", table, SCHEMA, delta_type_widening="rewrite")
    rows = ROWS[:20]
    for part in (rows[:10], rows[10:]):
        append(brokers, "rewritten", *part)
        tier(brokers, admin, spark, "rewritten")
    admin.alter_topic_schema("rewritten", pa.schema([("id", pa.int64())]))
    rows.append({"id": 2**40, "text": "needs the wider column"})
    append(brokers, "rewritten", rows[-1])
    file = next(iter(table.glob("*.parquet")))
    away = file.rename(tmp_path / file.name)
    spark.sql(f"SET {setting}=true")
    assert spark.tier(brokers.bootstrap_servers, "rewritten")["error"] == "TIERING_STOPPED"
    spark.sql(f"RESET {setting}")
    away.rename(file)
    tier(brokers, admin, spark, "rewritten")
    assert in_table(spark, table, ["id", "text"]) == rows
