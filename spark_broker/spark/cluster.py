"""A short connection to the cluster, for one step of a query: its schema or its plan. Tasks use `spark/kept.py`.

Each of these steps is a process of its own, forked from one that must have no threads, so Spark's processes import this
module late. What they learn here is lost when they end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.config import ConsumerConfig, ProducerConfig
from spark_broker.errors import UnknownTopicOrPartitionError
from spark_broker.model import INTERNAL_PREFIX, TopicPartition
from spark_broker.spark.refusals import invalid_option
from spark_broker.spark.selection import Assign, Selection, SubscribePattern


@contextmanager
def connected(settings: ConsumerConfig | ProducerConfig) -> Iterator[ClusterMetadata]:
    """Metadata of the cluster, with connections that are closed at the end. Raises InvalidConfigError."""
    metadata = ClusterMetadata.connect(settings)
    try:
        yield metadata
    finally:
        metadata.close()


def selected_topics(metadata: ClusterMetadata, selection: Selection, deadline: Deadline) -> list[TopicView]:
    """The topics of a read, one or more. A pattern's topics are in the order of their names.

    Raises UnknownTopicOrPartitionError for a name that does not exist or a pattern that matches nothing. Raises
    InvalidConfigError when the schemas of the topics differ.
    """
    names = _selected_names(metadata, selection, deadline)
    if not names and isinstance(selection, SubscribePattern):
        raise UnknownTopicOrPartitionError(f"no topic matches subscribePattern = {selection.pattern!r}")
    metadata.use(names)
    topics = [metadata.topic(name, deadline) for name in names]
    for topic in topics[1:]:
        if not topic.schema.equals(topics[0].schema):
            raise invalid_option(
                f"topics {topics[0].name!r} and {topic.name!r} have different schemas; read each by itself"
            )
    return topics


@dataclass(frozen=True, slots=True)
class KnownTopic:
    """What is known of a topic that is read: its id, and how many partitions it has at least."""

    topic_id: str
    partitions: int


def existing_topics(
    metadata: ClusterMetadata, selection: Selection, known: Mapping[str, KnownTopic], deadline: Deadline
) -> list[TopicView]:
    """The selected topics that exist now, by fresh metadata.

    If a topic of `known` is left out, it certainly does not exist any more. Nor do partitions of it that its view
    lacks. A new topic that a pattern matches may come a moment later.
    """
    names = dict.fromkeys(_selected_names(metadata, selection, deadline))
    if isinstance(selection, SubscribePattern):
        names.update(dict.fromkeys(name for name in known if re.fullmatch(selection.pattern, name)))
    metadata.use(names)
    metadata.refresh(deadline)
    topics = []
    for name in names:
        with suppress(UnknownTopicOrPartitionError):
            topics.append(_whole(metadata, metadata.topic(name, deadline), known.get(name), deadline))
    return topics


def _whole(metadata: ClusterMetadata, topic: TopicView, known: KnownTopic | None, deadline: Deadline) -> TopicView:
    """The topic with the partitions that it is known to have: a broker that lags behind may not know all of them."""
    if known is not None and topic.topic_id == known.topic_id and len(topic.partitions) < known.partitions:
        with suppress(UnknownTopicOrPartitionError):
            return metadata.topic(topic.name, deadline, partition=known.partitions - 1)
    return topic


def partitions_of(selection: Selection, topics: Sequence[TopicView]) -> list[TopicPartition]:
    """The selected partitions of these topics. Raises UnknownTopicOrPartitionError for an assigned partition that does
    not exist.
    """
    every = [TopicPartition(topic.name, state.partition) for topic in topics for state in topic.partitions]
    if not isinstance(selection, Assign):
        return every
    names = {topic.name for topic in topics}
    assigned = [TopicPartition(name, number) for name, numbers in selection.partitions.items() for number in numbers]
    missing = [tp for tp in assigned if tp.topic in names and tp not in set(every)]
    if missing:
        raise UnknownTopicOrPartitionError(f"assign: {missing[0]} does not exist")
    return [tp for tp in assigned if tp.topic in names]


def _selected_names(metadata: ClusterMetadata, selection: Selection, deadline: Deadline) -> list[str]:
    if not isinstance(selection, SubscribePattern):
        return list(selection.partitions) if isinstance(selection, Assign) else list(selection.topics)
    names = [name for name in metadata.fetch(None, deadline).topics if not name.startswith(INTERNAL_PREFIX)]
    return sorted(name for name in names if re.fullmatch(selection.pattern, name))
