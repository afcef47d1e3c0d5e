"""Every offset is in the topic's Delta table once, whenever a tierer is killed and whoever else tiers.

The tables are read with deltalake, which shares no code with the tierer.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.spark.delta_session import downloaded_jars
from tests.spark.application import ROOT, environment
from tests.spark.history import History
from tests.spark.tables.typed import append, dead_letters, in_table, tier
from tests.spark.tables.typed import create as create_typed
from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import BEFORE_DEAD_LETTERS, POINTS, Run, TiererProcess
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(900)

TYPED = pa.schema([pa.field("id", pa.int32(), nullable=False), ("name", pa.string())])
PARTITIONS = 3
BATCHES = 20
ROWS = 125

LARGE_ROWS = 500
"""Of a batch, where runs are to take their time."""

JOB = ROOT / "jobs" / "tier.py"

WRITING = "while it writes files"
"""Beside `POINTS`: where a run is killed without standing."""

Row = tuple[int, int, bytes]
"""Partition, offset, value."""


class Tiering(NamedTuple):
    """A run that has begun, and what it tiers."""

    topic: str
    table: Path
    run: Run


@pytest.fixture(scope="module")
def tierer(history: History) -> TiererProcess:
    """It recovers what others leave."""
    return history.tierer


@pytest.fixture(scope="module")
def brokers(tierer: TiererProcess, history: History) -> ProcessCluster:
    """They start while Spark does."""
    return history.brokers


def create(brokers: ProcessCluster, table: Path, name: str) -> None:
    with Admin(brokers.bootstrap_servers) as admin:
        config = {"delta.path": str(table), "segment.bytes": "262144"}
        admin.create_topic(NewTopic(name, partitions=PARTITIONS, replication_factor=2, config=config))


def fill(brokers: ProcessCluster, topic: str, rows: int = ROWS) -> None:
    """Batches to every partition. Some are of a transaction that is aborted, so offsets have gaps."""
    values = random.Random(topic)
    for name in (None, "aborted", None):
        with Producer(brokers.bootstrap_servers, transactional_id=name) as producer:
            if name:
                producer.init_transactions()
                producer.begin_transaction()
            for index in range(BATCHES * PARTITIONS if name is None else PARTITIONS):
                batch = pa.record_batch({"value": pa.array([values.randbytes(200) for _ in range(rows)], pa.binary())})
                producer.append(topic, batch, partition=index % PARTITIONS)
            if name:
                producer.abort_transaction()
            producer.flush()


def committed(brokers: ProcessCluster, topic: str) -> list[Row]:
    """What a consumer reads, in order of partition and offset."""
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    rows: list[Row] = []
    with Consumer(brokers.bootstrap_servers, enable_auto_commit=False, isolation_level="read_committed") as consumer:
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        consumer.seek_to_beginning()
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            for batch in consumer.poll(1.0):
                values = batch.data.column("value").to_pylist()
                rows += [(batch.partition, offset, value) for offset, value in enumerate(values, batch.base_offset)]
    return sorted(rows)


def tiered(table: Path) -> list[Row]:
    """What is in the table, in order of partition and offset."""
    columns = DeltaTable(str(table)).to_pyarrow_table(columns=["_partition", "_offset", "value"]).to_pydict()
    return sorted(zip(*columns.values(), strict=True))


def commits(table: Path) -> list[str]:
    return sorted(path.name for path in (table / "_delta_log").glob("*.json"))


def check_once(brokers: ProcessCluster, topic: str, table: Path) -> None:
    """The table has what a consumer reads, and the topic's description says so."""
    assert tiered(table) == committed(brokers, topic)
    with Admin(brokers.bootstrap_servers) as admin:
        description = admin.describe_topic(topic)
    assert description.history is not None
    assert description.history.stopped is None
    for partition in description.partitions:
        assert (partition.history_start_offset, partition.history_end_offset) == (0, partition.high_watermark)


