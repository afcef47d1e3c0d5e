"""Real brokers without a controller: servers, logs and replication in one process, with handmade images."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pyarrow as pa

from spark_broker.broker.append import Append
from spark_broker.broker.append_stream import AppendStream
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.fetch_stream import FetchStream
from spark_broker.broker.lease import Lease
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_manager import Outward, ReplicaManager
from spark_broker.broker.replica_stream import ReplicaStream
from spark_broker.broker.request_queue import RequestQueue
from spark_broker.config import ClusterConfig, ClusterSettings, TopicConfig
from spark_broker.controller.image import (
    EMPTY_IMAGE,
    BrokerState,
    MetadataImage,
    PartitionRegistration,
    TopicState,
)
from spark_broker.controller.tombstones import Tombstones
from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.messages import CallRequest, EmptyResponse, Message, ReplicaStateRequest
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.filesystem import LOCAL
from spark_broker.transport.server import Server

CLUSTER_ID = "rig"
TOPIC_ID = "ab" * 16
INTERNAL_TOPIC_ID = "cd" * 16
KEY: PartitionKey = (TOPIC_ID, 0)
FAR_FUTURE_MS = 3_600_000


def batch(*values: bytes) -> pa.RecordBatch:
    """Records as Kafka's, with these values."""
    columns = {
        "key": [None] * len(values),
        "value": list(values),
        "headers": [None] * len(values),
        "timestamp": [0] * len(values),
    }
    return pa.RecordBatch.from_arrays(
        [
            pa.array(columns[field.name], pa.int64()).cast(field.type)
            if field.name == "timestamp"
            else pa.array(columns[field.name], field.type)
            for field in DEFAULT_SCHEMA
        ],
        schema=DEFAULT_SCHEMA,
    )


class Outcome:
    """An append's answer."""

    def __init__(self) -> None:
        self.future: Future[int] = Future()

    def acknowledge(self, base_offset: int) -> None:
        self.future.set_result(base_offset)

    def refuse(self, error: SparkBrokerError) -> None:
        self.future.set_exception(error)


class RigBroker:
    """One broker on `base/broker-<slot>`; `proposals` are the ISRs that it has proposed."""

    def __init__(self, base: Path, broker_id: int, settings: ClusterSettings) -> None:
        self.id = broker_id
        self.bugs: list[BaseException] = []
        self.proposals: list[ProposeIsr] = []
        self.proposed = threading.Condition()
        self.directory = LogDirectory.claim(base, cluster_id=CLUSTER_ID, launch=broker_id + 1)
        self.queue = RequestQueue(1, 1)
        self.lease = Lease()
        self.lease.extend(SYSTEM_CLOCK.boottime_ms(), FAR_FUTURE_MS)
        outward = Outward(self._propose, lambda key, error: self.bugs.append(error), self.bugs.append)
        self.manager = ReplicaManager(settings, self.directory, self.lease, outward)
        streams: dict[str, Callable[..., None]] = {
            "append": lambda stream: AppendStream(self.manager, stream, 500, queue=self.queue).run(),
            "fetch": lambda stream: FetchStream(self.manager, stream, queue=self.queue, boot_id=LOCAL.boot_id()).run(),
            "replica": lambda stream: ReplicaStream(self.manager, stream, 1 << 22).run(),
        }
        self.server = Server("127.0.0.1", 0, self._answer, streams, self.bugs.append)

    def _answer(self, request: CallRequest) -> Message:
        if isinstance(request, ReplicaStateRequest):
            return self.manager.partition(request.topic_id, request.partition).replica_state(request.leader_epoch)
        return EmptyResponse()

    def _propose(self, key: PartitionKey, proposal: ProposeIsr) -> None:
        with self.proposed:
            self.proposals.append(proposal)
            self.proposed.notify_all()

    def await_proposal(self, isr: set[int], timeout_s: float = 20.0) -> ProposeIsr:
        """Wait for the proposal of exactly this ISR."""

        def find() -> ProposeIsr | None:
            return next((p for p in reversed(self.proposals) if {member for member, _ in p.isr} == isr), None)

        with self.proposed:
            self.proposed.wait_for(lambda: find() is not None, timeout_s)
            proposal = find()
        assert proposal is not None, f"ISR {isr} was not proposed; {self.proposals} were"
        return proposal

    @property
    def partition(self) -> Partition:
        return self.manager.partition(*KEY)

    def append(
        self,
        *values: bytes,
        epoch: int,
        acks: int = -1,
        sequence: int = -1,
        producer_id: int = -1,
        timeout_ms: int = 30_000,
    ) -> Future[int]:
        """Append as a client does. Errors that refuse the batch are raised."""
        outcome = Outcome()
        message = encode_batch(
            batch(*values),
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=sequence,
        )
        deadline_ms = SYSTEM_CLOCK.boottime_ms() + timeout_ms
        self.partition.append(Append(message, epoch, acks, 0, deadline_ms), outcome)
        return outcome.future

    def values(self) -> list[bytes]:
        """Everything in the log, committed or not."""
        log = self.partition.log
        frames = log.read(0, 1 << 30, log.log_end_offset) if log.log_end_offset else []
        return [v for frame in frames for v in self.partition.reader.decode(frame).column("value").to_pylist()]

    def stop(self, *, clean: bool = False) -> None:
        self.manager.stop(clean=clean)
        if clean:
            self.directory.mark_clean()
        self.directory.release()


