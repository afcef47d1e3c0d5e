"""The topics as the coordinator's broker knows them, and what a subscription means among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spark_broker.core.groups.patterns import compile_pattern
from spark_broker.core.groups.records import MemberValue
from spark_broker.model import INTERNAL_PREFIX


@dataclass(frozen=True, slots=True)
class Topic:
    """`racks`: of the replicas, sorted, for each partition. Empty: not known."""

    topic_id: str
    name: str
    partitions: int
    racks: tuple[tuple[str, ...], ...] = ()


class Topics:
    """One image of the topics. `version` rises with each image, so that an older one that comes late is dropped."""

    def __init__(self, topics: Iterable[Topic] = (), version: int = 0) -> None:
        self.version = version
        self.by_name = {topic.name: topic for topic in topics}
        self.by_id = {topic.topic_id: topic for topic in self.by_name.values()}
        self._matching: dict[str, tuple[Topic, ...]] = {}

    def subscribed(self, member: MemberValue) -> list[Topic]:
        """The topics that are there of those that a member subscribes to, by id."""
        named = {topic.topic_id: topic for name in member.topics if (topic := self.by_name.get(name)) is not None}
        if member.pattern:
            named |= {topic.topic_id: topic for topic in self._matches(member.pattern)}
        return [named[topic_id] for topic_id in sorted(named)]

    def _matches(self, pattern: str) -> tuple[Topic, ...]:
        """Each pattern is matched once with each image. It matches no internal topic; a subscription may name one."""
        matching = self._matching.get(pattern)
        if matching is None:
            matches = compile_pattern(pattern).matches
            matching = self._matching[pattern] = tuple(
                topic
                for topic in self.by_name.values()
                if not topic.name.startswith(INTERNAL_PREFIX) and matches(topic.name)
            )
        return matching

    def changed_since(self, earlier: Topics) -> frozenset[str]:
        """The names of topics that were created, deleted or changed since."""
        return frozenset(
            name
            for name in self.by_name.keys() | earlier.by_name.keys()
            if self.by_name.get(name) != earlier.by_name.get(name)
        )
