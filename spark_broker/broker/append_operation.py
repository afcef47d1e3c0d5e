"""One append of a producer, without a transport: what it waits for, and its answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from spark_broker.broker.append import Append, AwaitedTransaction
from spark_broker.broker.confirmation import CONFIRMATIONS_MAX
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.slow import SLOW, SLOW_S
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InvalidRequestError,
    InvalidTopicError,
    SparkBrokerError,
    StorageRefusedError,
    ThrottlingQuotaExceededError,
)
from spark_broker.model import INTERNAL_PREFIX
from spark_broker.protocol.messages import AppendRequest, AppendResponse
from spark_broker.protocol.wire import Buffer

logger = logging.getLogger(__name__)

Answer = Callable[[AppendResponse], None]
"""Takes the answer, perhaps in another stream's thread. It must not wait."""


class Question(NamedTuple):
    """What `confirmation.Confirm` is to ask a transaction's coordinator."""

    partition: Partition
    awaited: AwaitedTransaction
    transactional_id: str
    deadline_ms: int


class AppendOperation:
    """`try_answer`, and again whenever what it waits for is there; or `refuse`.

    It is answered once, as its acks ask: when the batch is stored, when the replicas have it, or never. It is the
    partition's `AppendToken`. That its client leaves changes nothing: what it has sent is stored.
    """

    __slots__ = ("_answer", "_append", "_asked", "_began_s", "_manager", "_partition", "request")

    def __init__(
        self, manager: ReplicaManager, request: AppendRequest, payload: Buffer, now_ms: int, answer: Answer
    ) -> None:
        """`now_ms`: on the boot-time clock."""
        self.request = request
        self._manager = manager
        self._partition: Partition | None = None
        self._answer = answer
        self._asked = 0  # coordinators
        self._began_s = time.monotonic()  # for the log line of a slow append
        self._append = Append(
            message=payload,
            leader_epoch=request.leader_epoch,
            acks=request.acks,
            schema_id=request.schema_id,
            deadline_ms=now_ms + request.timeout_ms,
        )

    def try_answer(self) -> Question | None:
        """Store the batch. Returns what its transaction's coordinator is to be asked first; None: it waits for nothing
        more here. The coordinator's answer may have changed nothing by then, so it may ask again.
        """
        try:
            return self._store()
        except SparkBrokerError as error:
            self.refuse(error)
            return None

    def acknowledge(self, base_offset: int) -> None:
        """The batch is as safe as its acks ask."""
        took_s = time.monotonic() - self._began_s
        if took_s >= SLOW_S and self._partition is not None:
            epoch = self._partition.replica.assignment.leader_epoch
            SLOW.took("append", took_s, topic_partition=self._partition, leader_epoch=epoch, offset=base_offset)
        newest = -1 if self._partition is None else self._partition.topic.schema_id
        newer = newest if newest > self.request.schema_id else -1
        self._answer(AppendResponse(self.request.correlation_id, 0, "", base_offset, newer_schema_id=newer))

    def refuse(self, error: SparkBrokerError) -> None:
        """Nothing is stored, or it is not known to be safe."""
        if self.request.acks == 0:
            # It asks for no answer. Ending the stream would also fail the batches behind this one. Such a producer
            # refreshes its metadata every second instead, and so finds a leader that has moved.
            # `Room` logs a full disk once, and overload would make a line for each append.
            often = isinstance(error, StorageRefusedError | ThrottlingQuotaExceededError)
            level = logging.DEBUG if often else logging.INFO
            logger.log(level, "an append with acks=0 was refused: %s", error)
            return
        self._answer(AppendResponse(self.request.correlation_id, error.code, error.message[:65_000]))

    def _store(self) -> Question | None:
        request = self.request
        partition = self._partition = self._manager.partition(request.topic_id, request.partition)
        if partition.topic.name.startswith(INTERNAL_PREFIX):
            raise InvalidTopicError(f"{partition.topic.name} is internal: only brokers append to it")
        awaited = partition.append(self._append, self if request.acks else None)
        if awaited is None:
            return None
        if not request.transactional_id:
            raise InvalidRequestError("a transactional batch without a transactional id")
        self._asked += 1
        if self._asked > CONFIRMATIONS_MAX:
            raise CoordinatorNotAvailableError(f"{partition}: the transaction was confirmed and changed again")
        return Question(partition, awaited, request.transactional_id, self._append.deadline_ms)