def test_what_is_sealed_is_in_the_table_and_the_next_run_goes_on(
    brokers: ProcessCluster, tierer: TiererProcess, tmp_path: Path
) -> None:
    create(brokers, tmp_path / "table", "plain")
    fill(brokers, "plain")
    first = tierer.tier(brokers.bootstrap_servers, "plain", include_active_segments=False)
    assert first["records"] == len(tiered(tmp_path / "table"))
    assert first["table_version"] == 0
    with Admin(brokers.bootstrap_servers) as admin:
        sealed = [partition.sealed_offset for partition in admin.describe_topic("plain").partitions]
    assert first["ends"] == sealed
    ends = dict(enumerate(sealed))
    assert tiered(tmp_path / "table") == [row for row in committed(brokers, "plain") if row[1] < (ends[row[0]] or 0)]
    nothing = tierer.tier(brokers.bootstrap_servers, "plain", include_active_segments=False)
    assert (nothing["table_version"], nothing["records"], nothing["ends"]) == (None, 0, sealed)
    fill(brokers, "plain")
    assert tierer.tier(brokers.bootstrap_servers, "plain")["table_version"] == 1
    check_once(brokers, "plain", tmp_path / "table")


@pytest.mark.full
def test_records_that_were_all_aborted_leave_nothing_to_write_and_count_as_tiered(
    brokers: ProcessCluster, tierer: TiererProcess, tmp_path: Path
) -> None:
    create(brokers, tmp_path / "table", "aborted")
    with Producer(brokers.bootstrap_servers, transactional_id="all") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.append("aborted", [{"value": b"never"}], partition=1).result(60)
        producer.abort_transaction()
    first = tierer.tier(brokers.bootstrap_servers, "aborted")
    assert (first["records"], first["ends"]) == (0, [0, 2, 0])
    assert tiered(tmp_path / "table") == []
    fill(brokers, "aborted")
    assert "error" not in tierer.tier(brokers.bootstrap_servers, "aborted")
    check_once(brokers, "aborted", tmp_path / "table")


@pytest.mark.full
def test_the_job_tiers_a_typed_topic(brokers: ProcessCluster, tmp_path: Path) -> None:
    schema = pa.schema(
        [pa.field("id", pa.int64(), nullable=False), ("at", pa.timestamp("us", "UTC")), ("d", pa.date32())]
    )
    table = tmp_path / "table"
    with Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic(
            NewTopic("typed", partitions=1, replication_factor=2, schema=schema, config={"delta.path": str(table)})
        )
    rows = [{"id": number, "at": number * 10**15, "d": number} for number in range(100)]
    with Producer(brokers.bootstrap_servers) as producer:
        producer.append("typed", rows).result(60)
    jars = ",".join(map(str, downloaded_jars()))
    command = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[2]", "--jars", jars]
    command += [str(JOB), *arguments_for(brokers, "typed")]
    done = subprocess.run(command, env=environment({}), timeout=400, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"typed: 100 records are in {table}, version 0")
    read = DeltaTable(str(table))
    assert [(field.name, field.nullable) for field in read.schema().fields] == [
        (name, True) for name in ("id", "at", "d", "_partition", "_offset", "_timestamp", "_leader_epoch")
    ]
    assert read.to_pyarrow_table(columns=schema.names).cast(schema).sort_by("id") == pa.Table.from_pylist(rows, schema)


def arguments_for(brokers: ProcessCluster, topic: str) -> list[str]:
    return ["--bootstrap-servers", brokers.bootstrap_servers, "--topic", topic, "--include-active-segments"]


@pytest.mark.full
def test_a_run_whose_jobs_a_neighbour_cancels_again_and_again_gives_up_and_says_so(
    brokers: ProcessCluster, tierer: TiererProcess, tmp_path: Path
) -> None:
    create(brokers, tmp_path / "table", "cancelled")
    fill(brokers, "cancelled")
    assert tierer.tier(brokers.bootstrap_servers, "cancelled", cancel_jobs=True)["error"] == "TIERING_STOPPED"
    with Admin(brokers.bootstrap_servers) as admin:
        history = admin.describe_topic("cancelled").history
    assert history is not None
    assert "cancelled as part of cancellation of all jobs" in (history.stopped or "")
    tierer.tier(brokers.bootstrap_servers, "cancelled")
    check_once(brokers, "cancelled", tmp_path / "table")


