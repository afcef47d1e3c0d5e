"""What metadata says of the topics that a consumer reads: one is missing, was created again, or lacks a column."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spark_broker.client import consumer_errors
from spark_broker.client.cluster_view import TopicView
from spark_broker.client.partition_position import PartitionPosition
from spark_broker.client.retry import UNKNOWN_TOPIC_GRACE_MS
from spark_broker.errors import InconsistentTopicIdError, SparkBrokerError, UnknownTopicOrPartitionError
from spark_broker.model import TopicPartition


@dataclass(slots=True)
class TopicChecks:
    """`errors`: by topic. An error is set when its cause lasts longer than brokers may lag behind."""

    positions: Mapping[TopicPartition, PartitionPosition]
    columns: Sequence[str] | None
    errors: dict[str, SparkBrokerError] = field(default_factory=dict)
    missing_since_ms: dict[str, float] = field(default_factory=dict)
    beyond_since_ms: dict[TopicPartition, float] = field(default_factory=dict)  # partitions that the topic lacks

    def keep(self, names: Collection[str]) -> None:
        """Only these topics are read from now on."""
        self.errors = {name: error for name, error in self.errors.items() if name in names}
        self.missing_since_ms = {name: since for name, since in self.missing_since_ms.items() if name in names}
        self.beyond_since_ms = {tp: since for tp, since in self.beyond_since_ms.items() if tp in self.positions}

    def check(self, name: str, topic: TopicView | None, now_ms: float) -> bool:
        """False: the topic is missing or was replaced, or it lacks a column."""
        if self.is_one_topic(name, topic):
            self.missing_since_ms.pop(name, None)
            self.errors.pop(name, None)
            unknown = consumer_errors.unknown_column(topic, self.columns)
            if unknown is not None:
                self.errors[name] = unknown
            return unknown is None
        since_ms = self.missing_since_ms.setdefault(name, now_ms)
        if now_ms - since_ms >= UNKNOWN_TOPIC_GRACE_MS:
            self.errors[name] = (
                UnknownTopicOrPartitionError(f"topic {name!r} does not exist")
                if topic is None
                else InconsistentTopicIdError(f"topic {name!r} was deleted and created again")
            )
        return False

    def has_partition(self, position: PartitionPosition, topic: TopicView, now_ms: float) -> bool:
        """False: the topic has not so many partitions. It is the position's error for as long as that lasts."""
        tp = position.tp
        if tp.partition < len(topic.partitions):
            if self.beyond_since_ms.pop(tp, None) is not None and isinstance(
                position.error, UnknownTopicOrPartitionError
            ):
                position.error = None
            return True
        since_ms = self.beyond_since_ms.setdefault(tp, now_ms)
        if now_ms - since_ms >= UNKNOWN_TOPIC_GRACE_MS and position.error is None:
            there = f"topic {topic.name!r} has {len(topic.partitions)} partitions"
            position.error = UnknownTopicOrPartitionError(there)
        return False

    def is_one_topic(self, name: str, topic: TopicView | None) -> bool:
        """Whether the topic exists, and no position belongs to an earlier topic of its name."""
        ids = {p.topic_id for tp, p in self.positions.items() if tp.topic == name and p.topic_id}
        return topic is not None and ids <= {topic.topic_id}

    def chosen_in(self, position: PartitionPosition, topic: TopicView | None) -> bool:
        """The caller chose a position. In a topic that was deleted and created again, it is one in the new topic.

        Whether the topic's error is over, or a look at the metadata may tell.
        """
        name = position.tp.topic
        if not isinstance(self.errors.get(name), InconsistentTopicIdError):
            return False
        if topic is not None:
            position.topic_id = topic.topic_id
        if self.is_one_topic(name, topic):
            del self.errors[name]
        return True

    def readable(self, positions: Iterable[PartitionPosition]) -> list[PartitionPosition]:
        """Those whose topics have no error."""
        return [position for position in positions if position.tp.topic not in self.errors]
