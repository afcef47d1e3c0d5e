"""The benchmarks: `make bench`, or `python -m benchmarks.run --help`.

One cluster has three brokers on three executors. One client is in the process that also drives Spark. Micro-batches,
the carrier, many partitions and groups are measured without Spark. Nothing is asserted: the figures are printed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from benchmarks.batches import BatchFigures, measure_batches
from benchmarks.batches import figures as batch_figures
from benchmarks.carrier import CarrierFigures, measure_carrier
from benchmarks.carrier import figures as carrier_figures
from benchmarks.clients import ClientsFigures, clients_figures, measure_clients
from benchmarks.failover import FAULTS, Distribution, FaultFigures, Tormentor, busy
from benchmarks.figures import Figure, machine, write
from benchmarks.group_members import MembersFigures, measure_members
from benchmarks.group_members import figures as members_figures
from benchmarks.groups import GroupFigures, measure_groups
from benchmarks.groups import figures as group_figures
from benchmarks.idle_groups import IdleFigures, measure_idle_groups
from benchmarks.idle_groups import figures as idle_figures
from benchmarks.partitions import PartitionFigures, measure_partitions
from benchmarks.partitions import figures as partition_figures
from spark_broker.cli.measure import (
    ConsumeFigures,
    Latency,
    ProduceFigures,
    measure_consume,
    measure_produce,
    random_records,
)
from spark_broker.cli.output import print_table
from spark_broker.client.admin import Admin
from spark_broker.client.consumer import Consumer
from spark_broker.client.producer import Producer
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.errors import SparkBrokerError
from spark_broker.model import NewTopic, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local-cluster[3,2,1024]"
BROKERS = 3
RECORD_BYTES = 100
WITH_SPARK = ("start", "throughput", "latency", "clients", "failover")
NAMES = ("start", "throughput", "latency", "clients", "batches", "carrier", "partitions", "groups", "failover")
BATCHES = ((1, 5000), (100, 2000), (10_000, 100))
"""Rows of a micro-batch whose processor time is measured, and how many of them."""
KEEP_ALL = {"retention.ms": -1}

GOALS = {
    "executor": "each under 1,000 ms, median under 250 ms, none restarted",
    "broker": "",
    "both": "",
    "keeper": "no election",
    "cancel": "each under 500 ms, none restarted",
}

err = Console(stderr=True, highlight=False)


class StartFigures(msgspec.Struct, frozen=True):
    """Seconds from one step of a start to the next. `controller_s` and `brokers_s` are ours; the others are Spark's."""

    session_s: float
    controller_s: float
    executors_s: float
    brokers_s: float
    first_append_s: float
    first_query_s: float
    second_query_s: float


class SendFigures(msgspec.Struct, frozen=True):
    """One thread sends records one by one, until the last is acknowledged."""

    keyed: bool
    records: int
    seconds: float
    records_per_s: int


