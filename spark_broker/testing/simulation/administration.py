"""Administration at random times: topics grow and move, settings change, records are deleted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_broker.core.replica import Role
from spark_broker.errors import DamagedLogError, SparkBrokerError, StorageRefusedError
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    CreatePartitionsRequest,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteTopicRequest,
    ElectLeadersRequest,
    ReassignPartitionRequest,
)
from spark_broker.testing.simulation.trace import TraceKind

if TYPE_CHECKING:
    from spark_broker.broker.partition import Partition
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World

MAX_TOPICS = 2
MAX_PARTITIONS = 4


class Administration:
    """Each kind of administration is a method, drawn by `Faults`. `leader` draws a machine that leads a partition."""

    def __init__(self, world: World, rng: random.Random, leader: Callable[[], SimulatedMachine | None]) -> None:
        self._world = world
        self._rng = rng
        self._leader = leader
        self._topics = 1

    def _elect_preferred(self) -> str:
        self._world.call_controller(ElectLeadersRequest(None), "elect preferred leaders")
        return "preferred-leader election"

    def _partitions(self) -> list[tuple[str, int, tuple[int, ...]]]:
        image = self._world.invariants.image
        return [(topic.name, number, state.replicas) for topic, number, state in image.partitions()]

    def _reassign(self) -> str:
        partitions, brokers = self._partitions(), sorted(self._world.invariants.image.brokers)
        if not partitions:
            return ""
        topic, number, replicas = self._rng.choice(partitions)
        count = min(len(brokers), max(1, self._world.swarm.replication_factor))
        target = self._rng.sample(brokers, count)
        if tuple(target) == replicas:
            return ""
        self._world.call_controller(ReassignPartitionRequest(topic, number, target), "reassign")
        return f"{topic}-{number} moves from {list(replicas)} to {target}"

    def _new_partitions(self) -> str:
        all_topics = self._world.invariants.image.topics.values()
        small = [topic for topic in all_topics if len(topic.partitions) < MAX_PARTITIONS]
        topics = [topic for topic in small if not topic.internal]
        if not topics:
            return ""
        topic = self._rng.choice(topics)
        total = len(topic.partitions) + 1
        self._world.call_controller(CreatePartitionsRequest(topic.name, total), "create partitions")
        return f"{topic.name} grows to {total} partitions"

    def _new_topic(self) -> str:
        if self._topics >= MAX_TOPICS:
            return ""
        self._topics += 1
        self._world.call_controller(self._world.new_topic_request(), "create topic")
        return "a new topic"

    def _aside_topic(self) -> str:
        """A topic that no client uses is created, or deleted if it is there."""
        request = self._world.aside.request()
        if self._world.invariants.image.topic(request.name) is not None:
            self._world.call_controller(DeleteTopicRequest(request.name), "delete a topic")
            return f"{request.name[:8]} is to be deleted"
        self._world.call_controller(request, "create a topic")
        return f"{request.name[:8]} is to be created"

    def _change_minimum(self) -> str:
        topics = list(self._world.invariants.image.topics.values())
        if not topics:
            return ""
        topic, minimum = self._rng.choice(topics), self._rng.choice([1, 2, 3])
        self._world.call_controller(
            AlterTopicConfigRequest(topic.name, {"min.insync.replicas": str(minimum)}), "change the minimum"
        )
        return f"min.insync.replicas of {topic.name} becomes {minimum}"

    def _delete_records(self) -> str:
        """A leader moves the log start up to a batch that is committed."""
        machine = self._leader()
        if machine is None or machine.process is None or machine.process.paused:
            return ""
        partitions = [p for p in machine.process.manager.partitions() if p.topic.name != TRANSACTION_STATE_TOPIC]
        led_partitions = [p for p in partitions if p.replica.role is Role.LEADER]
        if not led_partitions:
            return ""
        partition = self._rng.choice(led_partitions)
        try:
            bases = [h.base_offset for h in partition.log.headers(partition.replica.log_start_offset)]
        except (DamagedLogError, StorageRefusedError):
            return ""
        committed = [base for base in bases if base <= partition.replica.high_watermark]
        if not committed:
            return ""
        offset, process = (
            self._rng.choice([self._rng.choice(committed), partition.replica.high_watermark]),
            machine.process,
        )
        if self._world.tiering is not None:
            self._ask_to_delete(machine, partition, offset)
            return f"records of {partition} below {offset} are to be deleted"

        def delete() -> None:
            try:
                partition.advance_log_start(offset)
            except SparkBrokerError as error:
                self._world.note(process.name, TraceKind.CLIENT, f"records are not deleted: {error}")

        self._world.scheduler.after(0, process, "delete records", delete)
        return f"records of {partition} below {offset} are deleted"

    def _ask_to_delete(self, machine: SimulatedMachine, partition: Partition, offset: int) -> None:
        """As an Admin does: the leader asks the controller, which remembers it. Rows of a table are deleted, too."""
        topic_id, number = partition.key
        spec = DeleteRecordsPartition(topic_id, number, partition.replica.assignment.leader_epoch, offset)
        self._world.network.call(
            self._world.operator,
            machine.host,
            machine.address,
            DeleteRecordsRequest([spec]),
            timeout_ms=2000,
            on_answer=lambda _: None,
            on_error=lambda _: None,
        )
