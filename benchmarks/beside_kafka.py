"""Our DataFrames beside Spark's Kafka connector on a real Kafka: the same rows, one session, by turns.

`python -m benchmarks.beside_kafka --help`. Both clusters have three brokers, each a process, and topics of three
replicas; `acks` is `all` on both sides. A bare data source that reads and writes the same rows as Arrow files shows how
fast a data source in Python can be.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everywhere
from pyspark.sql.types import StructType

from benchmarks.bare_source import NAME, bare_options, read_files, write_files
from benchmarks.figures import Figure, machine, write
from benchmarks.kafka_server import jars, kafka, steady_kafka
from spark_broker import Admin, NewTopic, configure_spark, read_topic
from spark_broker.cli.output import print_table
from spark_broker.errors import SparkBrokerError
from spark_broker.history.tierer import tier_topic
from spark_broker.spark.delta_session import configure_delta
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamReader

NAMES = ("count", "columns", "typed", "stream", "write", "latency")
BROKERS = 3
RECORD_BYTES = 100
COLUMNS = (
    "id BIGINT, carrier STRING, flight INT, origin STRING, dest STRING, air_time DOUBLE, distance INT, dep_delay INT,"
    " arr_delay INT, tail STRING"
)
QUERY_COLUMNS = ("dest", "arr_delay")
MASTER = "local[2]"
BATCHES = {200_000: 10, 2_000: 40}
"""Rows of a micro-batch, and how many of them a stream has."""
WARM_BATCHES = 3
TIMEOUT_S = 120.0
LATENCY_RATE = 1000
LATENCY_S = 30
WARM_UP_S = 10

READ_TUNED = {
    "kafka.max.partition.fetch.bytes": "33554432",
    "kafka.fetch.max.bytes": "67108864",
    "kafka.max.poll.records": "100000",
    "kafka.receive.buffer.bytes": "4194304",
}
WRITE_TUNED = {
    "kafka.batch.size": "1048576",
    "kafka.linger.ms": "20",
    "kafka.buffer.memory": "268435456",
    "kafka.max.request.size": "16777216",
}


STEADY = """
import sys, threading, time
from spark_broker import Producer

servers, topic, rate, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pause, value, started = threading.Event(), bytes(100), time.monotonic()
with Producer(servers, acks="all") as producer:
    for number in range(rate * seconds):
        pause.wait(max(0.0, started + number / rate - time.monotonic()))
        producer.send(topic, value)
"""
"""Our steady producer. Kafka brings its own."""


@dataclass(frozen=True)
class Side:
    """One side of the comparison: a format, its address, and its options."""

    name: str
    format: str
    servers: str
    options: Mapping[str, str] = field(default_factory=dict)

    def read(self, spark: SparkSession, topic: str, **more: str) -> DataFrame:
        reader = spark.read.format(self.format).options(**self.all_options(subscribe=topic, startingOffsets="earliest"))
        return reader.options(**more).load()

    def stream(self, spark: SparkSession, topic: str, start: str) -> DataStreamReader:
        return spark.readStream.format(self.format).options(**self.all_options(subscribe=topic, startingOffsets=start))

    def all_options(self, **more: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.servers, **self.options, **more}

    @contextmanager
    def steadily(self, topic: str, rate: int, seconds: int, base: Path) -> Iterator[None]:
        """This many records a second, from a process of its own."""
        command = steady_kafka(base, self.servers, topic, rate, seconds)
        if self.format != "kafka":
            command = [sys.executable, "-c", STEADY, self.servers, topic, str(rate), str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def write(self, rows: DataFrame, topic: str) -> None:
        rows.write.format(self.format).options(**self.all_options(topic=topic)).mode("append").save()


@dataclass
class Rates:
    """Rows per second of each side, by measurement."""

    rows: int
    by_name: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def take(self, name: str, side: str, act: Callable[[], object]) -> None:
        """Run it once and keep its rate."""
        started = time.perf_counter()
        act()
        self.keep(name, side, self.rows / (time.perf_counter() - started))

    def keep(self, name: str, side: str, rate: float) -> None:
        """One rate (rows/s)."""
        self.by_name.setdefault(name, {}).setdefault(side, []).append(rate)
        print(f"{name}: {side}: {rate / 1e6:.2f} million rows/s", file=sys.stderr)

    def figures(self, goals: Mapping[tuple[str, str, str], str]) -> list[Figure]:
        """A line for each side of a measurement: our median, divided by that side's. The first turn warms up."""
        lines = []
        for (name, ours, theirs), goal in goals.items():
            rates = self.by_name.get(name, {})
            if ours in rates and theirs in rates:
                mine, other = statistics.median(rates[ours][1:]), statistics.median(rates[theirs][1:])
                result = f"{mine / other:.2f} times ({mine / 1e6:.3f} and {other / 1e6:.3f} million rows/s)"
                lines.append(Figure(f"{name}: {ours} by {theirs}", result, goal))
        return lines


