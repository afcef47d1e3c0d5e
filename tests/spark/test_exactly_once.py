"""A stream's sink stores each micro-batch once, whatever is killed when: real queries, real SIGKILLs, real brokers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, NewTopic, TopicPartition
from tests.spark.stream_application import (
    AFTER_COMMIT,
    BEFORE_COMMIT,
    DURING_COMMIT,
    EXECUTOR,
    FAILED_ATTEMPT,
    LINGERING_ATTEMPT,
    WRITTEN,
)
from tests.support.process_cluster import ProcessCluster
from tests.support.processes import kill_all
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(1800)

APPLICATION = Path(__file__).with_name("stream_application.py")
SCHEMA = pa.schema([("n", pa.int64()), ("word", pa.string())])
ROWS = 40
"""Of one file, which is one micro-batch."""

WAIT_S = 400.0
LOCAL = "local[2,4]"
DELAYS_S = (0.0, 0.01, 0.1)
"""How long after the beginning of a commit the driver dies."""


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("brokers"), 3) as started:
        yield started


class Query:
    """The query on its checkpoint: started, killed and started again. Its processes end with the block."""

    def __init__(self, directory: Path, brokers: ProcessCluster) -> None:
        self.directory = directory
        self.brokers = brokers
        self.topic = directory.name
        self.files = 0
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        (directory / "in").mkdir()
        with Admin(brokers.bootstrap_servers) as admin:
            config = {"key.columns": "n", "min.insync.replicas": 2}
            admin.create_topic(NewTopic(self.topic, 3, 3, SCHEMA, config))

    def add_file(self) -> int:
        """One micro-batch of input; its number."""
        number, self.files = self.files, self.files + 1
        rows = [{"n": n, "word": f"w{n}"} for n in range(number * ROWS, number * ROWS + ROWS)]
        written = self.directory / f"{number}.json"
        written.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(written, (1_700_000_000 + number,) * 2)
        written.rename(self.directory / "in" / written.name)
        return number

    def start(self, point: str = "", batch: int = -1, *, delay_s: float = 0.0, master: str = LOCAL) -> None:
        arguments = {
            "master": master,
            "servers": self.brokers.bootstrap_servers,
            "topic": self.topic,
            "directory": self.directory,
            "point": point,
            "batch": batch,
            "delay": delay_s,
        }
        command = [sys.executable, str(APPLICATION)]
        command += [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)

    def run_until_dead(self, point: str, batch: int, *, delay_s: float = 0.0) -> None:
        """Start the query; wait until it has killed itself there."""
        self.start(point, batch, delay_s=delay_s)
        assert self._process is not None
        self._process.wait(WAIT_S)
        assert (self.directory / f"{point}-{batch}-{delay_s}").exists(), self._log.read_text()
        assert not self.has_noted(batch)

    def has_noted(self, batch: int) -> bool:
        """Whether Spark's commit log has the micro-batch."""
        return (self.directory / "checkpoint" / "commits" / str(batch)).exists()

    def forget(self, batch: int) -> None:
        """Delete the micro-batch's entry of Spark's commit log.

        The query may have been killed between the entry and its checksum, which Spark writes after it.
        """
        commits = self.directory / "checkpoint" / "commits"
        (commits / str(batch)).unlink()
        (commits / f".{batch}.crc").unlink(missing_ok=True)

    def await_batch(self, batch: int) -> None:
        def noted() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()
            return self.has_noted(batch)

        eventually(noted, WAIT_S, f"micro-batch {batch}")

    def kill(self) -> None:
        """SIGKILL to everything of the application."""
        if self._process is None:
            return
        children = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.kill()
        self._process.wait(WAIT_S)
        kill_all(children)
        self._process = None

    def stored(self) -> list[int]:
        """What readers of committed records see, sorted."""
        partitions = [TopicPartition(self.topic, number) for number in range(3)]
        numbers: list[int] = []
        with Consumer(self.brokers.bootstrap_servers, enable_auto_commit=False) as consumer:
            ends = consumer.end_offsets(partitions)
            consumer.assign(partitions)
            consumer.seek_to_beginning()
            deadline = time.monotonic() + WAIT_S
            while any(consumer.position(tp) < end for tp, end in ends.items()):
                assert time.monotonic() < deadline
                for batch in consumer.poll(1.0):
                    numbers += batch.data["n"].to_pylist()
        return sorted(numbers)

    def assert_stored(self, files: int) -> None:
        """Each row of the first files, once."""
        assert self.stored() == list(range(files * ROWS))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def test_a_query_killed_after_its_rows_and_after_its_commit_stores_each_batch_once(
    tmp_path: Path, brokers: ProcessCluster
) -> None:
    with Query(tmp_path, brokers) as query:
        query.run_until_dead(WRITTEN, query.add_file())
        query.assert_stored(0)
        query.run_until_dead(AFTER_COMMIT, query.add_file())
        query.assert_stored(2)
        last = query.add_file()
        query.start()
        query.await_batch(last)
        query.assert_stored(3)