class Report(msgspec.Struct):
    """Everything that was measured, raw."""

    machine: str
    master: str
    produce_acks_1: list[ProduceFigures] = []
    produce_acks_all: list[ProduceFigures] = []
    consume: list[ConsumeFigures] = []
    send: list[SendFigures] = []
    append: ProduceFigures | None = None
    clients: ClientsFigures | None = None
    start: StartFigures | None = None
    faults: list[FaultFigures] = []
    busy_faults: list[FaultFigures] = []
    batches: list[BatchFigures] = []
    carrier: list[CarrierFigures] = []
    many: PartitionFigures | None = None
    groups: GroupFigures | None = None
    members: MembersFigures | None = None
    idle_groups: IdleFigures | None = None


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description="Measure a cluster on this machine.")
    parser.add_argument("--only", choices=NAMES, action="append", help="only this; may be repeated (default: all)")
    parser.add_argument("--master", default=MASTER, help=f"where brokers run (default {MASTER})")
    parser.add_argument("--records", type=int, default=5_000_000, help="records of one run (default 5,000,000)")
    parser.add_argument("--batch-records", type=int, default=10_000, help="records of a micro-batch (default 10,000)")
    parser.add_argument("--partitions", type=int, default=3, help="partitions of the topics (default 3)")
    parser.add_argument("--many", type=int, default=1000, help="partitions of `partitions` (default 1,000)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each throughput; the median counts (default 3)")
    parser.add_argument("--sends", type=int, default=300_000, help="records of one run of send() (default 300,000)")
    parser.add_argument("--appends", type=int, default=1000, help="single synchronous appends (default 1,000)")
    parser.add_argument("--consumers", type=int, default=200, help="idle consumers (default 200)")
    parser.add_argument("--groups", type=int, default=1000, help="idle groups of one member (default 1,000)")
    parser.add_argument("--first-appends", type=int, default=200, help="new clients beside them (default 200)")
    parser.add_argument("--kills", type=int, default=10, help="kills of each kind (default 10)")
    parser.add_argument("--cancels", type=int, default=5, help="times that every job is cancelled (default 5)")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this fault; may be repeated")
    parser.add_argument("--busy", type=int, default=0, help="run the faults again beside so many busy processes")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what to print on stdout")
    parser.add_argument(
        "--write", action="store_true", help="replace the figures of docs/benchmarks.md that were measured"
    )
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    options = arguments(given)
    try:
        report = measure(options)
    except SparkBrokerError as error:
        err.print(f"error: {error}", style="red", markup=False)
        return 1
    sections = summary(report, options)
    if options.output == "json":
        print(msgspec.json.encode(report).decode())
    else:
        show([figure for figures in sections.values() for figure in figures], f"{report.machine}, {report.master}")
    if options.write:
        for section, figures in sections.items():
            write(figures, f"{report.machine}, `{report.master}`", section)
    return 0


def measure(options: argparse.Namespace) -> Report:
    """Measure what was asked for."""
    wanted = options.only or NAMES
    report = Report(machine(), options.master)
    if "batches" in wanted:
        for rows, count in BATCHES:
            with err.status(f"processor time of micro-batches of {rows:,} rows"):
                report.batches.append(measure_batches(rows, count))
    if "carrier" in wanted:
        with err.status("the carrier alone, beside bare sockets"):
            report.carrier = measure_carrier()
    if "partitions" in wanted:
        with err.status(f"{options.many:,} partitions"):
            report.many = measure_partitions(options.many)
    if "groups" in wanted:
        with err.status("rebalances of groups, the core alone"):
            report.groups = measure_groups()
        with err.status("20 members that join, leave and are killed"):
            report.members = measure_members()
        with err.status(f"{options.groups:,} groups of one member"):
            report.idle_groups = measure_idle_groups(options.groups)
    if not set(wanted).isdisjoint(WITH_SPARK):
        measure_on_spark(wanted, options, report)
    return report


def measure_on_spark(wanted: Sequence[str], options: argparse.Namespace, report: Report) -> None:
    """Start a cluster, measure what was asked for, stop it."""
    watch = Stopwatch()
    with err.status(f"starting {BROKERS} brokers on {options.master} ..."):
        spark = session(options.master)
        watch.lap("session")
        cluster = BrokerCluster.start(spark, BROKERS, on_progress=watch.progress)
        watch.lap("brokers")
    try:
        with cluster:
            if "start" in wanted:
                report.start = first_use(cluster.bootstrap_servers, spark, watch)
            if "throughput" in wanted:
                throughput(cluster.bootstrap_servers, options, report)
                one_by_one(cluster.bootstrap_servers, options, report)
            if "latency" in wanted:
                latency(cluster.bootstrap_servers, options, report)
            if "clients" in wanted:
                many_clients(cluster.bootstrap_servers, options, report)
            if "failover" in wanted:
                failover(cluster.bootstrap_servers, spark, options, report)
    finally:
        spark.stop()


