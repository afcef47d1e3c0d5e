"""Tierers in processes of their own, each with its Spark: they can be stopped at a point, let go on, and killed.

`python -m tests.support.tierer_process` is such a process. It takes JSON objects on stdin, and answers each.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import psutil

from spark_broker import Admin, TopicPartition
from spark_broker.errors import SparkBrokerError
from spark_broker.history.spark_steps import SparkSteps
from spark_broker.history.table import HistoryTable
from spark_broker.history.tierer import tier_topic
from spark_broker.spark.history_stream import stream_history
from tests.support.meanwhile import meanwhile
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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

STOPPED, GO_ON = ".stopped", ".go"
"""The ends of files beside a run's mark."""


@dataclass(frozen=True)
class Run:
    """A run that a process was told to begin. `mark`: files beside this path say where the run stands."""

    process: TiererProcess
    mark: Path
    answers: queue.SimpleQueue[dict[str, Any]]

    def await_stopped(self) -> None:
        """Wait until it stands at its point."""
        what = f"the tierer stops: {self.process.log}"
        eventually(self.mark.with_suffix(STOPPED).exists, WAIT_S, what)

    def go_on(self) -> None:
        self.mark.with_suffix(GO_ON).touch()

    def ended(self) -> dict[str, Any]:
        """What it answers: the fields of TieredTopic, or `error` and `message`."""
        try:
            return self.answers.get(timeout=WAIT_S)
        except queue.Empty:
            raise TimeoutError(f"the tierer does not answer: {self.process.log}") from None


