"""The topic of a planned range. Since the plan, it may have been deleted, or deleted and created again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_broker.errors import InconsistentTopicIdError, UnknownTopicOrPartitionError

if TYPE_CHECKING:
    # Spark forks its processes from one that imports this, and that must have no threads.
    from spark_broker.client.cluster_view import TopicView
    from spark_broker.client.metadata import ClusterMetadata
    from spark_broker.client.retry import Deadline

TOPIC_GONE = (InconsistentTopicIdError, UnknownTopicOrPartitionError)
"""What `planned_topic` raises. Brokers answer with them, too, where they only lag behind."""


def planned_topic(metadata: ClusterMetadata, name: str, topic_id: str | None, deadline: Deadline) -> TopicView:
    """The topic of a range. `topic_id` None: whatever topic has the name.

    Raises InconsistentTopicIdError if another topic has its name now, and UnknownTopicOrPartitionError once it is
    certain that none has.
    """
    topic = metadata.topic(name, deadline)
    if topic_id not in (None, topic.topic_id):  # The metadata may be older than the plan.
        metadata.refresh(deadline)
        topic = metadata.topic(name, deadline)
    if topic_id not in (None, topic.topic_id):
        raise InconsistentTopicIdError(f"topic {name!r} was deleted and created again after the query was planned")
    return topic


def is_gone(metadata: ClusterMetadata, topic: str, topic_id: str | None, deadline: Deadline) -> bool:
    """Whether the topic does not exist any more, as the controller has it. `topic_id` None: no topic of the name does.

    What is passed over is lost, and a broker that lags behind may show an older topic. Raises the last retriable error
    at the deadline.
    """
    recorded = metadata.recorded(topic, deadline)
    return recorded is None or topic_id not in (None, recorded.topic_id)
