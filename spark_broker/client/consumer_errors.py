"""Which errors a consumer raises, and when: a partition that has failed stands still, and the others are read on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.partition_position import PartitionPosition
from spark_broker.errors import (
    ClientEndedError,
    FencedInstanceIdError,
    FencedMemberEpochError,
    InconsistentTopicIdError,
    InvariantError,
    SchemaMismatchError,
    SparkBrokerError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
    again,
)
from spark_broker.model import TopicPartition
from spark_broker.protocol.schema import nearest

LASTING = (InvariantError, ClientEndedError)
"""Failures of the consumer itself: poll raises them again and again."""

TOPIC_IS_GONE = (InconsistentTopicIdError, UnknownTopicOrPartitionError)
"""No failures of the consumer: the topic's partitions stand still, and tell of it."""

MEMBER_IS_GONE = (*TOPIC_IS_GONE, UnknownMemberIdError, FencedMemberEpochError, FencedInstanceIdError)
"""No failures of a group's member: its next heartbeat tells of it, and so does the listener."""

Partitions = Mapping[TopicPartition, PartitionPosition]
TopicErrors = Mapping[str, SparkBrokerError]


def errors_of(partitions: Partitions, topics: TopicErrors) -> dict[TopicPartition, SparkBrokerError]:
    """The partitions that stand still, and why."""
    found = {tp: position.error or topics.get(tp.topic) for tp, position in partitions.items()}
    return {tp: error for tp, error in found.items() if error is not None}


def stands_still(partitions: Partitions, topics: TopicErrors) -> bool:
    """Whether every partition has failed, or there is none and a topic has."""
    if not partitions:
        return bool(topics)
    return all(p.error is not None or tp.topic in topics for tp, p in partitions.items())


def unknown_column(topic: TopicView | None, columns: Sequence[str] | None) -> SparkBrokerError | None:
    """The error where the topic does not have a column that the consumer asks for."""
    names = [] if topic is None else topic.schema.names
    wrong = next((name for name in columns or () if topic is not None and name not in names), None)
    if topic is None or wrong is None:
        return None
    return SchemaMismatchError(f"topic {topic.name!r} has no column {wrong!r}" + nearest(wrong, names))


def raise_first(partitions: Partitions, topics: TopicErrors) -> None:
    """Raises the error of a topic or of a partition that is not paused, if there is one."""
    for error in topics.values():
        raise again(error)
    for position in partitions.values():
        if position.error is not None and not position.paused:
            raise again(position.error)
