"""The producer: micro-batches and single records into topics, in order, once, across fail-overs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from itertools import count
from types import TracebackType
from typing import Self, TypeVar

import pyarrow as pa

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.connections import ConnectionPool
from spark_broker.client.inputs import METADATA_BYTES, conformed, within_size
from spark_broker.client.lingering import Lingering
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.outgoing import AppendResult, Outcome, OutgoingBatch, complete_records
from spark_broker.client.partitioner import partition_batch
from spark_broker.client.record_builder import Headers, RecordBuilder, make_record
from spark_broker.client.retry import Backoff, Deadline
from spark_broker.client.sender import Sender
from spark_broker.client.settings import client_config, parse_addresses
from spark_broker.config import ProducerConfig
from spark_broker.errors import (
    ClosedError,
    RequestTimedOutError,
    SchemaMismatchError,
    SparkBrokerError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import RecordMetadata, TopicPartition
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.murmur2 import partition_of

_T = TypeVar("_T")

CLOSE_AFTER_ERROR_S = 5.0
"""A `with` block that ends in an exception waits this long for what is under way."""


class Producer:
    """Appends to topics. Safe for use by many threads.

    Idempotent by default: what is sent again after a failure is stored once, in order for each partition. Futures fail
    with the errors of `spark_broker.errors`. Settings are ProducerConfig's, as keywords (`linger_ms=5`) or as
    `config={"linger.ms": 5}`.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        acks: str | int | None = None,
        config: Mapping[str, object] | None = None,
        **settings: object,
    ) -> None:
        self._config = client_config(ProducerConfig, bootstrap_servers, config, {**settings, "acks": acks})
        self._compression = None if self._config.compression_type == "none" else self._config.compression_type
        self._metadata = ClusterMetadata(
            parse_addresses(self._config.bootstrap_servers),
            ConnectionPool(),
            Backoff(self._config.retry_backoff_ms, self._config.retry_backoff_max_ms),
            request_timeout_ms=self._config.request_timeout_ms,
            max_age_ms=self._config.metadata_max_age_ms,
        )
        self._sender = Sender(self._metadata, self._config)
        self._lingering = Lingering(
            self._dispatch,
            linger_ms=self._config.linger_ms,
            batch_size_bytes=self._config.batch_size,
            name=self._config.client_id or "producer",
        )
        self._sticky_counter = count()
        self._sticky: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def append(self, topic: str, data: object, *, partition: int | None = None) -> Future[list[RecordMetadata]]:
        """Append a RecordBatch, Table, pandas frame or list of dicts.

        Rows go to the partitions of their keys (or to `partition`); the result has one RecordMetadata for each batch
        that was stored, in order of partition. A RecordBatch larger than max.message.bytes is refused, other data is
        sliced. What is wrong with the data fails the Future, and then nothing was sent. Blocks for metadata and
        for room in the buffer, up to max.block.ms. Raises ClosedError.
        """
        self._check_open()
        self._lingering.hand_on(topic)
        try:
            deadline = Deadline.after_ms(self._config.max_block_ms)
            view = self._topic(topic, deadline)
            found = conformed(data, view)
            parts = [part for batch in found.batches for part in self._parts(view, batch, partition)]
            sized = [(p, one) for p, part in parts for one in within_size(part, view, divisible=found.divisible)]
            self._sender.prepare(deadline)
        except ClosedError:
            raise
        except SparkBrokerError as error:
            return _failed(error)
        result = AppendResult(len(sized))
        for index, (number, batch) in enumerate(sized):
            self._submit(view, number, batch, result.part(index), deadline)
        return result.future

    def send(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
        timestamp: datetime | int | None = None,
    ) -> Future[RecordMetadata]:
        """Append one record to a topic of Kafka's record; records gather in micro-batches (linger.ms, batch.size).

        `timestamp`: a datetime, or milliseconds since 1970; now by default. Text becomes UTF-8. Raises ClosedError.
        """
        self._check_open()
        try:
            view = self._topic(topic, Deadline.after_ms(self._config.max_block_ms))
            if not view.has_default_schema:
                raise SchemaMismatchError(f"topic {topic!r} has columns {', '.join(view.schema.names)}: use append()")
            record = make_record(value, key, headers, timestamp)
            number = self._record_partition(view, record.key, partition)
        except ClosedError:
            raise
        except SparkBrokerError as error:
            return _failed(error)
        alone = record.size_bytes + METADATA_BYTES > min(view.settings.max_message_bytes, self._config.batch_size)
        return self._lingering.add(TopicPartition(topic, number), record, alone=alone)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything appended so far is acknowledged or has failed (its Future says which).

        `timeout` in seconds; by default delivery.timeout.ms bounds the wait. Raises RequestTimedOutError.
        """
        self._lingering.hand_on()
        limit_s = self._config.delivery_timeout_ms / 1000 + 5.0 if timeout is None else timeout
        if not self._sender.drain(Deadline.after_ms(limit_s * 1000)):
            raise RequestTimedOutError(f"flush: not everything was acknowledged within {limit_s} s")

    def metrics(self) -> dict[str, int]:
        """Acknowledged rows and batches, and how many batches were sent again."""
        return {
            "acknowledged_rows": self._sender.acknowledged_rows,
            "acknowledged_batches": self._sender.acknowledged_batches,
            "retries": self._sender.retries,
        }

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is under way (up to `timeout` seconds, by default delivery.timeout.ms), then fail the rest."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._lingering.close()
        limit_ms = self._config.delivery_timeout_ms + 5000 if timeout is None else timeout * 1000
        self._sender.drain(Deadline.after_ms(limit_ms))
        self._sender.close()
        self._metadata.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if kind is None else CLOSE_AFTER_ERROR_S)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the producer is closed")

    def _topic(self, name: str, deadline: Deadline) -> TopicView:
        # The sender refreshes what is in use; only a topic's first append waits for a broker.
        return self._metadata.view.topic(name) or self._metadata.topic(name, deadline)

    def _parts(self, view: TopicView, batch: pa.RecordBatch, partition: int | None) -> list[tuple[int, pa.RecordBatch]]:
        if partition is not None:
            return [(self._checked(view, partition), batch)]
        return partition_batch(batch, view.key_columns, len(view.partitions), sticky=self._next_sticky(view))

    def _record_partition(self, view: TopicView, key: bytes | None, partition: int | None) -> int:
        if partition is not None:
            return self._checked(view, partition)
        if key is not None:
            return partition_of(key, len(view.partitions))
        sticky = self._sticky.get(view.name, -1)
        if not 0 <= sticky < len(view.partitions):
            sticky = self._sticky[view.name] = self._next_sticky(view)
        return sticky

    def _checked(self, view: TopicView, partition: int) -> int:
        if 0 <= partition < len(view.partitions):
            return partition
        fresh = self._metadata.refresh(Deadline.after_ms(self._config.max_block_ms)).topic(view.name) or view
        if 0 <= partition < len(fresh.partitions):
            return partition
        raise UnknownTopicOrPartitionError(f"topic {view.name!r} has partitions 0 to {len(fresh.partitions) - 1}")

    def _next_sticky(self, view: TopicView) -> int:
        """Partitions take turns by micro-batch; one without a leader is passed over while another has one."""
        led = [state.partition for state in view.partitions if state.leader >= 0]
        usable = led or [state.partition for state in view.partitions]
        return usable[next(self._sticky_counter) % len(usable)]

    def _submit(
        self,
        view: TopicView,
        partition: int,
        rows: pa.RecordBatch,
        complete: Callable[[Outcome], None],
        deadline: Deadline,
    ) -> None:
        """Encode, wait for room, hand to the sender. What fails is reported to `complete`."""
        message = encode_batch(rows, schema_id=view.schema_id, compression=self._compression)
        where = TopicPartition(view.name, partition)
        batch = OutgoingBatch(where, view.topic_id, view.schema_id, rows.num_rows, message, complete)
        try:
            self._sender.reserve(batch.size_bytes, deadline)
            self._sender.enqueue(batch)
        except SparkBrokerError as error:
            complete(error)

    def _dispatch(self, where: TopicPartition, builder: RecordBuilder) -> None:
        """A slot of `send` is full or due."""
        complete = complete_records(builder.futures)
        deadline = Deadline.after_ms(self._config.max_block_ms)
        if self._sticky.get(where.topic) == where.partition:
            self._sticky.pop(where.topic, None)
        try:
            view = self._topic(where.topic, deadline)
            self._sender.prepare(deadline)
            (batch,) = within_size(builder.build(), view, divisible=False)
        except SparkBrokerError as error:
            complete(error)
        else:
            self._submit(view, where.partition, batch, complete, deadline)


def _failed(error: SparkBrokerError) -> Future[_T]:
    future: Future[_T] = Future()
    future.set_exception(error)
    return future