class Stopwatch:
    """Seconds of each lap, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """The seconds since the last lap."""
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 2), now

    def progress(self, what: str, ready: int, needed: int) -> None:
        """The progress of a cluster's start. When executors are first awaited, the controller is there."""
        if what == "executors" and "controller" not in self.seconds:
            self.lap("controller")
        if what == "executors" and ready == needed:
            self.lap("executors")


def first_use(bootstrap: str, spark: SparkSession, watch: Stopwatch) -> StartFigures:
    """What the README does after the start: a topic, an append and a query. Then the same query again."""
    make_topic(bootstrap, "first", 6, BROKERS)
    with Producer(bootstrap, acks="all") as producer:
        producer.append("first", [{"key": b"en", "value": b"hello"}]).result()
    watch.lap("first_append")
    for name in ("first_query", "second_query"):
        read = spark.read.format("spark_broker").option("bootstrap.servers", bootstrap).option("subscribe", "first")
        read.load().collect()
        watch.lap(name)
    delete_topics(bootstrap, "first")
    return StartFigures(**{f"{name}_s": seconds for name, seconds in watch.seconds.items()})


def session(master: str) -> SparkSession:
    """A quiet Spark session."""
    from pyspark.sql import SparkSession

    from spark_broker.driver.session import configure_spark

    builder = SparkSession.builder.master(master).appName("benchmarks").config("spark.ui.enabled", "false")
    spark = configure_spark(builder).getOrCreate()
    # Executors are killed on purpose. What Spark and the launcher say about it is of no interest here.
    spark.sparkContext.setLogLevel("FATAL")
    logging.getLogger("spark_broker").setLevel(logging.ERROR)
    return spark


