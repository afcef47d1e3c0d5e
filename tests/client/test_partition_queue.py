"""Which batch of a partition may be sent: rules whose violation a broker shows only when it is too late."""

from __future__ import annotations

import pyarrow as pa

from spark_broker.client.outgoing import OutgoingBatch
from spark_broker.client.partition_queue import PartitionQueue
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import (
    MessageTooLargeError,
    OutOfOrderSequenceNumberError,
    RequestTimedOutError,
)
from spark_broker.model import TopicPartition
from spark_broker.protocol.arrow_message import encoded_batch

IN_FLIGHT = 5
TP = TopicPartition("t", 0)
OLD, NEW = ProducerIdentity(7, 0), ProducerIdentity(8, 0)
MESSAGE = encoded_batch(pa.record_batch({"value": [b"x"]}))


def queue_of(batches: int) -> PartitionQueue:
    queue = PartitionQueue(TP, "0" * 32, OLD, numbered=True)
    queue.unacked.extend(OutgoingBatch(TP, "0" * 32, 0, 1, MESSAGE, lambda _: None) for _ in range(batches))
    return queue


def send_all(queue: PartitionQueue) -> list[OutgoingBatch]:
    sent = []
    while (batch := queue.sendable(IN_FLIGHT)) is not None:
        queue.sent(batch)
        sent.append(batch)
    return sent


