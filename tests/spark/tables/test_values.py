"""Values that a table of the user's own design would change, or computes itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from spark_broker import Admin, NewTopic
from spark_broker.errors import InvalidConfigError
from tests.spark.tables.typed import Row, append, consumed, create, dead_letters, in_table, stopped, tier
from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import TiererProcess
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

SCHEMA = pa.schema([("id", pa.int32()), ("region", pa.string()), ("at", pa.timestamp("us", "UTC"))])
MIDNIGHT = datetime(2026, 11, 1, 4, 0, tzinfo=UTC)
"""In New York, where an hour comes twice that day."""
HOURS = [MIDNIGHT + timedelta(minutes=30, hours=hour) for hour in range(-5, 4)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def in_new_york(spark: TiererProcess) -> Iterator[None]:
    """The session that tiers has another zone than the one that reads."""
    spark.sql("SET spark.sql.session.timeZone=America/New_York")
    yield
    spark.sql("SET spark.sql.session.timeZone=UTC")


@pytest.fixture(params=["LEGACY", "EXCEPTION"])
def for_old_readers(spark: TiererProcess, request: pytest.FixtureRequest) -> Iterator[None]:
    """The session writes Parquet for Spark 2 and Hive, or refuses dates that these take for others."""
    name = "spark.sql.parquet.datetimeRebaseModeInWrite"
    spark.sql(f"SET {name}={request.param}")
    yield
    spark.sql(f"RESET {name}")


def dropped(admin: Admin, topic: str, end: int) -> bool:
    """Whether brokers have nothing before this offset any more: readers get it from the table."""
    (partition,) = admin.describe_topic(topic).partitions
    return (partition.local_log_start_offset or 0) >= end


@pytest.mark.usefixtures("in_new_york")
def test_a_table_partitioned_by_a_generated_column_gets_every_record(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, table: Path
) -> None:
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id INT, region STRING, at TIMESTAMP, "
        "day DATE GENERATED ALWAYS AS (CAST(at AS DATE)), part STRING GENERATED ALWAYS AS (region), "
        "kind STRING DEFAULT 'click') USING delta PARTITIONED BY (day, part, kind) "
        "TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')"
    )
    create(admin, "generated", table, SCHEMA, segment_ms=100)
    rows: list[Row] = [{"id": n, "region": f"r{n}", "at": at} for n, at in enumerate(HOURS)]
    rows += [{"id": 100, "region": "", "at": None}, {"id": 101, "region": None, "at": HOURS[0]}]
    append(brokers, "generated", *rows)
    tier(brokers, admin, spark, "generated")
    history = admin.describe_topic("generated").history
    assert history is not None
    assert (history.quarantined, history.stopped) == (0, None)
    there = DeltaTable(str(table)).to_pyarrow_table().sort_by("id").to_pylist()
    assert [(row["day"], row["part"], row["kind"]) for row in there] == [
        (at.date() if isinstance(at := row["at"], datetime) else None, row["region"] or None, "click") for row in rows
    ]
    assert there[0]["day"] == date(2026, 10, 31)
    append(brokers, "generated", {"id": 102, "region": "", "at": None})
    eventually(lambda: dropped(admin, "generated", len(rows)), 60, "only the table has the records")
    assert consumed(brokers, "generated", len(rows))[: len(rows)] == rows


@pytest.mark.usefixtures("in_new_york")
def test_a_partition_column_has_the_records_values_or_stops_tiering(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, table: Path
) -> None:
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id INT, region STRING, at TIMESTAMP) USING delta PARTITIONED BY (region, at)"
    )
    create(admin, "partitioned", table, SCHEMA, segment_ms=100)
    texts = [" ", "a/b=c%20", "é", None, "__HIVE", "x"]
    rows: list[Row] = [
        {"id": n, "region": texts[n % len(texts)], "at": at} for n, at in enumerate([*HOURS, None, HOURS[0]])
    ]
    append(brokers, "partitioned", *rows)
    tier(brokers, admin, spark, "partitioned")
    append(brokers, "partitioned", {"id": 20, "region": "x"})
    eventually(lambda: dropped(admin, "partitioned", len(rows)), 60, "only the table has the records")
    tier(brokers, admin, spark, "partitioned")
    rows.append({"id": 20, "region": "x", "at": None})
    assert consumed(brokers, "partitioned", len(rows)) == rows

    lossy: list[Row] = [{"id": 30, "region": ""}, {"id": 31, "region": "__HIVE_DEFAULT_PARTITION__"}, {"id": 32}]
    append(brokers, "partitioned", *lossy)
    answer = spark.tier(brokers.bootstrap_servers, "partitioned")
    assert answer["error"] == "TIERING_STOPPED"
    eventually(lambda: stopped(admin, "partitioned"), 10, "the broker that is asked has heard of it")
    why = stopped(admin, "partitioned") or ""
    assert (
        f"column 'region' of the table {table} cannot hold what the record at offset {len(rows)} of partition 0" in why
    )
    rows += [{"id": row["id"], "region": row.get("region"), "at": None} for row in lossy]
    assert consumed(brokers, "partitioned", len(rows)) == rows, "the topic goes on serving what it has"

    spark.sql(
        f"ALTER TABLE delta.`{table}` ADD CONSTRAINT named CHECK (region IS NULL OR region NOT LIKE '\\_\\_HIVE\\_D%')"
    )
    answer = spark.tier(brokers.bootstrap_servers, "partitioned")
    assert answer["error"] == "TIERING_STOPPED", "the empty text is null in the table, which the rule allows"


def test_an_empty_text_in_a_partition_column_is_judged_as_the_null_that_delta_stores(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, table: Path
) -> None:
    spark.sql(f"CREATE TABLE delta.`{table}` (id INT, region STRING NOT NULL) USING delta PARTITIONED BY (region)")
    create(admin, "judged", table, SCHEMA)
    append(
        brokers,
        "judged",
        {"id": 0, "region": "a"},
        {"id": 1, "region": "", "at": datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)},
        {"id": 2, "region": "__HIVE_DEFAULT_PARTITION__"},
    )
    tier(brokers, admin, spark, "judged")
    assert in_table(spark, table, ["id", "region"]) == [{"id": 0, "region": "a"}]
    reason = "column region must not be null"
    assert dead_letters(spark, table) == [
        (1, reason, {"id": 1, "region": "", "at": "2026-01-01T12:00:00.123456Z"}),
        (2, reason, {"id": 2, "region": "__HIVE_DEFAULT_PARTITION__", "at": None}),
    ]


def test_a_text_that_is_too_long_for_a_directory_is_named_until_a_constraint_refuses_it(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, table: Path
) -> None:
    """Story: Java said that a file's name is too long, each time, and not which record it was."""
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id INT, region STRING, copy STRING GENERATED ALWAYS AS (concat(region, 'y'))) "
        "USING delta PARTITIONED BY (copy)"
    )
    create(admin, "long", table, SCHEMA)
    fit: list[Row] = [
        {"id": id_, "region": region} for id_, region in enumerate(["x" * 249, "/" * 82 + "abc", "é" * 124 + "x", None])
    ]
    append(brokers, "long", *fit)
    tier(brokers, admin, spark, "long")
    assert in_table(spark, table, ["id", "region"]) == fit
    append(brokers, "long", {"id": 4, "region": "x" * 250})
    assert spark.tier(brokers.bootstrap_servers, "long")["error"] == "TIERING_STOPPED"
    eventually(lambda: stopped(admin, "long"), 10, "the broker that is asked has heard of it")
    why = stopped(admin, "long") or ""
    assert f"column 'copy' of the table {table} cannot hold what the record at offset 4 of partition 0 has there" in why
    assert "a directory's name, with 250 bytes at most" in why
    spark.sql(f"ALTER TABLE delta.`{table}` ADD CONSTRAINT short CHECK (region IS NULL OR octet_length(region) < 250)")
    tier(brokers, admin, spark, "long")
    assert in_table(spark, table, ["id", "region"]) == fit
    assert [offset for offset, *_ in dead_letters(spark, table)] == [4]


