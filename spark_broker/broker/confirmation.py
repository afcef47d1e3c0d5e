"""A transaction's coordinator adds a partition before the leader stores the transaction's first batch (KIP-890)."""

from __future__ import annotations

from collections.abc import Callable

from spark_broker.broker.append import AwaitedTransaction
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Reply
from spark_broker.broker.transaction_coordinator import TransactionCoordinator
from spark_broker.controller.image import BrokerState, MetadataImage
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    SparkBrokerError,
    UnknownServerError,
    again,
)
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import AddPartitionToTransactionRequest, AddPartitionToTransactionResponse, Message
from spark_broker.protocol.murmur2 import group_partition

CONFIRMATION_TIMEOUT_MS = 5_000
"""After this time the batch is refused. The producer repeats it, perhaps when a frozen coordinator was replaced."""

CONFIRMATIONS_MAX = 3
"""An append asks more than once only when a marker or a new leadership came between the answer and the append."""

Confirm = Callable[[Partition, AwaitedTransaction, str, int], None]
"""Has the coordinator add the partition to the open transaction of this transactional id, then confirms it to the
partition. The last argument is the deadline (ms, boot-time clock). Raises the error that refuses the batch."""


def no_coordinator(partition: Partition, awaited: AwaitedTransaction, transactional_id: str, deadline_ms: int) -> None:
    """For tests whose brokers have no coordinator."""
    del awaited, deadline_ms
    raise CoordinatorNotAvailableError(f"{partition}: nobody coordinates {transactional_id!r}")


def coordinator_of(image: MetadataImage, transactional_id: str) -> BrokerState:
    """The broker that coordinates a transactional id. Raises CoordinatorNotAvailableError."""
    topic = image.topic(TRANSACTION_STATE_TOPIC)
    if topic is None:
        raise CoordinatorNotAvailableError(f"{TRANSACTION_STATE_TOPIC} does not exist yet")
    number = group_partition(transactional_id, len(topic.partitions))
    broker = image.brokers.get(topic.partitions[number].leader)
    if broker is None:
        raise CoordinatorNotAvailableError(f"{TRANSACTION_STATE_TOPIC}-{number} has no leader")
    return broker


CallBroker = Callable[[BrokerState, Message, int, Reply], None]
"""Sends a request to another broker with a time-out (ms), and hands its answer or the error to the reply."""


class Confirmations:
    """Asks coordinators, among them this broker's own. It does not wait for the answer: the shell does."""

    def __init__(
        self,
        manager: ReplicaManager,
        coordinator: TransactionCoordinator,
        call: CallBroker,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._manager = manager
        self._coordinator = coordinator
        self._call = call
        self._clock = clock

    def ask(
        self,
        partition: Partition,
        awaited: AwaitedTransaction,
        transactional_id: str,
        deadline_ms: int,
        reply: Reply,
    ) -> int:
        """Ask. `reply` gets the answer, which goes to `take`. Returns how long the answer may take (ms)."""
        now_ms = self._clock.boottime_ms()
        timeout_ms = min(deadline_ms - now_ms, CONFIRMATION_TIMEOUT_MS)
        request = AddPartitionToTransactionRequest(
            transactional_id, awaited.producer_id, awaited.producer_epoch, *partition.key
        )
        try:
            broker = coordinator_of(self._manager.image, transactional_id)
        except SparkBrokerError as error:
            reply(error)
            return timeout_ms
        if broker.id == self._manager.broker_id:
            self._coordinator.handle(request, now_ms + timeout_ms, reply)
        else:
            self._call(broker, request, timeout_ms, reply)
        return timeout_ms

    def take(
        self,
        partition: Partition,
        awaited: AwaitedTransaction,
        transactional_id: str,
        answer: Message | SparkBrokerError,
    ) -> None:
        """Act on the coordinator's answer, or on the error in its place. Raises the error that refuses the batch."""
        if isinstance(answer, SparkBrokerError):
            if not answer.retriable:
                raise again(answer)
            # NOT_LEADER_OR_FOLLOWER would tell the producer that the partition has moved.
            raise CoordinatorNotAvailableError(f"{transactional_id!r}: {answer.message}")
        if not isinstance(answer, AddPartitionToTransactionResponse):
            raise UnknownServerError(f"AddPartitionToTransaction was answered with {type(answer).__name__}")
        partition.confirm(awaited, answer.repeat_after_ms)
