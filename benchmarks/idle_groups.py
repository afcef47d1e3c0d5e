"""A thousand groups of one member each that have nothing to do: what they cost brokers.

`python -m benchmarks.idle_groups <host:port> <kind> <count>` is the clients' process. They speak the protocol, with a
thread each and without the consumer's machines: `members` send heartbeats, `readers` fetch without a group.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil

from benchmarks.clients import cpu_percent
from benchmarks.figures import Figure
from spark_broker.client.admin import Admin
from spark_broker.client.group_offsets import GroupOffsets
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.client.settings import client_config
from spark_broker.config import ConsumerConfig
from spark_broker.errors import SparkBrokerError
from spark_broker.model import NewTopic
from spark_broker.protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    FetchPartition,
    FetchRequest,
    MemberAbout,
    TopicPartitions,
)
from spark_broker.transport.client import Connection
from tests.support.process_cluster import ProcessCluster

BROKERS, PARTITIONS = 3, 3
TOPIC = "idle"
SETTLE_S = 20.0
FETCH_MS = 5000
SESSION_MS = 45_000
RETRY_S = 0.5
ROOT = Path(__file__).resolve().parent.parent


class IdleFigures(msgspec.Struct, frozen=True):
    """Percent of a core, of each broker: beside no client, beside readers without a group, beside groups of one member.

    `started_s`: until all members had their partitions. `threads`: of each broker, beside the groups.
    """

    groups: int
    empty_percent: list[float]
    readers_percent: list[float]
    members_percent: list[float]
    members_process_percent: float
    started_s: float
    threads: list[int]


class Client:
    """Clients of one process share what is known of the cluster, and the connections."""

    def __init__(self, bootstrap: str) -> None:
        self.metadata = ClusterMetadata.connect(client_config(ConsumerConfig, bootstrap, None, {}))
        self.metadata.use([TOPIC])
        view = self.metadata.refresh(Deadline.after_ms(SESSION_MS))
        self.topic = view.topics[TOPIC]
        self.leaders = [view.leader(TOPIC, number) for number in range(PARTITIONS)]
        self.running = threading.Semaphore(0)

    def member(self, number: int) -> None:
        """The only member of a group: it joins, gets all partitions, and goes on to say that it is there."""
        group, about = f"idle-{number}", MemberAbout([TOPIC], "", "", "raw", "", SESSION_MS, 300_000, "")
        offsets = GroupOffsets(self.metadata, group)
        epoch, sequence, generation, pause = 0, 0, -1, threading.Event()
        owned: list[TopicPartitions] = []
        named = runs = False
        while True:
            sequence, sent_s = sequence + 1, time.monotonic()
            beat = ConsumerGroupHeartbeatRequest(
                group, group, epoch, sequence, generation, None if named else owned, None if named else about
            )
            try:
                answer = offsets.heartbeat(beat, Deadline.after_ms(SESSION_MS))
            except SparkBrokerError:
                named = False
                pause.wait(RETRY_S)
                continue
            named = answer.assignment is None and answer.generation == generation and epoch > 0
            epoch, generation = answer.member_epoch, answer.generation
            owned = owned if answer.assignment is None else answer.assignment
            if owned and not runs:
                runs = True
                self.running.release()
            if named:
                pause.wait(max(sent_s + answer.heartbeat_interval_ms / 1000 - time.monotonic(), 0))

    def reader(self, number: int) -> None:
        """Fetches from the end of one partition, again and again: there is nothing."""
        found = self.leaders[number % PARTITIONS]
        assert found is not None
        broker, state = found
        fetched = FetchPartition(self.topic.topic_id, state.partition, state.leader_epoch, 0, 1 << 20)
        stream = Connection(broker.host, broker.port).open_stream("fetch")
        correlation = 0
        while True:
            correlation += 1
            stream.send(FetchRequest(correlation, FETCH_MS, 1, 1 << 20, [fetched]))
            if correlation == 1:
                self.running.release()
            stream.receive(timeout_ms=10 * FETCH_MS)


def main() -> None:
    """Be these clients, until stdin ends. Says so once all of them run."""
    bootstrap, kind, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    threading.stack_size(1 << 18)
    client = Client(bootstrap)
    work: Callable[[int], None] = client.member if kind == "members" else client.reader
    for number in range(count):
        threading.Thread(target=partial(work, number), daemon=True).start()
    for _ in range(count):
        client.running.acquire()
    sys.stdout.write("running\n")
    sys.stdout.flush()
    sys.stdin.read()


@contextmanager
def clients(bootstrap: str, kind: str, count: int) -> Iterator[psutil.Process]:
    """The clients' process, once all of them run."""
    command = [sys.executable, "-m", "benchmarks.idle_groups", bootstrap, kind, str(count)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def measure_idle_groups(groups: int = 1000) -> IdleFigures:
    """Measure on a cluster of its own."""
    with TemporaryDirectory() as base, ProcessCluster(Path(base), BROKERS) as cluster:
        bootstrap = cluster.bootstrap_servers
        with Admin(bootstrap) as admin:
            admin.create_topic(NewTopic(TOPIC, PARTITIONS, BROKERS))
        with clients(bootstrap, "members", 1):
            """__consumer_offsets is there from now on."""
        brokers = [psutil.Process(cluster.pid(slot)) for slot in range(BROKERS)]
        rest = threading.Event()
        rest.wait(SETTLE_S)
        empty = cpu_percent(brokers)
        with clients(bootstrap, "readers", groups):
            rest.wait(SETTLE_S)
            readers = cpu_percent(brokers)
        began_s = time.monotonic()
        with clients(bootstrap, "members", groups) as process:
            started_s = time.monotonic() - began_s
            rest.wait(SETTLE_S)
            *members, of_process = cpu_percent([*brokers, process])
            threads = [broker.num_threads() for broker in brokers]
    return IdleFigures(groups, empty, readers, members, of_process, round(started_s, 1), threads)


def figures(found: IdleFigures) -> list[Figure]:
    """The lines of the table."""

    def percents(values: list[float]) -> str:
        return ", ".join(f"{value:.1f}" for value in values)

    return [
        Figure(
            f"{found.groups:,} groups of one member at rest: processor of each broker",
            f"{percents(found.members_percent)} % of a core, with {', '.join(map(str, found.threads))} threads; "
            f"beside {found.groups:,} readers without a group: {percents(found.readers_percent)} %; beside no client: "
            f"{percents(found.empty_percent)} %",
        ),
        Figure(f"{found.groups:,} groups of one member: until all have their partitions", f"{found.started_s:.1f} s"),
    ]


if __name__ == "__main__":
    main()