def test_dead_letters_keep_the_keys_of_maps(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, table: Path
) -> None:
    """Story: a key of bytes was where Java had it. A map whose keys are no names is the list of its entries."""
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id INT NOT NULL, counts MAP<BINARY, BIGINT>, "
        "deep MAP<STRING, ARRAY<MAP<BINARY, BIGINT>>>) USING delta"
    )
    counts = pa.map_(pa.binary(), pa.int64())
    deep = pa.map_(pa.string(), pa.list_(counts))
    create(admin, "keys", table, pa.schema([("id", pa.int32()), ("counts", counts), ("deep", deep)]))
    append(brokers, "keys", {"id": 1}, {"counts": {b"\xff": 5}, "deep": {"a": [{b"\x00": 7}, None]}})
    tier(brokers, admin, spark, "keys")
    ((offset, _, record),) = dead_letters(spark, table)
    assert offset == 1
    assert record == {
        "id": None,
        "counts": [{"key": "/w==", "value": 5}],
        "deep": {"a": [[{"key": "AA==", "value": 7}], None]},
    }


@pytest.mark.usefixtures("for_old_readers")
def test_dates_before_1582_are_the_same_in_the_table(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, table: Path
) -> None:
    """Story: the first of January 1200 was the eighth for consumers, once brokers had dropped it."""
    topic = f"dates-{table.parent.name}"
    create(admin, topic, table, pa.schema([("day", pa.date32()), ("at", pa.timestamp("us", "UTC"))]))
    days = [date(1, 1, 1), date(1200, 1, 1), date(1582, 10, 14), date(1899, 12, 31)]
    rows: list[Row] = [{"day": day, "at": datetime(day.year, day.month, day.day, tzinfo=UTC)} for day in days]
    append(brokers, topic, *rows)
    tier(brokers, admin, spark, topic)
    there = DeltaTable(str(table)).to_pyarrow_table().sort_by("_offset")
    assert there.select(["day", "at"]).to_pylist() == rows
    shown = spark.sql(f"SELECT CAST(day AS STRING) FROM delta.`{table}` ORDER BY _offset")
    assert shown == [[day.isoformat()] for day in days]


