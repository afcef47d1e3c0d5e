"""What a group has committed."""

from __future__ import annotations

from spark_broker import Consumer, TopicPartition


def committed_offset(consumer: Consumer, partition: TopicPartition) -> int | None:
    """The offset alone."""
    committed = consumer.committed(partition)
    return None if committed is None else committed.offset
