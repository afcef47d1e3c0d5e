"""What a task does with its rows: it gathers and converts them, appends them by partition, and waits for every
acknowledgement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_broker.client.retry import Deadline
from spark_broker.errors import SparkBrokerError
from spark_broker.model import RecordMetadata
from spark_broker.spark.cluster import connected
from spark_broker.spark.topic_rows import Target, by_partition, by_topic, mapping_of
from spark_broker.spark.write_plan import OneTopic, WritePlan

if TYPE_CHECKING:
    from spark_broker.client.producer import Producer

GATHERED_BYTES = 4 * 1024 * 1024
"""Spark hands on 10,000 rows at a time. The rows of this many bytes are divided at once, so partitions get larger
micro-batches.
"""


class TaskWrite:
    """One attempt's rows on their way to the log. `task`: the number of its partition. Tasks begin at different
    partitions.
    """

    def __init__(self, plan: WritePlan, producer: Producer, task: int) -> None:
        self._plan = plan
        self._producer = producer
        self._turns = itertools.count(task)
        self._topics: dict[str, OneTopic] = {}
        self._failure: BaseException | None = None

    def write(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Append everything. Returns the number of rows once all are acknowledged. Raises the first append's error, and
        errors of the rows.
        """
        rows = 0
        for gathered in _gathered(batches):
            rows += gathered.num_rows
            for target, part in self._by_topic(gathered):
                self._append(target, part)
        try:
            self._producer.flush()
        except SparkBrokerError as error:
            raise self._failure or error from None
        self._check()
        return rows

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[OneTopic, pa.RecordBatch]]:
        destination = self._plan.destination
        if isinstance(destination, OneTopic):
            yield destination, rows
            return
        for name, part in by_topic(rows, destination.position):
            yield self._topic(name), part

    def _topic(self, name: str) -> OneTopic:
        """A topic that the column names. The task keeps the topic as it was when its first row came."""
        if name not in self._topics:
            producer = self._plan.options.producer
            with connected(producer) as metadata:
                target = Target.of(metadata.topic(name, Deadline.after_ms(producer.max_block_ms)))
            plan = self._plan
            self._topics[name] = OneTopic(target, mapping_of(plan.rows, plan.unkept, target, routed=True))
        return self._topics[name]

    def _append(self, destination: OneTopic, rows: pa.RecordBatch) -> None:
        target = destination.target
        sticky = target.usable[next(self._turns) % len(target.usable)]
        for partition, part in by_partition(rows, destination.mapping, target, sticky=sticky):
            self._check()
            # A table may be cut into micro-batches that the topic takes.
            table = pa.Table.from_batches([part])
            # By its id: a topic that was created again since has none of what earlier tasks have written.
            future = self._producer._append_to(target.name, target.topic_id, table, partition)
            future.add_done_callback(self._done)

    def _done(self, future: Future[list[RecordMetadata]]) -> None:
        if self._failure is None:
            self._failure = future.exception()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows in their order, in batches of about GATHERED_BYTES."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        pending.append(batch)
        size += batch.nbytes
        if size >= GATHERED_BYTES:
            yield pa.concat_batches(pending)
            pending, size = [], 0
    if pending:
        yield pa.concat_batches(pending)