def throughput(bootstrap: str, options: argparse.Namespace, report: Report) -> None:
    """`perf produce` with acks=1 and one replica, with acks=all and three; then `perf consume` of the first topic."""
    batch = random_records(options.batch_records, RECORD_BYTES)
    for acks, factor, results in (("1", 1, report.produce_acks_1), ("all", BROKERS, report.produce_acks_all)):
        topic = f"perf-acks-{acks}"
        make_topic(bootstrap, topic, options.partitions, factor)
        for number in range(options.runs):
            doing = f"perf produce, acks={acks}, RF {factor}: run {number + 1} of {options.runs}"
            with err.status(doing), Producer(bootstrap, acks=acks) as producer:
                result = measure_produce(producer, topic, options.records, batch, warmup=options.records // 10)
            results.append(result)
            err.print(f"perf produce, acks={acks}, RF {factor}: {result.records_per_s:,} records/s")
    partitions = [TopicPartition("perf-acks-1", number) for number in range(options.partitions)]
    for number in range(options.runs):
        with err.status(f"perf consume: run {number + 1} of {options.runs}"), Consumer(bootstrap) as consumer:
            report.consume.append(measure_consume(consumer, partitions, options.records))
        err.print(f"perf consume: {report.consume[-1].records_per_s:,} records/s")
    delete_topics(bootstrap, "perf-acks-1", "perf-acks-all")


def one_by_one(bootstrap: str, options: argparse.Namespace, report: Report) -> None:
    """`Producer.send` of single records in one thread, first without keys, then with a thousand keys."""
    make_topic(bootstrap, "sends", 2 * BROKERS, BROKERS, {"min.insync.replicas": 2})
    keyless: list[bytes | None] = [None]
    for keys in (keyless, [f"key-{number:06}".encode() for number in range(1000)]):
        for number in range(options.runs):
            with err.status(f"send() one by one: run {number + 1} of {options.runs}"):
                report.send.append(send_each(bootstrap, "sends", options.sends, keys))
            err.print(f"send() one by one{_keys(report.send[-1].keyed)}: {report.send[-1].records_per_s:,} records/s")
    delete_topics(bootstrap, "sends")


def send_each(bootstrap: str, topic: str, records: int, keys: Sequence[bytes | None]) -> SendFigures:
    """The records take the keys in turn. A tenth as many records warm up. Raises the error of a record that failed."""
    value, turns = b"x" * RECORD_BYTES, itertools.cycle(keys)
    with Producer(bootstrap, acks="all") as producer:
        for key in itertools.islice(turns, records // 10):
            producer.send(topic, value, key=key)
        producer.flush()
        started = time.perf_counter()
        futures = [producer.send(topic, value, key=key) for key in itertools.islice(turns, records)]
        producer.flush()
        seconds = time.perf_counter() - started
        for future in futures:
            future.result()
    return SendFigures(keys[0] is not None, records, round(seconds, 4), round(records / seconds))


def latency(bootstrap: str, options: argparse.Namespace, report: Report) -> None:
    """One append of 100 rows after the other. Each is awaited."""
    make_topic(bootstrap, "latency", 1, BROKERS)
    batch = random_records(100, RECORD_BYTES)
    with err.status("single synchronous appends"), Producer(bootstrap, acks="all") as producer:
        report.append = measure_produce(
            producer, "latency", options.appends * 100, batch, warmup=10_000, in_flight=False
        )
    err.print(f"single append: median {report.append.latency.p50_ms:.2f} ms")
    delete_topics(bootstrap, "latency")


def many_clients(bootstrap: str, options: argparse.Namespace, report: Report) -> None:
    """Consumers that have nothing to read, and new producers beside them."""
    make_topic(bootstrap, "clients", 2 * BROKERS, BROKERS, {"min.insync.replicas": 2})
    with err.status(f"{options.consumers} idle consumers"):
        report.clients = measure_clients(bootstrap, "clients", options.consumers, options.first_appends)
    err.print(f"{options.consumers} idle consumers: a new client's first append: median {report.clients.p50_ms:.1f} ms")
    delete_topics(bootstrap, "clients")


def failover(bootstrap: str, spark: SparkSession, options: argparse.Namespace, report: Report) -> None:
    """Faults of random brokers, under a steady stream of appends. Then the same beside busy processes."""
    make_topic(bootstrap, "failover", 2 * BROKERS, BROKERS, {"min.insync.replicas": 2})
    times = {name: options.cancels if name == "cancel" else options.kills for name in options.fault or FAULTS}
    faults = [name for name, count in times.items() for _ in range(count)]
    batch = random_records(100, RECORD_BYTES)

    def tell(one: FaultFigures) -> None:
        err.print(
            f"{FAULTS[one.fault].described} (broker {one.broker}, leader of {one.partitions_led}): longest gap "
            f"{one.gap_ms:,.0f} ms, {one.restarted} others restarted, whole after {one.recovered_s} s"
        )

    tormentor = Tormentor(spark.sparkContext, bootstrap, "failover", tell)
    with err.status(f"failover: {len(faults)} faults"):
        report.faults += tormentor.run(faults, batch)
    if options.busy:
        with err.status(f"failover beside {options.busy} busy processes: {len(faults)} faults"), busy(options.busy):
            report.busy_faults += tormentor.run(faults, batch)


def make_topic(
    bootstrap: str, name: str, partitions: int, factor: int, config: dict[str, object] | None = None
) -> None:
    """A topic of Kafka's record."""
    with Admin(bootstrap) as admin:
        admin.create_topic(NewTopic(name, partitions, factor, config={**KEEP_ALL, **(config or {})}))


def delete_topics(bootstrap: str, *names: str) -> None:
    """Give the disk back before the next measurement."""
    with Admin(bootstrap) as admin:
        for name in names:
            admin.delete_topic(name)


def summary(report: Report, options: argparse.Namespace) -> dict[str, list[Figure]]:
    """The lines of what was measured, by the section of docs/benchmarks.md that they belong to."""
    sections = {
        "start": [] if report.start is None else [_start(report.start)],
        "throughput": _throughput(report, options) + _sends(report),
        "latency": [] if report.append is None else [_append(report.append.latency)],
        "clients": [] if report.clients is None else clients_figures(report.clients),
        "batches": [figure for batches in report.batches for figure in batch_figures(batches)],
        "carrier": carrier_figures(report.carrier),
        "partitions": [] if report.many is None else partition_figures(report.many),
        "groups": _groups(report),
        "failover": _faults(report.faults),
        "failover-busy": _faults(report.busy_faults, f", beside {options.busy} busy processes"),
    }
    return {section: figures for section, figures in sections.items() if figures}


def _groups(report: Report) -> list[Figure]:
    return [
        *([] if report.groups is None else group_figures(report.groups)),
        *([] if report.members is None else members_figures(report.members)),
        *([] if report.idle_groups is None else idle_figures(report.idle_groups)),
    ]


def _throughput(report: Report, options: argparse.Namespace) -> list[Figure]:
    size = f"{RECORD_BYTES}-byte records, batches of {options.batch_records:,}"
    runs: tuple[tuple[str, list[ProduceFigures] | list[ConsumeFigures], str], ...] = (
        (f"perf produce, acks=1, RF 1 ({size})", report.produce_acks_1, "1,500,000 records/s"),
        (f"perf produce, acks=all, RF 3 ({size})", report.produce_acks_all, "800,000 records/s"),
        ("perf consume", report.consume, "3,000,000 records/s"),
    )
    return [
        Figure(name, f"{_median(results, lambda run: run.records_per_s):,.0f} records/s", goal)
        for name, results, goal in runs
        if results
    ]


def _sends(report: Report) -> list[Figure]:
    figures = []
    for keyed, goal in ((False, "250,000 records/s"), (True, "")):
        speeds = [run.records_per_s for run in report.send if run.keyed is keyed]
        if speeds:
            name = f"send() one by one, acks=all, RF 3 ({RECORD_BYTES}-byte records{_keys(keyed)})"
            text = f"median {statistics.median(speeds):,.0f} records/s, {min(speeds):,} to {max(speeds):,}"
            figures.append(Figure(name, f"{text} over {len(speeds)}", goal))
    return figures


def _append(latency: Latency) -> Figure:
    text = f"median {latency.p50_ms:.2f} ms, p99 {latency.p99_ms:.2f} ms over {latency.count:,}"
    return Figure("one synchronous append of 100 rows, acks=all, RF 3", text, "median under 5 ms")


def _faults(faults: list[FaultFigures], beside: str = "") -> list[Figure]:
    return [
        Figure(
            f"time without an acknowledgement, {FAULTS[name].described}{beside}",
            f"{Distribution.of([fault.gap_ms for fault in those])}; "
            f"others restarted: {sum(fault.restarted for fault in those)}"
            + ("" if FAULTS[name].ends_victim else f"; elections: {sum(fault.elections for fault in those)}"),
            GOALS[name],
        )
        for name in FAULTS
        if (those := [fault for fault in faults if fault.fault == name])
    ]


def _keys(keyed: bool) -> str:
    return " with keys" if keyed else ""


def _start(one: StartFigures) -> Figure:
    text = (
        f"session {one.session_s:.1f} s, controller {one.controller_s:.1f}, executors {one.executors_s:.1f}, brokers "
        f"{one.brokers_s:.1f}, first append {one.first_append_s:.1f}, first query {one.first_query_s:.1f}, second "
        f"{one.second_query_s:.1f}"
    )
    return Figure("start, step by step", text)


def _median(
    results: list[ProduceFigures] | list[ConsumeFigures], value: Callable[[ProduceFigures | ConsumeFigures], float]
) -> float:
    return statistics.median(value(result) for result in results)


def show(figures: list[Figure], where: str) -> None:
    """The table."""
    print_table(
        ("measured", "result", "goal"), [(figure.name, figure.result, figure.goal) for figure in figures], title=where
    )


if __name__ == "__main__":
    sys.exit(main())
