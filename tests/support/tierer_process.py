"""Tierers in processes of their own, each with its Spark: they can be stopped at a point, let go on, and killed.

`python -m tests.support.tierer_process` is such a process. It takes JSON objects on stdin, and answers each.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psutil

from spark_broker.errors import SparkBrokerError
from spark_broker.history.spark_steps import SparkSteps
from spark_broker.history.table import HistoryTable
from spark_broker.history.tierer import tier_topic
from tests.support.meanwhile import meanwhile
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
WAIT_S = 180.0

FEW_TASKS: dict[str, bool | float | int | str | None] = {
    "spark.sql.shuffle.partitions": 2,
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": 2,
}
"""For two cores. VACUUM alone starts thousands of tasks otherwise."""

CANCEL_INTERVAL_S = 0.02
"""Far less than any job of a run takes."""

POINTS: dict[str, tuple[type, str]] = {
    "before the files are written": (HistoryTable, "append"),
    "after the commit, before it is read back": (HistoryTable, "_read_back"),
    "before the controller knows": (SparkSteps, "confirm"),
}
"""Where each run that appends comes by."""

BEFORE_DEAD_LETTERS = "before the dead letters are written"
"""Where a run comes by that the table has refused records of."""


class TiererProcess:
    """One tierer's process. A context manager; at its end the process and its JVM are killed."""

    def __init__(self, directory: Path, name: str, *, delta: bool = True, jars: str = "") -> None:
        """`delta`: whether its Spark has Delta. `jars`: the JARs of another Delta, in the form of spark.jars."""
        self._directory = directory / name
        self._directory.mkdir()
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        with (self._directory / "stderr").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.tierer_process",
                    str(self._directory),
                    "delta" if delta else "",
                    jars,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Lines that are no answer are Spark's own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(line)

    def begin(
        self,
        servers: str,
        topic: str,
        *,
        stop_at: str = "",
        include_active_segments: bool = True,
        cancel_jobs: bool = False,
    ) -> None:
        """Tier the topic. `stop_at`: wait at this point until `go_on`. `cancel_jobs`: a neighbour cancels all jobs."""
        for mark in ("stopped", "go"):
            (self._directory / mark).unlink(missing_ok=True)
        given = {"stop_at": stop_at, "all": include_active_segments, "cancel_jobs": cancel_jobs}
        self._give({"servers": servers, "topic": topic, **given})

    def _give(self, work: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()

    def await_stopped(self) -> None:
        """Wait until it stands at its point."""
        eventually((self._directory / "stopped").exists, WAIT_S, f"the tierer stops: {self.log}")

    def go_on(self) -> None:
        (self._directory / "go").touch()

    def ended(self) -> dict[str, Any]:
        """What it answers: the fields of TieredTopic, or `error` and `message`."""
        try:
            answer: dict[str, Any] = json.loads(self._answers.get(timeout=WAIT_S))
        except queue.Empty:
            raise TimeoutError(f"the tierer does not answer: {self.log}") from None
        return answer

    def tier(
        self, servers: str, topic: str, *, include_active_segments: bool = True, cancel_jobs: bool = False
    ) -> dict[str, Any]:
        """Tier the topic, and wait for the end."""
        self.begin(servers, topic, include_active_segments=include_active_segments, cancel_jobs=cancel_jobs)
        return self.ended()

    def read(self, servers: str, topic: str, **options: str) -> list[tuple[int, int, int]]:
        """Partition, offset and CRC-32 of the value of every row of `read_topic`, in order. Raises RuntimeError."""
        rows = self.select(servers, topic, ["partition", "offset", "crc32(value) AS crc"], **options)
        return sorted((partition, offset, crc) for partition, offset, crc in rows)

    def select(self, servers: str, topic: str, columns: list[str], **options: str) -> list[list[Any]]:
        """These expressions for every row of `read_topic`. Raises RuntimeError."""
        self._give({"servers": servers, "topic": topic, "read": options, "columns": columns})
        answer = self.ended()
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}: {answer['message']}")
        rows: list[list[Any]] = answer["rows"]
        return rows

    def sql(self, statement: str) -> list[list[Any]]:
        """What any Spark with Delta answers, without code of this project. Raises RuntimeError."""
        self._give({"sql": statement})
        answer = self.ended()
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}: {answer['message']}")
        rows: list[list[Any]] = answer["rows"]
        return rows

    @property
    def log(self) -> str:
        return (self._directory / "stderr").read_text()[-3000:]

    def kill(self) -> None:
        """SIGKILL to the process, its JVM, and the JVM's Python workers."""
        with psutil.Process(self._process.pid).oneshot():
            family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for process in family:
            if process.is_running():
                process.kill()
        self._process.wait(WAIT_S)
        psutil.wait_procs(family, WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        self._reader.join(WAIT_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def _stop_at(point: str, directory: Path) -> None:
    """Make the code wait at this point, once, until the file `go` is there."""
    owner, name = {**POINTS, BEFORE_DEAD_LETTERS: (HistoryTable, "quarantine")}[point]
    original = getattr(owner, name)

    @functools.wraps(original)
    def stopping(*arguments: Any, **keywords: Any) -> Any:
        setattr(owner, name, original)
        (directory / "stopped").touch()
        eventually((directory / "go").exists, 10 * WAIT_S, "go")
        return original(*arguments, **keywords)

    setattr(owner, name, stopping)


def _cancel_jobs(spark: SparkSession, ended: threading.Event) -> None:
    """Someone in the same application cancels every job, again and again."""
    while not ended.wait(CANCEL_INTERVAL_S):
        spark.sparkContext.cancelAllJobs()


def main(directory: Path, *, delta: bool, jars: str) -> None:
    """Tier or read what stdin names, until it ends."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from spark_broker.driver.session import configure_spark
    from spark_broker.spark.delta_session import configure_delta
    from spark_broker.spark.frames import read_topic

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config(map=FEW_TASKS)
    builder = configure_spark(builder.config("spark.jars", jars) if jars else builder)
    spark = (configure_delta(builder) if delta else builder).getOrCreate()
    for line in sys.stdin:
        given = json.loads(line)
        if given.get("stop_at"):
            _stop_at(given["stop_at"], directory)
        try:
            if "sql" in given:
                answer: dict[str, Any] = {"rows": [list(row) for row in spark.sql(given["sql"]).collect()]}
            elif "read" in given:
                frame = read_topic(spark, given["topic"], bootstrap_servers=given["servers"], **given["read"])
                rows = frame.selectExpr(*given["columns"]).collect()
                answer = {"rows": [list(row) for row in rows]}
            else:
                neighbour = functools.partial(_cancel_jobs, spark)
                with meanwhile(neighbour) if given["cancel_jobs"] else nullcontext():
                    answer = asdict(
                        tier_topic(spark, given["topic"], given["servers"], include_active_segments=given["all"])
                    )
        except SparkBrokerError as error:
            answer = {"error": error.name, "message": error.message}
        except PySparkException as error:
            answer = {"error": "SPARK", "message": str(error)[:2000]}
        os.write(sys.stdout.fileno(), (json.dumps(answer, default=str) + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), delta=sys.argv[2] == "delta", jars=sys.argv[3])
