"""A micro-batch on its way to the log. It is encoded once, numbered once for each producer identity, and sent until it
is answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from spark_broker.client.unseen import Unseen, WatchedFuture
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import SparkBrokerError
from spark_broker.model import RecordMetadata, TopicPartition
from spark_broker.protocol.message_head import EncodedBatch

Outcome = RecordMetadata | SparkBrokerError


class OutgoingBatch:
    """One micro-batch of one partition. Its mutable fields are guarded by the sender's lock."""

    __slots__ = (
        "complete",
        "correlation_id",
        "deadline_ms",
        "divide",
        "error",
        "identity",
        "last_error",
        "message",
        "rows",
        "schema_id",
        "sequence",
        "size_bytes",
        "too_large",
        "topic_id",
        "topic_partition",
        "uncertain",
    )

    def __init__(
        self,
        topic_partition: TopicPartition,
        topic_id: str,
        schema_id: int,
        rows: int,
        message: EncodedBatch,
        complete: Callable[[Outcome], None],
        divide: Callable[[OutgoingBatch, int], list[OutgoingBatch]] | None = None,
    ) -> None:
        """`divide`: makes pieces of the batch, of no more than so many bytes, which complete it. None: it stays whole.

        `uncertain`: an attempt may have stored it. `too_large`: it was certainly refused, and is to be divided.
        """
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.schema_id = schema_id
        self.rows = rows
        self.message = message
        self.size_bytes = len(message)
        self.complete = complete
        self.divide = divide
        self.too_large = False
        self.uncertain = False
        self.deadline_ms = 0
        self.identity: ProducerIdentity | None = None
        self.sequence = -1
        self.correlation_id = -1
        self.error: SparkBrokerError | None = None
        self.last_error: SparkBrokerError | None = None

    def number(self, identity: ProducerIdentity, sequence: int) -> None:
        """Give the batch its number. A retry keeps it: the broker recognises the batch by it."""
        self.identity, self.sequence = identity, sequence
        self.message = self.message.numbered(
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=sequence,
        )

    def forget_number(self) -> None:
        """The batch is certainly not in the log, so it may get another number."""
        self.identity = None
        self.uncertain = False

    def metadata(self, base_offset: int | None) -> RecordMetadata:
        return RecordMetadata(self.topic_partition.topic, self.topic_partition.partition, base_offset, self.rows)


class AppendResult:
    """The Future of one `append`. It is done when each of its batches is done."""

    def __init__(self, batches: int, unseen: Unseen) -> None:
        self.future: Future[list[RecordMetadata]] = WatchedFuture(unseen)
        self.future.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._outcomes: list[Outcome | None] = [None] * batches
        self._missing = batches
        if not batches:
            self.future.set_result([])

    def part(self, index: int) -> Callable[[Outcome], None]:
        """Where the batch with this index reports its outcome."""
        return lambda outcome: self._complete(index, outcome)

    def _complete(self, index: int, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[index] = outcome
            self._missing -= 1
            if self._missing:
                return
        errors = [error for error in self._outcomes if isinstance(error, SparkBrokerError)]
        if errors:
            self.future.set_exception(errors[0])
        else:
            self.future.set_result([metadata for metadata in self._outcomes if isinstance(metadata, RecordMetadata)])
