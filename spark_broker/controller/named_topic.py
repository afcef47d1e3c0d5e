"""The topic that a request means: it has this name, and this id where the client says it.

A request may come late, or be sent again, when its topic was deleted and another one has the name. It changes nothing
there.
"""

from __future__ import annotations

from spark_broker.controller.image import MetadataImage, PartitionRegistration, TopicState
from spark_broker.errors import InconsistentTopicIdError, UnknownTopicOrPartitionError


def named_topic(image: MetadataImage, name: str, topic_id: str) -> TopicState:
    """`topic_id`: empty, of an older client, is that of any topic. Raises UnknownTopicOrPartitionError and
    InconsistentTopicIdError.
    """
    topic = image.topic(name)
    if topic is None:
        raise UnknownTopicOrPartitionError(f"topic {name!r} does not exist")
    if topic_id not in ("", topic.topic_id):
        raise InconsistentTopicIdError(f"topic {name!r} is not the one that was meant, which was deleted")
    return topic


def named_partition(
    image: MetadataImage, name: str, number: int, topic_id: str
) -> tuple[TopicState, PartitionRegistration]:
    """Raises as `named_topic`, also for a partition that the topic lacks."""
    topic = named_topic(image, name, topic_id)
    state = image.partition(topic.topic_id, number)
    if state is None:
        raise UnknownTopicOrPartitionError(f"{name}-{number}")
    return topic, state