class Rig:
    """A cluster whose controller is the test."""

    def __init__(self, base: Path, brokers: int = 3, topic: TopicConfig | None = None, **cluster: object) -> None:
        self.settings = ClusterSettings(
            cluster=dataclasses.replace(ClusterConfig(), **cluster),  # type: ignore[arg-type]
            topic=topic or TopicConfig(),
        )
        self.base = base
        self.overrides = (topic or TopicConfig()).to_dict()
        self.brokers = {n: RigBroker(base, n, self.settings) for n in range(brokers)}
        self.fenced: set[int] = set()
        self.epochs = dict.fromkeys(self.brokers, 1)
        self.state = PartitionRegistration(
            tuple(self.brokers), tuple(self.brokers), leader=0, leader_epoch=0, partition_epoch=0
        )
        for broker in self.brokers.values():
            broker.manager.registered(broker.id, 1)

    def image(self, state: PartitionRegistration) -> MetadataImage:
        brokers = {n: self._broker_state(b) for n, b in self.brokers.items()}
        topic = TopicState(
            "t",
            TOPIC_ID,
            MappingProxyType(self.overrides),
            schemas=(schema_to_bytes(DEFAULT_SCHEMA),),
            partitions=(state,),
        )
        return dataclasses.replace(
            EMPTY_IMAGE,
            cluster_id=CLUSTER_ID,
            brokers=MappingProxyType(brokers),
            topics=MappingProxyType({TOPIC_ID: topic}),
            topic_ids=MappingProxyType({"t": TOPIC_ID}),
        )

    def _broker_state(self, broker: RigBroker) -> BrokerState:
        return BrokerState(
            id=broker.id,
            epoch=self.epochs[broker.id],
            directory_id=broker.directory.meta.directory_id,
            incarnation=str(broker.id),
            launch=broker.id + 1,
            host="127.0.0.1",
            port=broker.server.port,
            rack=None,
            machine="here",
            executor_id=str(broker.id),
            executor_pid=0,
            pid=0,
            pid_start_time=0,
            start_kind="clean",
            fenced=broker.id in self.fenced,
        )

    def publish(self, *to: int, **changes: object) -> None:
        """Change the partition and apply the image at these brokers (none named: all)."""
        self.state = dataclasses.replace(self.state, **changes)  # type: ignore[arg-type]
        image = self.image(self.state)
        for n in to or tuple(self.brokers):
            self.brokers[n].manager.apply(image)

    def stop(self) -> None:
        for broker in self.brokers.values():
            broker.stop()
        bugs = [bug for broker in self.brokers.values() for bug in broker.bugs]
        assert not bugs, bugs


class InternalTopicRig(Rig):
    """It has the topic `t`, and an internal topic of this name with one partition."""

    internal_topic: str
    internal_config: ClassVar[dict[str, str]] = {}
    deleted_id = "ef" * 16
    """Of a topic that was deleted."""
    log_state = PartitionRegistration((0, 1), (0, 1), leader=0, leader_epoch=0, partition_epoch=0)

    def image(self, state: PartitionRegistration) -> MetadataImage:
        image = super().image(state)
        topic = TopicState(
            self.internal_topic,
            INTERNAL_TOPIC_ID,
            MappingProxyType(self.internal_config),
            internal=True,
            schemas=(schema_to_bytes(DEFAULT_SCHEMA),),
            partitions=(self.log_state,),
        )
        return dataclasses.replace(
            image,
            tombstones=Tombstones([self.deleted_id]),
            topics=MappingProxyType({**image.topics, INTERNAL_TOPIC_ID: topic}),
            topic_ids=MappingProxyType({**image.topic_ids, self.internal_topic: INTERNAL_TOPIC_ID}),
        )

    def move_log(self, *to: int, **changes: object) -> None:
        """Change the log's partition and apply the image at these brokers (none named: all)."""
        self.log_state = dataclasses.replace(self.log_state, **changes)  # type: ignore[arg-type]
        self.publish(*to)
