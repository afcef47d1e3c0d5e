"""Reads the topic back, twice, and compares it with the flights that were sent, row for row.

    spark-submit --master local[2] jobs/compare_flights.py --bootstrap-servers HOST:PORT

It reads once as a DataFrame, in a Spark application of its own, and once by offset with a plain Python consumer. Status
0 only when both got exactly what was sent, in the order of each key, with the same row at every offset.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa

# Runs from a checkout, too: spark-submit puts the script's own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.comparison import OFFSET, PARTITION, Comparison, compare, same_offsets
from jobs.flights import KEY, read_flights
from spark_broker.cli.output import note, print_table
from spark_broker.client.admin import Admin
from spark_broker.client.consumer import Consumer
from spark_broker.driver.session import configure_spark, quiet_spark, submitted_settings
from spark_broker.errors import RequestTimedOutError, SparkBrokerError
from spark_broker.model import TopicPartition

TOPIC = "flights"
MASTER = "local[2]"
READ_TIMEOUT_S = 120.0


class Reading(msgspec.Struct, frozen=True):
    """One reader's comparison with the source, and the seconds that reading took."""

    comparison: Comparison
    seconds: float


class Result(msgspec.Struct, frozen=True):
    """Both comparisons. `same_offsets`: every offset holds the same row for both readers."""

    dataframe: Reading
    consumer: Reading
    same_offsets: bool

    @property
    def holds(self) -> bool:
        """Whether every comparison held."""
        return self.dataframe.comparison.holds and self.consumer.comparison.holds and self.same_offsets


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare a topic with the flights of 2013.")
    parser.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT,...")
    parser.add_argument("--topic", default=TOPIC)
    parser.add_argument("--rows", type=int, metavar="N", help="the first N rows were sent (default: all 336,776)")
    parser.add_argument("--result-file", type=Path, metavar="FILE", help="the result as JSON")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Read twice and compare; returns the exit status."""
    options = arguments(given)
    try:
        result = run(options)
    except SparkBrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.result_file:
        options.result_file.write_bytes(msgspec.json.encode(result) + b"\n")
    show(result)
    return 0 if result.holds else 1


def run(options: argparse.Namespace) -> Result:
    """Both readings and their comparisons."""
    source = read_flights(options.rows)
    note("reading the topic as a DataFrame ...")
    as_frame, frame_s = timed(lambda: read_dataframe(options.bootstrap_servers, options.topic, source.schema))
    note("reading the topic with a consumer ...")
    by_offset, offset_s = timed(lambda: read_consumer(options.bootstrap_servers, options.topic, source.schema))
    note("comparing ...")
    return Result(
        dataframe=Reading(compare("DataFrame", source, as_frame, KEY), frame_s),
        consumer=Reading(compare("Consumer", source, by_offset, KEY), offset_s),
        same_offsets=same_offsets(as_frame, by_offset),
    )


def timed(read: Callable[[], pa.Table]) -> tuple[pa.Table, float]:
    """What `read` returns, and the seconds that it took."""
    began = time.monotonic()
    table = read()
    return table, round(time.monotonic() - began, 2)


def read_dataframe(bootstrap_servers: str, topic: str, schema: pa.Schema) -> pa.Table:
    """The topic through Spark: its columns, `_partition` and `_offset`."""
    from pyspark.sql import SparkSession

    quiet_spark()
    builder = SparkSession.builder.appName("compare flights").config("spark.sql.session.timeZone", "UTC")
    spark = configure_spark(builder.master(submitted_settings().get("spark.master", MASTER))).getOrCreate()
    try:
        frame = (
            spark.read.format("spark_broker")
            .option("kafka.bootstrap.servers", bootstrap_servers)
            .option("subscribe", topic)
            .load()
        )
        return frame.select(*schema.names, PARTITION, OFFSET).toArrow()
    finally:
        spark.stop()


def read_consumer(bootstrap_servers: str, topic: str, schema: pa.Schema) -> pa.Table:
    """The topic by offset, up to its high watermarks. Raises RequestTimedOutError when they are not reached."""
    with Admin(bootstrap_servers) as admin:
        partitions = [
            TopicPartition(topic, info.partition) for info in admin.describe_topic(topic, with_offsets=False).partitions
        ]
    schema = schema.append(pa.field(PARTITION, pa.int32())).append(pa.field(OFFSET, pa.int64()))
    tables = [schema.empty_table()]
    deadline = time.monotonic() + READ_TIMEOUT_S
    with Consumer(bootstrap_servers, enable_auto_commit=False) as consumer:
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        consumer.seek_to_beginning()
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            if time.monotonic() > deadline:
                raise RequestTimedOutError(f"{topic} was not read to its end within {READ_TIMEOUT_S:g} s")
            for batch in consumer.poll(1.0):
                partition = pa.repeat(pa.scalar(batch.partition, pa.int32()), batch.data.num_rows)
                offset = pa.array(range(batch.base_offset, batch.next_offset), pa.int64())
                tables.append(pa.Table.from_arrays([*batch.data.columns, partition, offset], schema=schema))
    return pa.concat_tables(tables).combine_chunks()


def show(result: Result) -> None:
    """A small table, and examples of what differs."""
    readings = (result.dataframe, result.consumer)
    rows = [
        (
            reading.comparison.reader,
            f"{reading.comparison.rows_sent:,}",
            f"{reading.comparison.rows_read:,}",
            reading.comparison.rows_lost,
            reading.comparison.rows_extra,
            reading.comparison.keys_out_of_order,
            "equal" if reading.comparison.holds else "DIFFERENT",
        )
        for reading in readings
    ]
    columns = ("reader", "rows sent", "rows read", "lost", "twice or changed", "keys out of order", "result")
    print_table(columns, rows, right=columns[1:6])
    for line in (example for reading in readings for example in reading.comparison.examples):
        print(line)
    if not result.same_offsets:
        print("the DataFrame and the consumer do not see the same row at every offset")


if __name__ == "__main__":
    sys.exit(main())
