"""Our clients beside Kafka's, on clusters of three brokers each: the same work, by turns.

`python -m benchmarks.clients_beside_kafka --help`. Each piece of work runs in a process of its own: ours in
`benchmarks/client_work.py`, Kafka's in `benchmarks/kafka/Clients.java`. All have `acks=all`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figure, machine, write
from benchmarks.kafka_server import HERE, kafka
from benchmarks.run import MASTER, session
from spark_broker import BrokerCluster
from spark_broker.cli.output import print_table
from spark_broker.errors import SparkBrokerError

BROKERS = 3


class Work(NamedTuple):
    """`replicas`: of the topic. `goals`: ours, by figure."""

    title: str
    work: str
    records: int
    replicas: int
    goals: Mapping[str, str]


WORKS = {
    "append": Work(
        "one record after the other, each awaited, RF 3", "append", 2000, 3, {"p50_ms": "1.2 ms", "p99_ms": "4 ms"}
    ),
    "producers": Work(
        "16 producers, each awaits each of its records, RF 3", "producers", 16_000, 3, {"records_per_s": "2,500"}
    ),
    "send": Work("send, one thread, RF 3", "send", 500_000, 3, {"records_per_s": "450,000"}),
    "batches 1": Work("Arrow batches (Kafka: send, tuned), RF 1", "batches", 5_000_000, 1, {"records_per_s": ""}),
    "batches 3": Work("Arrow batches (Kafka: send, tuned), RF 3", "batches", 5_000_000, 3, {"records_per_s": ""}),
    "consume": Work("consume (Kafka: tuned), written with RF 1", "consume", 5_000_000, 1, {"records_per_s": ""}),
}
"""In this order: what is consumed was produced before."""

TOPICS = {"consume": "batches 1"}

SIDES = ("ours", "Kafka's")
NAMES = {"p50_ms": "p50, ms", "p99_ms": "p99, ms", "records_per_s": "records/s"}

Results = dict[tuple[str, str, str], list[float]]


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients_beside_kafka", description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="turns of each side; the median counts (default: 3)")
    parser.add_argument("--only", action="append", choices=WORKS, help="one piece of work; may be given several times")
    parser.add_argument("--master", default=MASTER, help=f"Spark's (default: {MASTER})")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/benchmarks.md")
    options = parser.parse_args(given)
    try:
        results = measure(options)
    except SparkBrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    lines = figures(results)
    print_table(
        ("measured", "result", "goal"), [(line.name, line.result, line.goal) for line in lines], title=machine()
    )
    if options.write:
        write(lines, f"{machine()}, `{options.master}`, {options.turns} turns", "kafka clients")
    return 0


def measure(options: argparse.Namespace) -> Results:
    """Start both clusters, and have each do all of its work before the other has its turn."""
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="beside-kafka-") as directory:
        base = Path(directory)
        with kafka(base, 3, brokers=BROKERS) as servers:
            spark = session(options.master)
            try:
                with BrokerCluster.start(spark, BROKERS) as cluster:
                    ours = [sys.executable, "-m", "benchmarks.client_work", cluster.bootstrap_servers]
                    commands = {"ours": ours, "Kafka's": _java(base, servers)}
                    for turn in range(options.turns):
                        for name in options.only or WORKS:
                            for side in SIDES:
                                _take(results, name, side, [*commands[side]], turn)
            finally:
                spark.stop()
    return results


def _java(base: Path, servers: str) -> list[str]:
    java = str(Path(os.environ["JAVA_HOME"]) / "bin" / "java")
    return [java, "-Xmx2g", "-cp", f"{base / 'server'}/*", str(HERE / "Clients.java"), servers]


def _take(results: Results, name: str, side: str, command: list[str], turn: int) -> None:
    """Have one side do its work, in a topic of this turn. Raises CalledProcessError."""
    work = WORKS[name]
    topic = f"{TOPICS.get(name, name).replace(' ', '-')}-{turn}"
    arguments = [work.work, topic, str(work.records), str(work.replicas)]
    ended = subprocess.run([*command, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    for figure, value in found.items():
        results.setdefault((name, figure, side), []).append(value)
    print(f"{name}: {side}: {found}", file=sys.stderr)


def figures(results: Results) -> list[Figure]:
    """A line for each figure: ours, Kafka's, and how many times Kafka's ours is."""
    lines = []
    for name, figure in dict.fromkeys((name, figure) for name, figure, _ in results):
        work = WORKS[name]
        ours, theirs = (statistics.median(results[name, figure, side]) for side in SIDES)
        form = "{:,.0f}" if figure == "records_per_s" else "{:.2f}"
        result = f"{form.format(ours)} and {form.format(theirs)}: {ours / theirs:.2f} times Kafka's"
        lines.append(Figure(f"{work.title}: {NAMES[figure]}", result, work.goals.get(figure, "")))
    return lines


if __name__ == "__main__":
    sys.exit(main())
