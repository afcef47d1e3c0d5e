"""History: how fast a topic goes into its Delta table, and what a scan through `read_topic` costs beside plain Delta.

`python -m benchmarks.history --help`. A cluster of one broker (a process, no Spark) and a Spark session of two
slots. Every row is read back after the log has dropped it, and compared with what was appended.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everywhere

from benchmarks.figures import Figure, machine, write
from spark_broker import Admin, NewTopic, Producer, configure_spark, read_topic
from spark_broker.cli.output import counted, note, print_table
from spark_broker.errors import InvalidDataError
from spark_broker.history.attempt import TieredTopic
from spark_broker.history.tierer import tier_topic
from spark_broker.spark.delta_session import configure_delta
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

SLOTS = 2
PARTITIONS = 4
RUNS = 10
"""The rows come in so many pieces, an hour of event time each, and a run tiers each piece."""
TURNS = 15
BATCH_ROWS = 50_000
RECORD_BYTES = (100, 1000)
FIRST_US = 1_600_000_000_000_000
HOUR_US = 3_600_000_000
UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("id", pa.int64()), ("dest", pa.string()), ("delay", pa.int32()), ("at", UTC)])
DESTINATIONS = np.array([f"D{number:02d}" for number in range(50)])
QUERY = ("count(*)", "sum(id)", "sum(delay)", "max(dest)")


@dataclass(frozen=True)
class Bench:
    """The cluster and the session of a measurement."""

    spark: SparkSession
    servers: str
    base: Path

    def path(self, topic: str) -> str:
        return str(self.base / "lake" / topic)

    def tier(self, topic: str) -> tuple[TieredTopic, float]:
        """One run with all that is committed, and its seconds."""
        began = time.monotonic()
        tiered = tier_topic(self.spark, topic, self.servers, include_active_segments=True)
        return tiered, time.monotonic() - began


def rows(start: int, end: int, total: int) -> pa.RecordBatch:
    """The rows with these ids."""
    ids = np.arange(start, end, dtype=np.int64)
    at = FIRST_US + ids * (RUNS * HOUR_US) // total
    columns = [ids, DESTINATIONS[ids % 50], (ids % 1000).astype(np.int32)]
    return pa.record_batch([*map(pa.array, columns), pa.array(at, UTC)], schema=SCHEMA)


def measure(bench: Bench, total: int) -> list[Figure]:
    """All figures of the topic of columns."""
    config = {"delta.path": bench.path("flights"), "timestamp.column": "at", "segment.bytes": 8 << 20}
    with Admin(bench.servers) as admin:
        admin.create_topic(
            NewTopic("flights", PARTITIONS, 1, schema=SCHEMA, config={**config, "local.retention.ms": 1})
        )
    runs = []
    for number in range(RUNS):
        append(bench, total * number // RUNS, total * (number + 1) // RUNS, total)
        runs.append(bench.tier("flights"))
        note(f"tiered {runs[-1][0].records:,} rows in {runs[-1][1]:.1f} s")
    await_drop(bench)
    through = read_topic(bench.spark, "flights", bootstrap_servers=bench.servers)
    check(through, total)
    streamed_s = stream_back(bench, total)
    plain = bench.spark.read.format("delta").load(bench.path("flights"))
    ours_s, plain_s = by_turns(lambda: scan(through), lambda: scan(plain))
    last = F.timestamp_micros(F.lit(FIRST_US + (RUNS - 1) * HOUR_US))
    touched, files = files_read(through.where(F.col("_timestamp") >= last)), len(plain.inputFiles())
    tiered_s = sum(seconds for _, seconds in runs)
    return [
        Figure(
            f"{total:,} rows of four columns into the table, in {RUNS} runs",
            f"{total / tiered_s / 1e6:.2f} million rows/s; {len(plain.inputFiles())} files",
        ),
        Figure("those rows read back after the log has dropped them, by `read_topic`", "every row, once"),
        Figure(
            "those rows streamed into Parquet files, from the first offset",
            f"every row, once; {total / streamed_s / 1e6:.2f} million rows/s",
        ),
        Figure(
            f"scan of {total:,} rows: `read_topic` by plain Delta",
            f"{ours_s / plain_s:.2f} times ({ours_s:.2f} and {plain_s:.2f} s)",
            "1.2 times",
        ),
        Figure("a query on the last hour of ten", f"reads {touched} of {files} files", "only that hour's"),
    ]


def measure_bytes(bench: Bench, topic: str, size_bytes: int, record_bytes: int) -> Figure:
    """How many bytes of records a run takes a second. The records have so many bytes each, which do not compress."""
    total = size_bytes // record_bytes
    batch_rows = BATCH_ROWS * RECORD_BYTES[0] // record_bytes
    with Admin(bench.servers) as admin:
        admin.create_topic(NewTopic(topic, PARTITIONS, 1, config={"delta.path": bench.path(topic)}))
    random = np.random.default_rng(7)
    with Producer(bench.servers) as producer:
        for start in range(0, total, batch_rows):
            count = min(batch_rows, total - start)
            data = pa.py_buffer(random.bytes(count * record_bytes))
            offsets = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * record_bytes)
            values = pa.Array.from_buffers(pa.binary(), count, [None, offsets, data])
            producer.append(topic, pa.record_batch({"value": values}), partition=start // batch_rows % PARTITIONS)
        producer.flush()
    tiered, seconds = bench.tier(topic)
    rate = total * record_bytes / seconds / 1e6
    return Figure(
        f"{total:,} records of {record_bytes:,} bytes into the table, in one run",
        f"{rate:.0f} MB/s, {rate / SLOTS:.0f} MB/s and core; {counted(tiered.files, 'file', 'files')}",
        "50 MB/s and core",
    )


def append(bench: Bench, start: int, end: int, total: int) -> None:
    with Producer(bench.servers) as producer:
        for number, first in enumerate(range(start, end, BATCH_ROWS)):
            producer.append("flights", rows(first, min(first + BATCH_ROWS, end), total), partition=number % PARTITIONS)
        producer.flush()


def await_drop(bench: Bench) -> None:
    """Wait until the log has only its active segments."""
    with Admin(bench.servers) as admin:

        def dropped() -> bool:
            partitions = admin.describe_topic("flights").partitions
            return all(state.local_log_start_offset == state.sealed_offset for state in partitions)

        eventually(dropped, 120, "the log drops what is in the table")


def stream_back(bench: Bench, total: int) -> float:
    """Stream the topic into files, and check them. Returns the seconds of the query."""
    files = str(bench.base / "streamed")
    frame = read_topic(bench.spark, "flights", bootstrap_servers=bench.servers, stream=True, startingOffsets="earliest")
    writer = frame.writeStream.option("checkpointLocation", files + "-checkpoint").trigger(availableNow=True)
    began = time.monotonic()
    writer.format("parquet").start(files).awaitTermination()
    took_s = time.monotonic() - began
    check(bench.spark.read.parquet(files), total)
    return took_s


def check(frame: DataFrame, total: int) -> None:
    """Raises InvalidDataError unless these are the rows that were appended, each once."""
    ids = np.arange(total, dtype=np.int64)
    by_destination = {
        row["dest"]: row["rows"] for row in frame.groupBy("dest").agg(F.count("*").alias("rows")).collect()
    }
    found = frame.selectExpr(
        "count(*) AS rows", "count(DISTINCT id) AS ids", "min(id)", "max(id)", "sum(delay)"
    ).first()
    expected = (total, total, 0, total - 1, int((ids % 1000).sum()))
    counts = dict(zip(DESTINATIONS.tolist(), np.bincount(ids % 50).tolist(), strict=True))
    if found is None or tuple(found) != expected or by_destination != counts:
        raise InvalidDataError(f"read back {found} and {by_destination}, not {expected} and {counts}")


def scan(frame: DataFrame) -> object:
    """A query of its own each time: Spark keeps the shuffles of one that has run."""
    return frame.selectExpr(*QUERY).collect()


def by_turns(*queries: Callable[[], Any]) -> list[float]:
    """The median seconds of each, after one turn to warm up."""
    took: list[list[float]] = [[] for _ in queries]
    for turn in range(TURNS + 1):
        for times, query in zip(took, queries, strict=True):
            began = time.monotonic()
            query()
            if turn:
                times.append(time.monotonic() - began)
    return [statistics.median(times) for times in took]


def files_read(frame: DataFrame) -> int:
    """How many files of tables a query opens, by the metrics of its plan."""
    query = frame._jdf.queryExecution()
    query.toRdd().count()
    leaves = query.executedPlan().collectLeaves()
    metrics = [leaves.apply(index).metrics().get("numFiles") for index in range(leaves.size())]
    return sum(int(metric.get().value()) for metric in metrics if metric.isDefined())


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="History in Delta, measured.")
    parser.add_argument("--rows", type=int, default=10_000_000, metavar="N", help="(default 10,000,000)")
    parser.add_argument("--write", action="store_true", help="write the figures into docs/benchmarks.md")
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        builder = SparkSession.builder.master(f"local[{SLOTS}]").config("spark.ui.enabled", "false")
        spark = configure_delta(configure_spark(builder)).getOrCreate()
        spark.conf.set("spark.sql.adaptive.enabled", "false")  # Its plans hide the metrics of a scan.
        with ProcessCluster(base, 1, {"log.retention.check.interval.ms": 100}) as cluster:
            bench = Bench(spark, cluster.bootstrap_servers, base)
            measure_bytes(bench, "warm-up", 5_000_000, RECORD_BYTES[0])
            figures = measure(bench, options.rows)
            figures += [measure_bytes(bench, f"records-{size}", options.rows * 50, size) for size in RECORD_BYTES]
        spark.stop()
    print_table(("measured", "result", "goal"), [(f.name, f.result, f.goal) for f in figures], title=machine())
    if options.write:
        write(figures, f"{machine()}, `local[{SLOTS}]`", "history")
    return 0


if __name__ == "__main__":
    sys.exit(main())
