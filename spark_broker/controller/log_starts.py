"""Where partitions begin once records were deleted, on demand or by the topic's retention."""

from __future__ import annotations

from spark_broker.controller.effects import Decision
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import LogStartsRecord
from spark_broker.errors import InvalidTopicError, UnknownTopicIdError, UnknownTopicOrPartitionError
from spark_broker.protocol.messages import EmptyResponse, RaiseLogStartsRequest


def raise_log_starts(image: MetadataImage, request: RaiseLogStartsRequest) -> Decision:
    """Record that records before these offsets are deleted. A lower offset than before changes nothing.

    Whoever asks has seen that the offsets are committed. Raises UnknownTopicIdError, UnknownTopicOrPartitionError,
    InvalidTopicError (internal topics: their coordinators delete what is not needed).
    """
    topic = image.topics.get(request.topic_id)
    if topic is None:
        raise UnknownTopicIdError(f"topic {request.topic_id}")
    if topic.internal:
        raise InvalidTopicError(f"records of the internal topic {topic.name} cannot be deleted")
    starts = dict(enumerate(topic.log_starts))
    for partition, offset in request.starts:
        if partition >= len(topic.partitions):
            raise UnknownTopicOrPartitionError(f"{topic.name}-{partition}")
        starts[partition] = max(starts.get(partition, 0), offset)
    listed = [starts.get(partition, 0) for partition in range(max(starts, default=-1) + 1)]
    if tuple(listed) == topic.log_starts or not any(listed):
        return Decision((), EmptyResponse())
    return Decision((LogStartsRecord(topic.topic_id, listed),), EmptyResponse())