@pytest.mark.parametrize(
    ("name", "design", "good", "bad"),
    [
        ("bytes", "v BINARY", b"a", b"\xff"),
        ("char", "v CHAR(3)", "abc", "a"),
        ("years", "v TIMESTAMP", datetime(1, 1, 1, tzinfo=UTC), -93_784_560_000_000_000),
    ],
)
def test_what_a_column_of_the_table_would_change_stops_tiering(
    brokers: ProcessCluster,
    admin: Admin,
    spark: TiererProcess,
    table: Path,
    name: str,
    design: str,
    good: object,
    bad: object,
) -> None:
    partitioned = "" if "CHAR" in design else "PARTITIONED BY (v)"
    spark.sql(f"CREATE TABLE delta.`{table}` (id INT, {design}) USING delta {partitioned}")
    kind = {"bytes": pa.binary(), "char": pa.string(), "years": pa.timestamp("us", "UTC")}[name]
    create(admin, name, table, pa.schema([("id", pa.int32()), ("v", kind)]))
    append(brokers, name, {"id": 1, "v": good}, {"id": 2, "v": None})
    tier(brokers, admin, spark, name)
    append(brokers, name, {"id": 3, "v": bad})
    answer = spark.tier(brokers.bootstrap_servers, name)
    assert "cannot hold what the record at offset 2 of partition 0 has there" in answer["message"]


def test_a_new_column_of_local_times_gets_what_the_table_needs_for_it(
    brokers: ProcessCluster, admin: Admin, spark: TiererProcess, table: Path
) -> None:
    create(admin, "local", table, SCHEMA)
    append(brokers, "local", {"id": 1})
    tier(brokers, admin, spark, "local")
    nested = pa.list_(pa.struct([("at", pa.timestamp("us"))]))
    admin.alter_topic_schema("local", pa.schema([("when", pa.timestamp("us")), ("deep", nested)]))
    when = datetime.fromisoformat("2026-01-02T03:04:05")
    append(brokers, "local", {"id": 2, "when": when, "deep": [{"at": when}]})
    tier(brokers, admin, spark, "local")
    assert in_table(spark, table, ["id", "CAST(when AS STRING)"])[1:] == [
        {"id": 2, "CAST(when AS STRING)": "2026-01-02 03:04:05"}
    ]


def test_a_table_for_a_topic_that_has_columns_no_table_can_have_is_refused_when_it_is_set(
    brokers: ProcessCluster, admin: Admin, table: Path
) -> None:
    columns = pa.schema([("unit price", pa.int32())])
    admin.create_topic(NewTopic("priced", partitions=1, replication_factor=1, schema=columns))
    with pytest.raises(InvalidConfigError, match="a Delta table takes no ' ' in the name of a column"):
        admin.alter_topic_config("priced", {"delta.path": str(table)})
    with pytest.raises(InvalidConfigError, match="takes no"):
        create(admin, "priced-anew", table, columns)
    del brokers
