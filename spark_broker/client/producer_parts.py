"""What a producer consists of. Its threads know this, and not the `Producer`, so that one which nobody has any more is
noticed: what it has taken is still sent, and then its threads end.
"""

from __future__ import annotations

import logging
import threading
import weakref
from functools import partial

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.collected import end_with
from spark_broker.client.dividing import Divider
from spark_broker.client.lingering import Lingering, OutOfTimeError
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.record_builder import RecordBuilder
from spark_broker.client.reentry import Within, refusal, refuse_within
from spark_broker.client.retry import Deadline
from spark_broker.client.sender import Sender
from spark_broker.client.submission import Submission
from spark_broker.client.transaction_state import ProducerTransaction
from spark_broker.client.transactions import TransactionManager
from spark_broker.client.unseen import Unseen
from spark_broker.config import ProducerConfig
from spark_broker.errors import BootstrapUnreachableError, SparkBrokerError, again
from spark_broker.interrupts import interruptible
from spark_broker.left_open import close_at_end
from spark_broker.model import TopicPartition
from spark_broker.protocol.frame import TRANSACTIONAL
from spark_broker.transport.origin import Origin

logger = logging.getLogger(__name__)


class ProducerParts:
    """Of one producer. Invariant: nothing here, or below, refers to the producer itself.

    `sticky`: the partition, by topic, to which records of `send` without a key go now. `ends_transactions`: whether the
    producer ends the transaction that it appends to. Otherwise `transactions` is None.
    """

    def __init__(self, config: ProducerConfig, *, ends_transactions: bool) -> None:
        compression = None if config.compression_type == "none" else config.compression_type
        divider = Divider(TRANSACTIONAL if config.transactional_id else 0, compression)
        self.config = config
        self.metadata = ClusterMetadata.connect(config)
        self.state = ProducerTransaction(self._refuse_appends) if config.transactional_id else None
        self.origin = Origin()
        self.sender = Sender(self.metadata, config, self.note_failure)
        self.submission = Submission(self.sender, divider, self.note_failure)
        self.unseen = Unseen()
        self.lingering = Lingering(
            self._dispatch,
            linger_ms=config.linger_ms,
            name=config.client_id or "producer",
            died=self.sender.died,
            unseen=self.unseen,
            lost=self.note_failure,
            calls_back=lambda: self.sender.reports_here,
        )
        self.transactions = self._open_transactions() if ends_transactions else None
        self.sticky: dict[str, int] = {}
        self.closed = False
        self._lock = threading.Lock()
        self._closer = 0  # the thread whose `close` is under way. If it is interrupted, the next one goes on
        self._ended = threading.Event()  # `close` has done everything
        self._producer: weakref.ref[object] | None = None

    def belong_to(self, producer: object) -> None:
        """End with the producer, or with the interpreter."""
        self._producer = weakref.ref(producer)
        end_with(producer, self._end_collected, self.sender.died, self._ended.is_set)
        close_at_end(self)

    @property
    def insides(self) -> tuple[object, ...]:
        """Whose methods are calls of the producer (see `reentry`)."""
        producer = None if self._producer is None else self._producer()
        return (producer or self, self, self.sender, self.lingering, self.transactions or self)

    def close(self, timeout: float | None = None) -> None:
        """See `Producer.close`. `timeout` (s) was checked."""
        if self.origin.is_elsewhere:  # the parent's, whose threads hold its locks
            return
        if refuse_within(*self.insides) is Within.CALLBACK and timeout != 0:
            self.check_nothing_else_left()
        with self._lock:
            if self._ended.is_set() or self._closer not in (0, threading.get_ident()):
                return
            self.closed, self._closer = True, threading.get_ident()
        try:
            self._close(Deadline.after_ms(self._limit_ms if timeout is None else timeout * 1000), at_once=timeout == 0)
            self._ended.set()
        finally:
            self._closer = 0

    def _close(self, deadline: Deadline, *, at_once: bool) -> None:
        if self.transactions is not None:
            try:
                self.transactions.close(deadline.remaining_ms)
            except SparkBrokerError as error:
                logger.warning("an open transaction was not aborted; its time-out will do so: %s", error)
        if at_once:
            self.sender.close()  # What is handed on from now on fails, and does not wait for room.
        self.lingering.close(deadline)
        self.sender.drain(deadline)
        self.sender.close()
        self.metadata.close()
        self.lingering.hand_on()  # what had no time fails
        self._tell_of_unseen()

    @property
    def _limit_ms(self) -> int:
        return self.config.delivery_timeout_ms + 5000

    def close_left(self, timeout: float) -> None:
        """The interpreter ends. Close, or wait up to `timeout` (s) for whoever does so."""
        limit = Deadline.after_ms(timeout * 1000)
        self.close(timeout)
        if self._closer:
            self._ended.wait(limit.remaining_s)

    def _end_collected(self) -> None:
        """Nobody has the producer any more."""
        if self._closer:  # The interpreter ends; or a `close` was interrupted before it had begun.
            self._ended.wait(self._limit_ms / 1000)
            self._closer = 0
        else:
            logger.warning("a producer was garbage collected without close(): what it has taken is sent before it ends")
        self.close()

    def check_nothing_else_left(self) -> None:
        """Call this in a done-callback, before a wait. Raises ReentrantCallError."""
        if self.lingering.has_records() or self.sender.has_others():
            raise refusal(Within.CALLBACK)

    def note_failure(self, error: SparkBrokerError) -> None:
        """An append failed for good. Its transaction cannot be committed."""
        if self.state is not None:
            self.state.append_failed(again(error))  # The frames of the error would keep the producer alive.

    def topic(self, name: str, deadline: Deadline) -> TopicView:
        """The topic as the client knows it, or else as brokers do."""
        # The sender refreshes the topics in use. Only a topic's first append waits for a broker.
        if (view := self.metadata.view.topic(name)) is None:
            with interruptible():
                view = self.metadata.topic(name, deadline)
        return view

    def _open_transactions(self) -> TransactionManager | None:
        if self.state is None:
            return None
        hand_on = partial(self.lingering.hand_on, None)
        return TransactionManager(self.state, self.metadata, self.sender, hand_on, self.config)

    def _refuse_appends(self, error: SparkBrokerError) -> None:
        self.sender.refuse(error)

    def _dispatch(self, where: TopicPartition, builder: RecordBuilder, limit: Deadline | None) -> None:
        """A slot of `send` is full or due. Records fail after max.block.ms; `limit` ends only the caller's wait."""
        complete = builder.result.complete
        deadline = Deadline.after_ms(self.config.max_block_ms)
        soon = limit if limit is not None and limit.at_s < deadline.at_s else None
        if self.sticky.get(where.topic) == where.partition:
            self.sticky.pop(where.topic, None)
        try:
            view = self.topic(where.topic, soon or deadline)
            self.sender.prepare(soon or deadline)
            rows = builder.build()
        except SparkBrokerError as error:
            if soon is not None and (error.retriable or isinstance(error, BootstrapUnreachableError)):
                raise OutOfTimeError from error
            self.note_failure(error)
            complete(error)
        else:
            self.submission.records(view, where.partition, rows, complete, deadline, soon)

    def _tell_of_unseen(self) -> None:
        """In a transaction that the producer ends, a failure is raised by the end."""
        unseen = None if self.transactions is not None else self.unseen.report()
        if unseen is not None:
            logger.warning(
                "%d sends and appends failed, and nobody looked at their Futures; the first of them: %s", *unseen
            )
