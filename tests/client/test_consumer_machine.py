"""The consumer's rules without threads: what it wants of its shell, event by event."""

from __future__ import annotations

import pytest

from spark_broker.client.cluster_view import ClusterView, merge
from spark_broker.client.consumer_effects import Effect, FollowLeader, LeaveLeader, RefreshMetadata
from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.retry import Backoff
from spark_broker.config import ConsumerConfig
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import BrokerMetadata, Metadata, PartitionMetadata, TopicMetadata
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes

T0 = TopicPartition("t", 0)


def view(leader: int) -> ClusterView:
    """A topic `t` with one partition."""
    brokers = [BrokerMetadata(number, "h", 9000 + number, None, 1, 1, "", 1, fenced=False) for number in (1, 2)]
    partition = PartitionMetadata(0, leader, 5, [1, 2], [1, 2], 5)
    topic = TopicMetadata("t", "0" * 32, [partition], [schema_to_bytes(DEFAULT_SCHEMA)], {})
    return merge(ClusterView(), Metadata("c", 1, brokers, [topic]), ["t"])


@pytest.fixture
def machine() -> ConsumerMachine:
    machine = ConsumerMachine(ConsumerConfig(auto_offset_reset="earliest"), None, Backoff(50, 1000))
    machine.assign([T0])
    return machine


def followed(effects: list[Effect]) -> list[int]:
    return [effect.broker_id for effect in effects if isinstance(effect, FollowLeader)]


def test_the_leaders_of_its_partitions_are_followed(machine: ConsumerMachine) -> None:
    assert isinstance(machine.step(0)[0], RefreshMetadata)
    machine.metadata_came(view(leader=1), 1)
    assert followed(machine.step(1)) == [1]
    machine.learned(view(leader=2))
    effects = machine.step(2)
    assert LeaveLeader(1) in effects
    assert followed(effects) == [2]


def test_metadata_that_comes_after_its_end_has_no_leader_followed(machine: ConsumerMachine) -> None:
    """It had been asked for before. Nobody would have ended the thread of that leader."""
    machine.step(0)
    machine.close()
    machine.metadata_came(view(leader=1), 1)
    assert machine.step(1) == []
