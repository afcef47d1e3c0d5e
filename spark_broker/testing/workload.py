"""Clients that record what happens to them: a writer of unique values, a reader that follows, reads of everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from spark_broker.client.consumer import Consumer
from spark_broker.client.producer import Producer
from spark_broker.errors import RequestTimedOutError, broken
from spark_broker.model import RecordMetadata, TopicPartition
from spark_broker.protocol.crc32c import crc32c
from spark_broker.testing.history import Isolation, Run, Stored
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.threads import Worker

POLL_S = 0.2
JOIN_S = 10.0
CLOSE_S = 5.0
"""How long a `with` block that ends without `stop` waits for what is under way."""


class RecordingWriter:
    """Appends small batches of unique values (column `value`) to all partitions in turn, in a thread, until stopped.

    `interval_s`: between two batches; it may be changed at any time. At most `max_outstanding` batches wait for their
    acknowledgement; at that number the writer waits. `settings` are the Producer's. `keys`: how many keys the records
    have, for a topic that is compacted; 0: none.
    """

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        topic: str,
        partitions: int,
        *,
        name: str = "writer",
        rows: int = 5,
        interval_s: float = 0.01,
        max_outstanding: int = 100,
        keys: int = 0,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._recorder = recorder
        self._topic = topic
        self._partitions = partitions
        self._name = name
        self._rows = rows
        self._keys = keys
        self.interval_s = interval_s
        self._room = threading.BoundedSemaphore(max_outstanding)
        self._producer = Producer(bootstrap_servers, acks="all", config=settings)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._gaps = _Gaps(self._partitions)
        self._thread = Worker(name, self._died, self._run)

    @property
    def longest_gap_s(self) -> float:
        """Longest time that a partition was without an acknowledgement, since `forget_gap` or the start."""
        return self._gaps.longest_s

    @property
    def last_acknowledged_s(self) -> list[float]:
        """For each partition, when an append was last acknowledged, on time.monotonic's clock."""
        return self._gaps.last_s

    def forget_gap(self) -> None:
        """Measure the longest gap from now on."""
        self._gaps = _Gaps(self._partitions)

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 120.0) -> None:
        """Stop and wait for every outcome. Raises RequestTimedOutError, or the error that ended the thread."""
        self._stopping.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RequestTimedOutError(f"{self._name} did not end within {timeout_s} s")
        try:
            self._producer.flush(timeout_s)
        finally:
            self._producer.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        number = 0
        while not self._stopping.wait(self.interval_s):
            if self._room.acquire(timeout=self.interval_s):
                self._append(number)
                number += 1

    def _died(self, error: BaseException) -> None:
        self._error = error

    def _append(self, number: int) -> None:
        partition = TopicPartition(self._topic, number % self._partitions)
        values = [b"%s-%d-%d" % (self._name.encode(), number, row) for row in range(self._rows)]
        keys = keys_of(values, self._keys)
        operation = self._recorder.invoked(self._name, partition, values, keys=keys)
        future = self._producer.append(self._topic, records_of(values, keys), partition=partition.partition)
        future.add_done_callback(lambda done: self._outcome(operation, done))

    def _outcome(self, operation: int, done: Future[list[RecordMetadata]]) -> None:
        self._room.release()
        record_outcome(self._recorder, operation, done)
        if done.exception() is None:
            self._gaps.acknowledged(done.result()[0].partition)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(JOIN_S)
        self._producer.close(CLOSE_S)


