"""Streaming queries from files to topics, in an application of their own. Each of them has its fault at a given point.

    python stream_application.py --master local[2,4] --servers HOST:PORT < specs

Each line of the standard input is a query to start, as JSON (`Spec`). The sink is the data source's own. The code
around it makes the fault: the query stays where it is until the application is killed, it sends SIGKILL to the driver
(its JVM and its Python) or to an executor, or it lets an attempt fail. It does so once: a marker file says that it has
been done.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle  # noqa: TID251 - a lingering attempt gets what Spark's own has got
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from pyspark_spark_broker import DefaultSource
from spark_broker.spark.task_write import TaskWrite
from spark_broker.spark.writer import BATCH_ID, StreamWriter, stream_version

WRITTEN = "written"
BEFORE_COMMIT = "before-commit"
AFTER_COMMIT = "after-commit"
"""Here a query stays until the application is killed. So one SIGKILL finds several queries at different points."""

DURING_COMMIT = "during-commit"
"""Here a query kills the driver itself, because the time since the beginning of its commit counts."""

FAILED_ATTEMPT = "failed-attempt"
LINGERING_ATTEMPT = "lingering-attempt"
EXECUTOR = "executor"

OPTION = "dying"
WAIT_S = 60.0


@dataclass(frozen=True)
class Spec:
    """A query: its directory (input, checkpoint, markers), its topic, and its fault.

    `point`: where the fault is, in micro-batch `batch`. `delay_s`: during a commit, how long after its beginning.
    """

    directory: str
    topic: str
    point: str = ""
    batch: int = -1
    delay_s: float = 0.0

    @property
    def marker(self) -> Path:
        return Path(self.directory) / f"{self.point}-{self.batch}-{self.delay_s}"


@dataclass(frozen=True)
class Dying:
    """A query's fault. `driver`: the pid of the driver's Python."""

    spec: Spec
    driver: int

    @property
    def marker(self) -> Path:
        return self.spec.marker

    def due(self, point: str, batch: int) -> bool:
        """Whether this is the place, and the first time."""
        return (point, batch) == (self.spec.point, self.spec.batch) and not self.marker.exists()

    def stay(self) -> None:
        """Wait here for the end of the application."""
        self.marker.touch()
        threading.Event().wait()

    def kill_driver(self) -> None:
        """SIGKILL to the JVM above this Python worker, and to the driver's Python."""
        self.marker.touch()
        jvms = [process for process in psutil.Process().parents() if process.name() == "java"]
        for process in jvms:
            process.kill()
        os.kill(self.driver, signal.SIGKILL)
        threading.Event().wait()

    def kill_executor(self) -> None:
        self.marker.touch()
        next(process for process in psutil.Process().parents() if process.name() == "java").kill()
        threading.Event().wait()


class DyingWriter(DataSourceStreamArrowWriter):
    """The data source's writer, with the faults around it."""

    def __init__(self, inner: StreamWriter, dying: Dying) -> None:
        self._inner = inner
        self._dying = dying

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        if context is None:
            raise AssertionError("a task has a context")
        batch = int(context.getLocalProperty(BATCH_ID) or -1)
        dying, first = self._dying, context.partitionId() == 0
        if first and dying.due(LINGERING_ATTEMPT, batch):
            self._leave_lingering(list(iterator))
        message = self._inner.write(iterator)
        if first and dying.due(WRITTEN, batch):
            dying.stay()
        if first and dying.due(EXECUTOR, batch):
            dying.kill_executor()
        if first and dying.due(FAILED_ATTEMPT, batch):
            dying.marker.touch()
            raise RuntimeError("this attempt fails after its rows")
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        dying = self._dying
        if dying.due(BEFORE_COMMIT, batchId):
            dying.stay()
        if dying.due(DURING_COMMIT, batchId):
            threading.Timer(dying.spec.delay_s, dying.kill_driver).start()
            self._inner.commit(messages, batchId)
            threading.Event().wait()
        self._inner.commit(messages, batchId)
        if dying.due(AFTER_COMMIT, batchId):
            dying.stay()

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._inner.abort(messages, batchId)

    def _leave_lingering(self, batches: list[pa.RecordBatch]) -> None:
        """The attempt goes on in a process of its own. For Spark, it has failed."""
        marker = self._dying.marker
        version = stream_version(self._inner.execution)
        marker.with_suffix(".rows").write_bytes(pickle.dumps((self._inner.plan, version, batches)))
        marker.touch()
        subprocess.Popen([sys.executable, __file__, "--linger", str(marker)], start_new_session=True)
        await_file(marker.with_suffix(".joined"))
        raise RuntimeError("this attempt lingers")


class DyingSource(DefaultSource):
    """The data source under another name."""

    @classmethod
    def name(cls) -> str:
        return "dying_spark_broker"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        options = dict(self.options)
        given = json.loads(options.pop(OPTION))
        dying = Dying(Spec(**given["spec"]), given["driver"])
        inner = DefaultSource(options).streamWriter(schema, overwrite)
        assert isinstance(inner, StreamWriter)
        return DyingWriter(inner, dying)


def linger(marker: Path) -> None:
    """An attempt that Spark gave up: it has joined and written, and goes on after its micro-batch was committed."""
    plan, version, batches = pickle.loads(marker.with_suffix(".rows").read_bytes())
    outcome = "nothing was refused"
    try:
        with version.group(plan).join() as writer:
            TaskWrite(plan, writer, 0).write(batches)
            marker.with_suffix(".joined").touch()
            await_file(marker.with_suffix(".go-on"))
            TaskWrite(plan, writer, 0).write(batches)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test reads it
        outcome = str(error)
    ended = marker.with_suffix(".ending")
    ended.write_text(outcome)
    ended.rename(marker.with_suffix(".ended"))


def await_file(path: Path) -> None:
    """Wait until another process has made the file."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if path.exists():
            return
        pause.wait(0.02)
    raise AssertionError(f"{path.name} has not come within {WAIT_S} s")


def main() -> None:
    """Run queries until somebody ends this process, or one of them fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--linger", type=Path)
    parser.add_argument("--master")
    parser.add_argument("--servers")
    given = parser.parse_args()
    if given.linger is not None:
        linger(given.linger)
        return
    spark = session(given.master)
    spark.dataSource.register(DyingSource)
    threading.Thread(target=end_with_a_query, args=(spark,), daemon=True).start()
    for line in sys.stdin:
        start(spark, given.servers, Spec(**json.loads(line)))


def session(master: str) -> SparkSession:
    settings: Mapping[str, str] = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.task.maxFailures": "4",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    builder = SparkSession.builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def end_with_a_query(spark: SparkSession) -> None:
    """No query ends by itself: one that does has failed. Its error is printed, and the application ends."""
    try:
        spark.streams.awaitAnyTermination()
    except Exception:
        traceback.print_exc()
        raise
    finally:
        os._exit(1)


def start(spark: SparkSession, servers: str, spec: Spec, source: type[DefaultSource] = DyingSource) -> StreamingQuery:
    """Start the query on its checkpoint. With the data source itself as the `source`, it has no fault."""
    directory = Path(spec.directory)
    rows = spark.readStream.schema("n LONG, word STRING").option("maxFilesPerTrigger", 1).json(str(directory / "in"))
    fault = {OPTION: json.dumps(asdict(Dying(spec, os.getpid())))} if source is DyingSource else {}
    return (
        rows.repartition(2)
        .writeStream.format(source.name())
        .option("bootstrap.servers", servers)
        .option("checkpointLocation", str(directory / "checkpoint"))
        .options(**fault)
        .start(spec.topic)
    )


if __name__ == "__main__":
    main()