OURS, PRUNED, DEFAULT, TUNED = "ours", "ours, the query's columns", "connector", "connector, tuned"
TIERED, TIERED_SHARE = "ours, 95 % in the topic's table", 0.95
BARE, BARE_PRUNED = "a bare data source", "a bare data source, the query's columns"
COUNT, ALL_COLUMNS = "count of 100-byte records", "all columns of 100-byte records to a no-op"
GROUPED = "group-by over ten columns"
STREAMED = {rows: f"a stream, {rows:,} rows a batch" for rows in BATCHES}
WRITTEN, WRITTEN_TYPED = "df.write of 100-byte records", "df.write of ten columns (Kafka: to_json)"
GOALS = {
    (COUNT, OURS, DEFAULT): "",
    (COUNT, OURS, TUNED): "1.4 times",
    (COUNT, OURS, BARE): "",
    (ALL_COLUMNS, OURS, DEFAULT): "",
    (ALL_COLUMNS, OURS, TUNED): "1.4 times",
    (GROUPED, OURS, DEFAULT): "",
    (GROUPED, OURS, TUNED): "6 times",
    (GROUPED, PRUNED, TUNED): "9 times",
    (GROUPED, TIERED, TUNED): "5 times",
    (GROUPED, OURS, BARE): "",
    (GROUPED, PRUNED, BARE_PRUNED): "",
    (STREAMED[200_000], OURS, DEFAULT): "",
    (STREAMED[200_000], OURS, TUNED): "1.1 times",
    (STREAMED[2_000], OURS, DEFAULT): "",
    (STREAMED[2_000], OURS, TUNED): "1.0 times",
    (WRITTEN, OURS, DEFAULT): "",
    (WRITTEN, OURS, TUNED): "1.0 times",
    (WRITTEN, OURS, BARE): "",
    (WRITTEN_TYPED, OURS, DEFAULT): "",
    (WRITTEN_TYPED, OURS, TUNED): "2 times",
}


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_kafka", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="records of each topic (default: 2,000,000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default: 3)")
    parser.add_argument("--partitions", type=int, default=6, help="of each topic (default: 6)")
    parser.add_argument("--master", default=MASTER, help=f"Spark's (default: {MASTER})")
    parser.add_argument("--only", action="append", choices=NAMES, help="one measurement; may be given several times")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/benchmarks.md")
    options = parser.parse_args(given)
    try:
        figures, failed = measure(options)
    except SparkBrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, why in failed.items():
        print(f"error: {name} was not measured: {why}", file=sys.stderr)
    print_table(
        ("measured", "result", "goal"),
        [(figure.name, figure.result, figure.goal) for figure in figures],
        title=machine(),
    )
    if options.write:
        write(figures, f"{machine()}, `{options.master}`, {options.rows:,} rows", "kafka")
    return 1 if failed else 0