class _Gaps:
    """For each partition, the longest time between two acknowledgements."""

    def __init__(self, partitions: int) -> None:
        self._lock = threading.Lock()
        self._last_s = [time.monotonic()] * partitions
        self._longest_s = [0.0] * partitions

    def acknowledged(self, partition: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._longest_s[partition] = max(self._longest_s[partition], now_s - self._last_s[partition])
            self._last_s[partition] = now_s

    @property
    def last_s(self) -> list[float]:
        with self._lock:
            return list(self._last_s)

    @property
    def longest_s(self) -> float:
        with self._lock:
            return max(*self._longest_s, time.monotonic() - min(self._last_s))


class RecordingReader:
    """Follows partitions from their beginning, in a thread, until stopped; every batch it is handed is recorded."""

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        partitions: Sequence[TopicPartition],
        *,
        name: str = "reader",
        isolation: Isolation = Isolation.READ_COMMITTED,
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._isolation = isolation
        self._partitions = tuple(partitions)
        self._consumer = Consumer(bootstrap_servers, auto_offset_reset="earliest", isolation_level=isolation.value)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = Worker(name, self._died, self._run)

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop reading. Raises the error that ended the thread."""
        self._stopping.set()
        self._thread.join(JOIN_S)
        self._consumer.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._recorder.opened(self._name, isolation=self._isolation)
        for partition in self._partitions:
            self._recorder.positioned(self._name, partition)
        self._consumer.assign(self._partitions)
        while not self._stopping.is_set():
            record_poll(self._consumer, self._recorder, self._name)

    def _died(self, error: BaseException) -> None:
        self._error = error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(JOIN_S)
        self._consumer.close()


def keys_of(values: Sequence[bytes], keys: int) -> tuple[bytes, ...]:
    """The key of each value, out of so many; none where `keys` is 0."""
    return tuple(b"key-%d" % (crc32c(value) % keys) for value in values) if keys else ()


def records_of(values: Sequence[bytes], keys: Sequence[bytes] = ()) -> pa.RecordBatch:
    """A micro-batch of Kafka's record, without keys where there are none."""
    columns = {"value": pa.array(values, pa.binary())}
    return pa.record_batch({"key": pa.array(keys, pa.binary()), **columns} if keys else columns)


def record_outcome(recorder: HistoryRecorder, operation: int, done: Future[list[RecordMetadata]]) -> None:
    """Record what became of an append of one micro-batch. For `Future.add_done_callback`."""
    error = done.exception()
    if error is not None:
        recorder.failed(operation, error)
        return
    (stored,) = done.result()
    if stored.base_offset is None:
        broken("an append with acks=all was answered without an offset")
    recorder.acknowledged(operation, stored.base_offset)


def record_poll(consumer: Consumer, recorder: HistoryRecorder, name: str) -> list[Run]:
    """Poll once, record every batch under the reader's name, and return what was handed out."""
    runs = []
    for batch in consumer.poll(timeout=POLL_S):
        run = Run(
            TopicPartition(batch.topic, batch.partition),
            batch.base_offset,
            tuple(batch.data.column("value").to_pylist()),
        )
        recorder.polled(name, run.partition, run.base_offset, run.values)
        runs.append(run)
    return runs


def snapshot_with_consumer(
    recorder: HistoryRecorder,
    bootstrap_servers: str,
    partitions: Sequence[TopicPartition],
    *,
    name: str = "consumer",
    timeout_s: float = 120.0,
    isolation: Isolation = Isolation.READ_COMMITTED,
    final: bool = True,
) -> None:
    """Read the partitions from their beginning to their present ends, with a consumer of its own.

    Raises RequestTimedOutError when it does not reach the ends in time.
    """
    deadline = time.monotonic() + timeout_s
    runs: list[Run] = []
    recorder.snapshot_began(name)
    recorder.opened(name, isolation=isolation)
    settings = {"auto.offset.reset": "earliest", "isolation.level": isolation.value}
    with Consumer(bootstrap_servers, config=settings) as consumer:
        ends = consumer.end_offsets(partitions)
        for partition in partitions:
            recorder.positioned(name, partition)
        consumer.assign(partitions)
        while any(consumer.position(partition) < end for partition, end in ends.items()):
            if time.monotonic() > deadline:
                raise RequestTimedOutError(f"{name} was not given everything below {ends} within {timeout_s} s")
            runs += record_poll(consumer, recorder, name)
    recorder.snapshot_of_runs(name, runs, isolation=isolation, final=final)


def snapshot_with_data_frame(
    recorder: HistoryRecorder,
    spark: Any,
    bootstrap_servers: str,
    topic: str,
    *,
    name: str = "DataFrame",
    final: bool = True,
) -> None:
    """Read a topic with Kafka's record, or several (`a,b`), as a DataFrame. `spark`: a SparkSession."""
    recorder.snapshot_began(name)
    reader = spark.read.format("spark_broker").option("kafka.bootstrap.servers", bootstrap_servers)
    table = reader.option("subscribe", topic).load().select("topic", "partition", "offset", "value").toArrow()
    columns = (table.column(column).to_pylist() for column in ("topic", "partition", "offset", "value"))
    rows = (Stored(TopicPartition(t, p), offset, value) for t, p, offset, value in zip(*columns, strict=True))
    recorder.snapshot(name, rows, final=final)
