"""Transactions as an administrator sees them: what the coordinators know, and the end of one that hangs."""

from __future__ import annotations

from spark_broker.client.broker_calls import ask_live_brokers
from spark_broker.client.cluster_view import ClusterView
from spark_broker.client.coordinator import CoordinatorClient
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.errors import InvalidProducerIdMappingError, InvalidTxnStateError
from spark_broker.model import TRANSACTION_STATE_TOPIC, TopicPartition, TransactionInfo
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EmptyResponse,
    EndTransactionRequest,
    InitProducerIdResponse,
    TransactionDescription,
)
from spark_broker.protocol.messages.common import known
from spark_broker.protocol.murmur2 import group_partition

EMPTY = "Empty"

KNOWN_IDS = "`spark-broker transactions list` shows the ids and the state of each."


def list_transactions(metadata: ClusterMetadata, deadline: Deadline) -> list[TransactionInfo]:
    """From every live broker. If two claim one id, the coordinator with the higher epoch is right."""
    view = metadata.fetch(None, deadline)
    transactions: dict[str, TransactionInfo] = {}
    request = DescribeTransactionsRequest(None)
    for broker_id, answer in ask_live_brokers(metadata, request, DescribeTransactionsResponse, deadline):
        for description in answer.transactions:
            info = _info(description, view, broker_id)
            earlier = transactions.get(info.transactional_id)
            if earlier is None or earlier.coordinator_epoch < info.coordinator_epoch:
                transactions[info.transactional_id] = info
    return [transactions[transactional_id] for transactional_id in sorted(transactions)]


def describe_transaction(metadata: ClusterMetadata, transactional_id: str, deadline: Deadline) -> TransactionInfo:
    """Raises InvalidProducerIdMappingError when the id is not known."""
    view = metadata.fetch(None, deadline)
    topic = view.topic(TRANSACTION_STATE_TOPIC)
    answer = None
    if topic is not None:
        coordinator = CoordinatorClient(metadata, TRANSACTION_STATE_TOPIC, transactional_id)
        answer = coordinator.ask(
            DescribeTransactionsRequest([transactional_id]), DescribeTransactionsResponse, deadline
        )
    if topic is None or answer is None or not answer.transactions:
        raise InvalidProducerIdMappingError(
            f"no coordinator knows the transactional id {transactional_id!r}", hint=KNOWN_IDS
        )
    number = group_partition(transactional_id, len(topic.partitions))
    return _info(answer.transactions[0], view, topic.partitions[number].leader)


def abort_transaction(metadata: ClusterMetadata, transactional_id: str, deadline: Deadline) -> None:
    """End the transaction in the name of its producer, or of its execution. Either gets an error when it commits."""
    transaction = describe_transaction(metadata, transactional_id, deadline)
    if transaction.state == EMPTY:
        raise InvalidTxnStateError(
            f"no transaction of {transactional_id!r} is open", hint=f"Nothing is to be aborted. {KNOWN_IDS}"
        )
    coordinator = CoordinatorClient(metadata, TRANSACTION_STATE_TOPIC, transactional_id)
    if transaction.version is not None:
        coordinator.ask(
            AbortTransactionRequest(transactional_id, transaction.version, transaction.execution or ""),
            EmptyResponse,
            deadline,
        )
        return
    producer_id, producer_epoch = transaction.writers[0]
    request = EndTransactionRequest(transactional_id, producer_id, producer_epoch, committed=False)
    coordinator.ask(request, InitProducerIdResponse, deadline)


def _info(transaction: TransactionDescription, view: ClusterView, coordinator: int) -> TransactionInfo:
    names = {topic.topic_id: topic.name for topic in view.topics.values()}
    return TransactionInfo(
        transaction.transactional_id,
        transaction.state,
        known(transaction.version),
        transaction.execution or None,
        known(transaction.last_committed),
        transaction.timeout_ms / 1000,
        transaction.idle_ms / 1000,
        tuple(transaction.writers),
        tuple(
            sorted(TopicPartition(names.get(topic_id, topic_id), number) for topic_id, number in transaction.partitions)
        ),
        coordinator,
        transaction.coordinator_epoch,
    )
