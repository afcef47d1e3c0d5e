"""Many partitions: how long a cold start, a fail-over and a new topic take, and what idle partitions cost.

It needs no Spark. The controller and three brokers are processes, which are killed and started again on the same
directories. The time of a cold start begins before the first process is started. Appends begin when all brokers are
live.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil

from benchmarks.figures import Figure
from spark_broker.client.admin import Admin
from spark_broker.client.producer import Producer
from spark_broker.model import NewTopic
from tests.support.process_cluster import ProcessCluster

BROKERS = 3
MANY, ONE = "many", "one"
RECORD = [{"value": b"x"}]
SETTLE_S = 12.0
IDLE_S = 8.0
APPENDS = 300
TIMEOUT_S = 120.0


class PartitionFigures(msgspec.Struct, frozen=True):
    """Seconds from the beginning to the first acknowledgement, and until every partition has acknowledged.

    `led`: partitions by leader after the cold start. `idle_percent`: percent of a core, for each broker. `append_ms`:
    the median of one synchronous append beside the idle partitions.
    """

    partitions: int
    created_s: tuple[float, float]
    cold_start_s: tuple[float, float]
    led: list[int]
    failover_of: int
    failover_s: tuple[float, float]
    idle_percent: list[float]
    append_ms: float


def measure_partitions(partitions: int) -> PartitionFigures:
    """Create a topic with this many partitions of three replicas, append to it, start cold, leave it idle, and kill one
    broker.
    """
    with TemporaryDirectory() as base:
        with ProcessCluster(Path(base), BROKERS) as cluster, Producer(cluster.bootstrap_servers) as producer:
            bootstrap = cluster.bootstrap_servers
            began = time.monotonic()
            _make_topic(bootstrap, ONE, 1)
            _make_topic(bootstrap, MANY, partitions)
            created = _append_to(producer, range(partitions), began)
            for pid in (cluster.controller.pid, *map(cluster.pid, range(BROKERS))):
                os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with ProcessCluster(Path(base), BROKERS) as cluster, Producer(bootstrap) as producer:
            cold_start = _append_to(producer, range(partitions), began)
            led_by_broker = _led(bootstrap)
            threading.Event().wait(SETTLE_S)  # Until fetchers wait in long polls, and leaders are balanced.
            idle = _idle_percent([cluster.pid(slot) for slot in range(BROKERS)])
            append_ms = _one_append_ms(producer)
            victim = min(led_by_broker)
            mine = [number for number, leader in enumerate(_leaders(bootstrap)) if leader == victim]
            began = time.monotonic()
            os.kill(_pid_of(bootstrap, victim), signal.SIGKILL)
            failover = _append_to(producer, mine, began)
    return PartitionFigures(
        partitions, created, cold_start, sorted(led_by_broker.values()), len(mine), failover, idle, append_ms
    )


def figures(found: PartitionFigures) -> list[Figure]:
    """The lines of the table."""
    of = f"{found.partitions:,} partitions, RF {BROKERS}, on {BROKERS} brokers"

    def times(both: tuple[float, float]) -> str:
        return f"first append {both[0]:.1f} s, all {both[1]:.1f} s"

    led_counts = " + ".join(map(str, found.led))
    idle = ", ".join(f"{percent:.1f}" for percent in found.idle_percent)
    return [
        Figure(f"a new topic of {of}", times(found.created_s)),
        Figure(
            f"cold start after kill -9 of everything, {of}",
            f"{times(found.cold_start_s)}; led: {led_counts}",
            "first append under 4 s",
        ),
        Figure(f"fail-over of {found.failover_of} partitions", times(found.failover_s), "all under 0.5 s"),
        Figure(f"an idle broker, {of}", f"{idle} % of a core", "under 3 %"),
        Figure(
            f"one synchronous append beside {found.partitions:,} idle partitions", f"median {found.append_ms:.2f} ms"
        ),
    ]


def _make_topic(bootstrap: str, name: str, partitions: int) -> None:
    with Admin(bootstrap, default_api_timeout_ms=int(TIMEOUT_S * 1000)) as admin:
        admin.create_topic(NewTopic(name, partitions, BROKERS, config={"min.insync.replicas": 2}))


def _append_to(producer: Producer, partitions: Iterable[int], began: float) -> tuple[float, float]:
    """Append one record to each. Returns the seconds until the first and the last acknowledgement. Raises an append's
    error.
    """
    times: list[float] = []
    futures = [producer.append(MANY, RECORD, partition=number) for number in partitions]
    for future in futures:
        future.add_done_callback(lambda _: times.append(time.monotonic() - began))
    wait(futures, TIMEOUT_S)
    for future in futures:
        future.result(0)
    return min(times), max(times)


def _leaders(bootstrap: str) -> list[int | None]:
    with Admin(bootstrap) as admin:
        return [partition.leader for partition in admin.describe_topic(MANY).partitions]


def _led(bootstrap: str) -> Counter[int]:
    return Counter(leader for leader in _leaders(bootstrap) if leader is not None)


def _pid_of(bootstrap: str, broker_id: int) -> int:
    with Admin(bootstrap) as admin:
        return next(broker.pid for broker in admin.describe_cluster().brokers if broker.id == broker_id)


def _idle_percent(pids: list[int]) -> list[float]:
    processes = [psutil.Process(pid) for pid in pids]

    def spent() -> list[float]:
        return [process.cpu_times().user + process.cpu_times().system for process in processes]

    before = spent()
    threading.Event().wait(IDLE_S)
    return [round((after - then) / IDLE_S * 100, 1) for then, after in zip(before, spent(), strict=True)]


def _one_append_ms(producer: Producer) -> float:
    times = []
    for _ in range(APPENDS):
        began = time.perf_counter()
        producer.append(ONE, RECORD, partition=0).result(TIMEOUT_S)
        times.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(times), 2)
