"""A stream's position in Spark's checkpoint: how far each partition is read, and the ids of the topics.

{"topics": {"flights": {"id": "0a1b...", "offsets": {"0": 23}, "ends": {"0": [23, 3]}}}, "first": {...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_broker.model import TopicPartition
from spark_broker.spark.refusals import invalid_option
from spark_broker.spark.selection import is_int

INITIAL = {"initial": True}
"""The offset before the first batch. It names no offsets. They are resolved once, and kept in the end of the first
batch (`StreamOffset.first`), which Spark stores before it runs that batch. So a batch that is repeated after a crash
starts where it started before, although Spark asks for the initial offset again.
"""


@dataclass(frozen=True)
class PartitionEnd:
    """Where a batch ends, and the leader epoch of the record before it. If that is not known: where the log ended."""

    offset: int
    leader_epoch: int


@dataclass(frozen=True)
class StreamOffset:
    """`offsets`: the first record of each partition that is not read yet. Topics without records may be absent.

    `ends`: a log that does not agree with them does not hold the planned records. `first`: where the first batch
    started; only the end of the first batch has it.
    """

    offsets: Mapping[TopicPartition, int]
    topic_ids: Mapping[str, str]
    ends: Mapping[TopicPartition, PartitionEnd] = field(default_factory=dict)
    first: StreamOffset | None = None

    # Invariant: every topic of a partition in `offsets` has an id, and `ends` names no other partitions.

    def to_json(self) -> dict[str, object]:
        """As Spark stores it. Equal offsets have equal texts."""
        topics = {topic: self._topic_json(topic) for topic in sorted(self.topic_ids)}
        return {"topics": topics} if self.first is None else {"topics": topics, "first": self.first.to_json()}

    def _topic_json(self, topic: str) -> dict[str, object]:
        partitions = sorted(tp for tp in self.offsets if tp.topic == topic)
        ends = {tp: self.ends[tp] for tp in partitions if tp in self.ends}
        return {
            "id": self.topic_ids[topic],
            "offsets": {str(tp.partition): self.offsets[tp] for tp in partitions},
            "ends": {str(tp.partition): [end.offset, end.leader_epoch] for tp, end in ends.items()},
        }


def parse_offset(value: object) -> StreamOffset | None:
    """The offset from Spark's checkpoint; None: the initial one. Raises InvalidConfigError for another source's."""
    if value == INITIAL:
        return None
    try:
        return _parse(value)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise invalid_option(
            f"the checkpoint has an offset that is not this source's: {value!r}; a query of another source, such as"
            " Kafka's, cannot go on here: begin with a new checkpointLocation and startingOffsets"
        ) from None


def _parse(value: object) -> StreamOffset:
    if not isinstance(value, dict):
        raise TypeError("an offset is an object")
    offsets: dict[TopicPartition, int] = {}
    ends: dict[TopicPartition, PartitionEnd] = {}
    topic_ids: dict[str, str] = {}
    for topic, state in value["topics"].items():
        topic_ids[topic] = str(state["id"])
        for partition, offset in state["offsets"].items():
            offsets[TopicPartition(topic, int(partition))] = _offset(offset)
        for partition, (offset, leader_epoch) in state["ends"].items():
            ends[TopicPartition(topic, int(partition))] = PartitionEnd(_offset(offset), int(leader_epoch))
    first = value.get("first")
    return StreamOffset(offsets, topic_ids, ends, None if first is None else _parse(first))


def _offset(value: object) -> int:
    if not isinstance(value, int) or not is_int(value) or value < 0:
        raise ValueError(f"{value!r} is not an offset")
    return value