class TiererProcess:
    """One tierer's process. A context manager; at its end the process and its JVM are killed.

    It carries out one command after the other, but for runs that are to stop at a point: each has a thread of its own.
    So several runs can stand at their points, and one SIGKILL ends all of them.
    """

    def __init__(self, directory: Path, name: str, *, jars: str = "") -> None:
        """Returns before its Spark has started. `jars`: the JARs of another Delta, in the form of spark.jars."""
        self._directory = directory / name
        self._directory.mkdir()
        self._numbers = itertools.count()
        self._runs: dict[int, Run] = {}
        with (self._directory / "stderr").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.tierer_process", str(self._directory), jars],
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
                answer = json.loads(line)
                self._runs.pop(answer.pop("run")).answers.put(answer)

    def begin(
        self,
        servers: str,
        topic: str,
        *,
        stop_at: str = "",
        include_active_segments: bool = True,
        cancel_jobs: bool = False,
    ) -> Run:
        """Tier the topic. `stop_at`: wait at this point until `go_on`. `cancel_jobs`: a neighbour cancels all jobs."""
        given = {"stop_at": stop_at, "all": include_active_segments, "cancel_jobs": cancel_jobs}
        return self._give({"servers": servers, "topic": topic, **given})

    def _give(self, work: dict[str, object]) -> Run:
        assert self._process.stdin is not None
        number = next(self._numbers)
        run = self._runs[number] = Run(self, self._directory / str(number), queue.SimpleQueue())
        self._process.stdin.write(json.dumps({"run": number, **work}) + "\n")
        self._process.stdin.flush()
        return run

    def _rows(self, work: dict[str, object]) -> list[list[Any]]:
        answer = self._give(work).ended()
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}: {answer['message']}")
        rows: list[list[Any]] = answer["rows"]
        return rows

    def tier(
        self, servers: str, topic: str, *, include_active_segments: bool = True, cancel_jobs: bool = False
    ) -> dict[str, Any]:
        """Tier the topic, and wait for the end."""
        run = self.begin(servers, topic, include_active_segments=include_active_segments, cancel_jobs=cancel_jobs)
        return run.ended()

    def read(self, servers: str, topic: str, **options: str) -> list[tuple[int, int, int]]:
        """Partition, offset and CRC-32 of the value of every row of `read_topic`, in order. Raises RuntimeError."""
        rows = self.select(servers, topic, ["partition", "offset", "crc32(value) AS crc"], **options)
        return sorted((partition, offset, crc) for partition, offset, crc in rows)

    def select(self, servers: str, topic: str, columns: list[str], **options: str) -> list[list[Any]]:
        """These expressions for every row of `read_topic`. Raises RuntimeError."""
        return self._rows({"servers": servers, "topic": topic, "read": options, "columns": columns})

    def read_after_deletion(self, servers: str, topic: str, before: int) -> list[tuple[int, int, int]]:
        """What `read` returns of a DataFrame that was made before the records of partition 0 up to an offset
        (exclusive) were deleted, from the table, too. Raises RuntimeError.
        """
        work = {"servers": servers, "topic": topic, "read": {}, "deleted_before": before}
        rows = self._rows({**work, "columns": ["partition", "offset", "crc32(value) AS crc"]})
        return sorted((partition, offset, crc) for partition, offset, crc in rows)

    def stream(
        self, servers: str, topic: str, checkpoint: Path, *, fails_at: int = -1, **options: str
    ) -> list[list[Any]]:
        """What `stream_history` hands out until it has caught up: partition, offset and CRC-32 of the value of every
        row, the batch's number, and whether it was read from files of the table. Raises RuntimeError, and where the
        batch `fails_at` is handed out.
        """
        given = {"stream": options, "checkpoint": str(checkpoint), "fails_at": fails_at}
        return self._rows({"servers": servers, "topic": topic, **given})

    def sql(self, statement: str) -> list[list[Any]]:
        """What any Spark with Delta answers, without code of this project. Raises RuntimeError."""
        return self._rows({"sql": statement})

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

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
        if self.is_alive:
            self.kill()
        self._reader.join(WAIT_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class Stop(NamedTuple):
    """Where this thread's run is to stop. It does so once."""

    point: str
    mark: Path


_stop: ContextVar[Stop | None] = ContextVar("stop", default=None)
"""Each thread has its own."""


def _stoppable(original: Callable[..., Any], point: str) -> Callable[..., Any]:
    """The same function, but a run that is to stop at this point waits before it, until it may go on."""

    @functools.wraps(original)
    def stopping(*arguments: Any, **keywords: Any) -> Any:
        stop = _stop.get()
        if stop is not None and stop.point == point:
            _stop.set(None)
            stop.mark.with_suffix(STOPPED).touch()
            eventually(stop.mark.with_suffix(GO_ON).exists, 10 * WAIT_S, "go on")
        return original(*arguments, **keywords)

    return stopping


def _cancel_jobs(spark: SparkSession, ended: threading.Event) -> None:
    """Someone in the same application cancels every job, again and again."""
    while not ended.wait(CANCEL_INTERVAL_S):
        spark.sparkContext.cancelAllJobs()


def _caught_up(spark: SparkSession, given: dict[str, Any]) -> list[list[Any]]:
    """Run a stream of the topic's history until it ends."""
    rows: list[list[Any]] = []

    def take(batch: DataFrame, number: int) -> None:
        found = batch.selectExpr("partition", "offset", "crc32(value)", "input_file_name() != ''").collect()
        if number == given["fails_at"]:
            raise RuntimeError(f"the batch {number} was to fail")
        rows.extend([*row[:3], number, row[3]] for row in found)

    writer = stream_history(spark, given["topic"], take, bootstrap_servers=given["servers"], **given["stream"])
    query = writer.option("checkpointLocation", given["checkpoint"]).trigger(availableNow=True).start()
    query.awaitTermination(int(WAIT_S))
    return rows


def _delete(spark: SparkSession, given: dict[str, Any]) -> None:
    """Delete records of partition 0, and have the tierer delete their rows."""
    with Admin(given["servers"]) as admin:
        admin.delete_records({TopicPartition(given["topic"], 0): given["deleted_before"]})
    tier_topic(spark, given["topic"], given["servers"], include_active_segments=True)


def _outcome(spark: SparkSession, given: dict[str, Any]) -> dict[str, Any]:
    """Carry out a command; returns the answer."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    from spark_broker.spark.frames import read_topic

    try:
        if "sql" in given:
            return {"rows": [list(row) for row in spark.sql(given["sql"]).collect()]}
        if "read" in given:
            frame = read_topic(spark, given["topic"], bootstrap_servers=given["servers"], **given["read"])
            if "deleted_before" in given:
                frame.count()
                _delete(spark, given)
            return {"rows": [list(row) for row in frame.selectExpr(*given["columns"]).collect()]}
        if "stream" in given:
            return {"rows": _caught_up(spark, given)}
        neighbour = functools.partial(_cancel_jobs, spark)
        with meanwhile(neighbour) if given["cancel_jobs"] else nullcontext():
            return asdict(tier_topic(spark, given["topic"], given["servers"], include_active_segments=given["all"]))
    except SparkBrokerError as error:
        return {"error": error.name, "message": error.message}
    except (PySparkException, Py4JJavaError) as error:
        return {"error": "SPARK", "message": str(error)[:2000]}


def main(directory: Path, *, jars: str) -> None:
    """Tier or read what stdin names, until it ends."""
    from pyspark.sql import SparkSession

    from spark_broker.driver.session import configure_spark
    from spark_broker.spark.delta_session import configure_delta

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config(map=FEW_TASKS)
    builder = builder.config("spark.jars", jars) if jars else builder
    spark = configure_delta(configure_spark(builder)).getOrCreate()
    for point, (owner, name) in {**POINTS, BEFORE_DEAD_LETTERS: (HistoryTable, "quarantine")}.items():
        setattr(owner, name, _stoppable(getattr(owner, name), point))
    writing = threading.Lock()

    def carry_out(given: dict[str, Any]) -> None:
        if given.get("stop_at"):
            _stop.set(Stop(given["stop_at"], directory / str(given["run"])))
        answer = json.dumps({"run": given["run"], **_outcome(spark, given)}, default=str) + "\n"
        with writing:
            os.write(sys.stdout.fileno(), answer.encode())

    for line in sys.stdin:
        given = json.loads(line)
        if given.get("stop_at"):
            threading.Thread(target=carry_out, args=(given,), daemon=True).start()
        else:
            carry_out(given)


if __name__ == "__main__":
    main(Path(sys.argv[1]), jars=sys.argv[2])
