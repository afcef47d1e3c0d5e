"""What changed between two images. A broker acts on it after a metadata update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spark_broker.controller.image import MetadataImage, TopicState


@dataclass(frozen=True)
class MetadataDelta:
    """The difference of two images. Parts that were not touched are shared and are skipped by identity."""

    old: MetadataImage
    new: MetadataImage

    @cached_property
    def topics_removed(self) -> list[TopicState]:
        """Topics of the old image that the new one does not have (as they were). A recreated topic has another id."""
        if self.old.topics is self.new.topics:
            return []
        return [topic for topic_id, topic in self.old.topics.items() if topic_id not in self.new.topics]

    @cached_property
    def topics_changed(self) -> list[TopicState]:
        """Topics (as they are now) that are new, or whose settings, schemas, history or log starts changed."""
        return [t for t in self._touched_topics() if _differs(self.old.topics.get(t.topic_id), t)]

    @cached_property
    def partitions_changed(self) -> list[tuple[str, int]]:
        """Partitions that are new or changed, as (topic id, number)."""
        changed: list[tuple[str, int]] = []
        for topic in self._touched_topics():
            before = self.old.topics.get(topic.topic_id)
            old_partitions = () if before is None else before.partitions
            for number, state in enumerate(topic.partitions):
                if number >= len(old_partitions) or (
                    old_partitions[number] is not state and old_partitions[number] != state
                ):
                    changed.append((topic.topic_id, number))
        return changed

    @cached_property
    def brokers_changed(self) -> list[int]:
        """Ids of brokers that were added, removed or changed."""
        if self.old.brokers is self.new.brokers:
            return []
        ids = sorted({*self.old.brokers, *self.new.brokers})
        return [id_ for id_ in ids if self.old.brokers.get(id_) != self.new.brokers.get(id_)]

    def _touched_topics(self) -> list[TopicState]:
        if self.old.topics is self.new.topics:
            return []
        return [t for topic_id, t in self.new.topics.items() if self.old.topics.get(topic_id) is not t]


def _differs(old: TopicState | None, new: TopicState) -> bool:
    return old is None or _of_brokers(old) != _of_brokers(new)


def _of_brokers(topic: TopicState) -> tuple[object, ...]:
    """What a broker keeps of a topic, beside its partitions."""
    return topic.config, topic.schemas, topic.history, topic.log_starts
