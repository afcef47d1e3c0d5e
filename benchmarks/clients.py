"""Many clients that have nothing to do: what they cost, and how long a new client waits beside them.

`python -m benchmarks.clients <host:port> <topic> <count>` is their process: consumers of an empty topic.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from benchmarks.figures import Figure
from spark_broker.client.admin import Admin
from spark_broker.client.consumer import Consumer
from spark_broker.client.producer import Producer

CPU_S = 10.0
SETTLE_S = 6.0
"""A consumer that finds nothing waits longer each time, up to five seconds."""

PAUSE_S = 1.0
"""Each record wakes all consumers. The next new client comes when they are idle again."""


class ClientsFigures(msgspec.Struct, frozen=True):
    """CPU in percent of one core. Times in milliseconds, for everything that a new producer's first append needs."""

    consumers: int
    brokers_percent: list[float]
    clients_percent: float
    first_appends: int
    p50_ms: float
    p99_ms: float
    longest_ms: float


def measure_clients(bootstrap: str, topic: str, consumers: int, first_appends: int) -> ClientsFigures:
    """Measure beside this many idle consumers of the topic, in a process of their own. Brokers are on this machine."""
    with Admin(bootstrap) as admin:
        brokers = [psutil.Process(broker.pid) for broker in admin.describe_cluster().brokers if not broker.fenced]
    with idle_consumers(bootstrap, topic, consumers) as pid:
        threading.Event().wait(SETTLE_S)
        *of_brokers, of_clients = cpu_percent([*brokers, psutil.Process(pid)])
        times = sorted(first_append_ms(bootstrap, topic) for _ in range(first_appends))
    return ClientsFigures(
        consumers,
        of_brokers,
        of_clients,
        first_appends,
        p50_ms=times[len(times) // 2],
        p99_ms=times[math.ceil(len(times) * 0.99) - 1],
        longest_ms=times[-1],
    )


def cpu_percent(processes: list[psutil.Process]) -> list[float]:
    """Of one core, over ten seconds."""

    def seconds() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    before = seconds()
    threading.Event().wait(CPU_S)
    return [round((after - was) / CPU_S * 100, 1) for after, was in zip(seconds(), before, strict=True)]


def first_append_ms(bootstrap: str, topic: str) -> float:
    """A new producer, from nothing to its first acknowledgement."""
    started = time.perf_counter()
    with Producer(bootstrap, acks="all") as producer:
        producer.append(topic, [{"value": b"x"}]).result()
        took_ms = round((time.perf_counter() - started) * 1000, 2)
    threading.Event().wait(PAUSE_S)
    return took_ms


@contextmanager
def idle_consumers(bootstrap: str, topic: str, count: int) -> Iterator[int]:
    """The pid of their process."""
    command = [sys.executable, "-m", "benchmarks.clients", bootstrap, topic, str(count)]
    pipe, root = subprocess.PIPE, Path(__file__).resolve().parent.parent
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


def clients_figures(found: ClientsFigures) -> list[Figure]:
    """The lines of the table."""
    brokers = ", ".join(f"{percent:.1f}" for percent in found.brokers_percent)
    beside = f"{found.consumers} idle consumers"
    times = f"median {found.p50_ms:.1f} ms, p99 {found.p99_ms:.1f}, longest {found.longest_ms:.1f}"
    return [
        Figure(
            f"{beside}: CPU of each broker, and of the consumers' process",
            f"{brokers} % of a core; {found.clients_percent:.1f} %",
            "under 5 % for each broker",
        ),
        Figure(
            f"a new client's first append beside {beside}, acks=all, RF 3",
            f"{times} over {found.first_appends}",
            "p99 under 50 ms",
        ),
    ]


def main() -> None:
    """Wait for records that do not come, until stdin ends."""
    bootstrap, topic, count = sys.argv[1:4]
    consumers = [Consumer(bootstrap, topics=[topic], auto_offset_reset="latest") for _ in range(int(count))]
    for consumer in consumers:
        consumer.poll(0.1)
        threading.Thread(target=_poll, args=(consumer,), daemon=True).start()
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    sys.stdin.read()


def _poll(consumer: Consumer) -> None:
    while True:
        consumer.poll(5.0)


if __name__ == "__main__":
    main()
