"""`jobs/produce.py` and `jobs/consume.py`: their `main` in the tests' shared session, and both through spark-submit.

Through spark-submit they run beside a cluster on the same standalone master, and there a mistake has its exit status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import jobs.consume
import jobs.produce
from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from tests.spark.application import ROOT, TRACEBACK, Application, environment
from tests.spark.standalone import StandaloneCluster
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

SPARK_SUBMIT = Path(sys.executable).with_name("spark-submit")
JOB_TIMEOUT_S = 400.0

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("brokers"), 2) as started:
        yield started


class SharedSession:
    """Runs the jobs' `main` in this process. In place of a session of their own they get the shared one."""

    def __init__(self, capsys: pytest.CaptureFixture[str], servers: str) -> None:
        self._capsys = capsys
        self.servers = servers

    def produce(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self._run(jobs.produce.main, *arguments)

    def consume(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self._run(jobs.consume.main, *arguments)

    def _run(self, main: Callable[[list[str]], int], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        given = ["--bootstrap-servers", self.servers, *map(str, arguments)]
        self._capsys.readouterr()
        with signals_kept():
            status = main(given)
        said = self._capsys.readouterr()
        return subprocess.CompletedProcess(given, status, said.out, said.err)


@contextmanager
def signals_kept() -> Iterator[None]:
    """A job keeps its handlers to its end, which is that of its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def shared(
    spark: SparkSession,
    brokers: ProcessCluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> SharedSession:
    @contextmanager
    def session(_name: str) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(jobs.produce, "session", session)
    monkeypatch.setattr(jobs.consume, "session", session)
    return SharedSession(capsys, brokers.bootstrap_servers)


def submit(
    job: str, servers: str, *arguments: str | Path, master: str = "local[2]"
) -> subprocess.CompletedProcess[str]:
    """Run the job as an application of its own. Returns its status and its output.

    spark-submit writes Python's stderr to its own stdout.
    """
    command = submitted(job, servers, *arguments, master=master)
    return subprocess.run(
        command, env=environment({}), timeout=JOB_TIMEOUT_S, capture_output=True, text=True, check=False
    )


def submitted(job: str, servers: str, *arguments: str | Path, master: str = "local[2]") -> list[str]:
    """The command line of the job as an application of its own."""
    settings = {"spark.ui.enabled": "false", "spark.cores.max": "2", "spark.executor.cores": "1"}
    conf = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    application = [str(SPARK_SUBMIT), "--master", master, *conf, str(ROOT / "jobs" / job)]
    return [*application, "--bootstrap-servers", servers, *map(str, arguments)]


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def error_line(said: str) -> str:
    """The job's one line about its error."""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    return lines[0]


def records(servers: str, topic: str) -> list[pa.RecordBatch]:
    """Every committed batch of the topic."""
    with Admin(servers) as admin:
        partitions = [
            TopicPartition(topic, partition.partition) for partition in admin.describe_topic(topic).partitions
        ]
    batches = []
    with Consumer(servers, enable_auto_commit=False) as consumer:
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        consumer.seek_to_beginning()
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            batches += [batch.data for batch in consumer.poll(1.0)]
    return batches


def write_csv(path: Path, start: int, end: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("dest,delay\n" + "".join(f"D{n % 5},{n}\n" for n in range(start, end)))
    return path


REPORTS_KEPT = "spark.sql.streaming.numRecentProgressUpdates"
NO_TOPIC = "[UNKNOWN_TOPIC_OR_PARTITION] topic 'nowhere' does not exist"
CSV = ("--format", "csv", "--option", "header=true", "--schema", "dest STRING, delay INT")


def test_files_become_a_typed_topic_once_for_each_version(tmp_path: Path, shared: SharedSession) -> None:
    file = write_csv(tmp_path / "in" / "a.csv", 0, 1000)
    topic = ("--topic", "flights", "--create", "--partitions", "3", "--topic-config", "key.columns=dest")
    for _ in range(2):
        said = succeeded(shared.produce(*topic, *CSV, "--app-id", "daily", "--app-version", "1", file))
        assert said.startswith("1,000 rows are in flights")

    stored = records(shared.servers, "flights")

    assert stored[0].schema == pa.schema([("dest", pa.string()), ("delay", pa.int32())])
    assert sorted(n for batch in stored for n in batch["delay"].to_pylist()) == list(range(1000))


@pytest.mark.full
def test_a_run_with_a_checkpoint_takes_the_files_that_are_new(tmp_path: Path, shared: SharedSession) -> None:
    """Story: the rows of the files were counted, and not those that `--select` makes of them."""
    twice = ("--select", "dest", "--select", "explode(array(delay, -delay)) AS delay")
    checkpoint = ("--checkpoint", tmp_path / "checkpoint")
    arguments = ("--topic", "inbox", "--create", *CSV, *twice, *checkpoint, tmp_path / "in")
    for start in (0, 100):
        file = write_csv(tmp_path / "in" / f"{start}.csv", start, start + 100)
        if (
            start
        ):  # `mv`, `cp -p` and `tar` keep the time. Spark itself leaves out what is a week older than the newest.
            os.utime(file, (0, time.time() - 30 * 86400))
        assert succeeded(shared.produce(*arguments)).startswith("200 rows are in inbox")
    assert succeeded(shared.produce(*arguments)).startswith("0 rows are in inbox")
    stored = records(shared.servers, "inbox")
    written = sorted(n for batch in stored for n in batch["delay"].to_pylist())
    assert written == sorted([*range(200), *range(0, -200, -1)])


def test_arguments_that_do_not_fit_end_spark_submit_with_status_1() -> None:
    done = submit("consume.py", "127.0.0.1:1", "--topic", "nowhere", "--every", "1")
    assert done.returncode == 1
    assert "--every needs --follow" in error_line(done.stdout)


@pytest.mark.full
def test_a_mistake_is_told_in_a_line_and_ends_spark_submit_with_status_1(
    tmp_path: Path, brokers: ProcessCluster
) -> None:
    file = write_csv(tmp_path / "in" / "a.csv", 0, 10)
    done = submit("produce.py", brokers.bootstrap_servers, "--topic", "nowhere", *CSV, file)
    assert done.returncode == 1
    assert NO_TOPIC in error_line(done.stdout)


def delays(files: Path) -> list[int]:
    """The column of all files of a directory."""
    return [n for file in sorted(files.glob("*.parquet")) for n in pq.read_table(file)["delay"].to_pylist()]


@pytest.fixture(scope="module")
def flights(brokers: ProcessCluster) -> str:
    """A typed topic with 1,000 rows; its name."""
    schema = pa.schema([("dest", pa.string()), ("delay", pa.int32())])
    with Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic(NewTopic("arrivals", partitions=2, schema=schema))
    append_flights(brokers, "arrivals", range(1000))
    return "arrivals"


def append_flights(brokers: ProcessCluster, topic: str, delays: range) -> None:
    with Producer(brokers.bootstrap_servers) as producer:
        for partition in (0, 1):
            rows = [{"dest": f"D{n % 5}", "delay": n} for n in delays if n % 2 == partition]
            producer.append(topic, rows, partition=partition).result(30)


def test_a_topic_becomes_files(tmp_path: Path, shared: SharedSession, flights: str) -> None:
    shape = ("--select", "delay", "--where", "delay >= 100")
    out = tmp_path / "out"
    said = succeeded(shared.consume("--topic", flights, *shape, "--to", out))
    assert said.startswith(f"900 records of arrivals went to {out}")
    assert sorted(delays(out)) == list(range(100, 1000))


@pytest.mark.full
def test_a_run_with_a_checkpoint_takes_the_records_that_are_new(
    tmp_path: Path, brokers: ProcessCluster, shared: SharedSession, spark: SparkSession
) -> None:
    """Story: what `--where` left out was counted, and batches were not of which a query keeps no report any more."""
    out = tmp_path / "out"
    with Admin(shared.servers) as admin:
        admin.create_topic(
            NewTopic("growing", partitions=2, schema=pa.schema([("dest", pa.string()), ("delay", pa.int32())]))
        )
    shape = ("--where", "delay % 10 > 0", "--option", "maxOffsetsPerTrigger=25")
    again = ("--topic", "growing", *shape, "--to", out, "--checkpoint", tmp_path / "checkpoint", "--group", "reports")
    spark.conf.set(REPORTS_KEPT, "2")
    try:
        for start in (0, 100):
            append_flights(brokers, "growing", range(start, start + 100))
            assert succeeded(shared.consume(*again)).startswith("90 records of growing")
        assert succeeded(shared.consume(*again)).startswith("0 records of growing")
    finally:
        spark.conf.unset(REPORTS_KEPT)
    assert sorted(delays(out)) == [n for n in range(200) if n % 10 > 0]
    with Consumer(shared.servers, group_id="reports", enable_auto_commit=False) as consumer:
        committed = [consumer.committed(TopicPartition("growing", number)) for number in (0, 1)]
    assert [stored and stored.offset for stored in committed] == [100, 100]


def ctrl_c(job: subprocess.Popen[bytes]) -> None:
    """What a terminal does: the JVM and the job's Python process get the signal."""
    os.killpg(job.pid, signal.SIGINT)


def kill(job: subprocess.Popen[bytes]) -> None:
    """What `kill` does with the pid of spark-submit: only the JVM gets the signal."""
    os.kill(job.pid, signal.SIGTERM)


@pytest.mark.full
@pytest.mark.parametrize("ended", [ctrl_c, kill])
def test_a_signal_ends_a_job_that_follows_in_order(
    tmp_path: Path, brokers: ProcessCluster, flights: str, ended: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    """Story: the signal ended the JVM, and the job could not stop its query: it said a traceback, and no number."""
    out, committed, log = tmp_path / "out", tmp_path / "checkpoint" / "commits" / "0", tmp_path / "log"
    target = ("--to", out, "--checkpoint", tmp_path / "checkpoint")
    follow = ("--topic", flights, "--where", "delay >= 100", *target, "--follow")
    command = submitted("consume.py", brokers.bootstrap_servers, *follow)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=environment({}), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as job,
    ):
        try:
            eventually(lambda: committed.exists() or job.poll() is not None, 150, "the first micro-batch")
            assert job.poll() is None, log.read_text()
            ended(job)
            status = job.wait(60)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    said = log.read_text()
    assert status == 0, said
    assert said.splitlines()[-1].startswith(f"900 records of {flights} went to {out}"), said
    assert not TRACEBACK.search(said), said
    assert sorted(delays(out)) == list(range(100, 1000))


@pytest.mark.full
def test_the_console_shows_times_as_the_command_line_does(shared: SharedSession, spark: SparkSession) -> None:
    """Story: they were of the machine's zone, and nothing said so."""
    with Admin(shared.servers) as admin:
        admin.create_topic(NewTopic("timed"))
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    with Producer(shared.servers) as producer:
        producer.send("timed", "x", timestamp=noon).result(30)
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        done = shared.consume("--topic", "timed", "--where", "timestamp = '2026-01-31 12:00:00'")
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    assert "|2026-01-31 12:00:00|" in done.stdout
    assert succeeded(done).startswith("1 record of timed went to the console, with times in UTC, in ")


@pytest.mark.full
def test_a_topic_on_the_console_and_a_mistake_in_a_line(shared: SharedSession, flights: str) -> None:
    done = shared.consume("--topic", flights, "--where", "delay = 7", "--select", "dest")
    assert "|D2  |" in done.stdout
    assert succeeded(done).startswith("1 record of arrivals went to the console, with times in UTC, in ")
    for mistaken in (shared.consume("--topic", "nowhere"), shared.produce("--topic", "nowhere", "--query", "SELECT 1")):
        assert mistaken.returncode == 1
        assert NO_TOPIC in error_line(mistaken.stderr)


@pytest.mark.full
def test_both_run_beside_a_cluster_on_the_same_standalone_master(tmp_path: Path) -> None:
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.cores.max": "4",  # two executors of two cores: the rest is for others
        "spark.executor.cores": "2",
    }
    config: dict[str, object] = {"log.dirs": tmp_path / "logs", "metadata.dir": tmp_path / "metadata"}
    file = write_csv(tmp_path / "in" / "a.csv", 0, 1000)
    with (
        StandaloneCluster(tmp_path, workers=2, cores=3) as hosts,
        Application(tmp_path, "cluster", config, master=hosts.master, brokers=2, spark_settings=settings) as cluster,
    ):
        servers = cluster.await_ready().bootstrap_servers
        topic = ("--topic", "flights", "--create", "--partitions", "3", "--replication-factor", "2")
        said = succeeded(submit("produce.py", servers, *topic, *CSV, file, master=hosts.master))
        assert said.startswith("1,000 rows are in flights")
        numbers = [n for batch in records(servers, "flights") for n in batch["delay"].to_pylist()]
        assert sorted(numbers) == list(range(1000))
        to_files = ("--topic", "flights", "--to", tmp_path / "out")
        said = succeeded(submit("consume.py", servers, *to_files, master=hosts.master))
        assert said.startswith("1,000 records of flights went to ")
        assert sorted(delays(tmp_path / "out")) == list(range(1000))
