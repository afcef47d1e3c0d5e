"""Appends the flights of 2013 to a topic, as a steady stream of typed micro-batches.

    spark-submit jobs/produce_flights.py --bootstrap-servers HOST:PORT --rate 20000

The producer goes on by itself when brokers die. `--ack-log` records each acknowledged batch with its time.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pyarrow as pa

# Runs from a checkout, too: spark-submit puts the script's own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.ack_log import AckLog
from jobs.flights import KEY, SCHEMA, read_flights
from spark_broker.cli.output import note, progress
from spark_broker.client.admin import Admin
from spark_broker.client.producer import Producer
from spark_broker.errors import SchemaMismatchError, SparkBrokerError, TopicAlreadyExistsError
from spark_broker.model import NewTopic, RecordMetadata

TOPIC = "flights"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Append the flights of 2013 to a topic.")
    parser.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT,...")
    parser.add_argument("--topic", default=TOPIC)
    parser.add_argument("--partitions", type=int, default=6, help="of the topic, if it is to be made (default 6)")
    parser.add_argument("--replication-factor", type=int, default=3, help="likewise (default 3)")
    parser.add_argument("--rows", type=int, metavar="N", help="only the first N rows (default: all 336,776)")
    parser.add_argument("--rate", type=float, default=20_000, metavar="R", help="rows a second; 0: as fast as it goes")
    parser.add_argument("--batch-rows", type=int, default=1000, metavar="N", help="rows of one append (default 1000)")
    parser.add_argument("--ack-log", type=Path, metavar="FILE", help="a line of JSON for each acknowledged batch")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Append all rows; returns the exit status."""
    options = arguments(given)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        flights = read_flights(options.rows)
        make_topic(options)
        began = time.monotonic()
        with AckLog(options.ack_log) as acks:
            append_all(flights, options, acks, stop)
            seconds = time.monotonic() - began
            print(
                f"{acks.rows:,} of {flights.num_rows:,} rows acknowledged in {seconds:.1f} s "
                f"({acks.rows / seconds:,.0f}/s); longest time without an acknowledgement {acks.longest_gap_s():.2f} s"
            )
            return 0 if acks.rows == flights.num_rows else 1
    except SparkBrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def make_topic(options: argparse.Namespace) -> None:
    """Create the topic unless it is there with the same columns. Raises SchemaMismatchError when it has others."""
    wanted = NewTopic(
        options.topic,
        partitions=options.partitions,
        replication_factor=options.replication_factor,
        schema=SCHEMA,
        config={"min.insync.replicas": min(2, options.replication_factor), "key.columns": KEY},
    )
    with Admin(options.bootstrap_servers) as admin:
        try:
            admin.create_topic(wanted)
            note(f"created topic {options.topic}")
        except TopicAlreadyExistsError:
            if not admin.describe_topic(options.topic, with_offsets=False).schema.equals(SCHEMA):
                raise SchemaMismatchError(f"topic {options.topic!r} exists, and has other columns") from None


def append_all(flights: pa.Table, options: argparse.Namespace, acks: AckLog, stop: threading.Event) -> None:
    """Append the rows in order at the rate, and wait until all are acknowledged. Raises the first append's error."""
    failed: list[BaseException] = []

    def finished(future: Future[list[RecordMetadata]]) -> None:
        error = future.exception()
        if error is None:
            acks.add(future.result())
        else:
            failed.append(error)
            stop.set()

    with (
        progress("flights", flights.num_rows) as tell,
        Producer(options.bootstrap_servers, acks="all", client_id="flights") as producer,
    ):
        for number, batch in enumerate(paced(flights, options.batch_rows, options.rate, stop)):
            appended = producer.append(options.topic, batch)
            appended.add_done_callback(finished)
            if number == 0:
                wait([appended])  # Connecting takes its time; the rate counts from here on.
            tell(acks.rows)
        producer.flush()
        tell(acks.rows)
    if failed:
        raise failed[0]


def paced(table: pa.Table, batch_rows: int, rate: float, stop: threading.Event) -> Iterator[pa.RecordBatch]:
    """The table's micro-batches in order, each when it is due; ends early when `stop` is set."""
    due = 0.0
    for batch in table.to_batches(max_chunksize=batch_rows):
        # Behind schedule there is no wait: the rows that an election held back are caught up.
        if stop.wait(max(0.0, due - time.monotonic())):
            return
        yield batch
        due = (due or time.monotonic()) + (batch.num_rows / rate if rate > 0 else 0.0)


if __name__ == "__main__":
    sys.exit(main())