@pytest.fixture(scope="module")
def asleep(history: History, brokers: ProcessCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiering]:
    """Runs of one process that stand at a point each, while the controller restarts. By point."""
    runs = {
        point: begun(history, f"asleep-{number}", tmp_path_factory.mktemp("asleep") / "table", point)
        for number, point in enumerate(POINTS)
    }
    for each in runs.values():
        each.run.await_stopped()
    brokers.restart_controller()
    return runs


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
def test_a_tierer_wakes_under_another_controller_after_another_tierer_has_gone_on(
    brokers: ProcessCluster, tierer: TiererProcess, asleep: dict[str, Tiering], point: str
) -> None:
    check_that_it_wakes(brokers, tierer, asleep[point])


@pytest.mark.full
def test_a_tierer_wakes_after_another_has_gone_on(
    history: History, brokers: ProcessCluster, tierer: TiererProcess, tmp_path: Path
) -> None:
    sleeping = begun(history, "asleep", tmp_path / "table", "before the files are written")
    sleeping.run.await_stopped()
    check_that_it_wakes(brokers, tierer, sleeping)


def begun(history: History, topic: str, table: Path, point: str) -> Tiering:
    """Another process tiers a new topic, up to this point."""
    other = history.other  # Its Spark starts while the topic is filled.
    create(history.brokers, table, topic)
    fill(history.brokers, topic)
    return Tiering(topic, table, other.begin(history.brokers.bootstrap_servers, topic, stop_at=point))


def check_that_it_wakes(brokers: ProcessCluster, tierer: TiererProcess, sleeping: Tiering) -> None:
    """Another tierer goes on with the topic before it wakes, and after it has ended."""
    fill(brokers, sleeping.topic)
    assert "error" not in tierer.tier(brokers.bootstrap_servers, sleeping.topic)
    check_once(brokers, sleeping.topic, sleeping.table)
    fill(brokers, sleeping.topic)
    sleeping.run.go_on()
    assert "error" not in sleeping.run.ended()
    assert "error" not in tierer.tier(brokers.bootstrap_servers, sleeping.topic)
    check_once(brokers, sleeping.topic, sleeping.table)


@pytest.fixture
def sleeper(history: History) -> TiererProcess:
    return history.other


@pytest.mark.full
def test_a_tierer_sees_the_table_that_another_has_made_since_it_looked(
    brokers: ProcessCluster, tierer: TiererProcess, sleeper: TiererProcess, tmp_path: Path
) -> None:
    """It looked while the first commit was under way: there was a directory for the log, and nothing in it.

    Delta remembered that there was no table. So it seemed later that somebody had deleted the table.
    """
    create(brokers, tmp_path / "table", "looked")
    (tmp_path / "table" / "_delta_log").mkdir(parents=True)
    assert "error" not in sleeper.tier(brokers.bootstrap_servers, "looked"), "there is nothing to tier"
    for one in (tierer, sleeper):
        fill(brokers, "looked")
        assert "error" not in one.tier(brokers.bootstrap_servers, "looked")
    check_once(brokers, "looked", tmp_path / "table")


@pytest.mark.full
def test_two_tierers_at_once(
    brokers: ProcessCluster, tierer: TiererProcess, sleeper: TiererProcess, tmp_path: Path
) -> None:
    create(brokers, tmp_path / "table", "both")
    for _ in range(4):
        fill(brokers, "both", LARGE_ROWS)
        runs = [one.begin(brokers.bootstrap_servers, "both") for one in (tierer, sleeper)]
        answers = [run.ended() for run in runs]
        assert [answer.get("message") for answer in answers] == [None, None]
    assert "error" not in tierer.tier(brokers.bootstrap_servers, "both")
    check_once(brokers, "both", tmp_path / "table")


