"""The producer appends micro-batches and single records to topics: in order, and once, also across fail-overs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from itertools import count
from types import TracebackType
from typing import ClassVar, Self, TypeVar, Unpack

import pyarrow as pa

from spark_broker.client import given
from spark_broker.client.cluster_view import TopicView
from spark_broker.client.collected import make_ready
from spark_broker.client.inputs import Conformed, conformed, tabular, within_size
from spark_broker.client.keywords import ProducerSettings
from spark_broker.client.one_process import OfOneProcess
from spark_broker.client.outgoing import AppendResult
from spark_broker.client.partition_queue import topic_gone
from spark_broker.client.partitioner import partition_batch
from spark_broker.client.producer_parts import ProducerParts
from spark_broker.client.record_builder import (
    RECORD_OVERHEAD_BYTES,
    Headers,
    to_bytes,
    to_pairs,
    to_timestamp_us,
)
from spark_broker.client.reentry import Within, refuse_within
from spark_broker.client.retry import Deadline
from spark_broker.client.send_target import SendTarget, target_of
from spark_broker.client.settings import client_config
from spark_broker.client.transactions import Offsets, TransactionManager, check_transactional, transaction_block
from spark_broker.client.unseen import WatchedFuture
from spark_broker.config import ProducerConfig
from spark_broker.errors import (
    BufferExhaustedError,
    ClosedError,
    InvalidTxnStateError,
    RequestTimedOutError,
    SchemaMismatchError,
    SparkBrokerError,
)
from spark_broker.interrupts import interruptible
from spark_broker.model import GroupMetadata, RecordMetadata, TopicPartition

_T = TypeVar("_T")

_ADMITTED = nullcontext()
"""Without a transactional id, every append is admitted."""

logger = logging.getLogger(__name__)

CLOSE_AFTER_ERROR_S = 5.0
"""A `with` block that ends in an exception waits this long for appends under way."""


class Producer(OfOneProcess):
    """Appends to topics. Safe for use by many threads.

    Idempotent by default: what is sent again after a failure is stored once, in order for each partition. Futures fail
    with the errors of `spark_broker.errors`. Settings are ProducerConfig's, as keywords (`linger_ms=5`) or as
    `config={"linger.ms": 5}`.

    With a `transactional_id`, everything is appended in transactions: `with producer.transaction(): ...`. A newer
    producer of the same id fences this one, whose calls raise ProducerFencedError from then on.

    ```python
    with Producer(servers) as producer:
        stored = producer.append("greetings", [{"value": "hello"}, {"value": "hallo"}], partition=0)
        print(stored.result()[0].count, producer.send("greetings", value="salut", partition=0).result().offset)
    ```
    """

    _ENDS_TRANSACTIONS: ClassVar[bool] = True
    """Whether the producer itself ends the transaction that it appends to."""

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        acks: str | int | None = None,
        transactional_id: str | None = None,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        keywords = {**settings, "acks": acks, "transactional_id": transactional_id}
        self._config = client_config(ProducerConfig, bootstrap_servers, config, keywords)
        if self._config.transactional_id:
            check_transactional(self._config)
        make_ready()
        self._parts = parts = ProducerParts(self._config, ends_transactions=self._ENDS_TRANSACTIONS)
        self._origin, self._state = parts.origin, parts.state
        self._metadata, self._sender, self._submission = parts.metadata, parts.sender, parts.submission
        self._lingering, self._transactions = parts.lingering, parts.transactions
        self._sticky, self._sticky_counter = parts.sticky, count()
        self._targets: dict[str, SendTarget] = {}
        parts.belong_to(self)

    def append(self, topic: str, data: object, *, partition: int | None = None) -> Future[list[RecordMetadata]]:
        """Append a RecordBatch, Table, pandas frame, list of dicts, or what has `__arrow_c_stream__` (polars, duckdb).

        Rows go to the partitions of their keys (or to `partition`). The result has one RecordMetadata for each batch
        that was stored, in the order of partitions. A RecordBatch larger than max.message.bytes is refused; other data
        is sliced. Bad data fails the Future, and nothing is sent then. Blocks for metadata and for room in the buffer,
        up to max.block.ms.

        Raises ClosedError, and ReentrantCallError in a signal handler that interrupted a call of this producer. With a
        transactional id it also raises InvalidTxnStateError outside of a transaction,
        TransactionAbortableError after an append that failed, and ProducerFencedError.
        """
        return self._append_to(topic, None, data, partition)

    def _append_to(
        self, topic: str, topic_id: str | None, data: object, partition: int | None
    ) -> Future[list[RecordMetadata]]:
        """`append`. With `topic_id` the Future fails where that topic was deleted, also if another one has its name."""
        self._check_open()
        refuse_within(*self._parts.insides)
        with self._state or _ADMITTED:
            return self._append(topic, topic_id, data, partition)

    def _append(
        self, topic: str, topic_id: str | None, data: object, partition: int | None
    ) -> Future[list[RecordMetadata]]:
        try:
            topic = given.topic_name(topic)
            deadline = Deadline.after_ms(self._config.max_block_ms)
            if not self._lingering.hand_on(topic, deadline):
                raise BufferExhaustedError("earlier records of `send` still wait: there was no room for them in time")
            view = self._topic_with(topic, topic_id, deadline)
            view, rows = self._conformed(tabular(data), view, deadline, of_id=topic_id is not None)
            parts = [part for batch in rows.batches for part in self._by_partition(view, batch, partition)]
            sized = [(p, piece) for p, part in parts for piece in within_size(part, view, divisible=rows.divisible)]
            self._sender.prepare(deadline)
        except ClosedError:
            raise
        except SparkBrokerError as error:
            return self._failed(error)
        result = AppendResult(len(sized), self._parts.unseen)
        for index, (number, batch) in enumerate(sized):
            self._submission.submit(view, number, batch, result.part(index), deadline)
        return result.future

    def _conformed(
        self, data: object, view: TopicView, deadline: Deadline, *, of_id: bool
    ) -> tuple[TopicView, Conformed]:
        """The rows under the topic's schema. Where they do not fit, the topic may have got another one since.

        `of_id`: another topic of its name will not do.
        """
        try:
            return view, conformed(data, view)
        except SchemaMismatchError as error:
            try:
                newer = self._metadata.refresh(deadline).topic(view.name)
            except SparkBrokerError:
                raise error from None
            another = newer is not None and of_id and newer.topic_id != view.topic_id
            if newer is None or another or newer.schema_bytes == view.schema_bytes:
                raise
        return newer, conformed(data, newer)

    def send(
        self,
        topic: str,
        value: bytes | str | None = None,
        *,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
        timestamp: datetime | None = None,
    ) -> Future[RecordMetadata]:
        """Append one record to a topic of Kafka's record; records gather in micro-batches (linger.ms, batch.size).

        `timestamp`: now by default; without a zone it is UTC. Text becomes UTF-8. Raises what `append` raises.
        """
        self._check_open()
        if self._state is None:
            return self._send(topic, value, key, partition, headers, timestamp)
        with self._state:
            return self._send(topic, value, key, partition, headers, timestamp)

    def _send(
        self,
        topic: str,
        value: object,
        key: object,
        partition: int | None,
        headers: Headers | None,
        timestamp: datetime | None,
    ) -> Future[RecordMetadata]:
        # This runs for each record. What can be remembered is in the target; what can wait is done for the micro-batch.
        try:
            target = self._targets.get(topic)
            if target is None or target.cluster is not self._metadata.view:
                target = self._target(topic)
            value = to_bytes(value, "value")
            size_bytes = RECORD_OVERHEAD_BYTES if value is None else RECORD_OVERHEAD_BYTES + len(value)
            if key is not None:
                key = to_bytes(key, "key") or b""
                size_bytes += len(key)
            pairs = None
            if headers is not None:
                pairs, header_bytes = to_pairs(headers)
                size_bytes += header_bytes
            timestamp_us = time.time_ns() // 1000 if timestamp is None else to_timestamp_us(timestamp)
            number = self._record_partition(target, key, partition)
        except ClosedError:
            raise
        except SparkBrokerError as error:
            return self._failed(error)
        except (TypeError, ValueError):  # `topic` cannot be looked up
            if given.is_hashable(topic):
                raise
            return self._failed(given.no_text(topic, "a topic's name"))
        slot = target.slots.get(number)
        if slot is None:
            self._sender.expect(tp := TopicPartition(target.topic.name, number))
            slot = target.slots[number] = self._lingering.slot(tp)
        return self._lingering.add(slot, target.batch_bytes, key, value, pairs, timestamp_us, size_bytes)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything appended so far is acknowledged or has failed (its Future says which).

        `timeout` is in seconds. By default delivery.timeout.ms bounds the wait. Raises RequestTimedOutError, and
        ReentrantCallError where it would wait for itself: in a signal handler that interrupted a call of this producer,
        and in a done-callback while anything else is under way.
        """
        self._origin.check()  # before any lock, as everywhere
        given_s = None if timeout is None else given.seconds(timeout, "timeout")
        if refuse_within(*self._parts.insides) is Within.CALLBACK:
            self._parts.check_nothing_else_left()
        limit_s = self._config.delivery_timeout_ms / 1000 + 5.0 if given_s is None else given_s
        deadline = Deadline.after_ms(limit_s * 1000)
        if not (self._lingering.hand_on(deadline=deadline) and self._sender.drain(deadline)):
            raise RequestTimedOutError(f"flush: not everything was acknowledged within {limit_s} s")
        self._sender.check()

    def transaction(self) -> AbstractContextManager[None]:
        """Everything appended in the `with` block is committed as a whole when the block ends, or else aborted.

        An exception aborts the transaction and is raised again. An append that failed aborts it, too, and the block
        raises TransactionAbortableError. Also raises what `begin_transaction` and `commit_transaction` raise.
        """
        return transaction_block(self.begin_transaction, self.commit_transaction, self.abort_transaction)

    def init_transactions(self) -> None:
        """Take the transactional id over: fence its older producers and abort what they left open.

        The first `begin_transaction` does so, too. Raises InvalidTransactionTimeoutError, and a retriable error when no
        coordinator answers within max.block.ms.
        """
        self._transactional().init()

    def begin_transaction(self) -> None:
        """Begin a transaction. The appends from here on belong to it. Raises InvalidTxnStateError inside of a
        transaction.

        If the outcome of the last transaction is not known, the coordinator is asked for it first. Its error is raised
        here.
        """
        self._transactional().begin()

    def commit_transaction(self) -> None:
        """Wait for every append of the transaction, then commit it. Once this returns, every partition shows all of it.

        Raises TransactionAbortableError when an append failed or the coordinator has aborted the transaction
        (time-out). Then only `abort_transaction` is left. Raises RequestTimedOutError when no coordinator reports the
        outcome within delivery.timeout.ms: the transaction may be committed or not, and another `commit_transaction`
        asks again. Raises ProducerFencedError when a newer producer has taken over. It has aborted the transaction, but
        for one whose commit was decided before: only its answer was lost.
        """
        self._transactional().commit()

    def abort_transaction(self) -> None:
        """Discard the transaction: Futures that are not done fail with TransactionAbortableError.

        Raises RequestTimedOutError when no coordinator answers; the next `begin_transaction` asks again.
        """
        self._transactional().abort()

    def send_offsets_to_transaction(self, offsets: Offsets, group_id: str | GroupMetadata) -> None:
        """Commit a consumer group's positions (offsets of the next records to read) with the transaction.

        Give `consumer.group_metadata()` for what a member of the group has read: it is refused if the group has given
        the partitions to others meanwhile (KIP-447). The id alone is enough while the group has no members.

        Raises what `append` raises, and the error of the group's coordinator. The transaction can only be aborted then.
        """
        self._check_open()
        self._transactional().send_offsets(offsets, group_id)

    def metrics(self) -> dict[str, int]:
        """Counts of acknowledged rows and batches, of batches that were sent again or divided, and of transactions by
        their outcome.
        """
        transactions = self._transactions
        return {
            "acknowledged_rows": self._sender.acknowledged_rows,
            "acknowledged_batches": self._sender.acknowledged_batches,
            "retries": self._sender.retries,
            "divided_batches": self._sender.divided_batches,
            "transactions_committed": 0 if transactions is None else transactions.committed,
            "transactions_aborted": 0 if transactions is None else transactions.aborted,
        }

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is under way (up to `timeout` seconds, by default delivery.timeout.ms), then fail the rest.

        An open transaction is aborted. Otherwise a warning in the log says how many appends failed whose Futures nobody
        looked at, and why. Raises ReentrantCallError as `flush` does; in a done-callback, `close(0)` works.
        """
        given_s = None if timeout is None else given.seconds(timeout, "timeout")
        self._parts.close(given_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if kind is None else CLOSE_AFTER_ERROR_S)

    def _check_open(self) -> None:
        self._origin.check()
        if self._parts.closed:
            raise ClosedError("the producer is closed")

    def _transactional(self) -> TransactionManager:
        self._check_open()
        refuse_within(*self._parts.insides, least=Within.CALLBACK)
        if self._transactions is None:
            raise InvalidTxnStateError(
                "the producer has no transactional id", hint="Open it with `Producer(servers, transactional_id=...)`."
            )
        return self._transactions

    def _failed(self, error: SparkBrokerError) -> Future[_T]:
        self._parts.note_failure(error)
        future: Future[_T] = WatchedFuture(self._parts.unseen)
        future.set_exception(error)
        return future

    def _topic_with(self, name: str, topic_id: str | None, deadline: Deadline) -> TopicView:
        """The topic with this id (None: with any). Raises `topic_gone` once that is certain."""
        view = self._parts.topic(name, deadline)
        if topic_id in (None, view.topic_id):
            return view
        with interruptible():  # The broker that has answered may lag behind: the controller knows.
            recorded = self._metadata.recorded(name, deadline)
        if recorded is None or recorded.topic_id != topic_id:
            raise topic_gone(name, created_again=recorded is not None)
        return recorded

    def _target(self, name: str) -> SendTarget:
        """What `send` needs to know of a topic, in the current view of the cluster."""
        name = given.topic_name(name)
        cluster, deadline = self._metadata.view, Deadline.after_ms(self._config.max_block_ms)
        view = self._parts.topic(name, deadline)
        if not view.has_default_schema:  # The topic may have been made again since.
            cluster = self._metadata.refresh(deadline)
            view = cluster.topic(name) or view
        if name not in self._targets:  # Each keeps thousands of keys: not those of topics that have gone.
            self._targets = {known: each for known, each in self._targets.items() if cluster.topic(known) is not None}
        target = target_of(view, cluster, self._config.batch_size, self._targets.get(name))
        self._targets[name] = target
        return target

    def _by_partition(
        self, view: TopicView, batch: pa.RecordBatch, partition: int | None
    ) -> list[tuple[int, pa.RecordBatch]]:
        if partition is not None:
            number = self._checked(view, partition)
            return [(number, batch)] if batch.num_rows else []
        return partition_batch(batch, view.key_columns, len(view.partitions), sticky=self._next_sticky(view))

    def _record_partition(self, target: SendTarget, key: bytes | None, partition: int | None) -> int:
        if partition is not None:
            return self._checked(target.topic, partition)
        if key is not None:
            return target.key_partitions[key]
        sticky = self._sticky.get(target.topic.name, -1)
        if not 0 <= sticky < len(target.topic.partitions):
            sticky = self._sticky[target.topic.name] = self._next_sticky(target.topic)
        return sticky

    def _checked(self, view: TopicView, partition: int) -> int:
        if type(partition) is not int or partition < 0:  # This runs for each record of `send`.
            partition = given.partition_number(partition, "partition")
        if partition < len(view.partitions):
            return partition
        # The partition may be newer than the view.
        self._metadata.topic(view.name, Deadline.after_ms(self._config.max_block_ms), partition=partition)
        return partition

    def _next_sticky(self, view: TopicView) -> int:
        """Partitions take turns by micro-batch. One without a leader is passed over while another has a leader."""
        led_partitions = [state.partition for state in view.partitions if state.leader >= 0]
        usable = led_partitions or [state.partition for state in view.partitions]
        return usable[next(self._sticky_counter) % len(usable)]
