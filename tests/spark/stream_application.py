"""A streaming query from files to a topic, as an application of its own, which dies at a given point.

    python stream_application.py --point after-commit --batch 1 ...

The sink is the data source's own. The code around it sends SIGKILL to the driver (its JVM and its Python) or to an
executor, or lets an attempt fail. It does so once: a marker file says that it has been done.
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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pyspark_spark_broker import DefaultSource
from spark_broker.spark.task_write import TaskWrite
from spark_broker.spark.writer import BATCH_ID, StreamWriter, stream_version

WRITTEN = "written"
BEFORE_COMMIT = "before-commit"
DURING_COMMIT = "during-commit"
AFTER_COMMIT = "after-commit"
FAILED_ATTEMPT = "failed-attempt"
LINGERING_ATTEMPT = "lingering-attempt"
EXECUTOR = "executor"

OPTION = "dying"
WAIT_S = 60.0


@dataclass(frozen=True)
class Dying:
    """Where the query dies, in which micro-batch, and (during a commit) how many seconds after its beginning."""

    point: str
    batch: int
    delay_s: float
    driver: int
    directory: str

    @property
    def marker(self) -> Path:
        return Path(self.directory) / f"{self.point}-{self.batch}-{self.delay_s}"

    def due(self, point: str, batch: int) -> bool:
        """Whether this is the place, and the first time."""
        return (point, batch) == (self.point, self.batch) and not self.marker.exists()

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
            dying.kill_driver()
        if first and dying.due(EXECUTOR, batch):
            dying.kill_executor()
        if first and dying.due(FAILED_ATTEMPT, batch):
            dying.marker.touch()
            raise RuntimeError("this attempt fails after its rows")
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        dying = self._dying
        if dying.due(BEFORE_COMMIT, batchId):
            dying.kill_driver()
        if dying.due(DURING_COMMIT, batchId):
            threading.Timer(dying.delay_s, dying.kill_driver).start()
            self._inner.commit(messages, batchId)
            threading.Event().wait()
        self._inner.commit(messages, batchId)
        if dying.due(AFTER_COMMIT, batchId):
            dying.kill_driver()

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
        dying = Dying(**json.loads(options.pop(OPTION)))
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
    """Run the query until somebody ends this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--linger", type=Path)
    for name in ("master", "servers", "topic", "directory", "point"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--batch", type=int, default=-1)
    parser.add_argument("--delay", type=float, default=0.0)
    given = parser.parse_args()
    if given.linger is not None:
        linger(given.linger)
        return
    run(given.master, given.servers, given.topic, Path(given.directory), given)


def run(master: str, servers: str, topic: str, directory: Path, given: argparse.Namespace) -> None:
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
    spark = builder.getOrCreate()
    spark.dataSource.register(DyingSource)
    dying = Dying(given.point, given.batch, given.delay, os.getpid(), str(directory))
    rows = spark.readStream.schema("n LONG, word STRING").option("maxFilesPerTrigger", 1).json(str(directory / "in"))
    query = (
        rows.repartition(2)
        .writeStream.format(DyingSource.name())
        .option("bootstrap.servers", servers)
        .option("checkpointLocation", str(directory / "checkpoint"))
        .option(OPTION, json.dumps(asdict(dying)))
        .start(topic)
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
