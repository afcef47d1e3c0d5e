"""`jobs/produce.py` through spark-submit: files, once; also beside a cluster on the same standalone master."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, TopicPartition
from tests.spark.application import ROOT, Application, environment
from tests.spark.standalone import StandaloneCluster
from tests.support.process_cluster import ProcessCluster

SPARK_SUBMIT = Path(sys.executable).with_name("spark-submit")
JOB_TIMEOUT_S = 400.0

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("brokers"), 2) as started:
        yield started


def produce(servers: str, *arguments: str | Path, master: str = "local[2]") -> subprocess.CompletedProcess[str]:
    """Run the job as an application of its own; its status and what it says."""
    settings = {"spark.ui.enabled": "false", "spark.cores.max": "2", "spark.executor.cores": "1"}
    conf = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    job = [str(SPARK_SUBMIT), "--master", master, *conf, str(ROOT / "jobs" / "produce.py")]
    command = [*job, "--bootstrap-servers", servers, *map(str, arguments)]
    return subprocess.run(
        command, env=environment({}), timeout=JOB_TIMEOUT_S, capture_output=True, text=True, check=False
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def records(servers: str, topic: str) -> list[pa.RecordBatch]:
    """Every committed batch of the topic."""
    with Admin(servers) as admin:
        partitions = [TopicPartition(topic, one.partition) for one in admin.describe_topic(topic).partitions]
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


CSV = ("--format", "csv", "--option", "header=true", "--schema", "dest STRING, delay INT")


def test_files_become_a_typed_topic_once_for_each_version(tmp_path: Path, brokers: ProcessCluster) -> None:
    servers = brokers.bootstrap_servers
    file = write_csv(tmp_path / "in" / "a.csv", 0, 1000)
    topic = ("--topic", "flights", "--create", "--partitions", "3", "--topic-config", "key.columns=dest")
    for _ in range(2):
        said = succeeded(produce(servers, *topic, *CSV, "--app-id", "daily", "--app-version", "1", file))
        assert said.startswith("1,000 rows are in flights")

    stored = records(servers, "flights")

    assert stored[0].schema == pa.schema([("dest", pa.string()), ("delay", pa.int32())])
    assert sorted(n for batch in stored for n in batch["delay"].to_pylist()) == list(range(1000))


@pytest.mark.full
def test_a_run_with_a_checkpoint_takes_the_files_that_are_new(tmp_path: Path, brokers: ProcessCluster) -> None:
    servers = brokers.bootstrap_servers
    arguments = ("--topic", "inbox", "--create", *CSV, "--checkpoint", tmp_path / "checkpoint", tmp_path / "in")
    for start in (0, 100):
        write_csv(tmp_path / "in" / f"{start}.csv", start, start + 100)
        assert succeeded(produce(servers, *arguments)).startswith("100 rows are in inbox")
    assert succeeded(produce(servers, *arguments)).startswith("0 rows are in inbox")
    assert sorted(n for batch in records(servers, "inbox") for n in batch["delay"].to_pylist()) == list(range(200))


@pytest.mark.full
def test_a_mistake_is_told_in_a_line(tmp_path: Path, brokers: ProcessCluster) -> None:
    file = write_csv(tmp_path / "in" / "a.csv", 0, 10)
    done = produce(brokers.bootstrap_servers, "--topic", "nowhere", *CSV, file)
    assert done.returncode == 1
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "[UNKNOWN_TOPIC_OR_PARTITION] topic 'nowhere' does not exist" in told


@pytest.mark.full
def test_it_runs_beside_a_cluster_on_the_same_standalone_master(tmp_path: Path) -> None:
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
        said = succeeded(produce(servers, *topic, *CSV, file, master=hosts.master))
        assert said.startswith("1,000 rows are in flights")
        numbers = [n for batch in records(servers, "flights") for n in batch["delay"].to_pylist()]
        assert sorted(numbers) == list(range(1000))
