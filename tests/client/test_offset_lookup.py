"""Lookups of offsets beside a leader that does not answer this client."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

from spark_broker.client.cluster_view import ClusterView
from spark_broker.client.offset_lookup import try_lookup_offsets
from spark_broker.client.retry import Backoff, Deadline
from spark_broker.client.settings import Address
from spark_broker.errors import RequestTimedOutError
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import ListedOffset, ListOffsetsRequest, ListOffsetsResponse
from spark_broker.times import EARLIEST
from tests.unit.test_consumer_machine import view

ROUND_MS = 600
ANSWER_MS = 30


class Brokers:
    """The metadata of a client. The broker `b0` leads on, and does not answer: a firewall lies between."""

    def __init__(self) -> None:
        self.view = view((0, 0), (1, 0), (2, 0))
        self.backoff = Backoff(100, 1000, rng=random.Random(1))
        self.closing = threading.Event()
        self.asked: list[str] = []

    def use(self, topics: set[str]) -> None:
        """Nothing is refreshed here."""

    def refresh(self, deadline: Deadline) -> ClusterView:
        del deadline
        return self.view

    def suspects_last(self, addresses: Iterable[Address]) -> list[Address]:
        return sorted(addresses, key=lambda address: address.host)  # At first, nobody is suspect.

    def call(self, address: Address, request: ListOffsetsRequest, deadline: Deadline) -> ListOffsetsResponse:
        timeout_ms = max(1, deadline.remaining_ms)
        self.asked.append(address.host)
        silent = address.host == "b0" or timeout_ms < ANSWER_MS
        threading.Event().wait((timeout_ms if silent else ANSWER_MS) / 1000)
        if silent:
            raise RequestTimedOutError(f"{address} did not answer within {timeout_ms} ms")
        return ListOffsetsResponse(
            [ListedOffset(each.topic_id, each.partition, 0, "", offset=0) for each in request.partitions]
        )


def test_a_leader_that_does_not_answer_keeps_no_other_from_being_asked() -> None:
    """Story: it was asked first and used up the time of each round. Two thirds of a topic were never read."""
    brokers = Brokers()
    wanted = {TopicPartition("t", number): EARLIEST for number in range(3)}
    found, failures = try_lookup_offsets(brokers, wanted, Deadline.after_ms(ROUND_MS))  # type: ignore[arg-type]
    assert sorted(tp.partition for tp in found) == [1, 2]
    assert list(failures) == [TopicPartition("t", 0)]
    assert brokers.asked[:3] == ["b0", "b1", "b2"]
