"""Clients that do not read their answers cost a bounded amount of memory, and others do not notice them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

BUDGET_MB = 32
SEND_TIMEOUT_MS = 3000
READERS = 20
RECORDS, RECORD_BYTES = 60, 1_000_000


@contextmanager
def serving(base: Path, send_timeout_ms: int) -> Iterator[ProcessCluster]:
    config = {"fetch.answers.max.bytes": BUDGET_MB << 20, "socket.send.timeout.ms": send_timeout_ms}
    with ProcessCluster(base, 1, config, output=base) as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topic(NewTopic("large", 1, 1, config={"max.message.bytes": 4 << 20}))
        with Producer(cluster.bootstrap_servers) as producer:
            for _ in range(RECORDS):
                producer.append("large", [{"value": os.urandom(RECORD_BYTES)}]).result(60)
        yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with serving(tmp_path_factory.mktemp("cluster"), SEND_TIMEOUT_MS) as cluster:
        yield cluster


class Readers:
    """A process with readers that have sent requests and do not read the answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"

    @property
    def connected(self) -> int:
        """How many connections of the process are open."""
        connections = psutil.Process(self._process.pid).net_connections("tcp")
        return sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)

    def look(self) -> list[str]:
        """What they find when they read at last."""
        return list(json.loads(self._process.communicate("\n", timeout=120)[0]))

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def stalled(cluster: ProcessCluster, count: int) -> Iterator[Readers]:
    command = [sys.executable, "-m", "tests.support.stalled_readers", cluster.bootstrap_servers, "large", str(count)]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        yield Readers(process)
    finally:
        process.kill()
        process.communicate(timeout=30)


def read_everything(cluster: ProcessCluster) -> int:
    """How many records an ordinary reader finds."""
    seen = 0
    with Consumer(cluster.bootstrap_servers, topics=["large"], auto_offset_reset="earliest") as consumer:
        for _ in range(1000):
            seen += sum(batch.data.num_rows for batch in consumer.poll(1.0))
            if seen >= RECORDS:
                break
    return seen


def test_readers_that_take_nothing_hold_a_bounded_amount_of_memory_and_are_disconnected(
    cluster: ProcessCluster,
) -> None:
    broker = psutil.Process(cluster.pid(0))
    assert read_everything(cluster) == RECORDS
    before = broker.memory_info().rss

    with stalled(cluster, READERS) as readers:
        readers.freeze()  # else their own process may read some of it ahead
        at_first = readers.connected
        assert at_first >= READERS
        assert read_everything(cluster) == RECORDS, "an ordinary reader beside them"
        grown_mb = (broker.memory_info().rss - before) >> 20
        # What a system takes for a frozen process is megabytes: whose answers fit into that are not stalled.
        eventually(lambda: readers.connected < at_first, 30, "readers are disconnected")
        readers.thaw()
        told = readers.look()

    assert grown_mb < 8 * BUDGET_MB
    assert len(told) == READERS
    assert "NetworkError" in told


@pytest.mark.full
def test_readers_that_are_frozen_for_less_than_the_time_out_are_not_disconnected(tmp_path: Path) -> None:
    with serving(tmp_path, send_timeout_ms=60_000) as cluster, stalled(cluster, 2) as readers:
        readers.freeze()
        assert read_everything(cluster) == RECORDS
        readers.thaw()
        assert readers.look() == ["answers"] * 2
