"""How long appends stall when something is killed, and which other brokers restart."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from spark_broker.client.admin import Admin
from spark_broker.client.producer import Producer
from spark_broker.errors import ClusterStartError, SparkBrokerError
from spark_broker.model import BrokerInfo, RecordMetadata, TopicDescription
from spark_broker.testing.faults import (
    BrokerProcesses,
    broker_processes,
    kill_broker,
    kill_executor,
    kill_executor_and_broker,
    kill_keeper,
)

if TYPE_CHECKING:
    from pyspark import SparkContext

TICK_S = 0.02
"""Every partition gets a batch at this interval. A gap is measured no finer than that."""

SETTLE_S = 1.0
RECOVER_TIMEOUT_S = 180.0

BUCKETS_MS = (50, 100, 250, 500, 1000)


@dataclass(frozen=True)
class Fault:
    """What a fault does. `ends_victim`: the broker that is hit is replaced. Otherwise no broker is."""

    described: str
    strike: Callable[[SparkContext, BrokerProcesses], None]
    ends_victim: bool


FAULTS = {
    "executor": Fault("an executor's JVM killed", lambda _, victim: kill_executor(victim), ends_victim=True),
    "broker": Fault("a broker's process killed", lambda _, victim: kill_broker(victim), ends_victim=True),
    "both": Fault("JVM and broker killed", lambda _, victim: kill_executor_and_broker(victim), ends_victim=True),
    "keeper": Fault("a keeper killed", lambda _, victim: kill_keeper(victim), ends_victim=False),
    "cancel": Fault("cancelAllJobs", lambda sc, _: sc.cancelAllJobs(), ends_victim=False),
}


class FaultFigures(msgspec.Struct, frozen=True):
    """One fault. `gap_ms`: the longest time that any one partition went without an acknowledgement.

    `recovered_s`: until the replacement was back in every ISR, or every broker was kept again. `restarted`: brokers
    that were not hit and have another epoch than before. `elections`: partitions whose leader epoch rose.
    """

    fault: str
    broker: int
    partitions_led: int
    gap_ms: float
    recovered_s: float
    restarted: int
    elections: int


class Distribution(msgspec.Struct, frozen=True):
    """The gaps of one kind of fault, in milliseconds. `buckets`: how many lie between two of `BUCKETS_MS`, or above the
    last.
    """

    count: int
    median: float
    p90: float
    p99: float
    longest: float
    buckets: dict[str, int]

    @classmethod
    def of(cls, gaps_ms: Sequence[float]) -> Distribution:
        """Raises statistics.StatisticsError for no gaps."""
        ordered = sorted(gaps_ms)
        edges = (0, *BUCKETS_MS)
        buckets = {
            f"{low}-{high} ms": sum(low <= gap < high for gap in ordered) for low, high in itertools.pairwise(edges)
        }
        buckets[f"over {BUCKETS_MS[-1]} ms"] = sum(gap >= BUCKETS_MS[-1] for gap in ordered)
        return cls(
            len(ordered), statistics.median(ordered), _at(ordered, 0.9), _at(ordered, 0.99), ordered[-1], buckets
        )

    def __str__(self) -> str:
        shown = ", ".join(f"{name}: {count}" for name, count in self.buckets.items() if count)
        return (
            f"median {self.median:,.0f} ms, p90 {self.p90:,.0f}, p99 {self.p99:,.0f}, longest {self.longest:,.0f} "
            f"over {self.count} ({shown})"
        )


def _at(ordered: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest value that at least this share of all does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


class Appending:
    """Appends a batch to every partition, tick by tick, and notes when each was acknowledged."""

    def __init__(self, producer: Producer, topic: str, partitions: int, batch: pa.RecordBatch) -> None:
        self._producer, self._topic, self._partitions, self._batch = producer, topic, partitions, batch
        self._lock = threading.Lock()
        self._times: dict[int, list[float]] = {number: [] for number in range(partitions)}
        self._errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="appending", daemon=True)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due = max(due + TICK_S, time.monotonic())
            for number in range(self._partitions):
                future = self._producer.append(self._topic, self._batch, partition=number)
                future.add_done_callback(lambda done, number=number: self._finished(done, number))  # type: ignore[misc]

    def _finished(self, future: Future[list[RecordMetadata]], partition: int) -> None:
        now, error = time.monotonic(), future.exception()
        with self._lock:
            if error is None:
                self._times[partition].append(now)
            else:
                self._errors.append(error)

    def longest_gap_ms(self, since: float, until: float) -> float:
        """The longest gap of any partition in this time. Raises the error of an append that failed."""
        with self._lock:
            if self._errors:
                raise self._errors[0]
            return max(longest_gap_within_s(times, since, until) for times in self._times.values()) * 1000

    @contextmanager
    def running(self) -> Iterator[None]:
        """Appends while the block runs."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """This many processes that only compute, as long as the block runs."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


