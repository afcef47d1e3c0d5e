"""What a failover test does around its fault: clients that record, waits for the cluster's states, the judgement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pytest

from spark_broker import Admin, BrokerInfo, NewTopic, PartitionInfo, TopicPartition
from spark_broker.errors import SparkBrokerError
from spark_broker.model import NO_LEADER
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.messages import ACKS_ALL, AppendRequest, AppendResponse
from spark_broker.testing.checker import check_history
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.replicas import compare_replicas, find_replicas, stored_values
from spark_broker.testing.workload import (
    RecordingReader,
    RecordingWriter,
    snapshot_with_consumer,
    snapshot_with_data_frame,
)
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S = 0.1
WAIT_S = 200.0
"""Bounds a hang, and measures nothing: Spark takes 4 to 16 s for a new executor on an idle machine."""

PARTITIONS = 4

ATTEMPTS = 5

_topics = count()
_old_leaders = count()


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Return once the condition holds. A call that fails while brokers change is repeated."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    last = "it was false"
    while True:
        try:
            if condition():
                return
        except SparkBrokerError as error:
            last = str(error)
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s in vain for {what}; at last {last}")
        pause.wait(POLL_S)


class Scenario:
    """A topic with a writer and a reader on it, from before the fault until `judge`.

    RF 3 and min ISR 2 unless the test says otherwise; small segments, so that a run rolls many.
    """

    def __init__(
        self, bootstrap_servers: str, log_dirs: str, *, replicas: int = 3, min_isr: int = 2, interval_s: float = 0.005
    ) -> None:
        self.topic = f"failover-{next(_topics)}"
        self.bootstrap_servers = bootstrap_servers
        self.log_dirs = log_dirs
        self.replicas = replicas
        self.recorder = HistoryRecorder()
        self.admin = Admin(bootstrap_servers)
        config = {"min.insync.replicas": min_isr, "segment.bytes": 65_536}
        self.admin.create_topic(NewTopic(self.topic, PARTITIONS, replicas, config=config))
        self.partitions = [TopicPartition(self.topic, number) for number in range(PARTITIONS)]
        self._clients = ExitStack()
        # These tests look for batches that are never acknowledged, and not for slow ones.
        patient = {"delivery.timeout.ms": 600_000, "max.block.ms": 600_000}
        self.writer = RecordingWriter(
            self.recorder, bootstrap_servers, self.topic, PARTITIONS, rows=2, interval_s=interval_s, settings=patient
        )
        self.reader = RecordingReader(self.recorder, bootstrap_servers, self.partitions)

    def __enter__(self) -> Self:
        self._clients.callback(self.admin.close)
        self._clients.enter_context(self.writer)
        self._clients.enter_context(self.reader)
        self.await_writes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clients.close()

    # What the cluster is like.

    def described(self) -> tuple[PartitionInfo, ...]:
        return self.admin.describe_topic(self.topic).partitions

    def leader(self, partition: int = 0) -> BrokerInfo:
        """The broker that leads a partition; waits for one."""
        wait_for(lambda: self.described()[partition].leader != NO_LEADER, "a leader")
        leader = self.described()[partition].leader
        return next(b for b in self.admin.describe_cluster(include_fenced=True).brokers if b.id == leader)

    def live(self) -> tuple[BrokerInfo, ...]:
        return self.admin.describe_cluster().brokers

    # Waiting.

    def await_writes(self, more: int = 10 * PARTITIONS) -> None:
        """Wait until so many more appends are acknowledged."""
        target = self.recorder.acknowledged_count + more
        if not self.recorder.wait_acknowledged(target, WAIT_S):
            pytest.fail(f"{self.recorder.acknowledged_count} of {target} appends acknowledged: {self.described()}")

    def await_leaders_elsewhere(self, victim: BrokerInfo) -> None:
        """Wait until every partition is led, by another broker, or by a later incarnation of this one."""

        def moved() -> bool:
            epoch = {broker.id: broker.epoch for broker in self.live()}
            leaders = [partition.leader for partition in self.described()]
            return all(leader in epoch and (leader, epoch[leader]) != (victim.id, victim.epoch) for leader in leaders)

        wait_for(moved, f"other leaders than broker {victim.id}, epoch {victim.epoch}")

    def await_min_isr(self) -> None:
        """Wait until every partition has a leader, and enough replicas in sync to take appends."""

        def enough() -> bool:
            return all(p.leader in p.isr and len(p.isr) > 1 for p in self.described())

        wait_for(enough, "leaders with followers")

    def await_healed(self, brokers: int = 3) -> None:
        """Wait until so many brokers are live and every partition has its leader and all replicas in sync."""

        def healed() -> bool:
            full = all(p.leader in p.isr and len(p.isr) == self.replicas for p in self.described())
            return full and len(self.live()) == brokers

        wait_for(healed, f"{brokers} live brokers and full ISRs")

    # The judgement.

    def judge(self, spark: SparkSession, *, brokers: int = 3) -> None:
        """Everything acknowledged is there once, where it was acknowledged, for every reader, on every replica."""
        self.await_healed(brokers)
        self.await_writes()
        self.writer.stop(WAIT_S)
        snapshot_with_consumer(self.recorder, self.bootstrap_servers, self.partitions, timeout_s=WAIT_S)
        snapshot_with_data_frame(self.recorder, spark, self.bootstrap_servers, self.topic)
        self.reader.stop()
        described = self.described()
        ends = {p.partition: p.high_watermark or 0 for p in described}
        assert all(end > 0 for end in ends.values())
        stored = [
            row
            for p in described
            for replica in find_replicas(self.log_dirs, TopicPartition(p.topic, p.partition))
            for row in stored_values(replica, "value", ends[p.partition])
        ]
        result = check_history(self.recorder.history(), stored)
        assert result.ok, str(result)
        assert result.acknowledged_values > 0
        differences = [
            difference
            for p in described
            for difference in compare_replicas(
                self.log_dirs, TopicPartition(p.topic, p.partition), p.replicas, up_to_offset=ends[p.partition]
            )
        ]
        assert differences == []
        assert all(len(p.isr) == self.replicas for p in described)
        self.admin.delete_topic(self.topic)


class OldLeaderClient:
    """A client that knows only one leader and its epoch, as if it had missed the election. Its answers are recorded."""

    def __init__(self, scenario: Scenario, leader: BrokerInfo) -> None:
        description = scenario.admin.describe_topic(scenario.topic)
        partition = description.partitions[0]
        self.leader = leader
        self._recorder = scenario.recorder
        self._partition = TopicPartition(partition.topic, partition.partition)
        self._topic_id, self._epoch = description.topic_id, partition.leader_epoch
        self._schema = description.schema
        self._connection = Connection(leader.host, leader.port)
        self._stream: ClientStream = self._connection.open_stream("append")
        self._waiting: list[int] = []
        self.acknowledged = 0
        self.errors: list[SparkBrokerError | int] = []

    def send(self, value: bytes) -> None:
        """Ask for one append with acks=all under the old epoch. The answer is awaited by `hear`."""
        rows = [{name: value if name == "value" else None for name in self._schema.names}]
        operation = self._recorder.invoked("old-leader-client", self._partition, [value])
        request = AppendRequest(
            correlation_id=operation,
            topic_id=self._topic_id,
            partition=self._partition.partition,
            leader_epoch=self._epoch,
            acks=ACKS_ALL,
            timeout_ms=20_000,
        )
        try:
            batch = pa.RecordBatch.from_pylist(rows, schema=self._schema)
            self._stream.send(request, encode_batch(batch), timeout_ms=20_000)
        except SparkBrokerError as error:
            self._failed(operation, error)
        else:
            self._waiting.append(operation)

    def hear(self) -> None:
        """Wait for every answer that is due."""
        while self._waiting:
            try:
                answer, _ = self._stream.receive(timeout_ms=60_000)
            except SparkBrokerError as error:
                for operation in self._waiting:
                    self._failed(operation, error)
                self._waiting.clear()
                return
            assert isinstance(answer, AppendResponse)
            self._waiting.remove(answer.correlation_id)
            if answer.error_code:
                self._failed(answer.correlation_id, answer.error_code)
            else:
                self.acknowledged += 1
                self._recorder.acknowledged(answer.correlation_id, answer.base_offset)

    def _failed(self, operation: int, error: SparkBrokerError | int) -> None:
        self.errors.append(error)
        self._recorder.failed(operation, error if isinstance(error, SparkBrokerError) else ValueError(error))

    def close(self) -> None:
        self._stream.close()
        self._connection.close()


@contextmanager
def old_leader_client(scenario: Scenario) -> Iterator[OldLeaderClient]:
    """A client of partition 0's leader, with one append acknowledged. So only its epoch can fail the next one."""
    for _ in range(ATTEMPTS):
        client = OldLeaderClient(scenario, scenario.leader())
        try:
            client.send(b"old-leader-%d" % next(_old_leaders))
            client.hear()
            if client.acknowledged:
                yield client
                return
        finally:
            client.close()
    pytest.fail("no leader of partition 0 stayed for one append")
