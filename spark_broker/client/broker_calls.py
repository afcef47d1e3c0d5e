"""Calls that one certain broker answers: about what it coordinates, or what it stores."""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

from spark_broker.client.cluster_view import address_of
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline, call_with_retries
from spark_broker.errors import UnknownServerError
from spark_broker.model import LogDirInfo, SetAside, TopicPartition
from spark_broker.protocol.messages import BrokerMetadata, DescribeLogDirRequest, DescribeLogDirResponse, Message
from spark_broker.times import from_ms

Answer = TypeVar("Answer", bound=Message)


def ask_live_brokers(
    metadata: ClusterMetadata, request: Message, kind: type[Answer], deadline: Deadline
) -> list[tuple[int, Answer]]:
    """The answers of all live brokers, in order of their ids. Errors that pass are tried again until the deadline.

    If a broker dies meanwhile, those that are live then are asked: what it had may be theirs. Raises other errors.
    """

    def once() -> list[tuple[int, Answer]]:
        brokers = sorted(metadata.fetch([], deadline).brokers.values(), key=lambda broker: broker.id)
        return [(broker.id, ask(broker)) for broker in brokers if not broker.fenced]

    def ask(broker: BrokerMetadata) -> Answer:
        answer = metadata.call(address_of(broker), request, deadline)
        if not isinstance(answer, kind):
            raise UnknownServerError(f"{type(request).__name__} was answered with {type(answer).__name__}")
        return answer

    return call_with_retries(once, deadline=deadline, backoff=metadata.backoff, closing=metadata.closing)


def describe_log_dirs(metadata: ClusterMetadata, deadline: Deadline) -> list[LogDirInfo]:
    """The log directories of all live brokers, in order of their ids."""
    answers = ask_live_brokers(metadata, DescribeLogDirRequest(), DescribeLogDirResponse, deadline)
    return [_info(broker_id, answer) for broker_id, answer in answers]


def _info(broker_id: int, answer: DescribeLogDirResponse) -> LogDirInfo:
    replicas = {TopicPartition(r.topic, r.partition): r.size_bytes for r in answer.replicas}
    aside = [
        SetAside(broker_id, TopicPartition(r.topic, r.partition), r.kind, r.path, _time(r.since_ms))
        for r in answer.set_aside
    ]
    return LogDirInfo(broker_id, answer.path, dict(sorted(replicas.items())), tuple(aside))


def _time(ms: int) -> datetime | None:
    return None if ms < 0 else from_ms(ms)
