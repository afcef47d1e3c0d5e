"""Producer ids: given out in blocks to brokers, each id once in the life of the cluster."""

from __future__ import annotations

from spark_broker.controller.effects import Decision
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.isr import check_broker_epoch
from spark_broker.controller.records import ProducerIdsRecord
from spark_broker.protocol.messages import AllocateProducerIdsRequest, AllocateProducerIdsResponse

BLOCK_SIZE = 1000


def allocate_producer_ids(image: MetadataImage, request: AllocateProducerIdsRequest) -> Decision:
    """The next block. Raises BrokerIdNotRegisteredError, StaleBrokerEpochError."""
    check_broker_epoch(image, request.broker_id, request.broker_epoch)
    first = image.next_producer_id
    return Decision((ProducerIdsRecord(first + BLOCK_SIZE),), AllocateProducerIdsResponse(first, BLOCK_SIZE))
