"""Streaming queries on their checkpoints, and the applications (`stream_application.py`) in which they run and die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pyarrow as pa

from spark_broker import Admin, Consumer, NewTopic, TopicPartition
from tests.spark.stream_application import Spec
from tests.support.process_cluster import ProcessCluster
from tests.support.processes import kill_all
from tests.support.waiting import eventually

APPLICATION = Path(__file__).with_name("stream_application.py")
SCHEMA = pa.schema([("n", pa.int64()), ("word", pa.string())])
ROWS = 40
"""Of one file, which is one micro-batch."""

WAIT_S = 400.0
LOCAL = "local[2,4]"


class Query:
    """A query on a checkpoint and a topic of its own. Applications run it one after the other."""

    def __init__(self, directory: Path, name: str, brokers: ProcessCluster) -> None:
        self.name = name
        self.spec = Spec(str(directory / name), f"{directory.name}-{name}")
        self._directory = directory / name
        self._brokers = brokers
        self._files = 0
        (self._directory / "in").mkdir(parents=True)
        with Admin(brokers.bootstrap_servers) as admin:
            config = {"key.columns": "n", "min.insync.replicas": 2}
            admin.create_topic(NewTopic(self.spec.topic, 3, 3, SCHEMA, config))

    def add_file(self) -> int:
        """One micro-batch of input; its number."""
        number, self._files = self._files, self._files + 1
        rows = [{"n": n, "word": f"w{n}"} for n in range(number * ROWS, number * ROWS + ROWS)]
        written = self._directory / f"{number}.json"
        written.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(written, (1_700_000_000 + number,) * 2)
        written.rename(self._directory / "in" / written.name)
        return number

    def has_noted(self, batch: int) -> bool:
        """Whether Spark's commit log has the micro-batch."""
        return (self._directory / "checkpoint" / "commits" / str(batch)).exists()

    def forget(self, batch: int) -> None:
        """Delete the micro-batch's entry of Spark's commit log.

        The query may have been killed between the entry and its checksum, which Spark writes after it.
        """
        commits = self._directory / "checkpoint" / "commits"
        (commits / str(batch)).unlink()
        (commits / f".{batch}.crc").unlink(missing_ok=True)

    def stored(self) -> list[int]:
        """What readers of committed records see, sorted."""
        partitions = [TopicPartition(self.spec.topic, number) for number in range(3)]
        numbers: list[int] = []
        with Consumer(self._brokers.bootstrap_servers, enable_auto_commit=False) as consumer:
            ends = consumer.end_offsets(partitions)
            consumer.assign(partitions)
            consumer.seek_to_beginning()
            deadline = time.monotonic() + WAIT_S
            while any(consumer.position(tp) < end for tp, end in ends.items()):
                assert time.monotonic() < deadline, f"query {self.name}: {len(numbers)} rows were read, up to {ends}"
                for batch in consumer.poll(1.0):
                    numbers += batch.data["n"].to_pylist()
        return sorted(numbers)

    def assert_stored(self, files: int, when: str) -> None:
        """Each row of the first files, once."""
        assert self.stored() == list(range(files * ROWS)), f"query {self.name}, {when}"

    def kill_coordinator(self) -> None:
        """SIGKILL to the broker that coordinates the query's transactions."""
        query_id = json.loads((self._directory / "checkpoint" / "metadata").read_text())["id"]
        with Admin(self._brokers.bootstrap_servers) as admin:
            (coordinator,) = [
                transaction.coordinator
                for transaction in admin.list_transactions()
                if transaction.transactional_id == query_id
            ]
            pid = next(broker.pid for broker in admin.describe_cluster().brokers if broker.id == coordinator)
        os.kill(pid, signal.SIGKILL)


class StreamApplication:
    """One start of the application. A context manager: nothing of it is left after the block.

    `run`: its name in messages. It ends when a query fails, and every wait then fails with its log.
    """

    def __init__(self, directory: Path, brokers: ProcessCluster, run: str, *, master: str = LOCAL) -> None:
        self.run = run
        self._log = directory / f"{run}.log"
        command = [sys.executable, str(APPLICATION), "--master", master, "--servers", brokers.bootstrap_servers]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=directory, text=True
            )

    def start(self, query: Query, point: str = "", batch: int = -1, *, delay_s: float = 0.0) -> Spec:
        """Start the query with this fault, as soon as the application is there. Returns what was asked for."""
        spec = Spec(query.spec.directory, query.spec.topic, point, batch, delay_s)
        self._assert_runs(f"query {query.name} was started")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(spec)) + "\n")
        self._process.stdin.flush()
        return spec

    def await_batch(self, query: Query, batch: int) -> None:
        """Wait until Spark has noted the micro-batch as done."""
        self._await(query, lambda: query.has_noted(batch), f"the end of micro-batch {batch}")

    def await_fault(self, query: Query, spec: Spec) -> None:
        """Wait until the query is at its point, where it stays. Its micro-batch is not done."""
        self._await(query, spec.marker.exists, f"{spec.point} of micro-batch {spec.batch}")
        assert not query.has_noted(spec.batch), f"{self.run}: query {query.name} has passed {spec}"

    def await_file(self, query: Query, path: Path) -> None:
        """Wait for a file that the query or one of its attempts makes."""
        self._await(query, path.exists, path.name)

    def await_death(self, query: Query, spec: Spec) -> None:
        """Wait until the query has killed the driver. Its micro-batch is not done."""
        self._process.wait(WAIT_S)
        assert spec.marker.exists(), f"{self.run}: it has not died of {spec}:\n{self._log.read_text()}"
        assert not query.has_noted(spec.batch), f"{self.run}: query {query.name} has passed {spec}"

    def _await(self, query: Query, condition: Callable[[], bool], what: str) -> None:
        what = f"{what} of query {query.name}"

        def there() -> bool:
            self._assert_runs(what)
            return condition()

        eventually(there, WAIT_S, f"{self.run}: {what}")

    def _assert_runs(self, before: str) -> None:
        assert self._process.poll() is None, f"{self.run}: it ended before {before}:\n{self._log.read_text()}"

    def kill(self) -> None:
        """SIGKILL to the driver, its JVM and its Python, and then to what is left of the application."""
        if self._process.poll() is None:
            driver = psutil.Process(self._process.pid)
            jvm, everything = driver.children(), driver.children(recursive=True)
            kill_all(jvm)
            self._process.kill()
            self._process.wait(WAIT_S)
            kill_all(everything)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
