"""Which batch of a partition may be sent: the rules that no broker shows until it is too late."""

from __future__ import annotations

import pyarrow as pa

from spark_broker.client.outgoing import Identity, OutgoingBatch
from spark_broker.client.partition_queue import PartitionQueue
from spark_broker.errors import RequestTimedOutError
from spark_broker.model import TopicPartition
from spark_broker.protocol.arrow_message import encode_batch

IN_FLIGHT = 5
TP = TopicPartition("t", 0)
MESSAGE = encode_batch(pa.record_batch({"value": [b"x"]}))


def queue_of(batches: int) -> PartitionQueue:
    queue = PartitionQueue(TP, "0" * 32, Identity(7, 0), numbered=True)
    queue.unacked.extend(OutgoingBatch(TP, "0" * 32, 0, 1, MESSAGE, lambda _: None) for _ in range(batches))
    return queue


def send_all(queue: PartitionQueue) -> list[OutgoingBatch]:
    sent = []
    while (batch := queue.sendable(IN_FLIGHT)) is not None:
        queue.sent(batch)
        sent.append(batch)
    return sent


def test_a_batch_that_failed_is_never_more_than_five_numbers_behind_the_newest() -> None:
    """KNOWN_BUGS 22, simulator seed 105662: a partition remembers five batches of a producer.

    The first four time out at the leader, and the fifth, which has a later deadline, is acknowledged. A sixth that was
    sent together with the four would push the first out of what is remembered, and its retry would get no offset.
    """
    queue = queue_of(7)
    first = send_all(queue)
    assert [batch.sequence for batch in first] == [0, 1, 2, 3, 4]
    for batch in first[:4]:
        queue.failed(batch, RequestTimedOutError("the ISR was too small for too long"))
    queue.acknowledged(first[4])
    assert queue.settle() == []
    queue.recovering = False

    again = send_all(queue)
    assert [batch.sequence for batch in again] == [0, 1, 2, 3]
    queue.acknowledged(again[0])
    assert [batch.sequence for batch in send_all(queue)] == [5]