def measure(options: argparse.Namespace) -> tuple[list[Figure], dict[str, PySparkException]]:
    """Start both logs and a session that knows both, and measure what was asked for. Returns the figures, and what
    failed: the others took half an hour.
    """
    wanted = options.only or NAMES
    failed: dict[str, PySparkException] = {}
    with tempfile.TemporaryDirectory(prefix="beside-kafka-") as directory:
        base = Path(directory)
        with (
            kafka(base, options.partitions, brokers=BROKERS) as servers,
            ProcessCluster(base / "ours", BROKERS) as ours,
            session(options.master, base) as spark,
        ):
            bench = Bench(spark, ours.bootstrap_servers, servers, options, base)
            for name in wanted:
                try:
                    getattr(bench, name)()
                except PySparkException as error:
                    failed[name] = error
            return bench.rates.figures(GOALS) + bench.latencies, failed


@contextmanager
def session(master: str, base: Path) -> Iterator[SparkSession]:
    """A session with the connector's packages."""
    connector = ",".join(map(str, jars("connector.xml", base / "connector")))
    builder = SparkSession.builder.master(master).appName("beside Kafka").config("spark.ui.enabled", "false")
    builder = builder.config("spark.jars", connector).config("spark.driver.memory", "4g")
    spark = configure_delta(configure_spark(builder)).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


