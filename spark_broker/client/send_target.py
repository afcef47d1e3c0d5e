"""A topic as `send` sees it."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.client.cluster_view import ClusterView, TopicView
from spark_broker.client.inputs import METADATA_BYTES
from spark_broker.client.partitioner import KeyPartitions
from spark_broker.client.record_builder import Slot
from spark_broker.errors import SchemaMismatchError


@dataclass(frozen=True, slots=True)
class SendTarget:
    """A topic in one view of the cluster. `slots`: those that were used, by partition."""

    cluster: ClusterView
    topic: TopicView
    batch_bytes: int
    key_partitions: KeyPartitions
    slots: dict[int, Slot]


def target_of(topic: TopicView, cluster: ClusterView, batch_size: int, old: SendTarget | None) -> SendTarget:
    """The topic in this view. `old`: in an earlier one. Raises SchemaMismatchError for a topic with columns."""
    if not topic.has_default_schema:
        columns = ", ".join(topic.schema.names)
        raise SchemaMismatchError(f"topic {topic.name!r} has columns {columns}: use append()")
    batch_bytes = min(topic.settings.max_message_bytes - METADATA_BYTES, batch_size)
    keys = None if old is None else old.key_partitions
    if keys is None or keys.partitions != len(topic.partitions):
        keys = KeyPartitions(len(topic.partitions))
    return SendTarget(cluster, topic, batch_bytes, keys, {} if old is None else old.slots)
