"""The schema of a topic changes, and its table follows; or the user's table has rules of its own."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from spark_broker import Admin
from spark_broker.errors import InvalidDataError
from tests.spark.tables.typed import Row, append, by_spark, consumed, create, dead_letters, in_table, stopped, tier
from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import TiererProcess
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

BIG = 2**40
OLD = pa.schema([pa.field("id", pa.int32(), nullable=False), ("name", pa.string())])


@pytest.fixture
def topic(request: pytest.FixtureRequest, admin: Admin, tmp_path: Path) -> str:
    """A typed topic with a table at `tmp_path / "table"`, whose brokers drop what is in it."""
    name = str(request.node.originalname)[:200] + tmp_path.name[-2:].strip("_")
    create(admin, name, tmp_path / "table", OLD)
    return name


COLUMNS = ["id", "name", "price"]
FIRST: list[Row] = [{"id": 1, "name": "a", "price": None}, {"id": 2, "name": None, "price": None}]


def test_new_columns_go_through_and_a_wider_one_waits_until_the_user_has_chosen_to_rewrite(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    append(brokers, topic, {"id": 1, "name": "a"}, {"id": 2})
    tier(brokers, admin, spark, topic)
    admin.alter_topic_schema(topic, pa.schema([("price", pa.float64())]))
    append(brokers, topic, {"id": 3, "price": 1.5})
    rows = [*FIRST, {"id": 3, "name": None, "price": 1.5}]
    assert consumed(brokers, topic, 3) == by_spark(brokers, spark, topic, COLUMNS) == rows, "not in the table yet"
    tier(brokers, admin, spark, topic)
    assert in_table(spark, table, COLUMNS) == rows

    admin.alter_topic_schema(topic, pa.schema([("id", pa.int64())]))
    append(brokers, topic, {"id": BIG})
    rows.append({"id": BIG, "name": None, "price": None})
    answer = spark.tier(brokers.bootstrap_servers, topic)
    assert answer["error"] == "TIERING_STOPPED"
    eventually(lambda: stopped(admin, topic), 10, "the broker that is asked has heard of it")
    history = admin.describe_topic(topic).history
    assert history is not None
    assert "id to bigint" in (history.stopped or "")
    assert "delta.type.widening" in (history.stopped or "")
    assert in_table(spark, table, COLUMNS) == rows[:3], "nothing was written"
    assert consumed(brokers, topic, 4) == by_spark(brokers, spark, topic, COLUMNS) == rows

    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('mine' = 'stays')")
    admin.alter_topic_config(topic, {"delta.type.widening": "rewrite"})
    tier(brokers, admin, spark, topic)
    assert in_table(spark, table, COLUMNS) == rows
    assert DeltaTable(str(table)).metadata().configuration["mine"] == "stays"
    assert DeltaTable(str(table)).to_pyarrow_table(columns=["id"]).column("id").type == pa.int64()
    assert consumed(brokers, topic, 4) == by_spark(brokers, spark, topic, COLUMNS) == rows
    history = admin.describe_topic(topic).history
    assert history is not None
    assert history.stopped is None


def test_a_wider_column_goes_through_by_deltas_own_widening_which_other_readers_cannot_read(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    admin.alter_topic_config(topic, {"delta.type.widening": "native", "segment.ms": 100})
    append(brokers, topic, {"id": 1, "name": "a"}, {"id": 2})
    tier(brokers, admin, spark, topic)
    admin.alter_topic_schema(topic, pa.schema([("id", pa.int64()), ("price", pa.float64())]))
    append(brokers, topic, {"id": BIG})
    rows = [*FIRST, {"id": BIG, "name": None, "price": None}]
    tier(brokers, admin, spark, topic)
    assert in_table(spark, table, COLUMNS) == by_spark(brokers, spark, topic, COLUMNS) == rows
    assert spark.sql(f"SELECT typeof(id) FROM delta.`{table}` LIMIT 1") == [["bigint"]]

    def dropped() -> bool:
        (partition,) = admin.describe_topic(topic).partitions
        return (partition.local_log_start_offset or 0) > 0

    append(brokers, topic, {"id": 4})
    eventually(dropped, 30, "a segment that only the table has")
    with pytest.raises(InvalidDataError, match=r"TypeWidening.*read_topic"):
        consumed(brokers, topic, 4)


def test_records_that_the_users_rules_refuse_are_quarantined_and_the_rest_goes_on(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table, columns = tmp_path / "table", ["id", "name"]
    spark.sql(
        f"CREATE TABLE delta.`{table}` (name VARCHAR(3) NOT NULL, id INT, next INT GENERATED ALWAYS AS (id + 1), "
        "mine STRING) USING delta TBLPROPERTIES ('delta.constraints.positive' = 'next > 0 AND mine IS NULL')"
    )
    append(brokers, topic, {"id": 1, "name": "abc"}, {"id": 2}, {"id": 3, "name": "abcd"}, {"id": -4, "name": "x"})
    append(brokers, topic, {"id": 5, "name": ""})
    tier(brokers, admin, spark, topic)
    good: list[Row] = [{"id": 1, "name": "abc"}, {"id": 5, "name": ""}]
    assert in_table(spark, table, columns) == good
    assert spark.sql(f"SELECT next FROM delta.`{table}` ORDER BY id") == [[2], [6]]
    bad: list[tuple[int, str, Row]] = [
        (1, "column name must not be null", {"id": 2, "name": None}),
        (2, "length of column name", {"id": 3, "name": "abcd"}),
        (3, "CHECK constraint positive", {"id": -4, "name": "x"}),
    ]
    assert dead_letters(spark, table) == bad
    history = admin.describe_topic(topic).history
    assert history is not None
    assert (history.quarantined, history.dead_letters, history.stopped) == (3, f"{table}_dead_letters", None)

    append(brokers, topic, {"id": 6})
    tier(brokers, admin, spark, topic)
    assert in_table(spark, table, columns) == good, "a run of which nothing is accepted"
    append(brokers, topic, {"id": 7, "name": "ok"})
    tier(brokers, admin, spark, topic)
    tier(brokers, admin, spark, topic)
    assert in_table(spark, table, columns) == [*good, {"id": 7, "name": "ok"}]
    assert dead_letters(spark, table) == [*bad, (5, "column name must not be null", {"id": 6, "name": None})]
    history = admin.describe_topic(topic).history
    assert history is not None
    assert history.quarantined == 4


def test_what_the_table_refuses_is_read_for_as_long_as_the_brokers_have_it(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    """Story: read_topic had 97 of 100 records without a word; a consumer had all."""
    table, columns = tmp_path / "table", ["id", "name"]
    admin.alter_topic_config(topic, {"storage.format": "arrow"})
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id INT, name STRING) USING delta "
        "TBLPROPERTIES ('delta.constraints.positive' = 'id > 0')"
    )
    rows: list[Row] = [{"id": number, "name": None} for number in (1, -2, 3)]
    append(brokers, topic, *rows)
    tier(brokers, admin, spark, topic)
    assert in_table(spark, table, columns) == [rows[0], rows[2]]
    assert by_spark(brokers, spark, topic, columns) == consumed(brokers, topic, 3) == rows


def test_a_table_that_demands_what_the_topic_lacks_stops_tiering(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    spark.sql(f"CREATE TABLE delta.`{table}` (id INT, owner STRING NOT NULL) USING delta")
    append(brokers, topic, {"id": 1})
    answer = spark.tier(brokers.bootstrap_servers, topic)
    assert "column 'owner'" in answer["message"]
    assert not Path(f"{table}_dead_letters").exists()
    assert consumed(brokers, topic, 1) == [{"id": 1, "name": None}]


def test_a_renamed_column_stops_tiering_and_readers_until_it_has_its_name_again(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, topic: str, tmp_path: Path
) -> None:
    """Story: the next run added a new column of the old name, in which the whole history had nulls."""
    table = tmp_path / "table"
    append(brokers, topic, {"id": 1, "name": "a"}, {"id": 2})
    tier(brokers, admin, spark, topic)
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE delta.`{table}` RENAME COLUMN name TO title")
    append(brokers, topic, {"id": 3, "name": "c"})
    answer = spark.tier(brokers.bootstrap_servers, topic)
    assert answer["error"] == "HISTORY_NOT_FOUND"
    assert "it has no column name any more" in str(answer)
    with pytest.raises(Exception, match="it has no column name any more"):
        by_spark(brokers, spark, topic, ["id", "name"])
    spark.sql(f"ALTER TABLE delta.`{table}` RENAME COLUMN title TO name")
    tier(brokers, admin, spark, topic)
    rows: list[Row] = [{"id": 1, "name": "a"}, {"id": 2, "name": None}, {"id": 3, "name": "c"}]
    assert in_table(spark, table, ["id", "name"]) == rows

    # Those that say where a record was count, too: `read_topic` found no row of the history any more.
    spark.sql(f"ALTER TABLE delta.`{table}` RENAME COLUMN _offset TO place")
    append(brokers, topic, {"id": 4, "name": "d"})
    assert "it has no column _offset any more" in str(spark.tier(brokers.bootstrap_servers, topic))
    with pytest.raises(Exception, match="it has no column _offset any more"):
        by_spark(brokers, spark, topic, ["id", "name"])
    spark.sql(f"ALTER TABLE delta.`{table}` RENAME COLUMN place TO _offset")
    tier(brokers, admin, spark, topic)
    rows.append({"id": 4, "name": "d"})
    assert consumed(brokers, topic, 4) == by_spark(brokers, spark, topic, ["id", "name"]) == rows