class Bench:
    """The measurements. Each one creates the topics that it needs."""

    def __init__(self, spark: SparkSession, ours: str, servers: str, options: argparse.Namespace, base: Path) -> None:
        self.spark = spark
        self.rates = Rates(options.rows)
        self.latencies: list[Figure] = []
        self._ours = Side(OURS, "spark_broker", ours)
        self._default = Side(DEFAULT, "kafka", servers)
        self._read_tuned = Side(TUNED, "kafka", servers, READ_TUNED)
        self._write_tuned = Side(TUNED, "kafka", servers, WRITE_TUNED)
        self._rounds: int = options.rounds + 1  # the first one warms up
        self._partitions: int = options.partitions
        self._base = base
        self._made: set[str] = set()

    def count(self) -> None:
        """Every record of a topic of 100-byte records."""
        self._fill("plain", self._records())
        reads: dict[str, Callable[[], DataFrame]] = {
            side.name: partial(side.read, self.spark, "plain") for side in (self._ours, self._default, self._read_tuned)
        }
        reads[BARE] = self._in_files("plain", reads[OURS]())
        for _ in range(self._rounds):
            for name, read in reads.items():
                self.rates.take(COUNT, name, partial(self._counted, read))

    def columns(self) -> None:
        """All columns of the same topic, into a sink that does nothing."""
        self._fill("plain", self._records())
        for _ in range(self._rounds):
            for side in (self._ours, self._default, self._read_tuned):
                rows = side.read(self.spark, "plain")
                self.rates.take(ALL_COLUMNS, side.name, rows.write.format("noop").mode("overwrite").save)

    def typed(self) -> None:
        """A group-by over ten columns. Ours are columns; the connector's come out of JSON."""
        self._fill_typed()
        schema = cast("StructType", StructType.fromDDL(COLUMNS))

        def grouped(read: Callable[[], DataFrame]) -> None:
            read().groupBy("dest").agg(F.avg("arr_delay"), F.count("*")).collect()

        def parsed(side: Side) -> DataFrame:
            value = F.from_json(F.col("value").cast("string"), schema)
            return side.read(self.spark, "json").select(value.alias("v")).select("v.*")

        reads: dict[str, Callable[[], DataFrame]] = {
            OURS: partial(self._ours.read, self.spark, "typed"),
            PRUNED: partial(self._ours.read, self.spark, "typed", columns=",".join(QUERY_COLUMNS)),
            TIERED: partial(read_topic, self.spark, "tiered", bootstrap_servers=self._ours.servers),
            DEFAULT: partial(parsed, self._default),
            TUNED: partial(parsed, self._read_tuned),
        }
        reads[BARE] = self._in_files("typed", reads[OURS]())
        reads[BARE_PRUNED] = self._in_files("pruned", reads[PRUNED]())
        for _ in range(self._rounds):
            for side, read in reads.items():
                self.rates.take(GROUPED, side, partial(grouped, read))

    def stream(self) -> None:
        """Micro-batches of the same number of rows, into a sink that does nothing. The median batch counts."""
        self._fill("plain", self._records())
        for rows, most in BATCHES.items():
            batches = min(most, self.rates.rows // rows)
            if batches <= WARM_BATCHES:
                print(f"{STREAMED[rows]}: left out: it needs more --rows", file=sys.stderr)
                continue
            for number in range(self._rounds):
                for side in (self._ours, self._default, self._read_tuned):
                    checkpoint = self._base / f"checkpoint-{rows}-{number}-{side.name}"
                    reader = side.stream(self.spark, "plain", "earliest").option("maxOffsetsPerTrigger", rows)
                    took_ms = _batches_ms(reader.load(), checkpoint, rows, batches)
                    self.rates.keep(STREAMED[rows], side.name, rows / statistics.median(took_ms) * 1000)

    def write(self) -> None:
        """The same rows to a topic, acknowledged by all replicas."""
        self._write_records()
        self._write_typed()

    def _write_records(self) -> None:
        self._make("written", {})
        rows = self._records().persist()  # The rows are ready: the clock does not see how they are made.
        rows.count()
        files = self._base / "bare-written"
        files.mkdir()
        to_files = rows.write.format(NAME).mode("append").options(**bare_options(self.spark, rows.schema, files))
        writes: dict[str, Callable[[], None]] = {
            side.name: partial(side.write, rows, "written") for side in (self._ours, self._default, self._write_tuned)
        }
        writes[BARE] = to_files.save
        for _ in range(self._rounds):
            for name, write_rows in writes.items():
                self.rates.take(WRITTEN, name, write_rows)
        rows.unpersist()

    def _write_typed(self) -> None:
        """Ten columns: ours take them as they are, and the connector's side makes JSON of them."""
        with Admin(self._ours.servers) as admin:
            admin.create_topic(NewTopic("typed-written", self._partitions, BROKERS, schema=COLUMNS))
        rows = self._typed_rows().persist()
        rows.count()
        for _ in range(self._rounds):
            self.rates.take(WRITTEN_TYPED, OURS, partial(self._ours.write, rows, "typed-written"))
            for side in (self._default, self._write_tuned):
                json = rows.select(F.to_json(F.struct("*")).alias("value"))
                self.rates.take(WRITTEN_TYPED, side.name, partial(side.write, json, "json-written"))
        rows.unpersist()

    def latency(self) -> None:
        """From one topic to another: the time from a record's creation to its append, both by this machine's clock."""
        medians = {}
        for side in (self._ours, self._default):
            medians[side.name] = self._copied(side)
        result = f"{medians[OURS]:.0f} and {medians[DEFAULT]:.0f} ms"
        self.latencies.append(
            Figure(
                f"topic to topic, {LATENCY_RATE} records/s: median latency of ours and the connector's",
                result,
                "no worse",
            )
        )

    def _copied(self, side: Side) -> float:
        """Median milliseconds."""
        for topic in ("from", "to"):
            self._make(topic, {})
            # Kafka creates a topic on first use, and a stream that begins before all leaders know it fails.
            side.write(self.spark.range(1).select(F.lit(None).cast("binary").alias("value")), topic)
            side.read(self.spark, topic).count()
        made = F.unix_micros(F.col("timestamp")).cast("string").cast("binary").alias("value")
        rows = side.stream(self.spark, "from", "latest").load().select(made)
        writer = rows.writeStream.format(side.format).options(**side.all_options(topic="to"))
        query = writer.option("checkpointLocation", str(self._base / f"latency-{side.format}")).start()
        with side.steadily("from", LATENCY_RATE, WARM_UP_S + LATENCY_S, self._base):
            query.awaitTermination(WARM_UP_S + LATENCY_S)  # raises what ended it
        query.stop()
        arrived = F.unix_micros(F.col("timestamp")) - F.col("value").cast("string").cast("long")
        rows = side.read(self.spark, "to").where("value IS NOT NULL").select(arrived.alias("us"), "timestamp")
        first = rows.agg(F.min("timestamp")).collect()[0][0]
        late = rows.where(F.col("timestamp") > F.lit(first) + F.expr(f"INTERVAL {WARM_UP_S} SECONDS"))
        return float(late.agg(F.percentile_approx("us", 0.5)).collect()[0][0]) / 1000

    def _in_files(self, name: str, rows: DataFrame) -> Callable[[], DataFrame]:
        """Write the rows for the bare data source. Returns what reads them."""
        directory = self._base / f"bare-{name}"
        write_files(rows, directory, self._partitions)
        return partial(read_files, self.spark, rows.schema, directory)

    def _counted(self, read: Callable[[], DataFrame]) -> None:
        count = read().count()
        if count != self.rates.rows:
            raise AssertionError(f"{count} rows of {self.rates.rows}")

    def _records(self) -> DataFrame:
        text = F.rpad(F.col("id").cast("string"), RECORD_BYTES, "x")
        return self.spark.range(self.rates.rows, numPartitions=self._partitions).select(
            F.col("id").cast("string").cast("binary").alias("key"), text.cast("binary").alias("value")
        )

    def _fill(self, topic: str, rows: DataFrame) -> None:
        if topic in self._made:
            return
        self._make(topic, {})
        for side in (self._ours, self._write_tuned):
            side.write(rows, topic)

    def _typed_rows(self) -> DataFrame:
        return self.spark.range(self.rates.rows, numPartitions=self._partitions).select(
            "id",
            F.concat(F.lit("C"), F.col("id") % 16).alias("carrier"),
            (F.col("id") % 9000).cast("int").alias("flight"),
            F.concat(F.lit("O"), F.col("id") % 30).alias("origin"),
            F.concat(F.lit("D"), F.col("id") % 100).alias("dest"),
            (F.col("id") % 600 + 0.5).cast("double").alias("air_time"),
            (F.col("id") % 5000).cast("int").alias("distance"),
            (F.col("id") % 120).cast("int").alias("dep_delay"),
            (F.col("id") % 180).cast("int").alias("arr_delay"),
            F.concat(F.lit("N"), F.col("id") % 4000).alias("tail"),
        )

    def _fill_typed(self) -> None:
        rows = self._typed_rows()
        with Admin(self._ours.servers) as admin:
            admin.create_topic(NewTopic("typed", self._partitions, BROKERS, schema=COLUMNS))
        self._ours.write(rows, "typed")
        self._fill_tiered(rows)
        self._write_tuned.write(rows.select(F.to_json(F.struct("*")).alias("value")), "json")

    def _fill_tiered(self, rows: DataFrame) -> None:
        """Most of the rows in the topic's table, the rest in its log."""
        boundary, config = int(self.rates.rows * TIERED_SHARE), {"delta.path": str(self._base / "tiered")}
        with Admin(self._ours.servers) as admin:
            admin.create_topic(NewTopic("tiered", self._partitions, BROKERS, schema=COLUMNS, config=config))
        self._ours.write(rows.where(F.col("id") < boundary), "tiered")
        tier_topic(self.spark, "tiered", self._ours.servers, include_active_segments=True)
        self._ours.write(rows.where(F.col("id") >= boundary), "tiered")

    def _make(self, topic: str, config: dict[str, object]) -> None:
        """Kafka creates its topics on first use."""
        if topic not in self._made:
            with Admin(self._ours.servers) as admin:
                admin.create_topic(NewTopic(topic, self._partitions, BROKERS, config=config))
            self._made.add(topic)


def _batches_ms(rows: DataFrame, checkpoint: Path, size: int, count: int) -> list[float]:
    """How long each micro-batch of `size` rows took from trigger to trigger; the first ones warm up."""
    query = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        eventually(lambda: query.exception() or len(query.recentProgress) >= count or not query.isActive, TIMEOUT_S)
        if (error := query.exception()) is not None:
            raise error
        progress = [each for each in query.recentProgress if each.numInputRows >= size * 0.9]
    finally:
        query.stop()
    return [each.durationMs["triggerExecution"] for each in progress[WARM_BATCHES:count]]


if __name__ == "__main__":
    sys.exit(main())
