"""A short connection to the cluster, for one step of a query: its schema, its plan, or one of its tasks.

Each of these is a process of its own. gRPC must not be loaded before a fork, so Spark's processes import this module
late, and what they learn here is gone when they end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.connections import ConnectionPool
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Backoff, Deadline
from spark_broker.client.settings import parse_addresses
from spark_broker.config import ConsumerConfig, ProducerConfig
from spark_broker.errors import InvalidConfigError, UnknownServerError, UnknownTopicOrPartitionError
from spark_broker.model import INTERNAL_PREFIX
from spark_broker.protocol.messages import GetMetadata, Metadata
from spark_broker.spark.selection import Assign, Selection, SubscribePattern


@contextmanager
def connected(settings: ConsumerConfig | ProducerConfig) -> Iterator[ClusterMetadata]:
    """Metadata of the cluster, with connections that are closed at the end. Raises InvalidConfigError."""
    metadata = ClusterMetadata(
        parse_addresses(settings.bootstrap_servers),
        ConnectionPool(),
        Backoff(settings.retry_backoff_ms, settings.retry_backoff_max_ms),
        request_timeout_ms=settings.request_timeout_ms,
        max_age_ms=settings.metadata_max_age_ms,
    )
    try:
        yield metadata
    finally:
        metadata.close()


def selected_topics(metadata: ClusterMetadata, selection: Selection, deadline: Deadline) -> list[TopicView]:
    """The topics of a read, one or more, in order of their names where a pattern chose them.

    Raises UnknownTopicOrPartitionError for a name that does not exist or a pattern that matches nothing, and
    InvalidConfigError when their schemas differ.
    """
    if isinstance(selection, SubscribePattern):
        names = _matching(metadata, selection.pattern, deadline)
    else:
        names = list(selection.partitions) if isinstance(selection, Assign) else list(selection.topics)
    metadata.use(names)
    topics = [metadata.topic(name, deadline) for name in names]
    for topic in topics[1:]:
        if not topic.schema.equals(topics[0].schema):
            raise InvalidConfigError(
                f"topics {topics[0].name!r} and {topic.name!r} have different schemas; read each by itself"
            )
    return topics


def _matching(metadata: ClusterMetadata, pattern: str, deadline: Deadline) -> list[str]:
    answer = metadata.call_any(GetMetadata(None), deadline)
    if not isinstance(answer, Metadata):
        raise UnknownServerError(f"metadata was answered with {type(answer).__name__}")
    names = [topic.name for topic in answer.topics if not topic.name.startswith(INTERNAL_PREFIX)]
    found = sorted(name for name in names if re.fullmatch(pattern, name))
    if not found:
        raise UnknownTopicOrPartitionError(f"no topic matches subscribePattern = {pattern!r}")
    return found
