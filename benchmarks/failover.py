"""How long appends stall when the executor that leads the most partitions is killed."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec
import pyarrow as pa

from spark_broker.client.admin import Admin
from spark_broker.client.producer import Producer
from spark_broker.errors import ClusterStartError, SparkBrokerError
from spark_broker.model import BrokerInfo, RecordMetadata, TopicDescription

TICK_S = 0.02
"""Every partition gets a batch this often: a gap cannot be seen finer than this."""

SETTLE_S = 1.0
RECOVER_TIMEOUT_S = 120.0


class KillFigures(msgspec.Struct, frozen=True):
    """One kill. `gap_ms`: the longest time that any one partition went without an acknowledgement."""

    broker: int
    partitions_led: int
    gap_ms: float
    recovered_s: float
    """Seconds until the replacement was back in every ISR."""


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


def measure_failover(
    bootstrap: str, topic: str, batch: pa.RecordBatch, kills: int, tell: Callable[[KillFigures], None]
) -> list[KillFigures]:
    """Kill the leading executor this many times; between two kills every replica gets back in sync."""
    with Admin(bootstrap) as admin, Producer(bootstrap, acks="all") as producer:
        appending = Appending(producer, topic, len(admin.describe_topic(topic).partitions), batch)
        with appending.running():
            found = []
            for _ in range(kills):
                found.append(_kill_once(admin, topic, appending))
                tell(found[-1])
            return found


def _kill_once(admin: Admin, topic: str, appending: Appending) -> KillFigures:
    pause = threading.Event()
    admin.elect_leaders()
    pause.wait(SETTLE_S)
    began = time.monotonic()
    victim, led = _busiest(admin, admin.describe_topic(topic))
    killed = time.monotonic()
    os.kill(victim.executor_pid, signal.SIGKILL)
    pause.wait(SETTLE_S)
    while not _whole(admin, topic, victim):
        if time.monotonic() - killed > RECOVER_TIMEOUT_S:
            raise ClusterStartError(f"the replacement of broker {victim.id} is not in sync in {RECOVER_TIMEOUT_S:g} s")
        pause.wait(0.1)
    recovered = time.monotonic()
    pause.wait(SETTLE_S)
    gap_ms = appending.longest_gap_ms(began, time.monotonic())
    return KillFigures(victim.id, led, round(gap_ms), round(recovered - killed, 1))


def _busiest(admin: Admin, topic: TopicDescription) -> tuple[BrokerInfo, int]:
    leads = Counter(one.leader for one in topic.partitions)
    victim = max(admin.describe_cluster().brokers, key=lambda broker: leads[broker.id])
    return victim, leads[victim.id]


def _whole(admin: Admin, topic: str, victim: BrokerInfo) -> bool:
    """Whether every replica is in sync, and none of it is the victim's old incarnation."""
    try:
        incarnations = {(broker.id, broker.epoch) for broker in admin.describe_cluster().brokers}
        described = admin.describe_topic(topic)
    except SparkBrokerError as error:
        if not error.retriable:
            raise
        return False
    whole = all(set(one.isr) == set(one.replicas) for one in described.partitions)
    return whole and (victim.id, victim.epoch) not in incarnations


def longest_gap_within_s(times: list[float], since: float, until: float) -> float:
    """The longest time without an acknowledgement between two moments, both ends included."""
    inside = [since, *(one for one in times if since < one < until), until]
    return max(after - before for before, after in itertools.pairwise(inside))