@pytest.mark.full
def test_a_query_killed_before_and_during_its_commit_stores_each_batch_once(
    tmp_path: Path, brokers: ProcessCluster
) -> None:
    with Query(tmp_path, brokers) as query:
        query.run_until_dead(BEFORE_COMMIT, query.add_file())
        query.assert_stored(0)
        for delay_s in DELAYS_S:
            batch = query.add_file()
            query.run_until_dead(DURING_COMMIT, batch, delay_s=delay_s)
        last = query.add_file()
        query.start()
        query.await_batch(last)
        query.assert_stored(last + 1)


@pytest.mark.full
def test_a_failed_and_a_lingering_attempt_store_nothing(tmp_path: Path, brokers: ProcessCluster) -> None:
    with Query(tmp_path, brokers) as query:
        batch = query.add_file()
        query.start(FAILED_ATTEMPT, batch)
        query.await_batch(batch)
        query.kill()
        query.assert_stored(1)

        batch = query.add_file()
        query.start(LINGERING_ATTEMPT, batch)
        query.await_batch(batch)
        query.assert_stored(2)
        marker = tmp_path / f"{LINGERING_ATTEMPT}-{batch}-0.0"
        marker.with_suffix(".go-on").touch()
        ended = marker.with_suffix(".ended")
        eventually(ended.exists, WAIT_S, "the end of the attempt that lingers")
        assert "nothing was refused" not in ended.read_text()
        batch = query.add_file()
        query.await_batch(batch)
        query.assert_stored(3)


@pytest.mark.full
def test_a_batch_whose_entry_of_the_commit_log_was_deleted_is_stored_once(
    tmp_path: Path, brokers: ProcessCluster
) -> None:
    with Query(tmp_path, brokers) as query:
        query.add_file()
        batch = query.add_file()
        query.start()
        query.await_batch(batch)
        query.kill()
        query.forget(batch)
        query.start()
        query.await_batch(batch)
        batch = query.add_file()
        query.await_batch(batch)
        query.assert_stored(3)


@pytest.mark.full
def test_an_executor_killed_after_its_rows_is_replaced_and_they_are_stored_once(
    tmp_path: Path, brokers: ProcessCluster
) -> None:
    with Query(tmp_path, brokers) as query:
        batch = query.add_file()
        query.start(EXECUTOR, batch, master="local-cluster[2,1,1024]")
        query.await_batch(batch)
        assert (tmp_path / f"{EXECUTOR}-{batch}-0.0").exists()
        query.assert_stored(1)


@pytest.mark.full
@pytest.mark.parametrize("point", [WRITTEN, AFTER_COMMIT])
def test_a_broker_killed_between_two_runs_makes_no_difference(
    tmp_path: Path, brokers: ProcessCluster, point: str
) -> None:
    """The broker is the coordinator of the query's transactions. The next coordinator knows what it decided."""
    with Query(tmp_path, brokers) as query:
        batch = query.add_file()
        query.run_until_dead(point, batch)
        query_id = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
        with Admin(brokers.bootstrap_servers) as admin:
            (coordinator,) = [
                transaction.coordinator
                for transaction in admin.list_transactions()
                if transaction.transactional_id == query_id
            ]
            pid = next(broker.pid for broker in admin.describe_cluster().brokers if broker.id == coordinator)
        os.kill(pid, signal.SIGKILL)

        query.start()
        query.await_batch(batch)

        query.assert_stored(1)
        eventually(brokers.launch_ended, WAIT_S)
        brokers.await_live(3)