class Tormentor:
    """Makes one fault after the other on a topic's brokers, under appends. Everything is whole before each one."""

    def __init__(
        self, sc: SparkContext, bootstrap: str, topic: str, tell: Callable[[FaultFigures], None], *, seed: int = 1
    ) -> None:
        self._sc = sc
        self._bootstrap = bootstrap
        self._topic = topic
        self._tell = tell
        self._rng = random.Random(seed)
        self._pause = threading.Event()

    def run(self, faults: Sequence[str], batch: pa.RecordBatch) -> list[FaultFigures]:
        """Each fault by its name, of a broker drawn at random."""
        with Admin(self._bootstrap) as admin, Producer(self._bootstrap, acks="all") as producer:
            appending = Appending(producer, self._topic, len(admin.describe_topic(self._topic).partitions), batch)
            with appending.running():
                figures = []
                for name in faults:
                    figures.append(self._strike(admin, appending, name))
                    self._tell(figures[-1])
                return figures

    def _strike(self, admin: Admin, appending: Appending, name: str) -> FaultFigures:
        fault = FAULTS[name]
        admin.elect_leaders()
        self._pause.wait(SETTLE_S)
        began = time.monotonic()
        victim, before = self._choose(admin), self._epochs(admin)
        described = admin.describe_topic(self._topic)
        processes = broker_processes(victim)
        struck = time.monotonic()
        fault.strike(self._sc, processes)
        self._pause.wait(SETTLE_S)
        while not (self._is_whole(admin, victim) if fault.ends_victim else self._are_kept(admin, processes)):
            if time.monotonic() - struck > RECOVER_TIMEOUT_S:
                raise ClusterStartError(f"after {fault.described} the cluster is not whole in {RECOVER_TIMEOUT_S:g} s")
            self._pause.wait(0.1)
        recovered = time.monotonic()
        self._pause.wait(SETTLE_S)
        gap_ms = appending.longest_gap_ms(began, time.monotonic())
        after = self._epochs(admin)
        spared = [broker for broker in before if not (fault.ends_victim and broker == victim.id)]
        return FaultFigures(
            fault=name,
            broker=victim.id,
            partitions_led=Counter(partition.leader for partition in described.partitions)[victim.id],
            gap_ms=round(gap_ms),
            recovered_s=round(recovered - struck, 1),
            restarted=sum(after.get(broker) != before[broker] for broker in spared),
            elections=self._elections(described, admin.describe_topic(self._topic)),
        )

    def _choose(self, admin: Admin) -> BrokerInfo:
        """A live broker that is kept."""
        while True:
            victim = self._rng.choice(admin.describe_cluster().brokers)
            if broker_processes(victim).keeper is not None:
                return victim
            self._pause.wait(0.1)

    @staticmethod
    def _epochs(admin: Admin) -> dict[int, int]:
        return {broker.id: broker.epoch for broker in admin.describe_cluster(include_fenced=True).brokers}

    @staticmethod
    def _elections(before: TopicDescription, after: TopicDescription) -> int:
        pairs = zip(before.partitions, after.partitions, strict=True)
        return sum(new.leader_epoch > old.leader_epoch for old, new in pairs)

    def _is_whole(self, admin: Admin, victim: BrokerInfo) -> bool:
        """Whether every replica is in sync, and none of it is the victim's old incarnation."""
        try:
            incarnations = {(broker.id, broker.epoch) for broker in admin.describe_cluster().brokers}
            described = admin.describe_topic(self._topic)
        except SparkBrokerError as error:
            if not error.retriable:
                raise
            return False
        whole = all(set(partition.isr) == set(partition.replicas) for partition in described.partitions)
        return whole and (victim.id, victim.epoch) not in incarnations

    @staticmethod
    def _are_kept(admin: Admin, victim: BrokerProcesses) -> bool:
        """Whether every broker has a keeper, and the victim another one."""
        keepers = [broker_processes(broker).keeper for broker in admin.describe_cluster().brokers]
        return None not in keepers and victim.keeper not in keepers


def longest_gap_within_s(times: list[float], since: float, until: float) -> float:
    """The longest time without an acknowledgement between two moments, both ends included."""
    inside = [since, *(moment for moment in times if since < moment < until), until]
    return max(after - before for before, after in itertools.pairwise(inside))
