"""Preferred-leader election: partitions go back to the first of their replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from spark_broker.controller.effects import Decision
from spark_broker.controller.image import MetadataImage, PartitionState
from spark_broker.controller.records import MetadataRecord, PartitionChangeRecord
from spark_broker.errors import UnknownTopicOrPartitionError
from spark_broker.protocol.messages import ElectLeaders, Empty


def elect_leaders(image: MetadataImage, request: ElectLeaders) -> Decision:
    """Preferred-leader election on demand; partitions whose preferred leader is not in sync stay as they are.

    Raises UnknownTopicOrPartitionError.
    """
    if request.partitions is None:
        every = ((t.topic_id, p, s) for t, p, s in image.partitions())
        return Decision(_elect_preferred(every, image), Empty())
    named = []
    for name, number in dict.fromkeys(request.partitions):
        topic = image.topic(name)
        state = None if topic is None else image.partition(topic.topic_id, number)
        if topic is None or state is None:
            raise UnknownTopicOrPartitionError(f"{name}-{number}")
        named.append((topic.topic_id, number, state))
    return Decision(_elect_preferred(named, image), Empty())


def balance_leaders(image: MetadataImage, imbalance_percentage: int) -> tuple[MetadataRecord, ...]:
    """The automatic election: for brokers of whose preferred partitions more than this share is led elsewhere."""
    preferred: Counter[int] = Counter()
    elsewhere: Counter[int] = Counter()
    for _, _, state in image.partitions():
        preferred[state.replicas[0]] += 1
        elsewhere[state.replicas[0]] += state.leader != state.replicas[0]
    due = {b for b in preferred if elsewhere[b] * 100 > preferred[b] * imbalance_percentage and image.is_live(b)}
    candidates = ((t.topic_id, p, s) for t, p, s in image.partitions() if s.replicas[0] in due)
    return _elect_preferred(candidates, image)


def _elect_preferred(
    partitions: Iterable[tuple[str, int, PartitionState]], image: MetadataImage
) -> tuple[MetadataRecord, ...]:
    records = []
    for topic_id, number, state in partitions:
        preferred = state.replicas[0]
        if preferred != state.leader and preferred in state.isr and image.is_live(preferred):
            records.append(PartitionChangeRecord(topic_id, number, leader=preferred))
    return tuple(records)