def test_a_batch_that_failed_is_never_more_than_five_numbers_behind_the_newest() -> None:
    """Known bug 22, simulator seed 105662: a partition remembers five batches of a producer.

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
    queue.resume()

    again = send_all(queue)
    assert [batch.sequence for batch in again] == [0, 1, 2, 3]
    queue.acknowledged(again[0])
    assert [batch.sequence for batch in send_all(queue)] == [5]


def test_numbers_that_are_missing_are_known_of_every_identity_that_batches_still_have() -> None:
    """KIP-360, simulator seed 103088: 0 and 1 are given up; 2 goes on under a new id, and is given up as well.

    The broker then has neither 0 nor 1, so 3 is out of order under the old id. Nothing is lost, and 3 gets a new
    number, too.
    """
    queue = queue_of(4)
    sent = send_all(queue)
    out_of_order = OutOfOrderSequenceNumberError("0 is next")
    for batch in sent:
        batch.correlation_id = 1
        batch.deadline_ms = 9000
    sent[0].deadline_ms = sent[1].deadline_ms = 1000
    assert [batch for batch, _ in queue.expire(2000)] == sent[:2]
    for batch in sent[2:]:
        queue.failed(batch, out_of_order)
        batch.correlation_id = -1
    assert queue.settle() == []
    assert sent[2].identity is None
    assert sent[3].identity == OLD

    queue.take_identity(NEW)
    queue.resume()
    assert queue.sendable(IN_FLIGHT) is sent[2]
    queue.sent(sent[2])
    sent[2].correlation_id, sent[2].deadline_ms = 2, 3000
    assert [batch for batch, _ in queue.expire(4000)] == [sent[2]]
    assert queue.settle() == []

    queue.resume()
    queue.sent(sent[3])
    queue.failed(sent[3], out_of_order)
    assert queue.settle() == []
    assert sent[3].identity is None


def test_what_may_be_stored_behind_a_batch_that_may_be_gets_no_other_number() -> None:
    """Simulator seed 250001277: the leader had neither. A replica that had both led later, and 1 was there twice."""
    queue = queue_of(2)
    sent = send_all(queue)
    for batch in sent:
        batch.deadline_ms = 9000
        queue.failed(batch, RequestTimedOutError("no answer"))
    queue.settle()
    queue.resume()
    send_all(queue)
    sent[0].correlation_id, sent[0].deadline_ms = 1, 1000
    assert [batch for batch, _ in queue.expire(2000)] == sent[:1]
    queue.failed(sent[1], OUT_OF_ORDER)
    ((failed, error),) = queue.settle()
    assert failed is sent[1]
    assert "an earlier attempt may have stored it" in error.message


def test_what_follows_a_batch_that_was_certainly_refused_gets_another_number() -> None:
    queue = queue_of(2)
    sent = send_all(queue)
    queue.failed(sent[0], TOO_LARGE)
    queue.failed(sent[1], RequestTimedOutError("no answer, but it cannot be stored without the one before"))
    assert [batch for batch, _ in queue.settle()] == sent[:1]
    queue.resume()
    send_all(queue)
    queue.failed(sent[1], OUT_OF_ORDER)
    assert queue.settle() == []
    assert sent[1].identity is None


TOO_LARGE = MessageTooLargeError("a batch of so many bytes")
OUT_OF_ORDER = OutOfOrderSequenceNumberError("numbers are missing")


def in_two(batch: OutgoingBatch, limit_bytes: int) -> list[OutgoingBatch]:
    return [OutgoingBatch(TP, "0" * 32, 0, 1, MESSAGE, lambda _: None) for _ in range(2)]


def divisible_queue(batches: int, *, renumbers: bool = True) -> PartitionQueue:
    queue = PartitionQueue(TP, "0" * 32, OLD, numbered=True, renumbers=renumbers)
    queue.unacked.extend(OutgoingBatch(TP, "0" * 32, 0, 2, MESSAGE, lambda _: None, in_two) for _ in range(batches))
    return queue


def numbers(sent: list[OutgoingBatch]) -> list[tuple[ProducerIdentity | None, int]]:
    return [(batch.identity, batch.sequence) for batch in sent]


def test_pieces_of_a_refused_batch_and_what_follows_get_numbers_of_a_new_producer_id() -> None:
    queue = divisible_queue(3)
    first, second, third = send_all(queue)
    queue.acknowledged(first)
    queue.failed(second, TOO_LARGE)
    queue.failed(third, RequestTimedOutError("its answer was lost; but it cannot have been stored"))
    assert queue.settle() == []
    assert queue.needs_identity
    queue.take_identity(NEW)
    ((divided, pieces),) = queue.divide(1000)
    assert divided is second
    queue.resume()
    assert send_all(queue) == [*pieces, third]
    assert numbers([*pieces, third]) == [(NEW, 0), (NEW, 1), (NEW, 2)]


def test_what_comes_before_a_refused_batch_keeps_its_number_and_goes_first() -> None:
    queue = divisible_queue(2)
    first, second = send_all(queue)
    queue.failed(first, RequestTimedOutError("it may be stored"))
    queue.failed(second, TOO_LARGE)
    assert queue.settle() == []
    queue.take_identity(NEW)
    queue.divide(1000)
    queue.resume()
    assert send_all(queue) == [first], "the rest waits until it is acknowledged"
    assert numbers([first]) == [(OLD, 0)]
    queue.acknowledged(first)
    assert numbers(send_all(queue)) == [(NEW, 0), (NEW, 1)]


def test_a_batch_that_may_have_been_stored_is_not_divided() -> None:
    queue = divisible_queue(1)
    (batch,) = send_all(queue)
    queue.failed(batch, RequestTimedOutError("it may be stored"))
    assert queue.settle() == []
    queue.resume()
    send_all(queue)
    queue.failed(batch, TOO_LARGE)
    ((failed, error),) = queue.settle()
    assert failed is batch
    assert isinstance(error, MessageTooLargeError)
    assert "may have stored it" in error.message


def test_in_a_transaction_the_same_numbers_are_used_again() -> None:
    queue = divisible_queue(3, renumbers=False)
    first, second, third = send_all(queue)
    queue.acknowledged(first)
    queue.failed(second, TOO_LARGE)
    queue.failed(third, OUT_OF_ORDER)
    assert queue.settle() == []
    ((_, pieces),) = queue.divide(1000)
    queue.resume()
    assert send_all(queue) == [*pieces, third]
    assert numbers([*pieces, third]) == [(OLD, 1), (OLD, 2), (OLD, 3)]


def test_in_a_transaction_a_number_is_not_used_again_while_a_copy_of_it_may_be_under_way() -> None:
    queue = divisible_queue(2, renumbers=False)
    first, second = send_all(queue)
    queue.failed(first, TOO_LARGE)
    queue.failed(second, RequestTimedOutError("a copy of it may still arrive"))
    assert [batch for batch, _ in queue.settle()] == [first]