class Killed(NamedTuple):
    """Topic and table of a run that was killed. `commits`: those of the table then."""

    topic: str
    table: Path
    commits: list[str]


@pytest.fixture(scope="module")
def killed(
    history: History, tierer: TiererProcess, brokers: ProcessCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Killed]:
    """One SIGKILL ends all runs of a process: four stand at a point each, and the fifth writes files. By point."""
    victim, servers = history.other, brokers.bootstrap_servers
    tables = {point: tmp_path_factory.mktemp("killed") / "table" for point in (*POINTS, BEFORE_DEAD_LETTERS, WRITING)}
    names = {point: f"killed-{number}" for number, point in enumerate(tables)}
    standing = [begun(history, names[point], tables[point], point).run for point in POINTS]
    with Admin(servers) as admin:
        create_typed(admin, names[BEFORE_DEAD_LETTERS], tables[BEFORE_DEAD_LETTERS], TYPED)
        append(brokers, names[BEFORE_DEAD_LETTERS], {"id": 1, "name": "a"})
        tier(brokers, admin, tierer, names[BEFORE_DEAD_LETTERS])
    tierer.sql(f"ALTER TABLE delta.`{tables[BEFORE_DEAD_LETTERS]}` ADD CONSTRAINT positive CHECK (id > 0)")
    append(brokers, names[BEFORE_DEAD_LETTERS], {"id": -2}, {"id": 3})
    standing.append(victim.begin(servers, names[BEFORE_DEAD_LETTERS], stop_at=BEFORE_DEAD_LETTERS))
    create(brokers, tables[WRITING], names[WRITING])
    for _ in range(3):
        fill(brokers, names[WRITING], LARGE_ROWS)
    for run in standing:
        run.await_stopped()
    victim.begin(servers, names[WRITING])
    eventually(lambda: list(tables[WRITING].glob("*.parquet")), 180, "a file of the table")
    victim.kill()
    return {point: Killed(names[point], table, commits(table)) for point, table in tables.items()}


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
def test_a_tierer_is_killed(
    brokers: ProcessCluster, tierer: TiererProcess, killed: dict[str, Killed], point: str
) -> None:
    topic, table, committed_before = killed[point]
    assert len(committed_before) == (0 if point == "before the files are written" else 1), "it stood elsewhere"
    fill(brokers, topic)
    assert "error" not in tierer.tier(brokers.bootstrap_servers, topic)
    check_once(brokers, topic, table)


@pytest.mark.full
def test_a_tierer_is_killed_while_it_writes_files(
    brokers: ProcessCluster, tierer: TiererProcess, killed: dict[str, Killed]
) -> None:
    topic, table, committed_before = killed[WRITING]
    assert committed_before == [], "the kill came after the commit"
    assert "error" not in tierer.tier(brokers.bootstrap_servers, topic)
    check_once(brokers, topic, table)


@pytest.mark.full
def test_a_tierer_that_is_killed_loses_and_repeats_no_record_that_the_table_refused(
    brokers: ProcessCluster, tierer: TiererProcess, killed: dict[str, Killed]
) -> None:
    topic, table, _ = killed[BEFORE_DEAD_LETTERS]
    append(brokers, topic, {"id": -5}, {"id": 6})
    tierer.sql(f"ALTER TABLE delta.`{table}` DROP CONSTRAINT positive")
    with Admin(brokers.bootstrap_servers) as admin:
        tier(brokers, admin, tierer, topic)
        history = admin.describe_topic(topic).history
    assert [row["id"] for row in in_table(tierer, table, ["id"])] == [1, 3, -5, 6]
    assert dead_letters(tierer, table) == [(1, "refused by the table", {"id": -2, "name": None})], "the rule is gone"
    assert history is not None
    assert history.quarantined == 1
