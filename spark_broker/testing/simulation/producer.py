"""Simulated producers: the production queue of a partition, with events for the sender's threads.

Idempotent batches are sent again until they are acknowledged, refused for good or out of time. Plain batches are sent
once with acks 0, 1 or all; only what is acknowledged with acks=all is promised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from spark_broker.client.outgoing import Identity, Outcome, OutgoingBatch
from spark_broker.client.partition_queue import Completion, PartitionQueue
from spark_broker.errors import (
    DuplicateSequenceNumberError,
    NetworkError,
    RequestTimedOutError,
    SparkBrokerError,
    error_from_code,
)
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import (
    ACKS_ALL,
    AppendRequest,
    AppendResponse,
    InitProducerId,
    ProducerIdentity,
)
from spark_broker.testing.simulation.batches import encoded, values_of
from spark_broker.testing.simulation.client import BACKOFF_MS, Client
from spark_broker.testing.simulation.network import Address, End
from spark_broker.testing.simulation.scheduler import Timer

if TYPE_CHECKING:
    from spark_broker.client.append_channel import AppendChannel
    from spark_broker.testing.simulation.world import World

REQUEST_TIMEOUT_MS = 800
MAX_ROWS = 3
BLOCKED_FACTOR = 4
"""How much seldomer a producer tries that had to hold back."""


@dataclass(slots=True, eq=False)
class _Channel:
    """The stream to one leader, and what it owes an answer to."""

    address: Address
    end: End
    timer: Timer
    in_flight: dict[int, tuple[PartitionQueue, OutgoingBatch]] = field(default_factory=dict)
    plain: dict[int, int] = field(default_factory=dict)  # correlation id to operation


class SimProducer(Client):
    """`client.sender.Sender` without its threads and locks."""

    transactional_id = ""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.stopped = False
        self._queues: dict[tuple[str, int], PartitionQueue] = {}
        self._channels: dict[int, _Channel] = {}
        self._identity: Identity | None = None
        self._asking_identity = False
        self._correlation_id = 0
        self._plain_count = 0

    @property
    def open_batches(self) -> int:
        """Batches without an outcome."""
        return sum(len(queue.unacked) for queue in self._queues.values())

    def start(self) -> None:
        """Learn of the cluster, then append from time to time."""
        self.want_metadata()
        self._produce_later()

    def _produce_later(self, *, blocked: bool = False) -> None:
        interval_ms = self.world.swarm.produce_interval_ms * (0.2 + 1.6 * self.world.client_rng.random())
        interval_ms *= BLOCKED_FACTOR if blocked else 1.0
        self.world.scheduler.after(interval_ms, self, "append", self._produce)

    def _produce(self) -> None:
        appended = not self.stopped and self._append_one()
        self._expire()
        if not self.stopped or self.open_batches:
            self._produce_later(blocked=not appended)

    def _append_one(self) -> bool:
        """Append a batch; whether that was possible."""
        rng, world = self.world.client_rng, self.world
        partitions = world.known_partitions(self.image)
        if not partitions:
            self.want_metadata()
            return False
        topic_id, tp = rng.choice(partitions)
        number, rows = world.next_batch(), rng.randint(1, MAX_ROWS)
        if rng.random() < world.swarm.plain_share:
            return self._append_plainly(topic_id, tp, number, rows)
        if self._identity is None:
            self._want_identity()
            return False
        if self.open_batches >= world.swarm.idempotent_open_max:
            return False
        self._append(topic_id, tp, number, rows)
        return True

    # ---- idempotent appends ------------------------------------------------------------------------------------

    def _append(self, topic_id: str, tp: TopicPartition, number: int, rows: int) -> None:
        operation = self.world.history.invoked(self.name, tp, values_of(number, rows))

        def complete(outcome: Outcome) -> None:
            self.world.append_outcome(operation, outcome)

        batch = OutgoingBatch(tp, topic_id, 0, rows, encoded(number, rows), complete)
        batch.deadline_s = self._now_s + self.world.swarm.delivery_timeout_ms / 1000
        key = (topic_id, tp.partition)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = PartitionQueue(tp, topic_id, self._identity, numbered=True)
        queue.unacked.append(batch)
        if not queue.recovering:
            self._route(queue)

    @property
    def _now_s(self) -> float:
        return self.world.scheduler.now_us / 1e6

    def _route(self, queue: PartitionQueue) -> None:
        channel = self._channel_of(queue)
        if channel is None:
            queue.stop()
            self._settle(queue)
        else:
            self._send_all(queue, channel)

    def _channel_of(self, queue: PartitionQueue) -> _Channel | None:
        if queue.in_flight:
            routed = cast("_Channel | None", queue.channel)
            if routed in self._channels.values():
                return routed
        found = self.leader(queue.topic_id, queue.topic_partition.partition)
        if found is None:
            return None
        broker_id, queue.leader_epoch, address = found
        channel = self._open_channel(broker_id, address)
        queue.channel = cast("AppendChannel", channel)  # the queue only keeps it
        return channel

    def _open_channel(self, broker_id: int, address: Address) -> _Channel:
        channel = self._channels.get(broker_id)
        if channel is None:
            end = self.world.network.open(self, address[0], address, "append")
            timer = Timer(self.world.scheduler, self, "appends timed out", lambda: self._timed_out(broker_id, opened))
            channel = opened = self._channels[broker_id] = _Channel(address, end, timer)
            end.on_message = lambda message: self._received(broker_id, opened, message)
            end.on_break = lambda error: self._broke(broker_id, opened, error)
        return channel

    def _send_all(self, queue: PartitionQueue, channel: _Channel) -> None:
        while (batch := queue.sendable(self.world.swarm.in_flight_max)) is not None:
            queue.sent(batch)
            self._correlation_id += 1
            batch.correlation_id = self._correlation_id
            channel.in_flight[batch.correlation_id] = (queue, batch)
            request = AppendRequest(
                correlation_id=batch.correlation_id,
                topic_id=batch.topic_id,
                partition=batch.topic_partition.partition,
                leader_epoch=queue.leader_epoch,
                acks=ACKS_ALL,
                timeout_ms=REQUEST_TIMEOUT_MS,
                transactional_id=self.transactional_id,
            )
            channel.end.send((request, bytes(batch.head) + batch.body))
            channel.timer.set(REQUEST_TIMEOUT_MS * 1.5)

    # ---- answers -----------------------------------------------------------------------------------------------

    def _received(self, broker_id: int, channel: _Channel, message: object) -> None:
        if isinstance(message, SparkBrokerError):
            channel.end.close()
            self._broke(broker_id, channel, message)
            return
        response, _ = cast("tuple[AppendResponse, bytes]", message)
        self._answered(channel, response)

    def _answered(self, channel: _Channel, response: AppendResponse) -> None:
        if (operation := channel.plain.pop(response.correlation_id, None)) is not None:
            self._plain_answered(operation, response)
            return
        queue, batch = channel.in_flight.pop(response.correlation_id, (None, None))
        if queue is None or batch is None:  # expired meanwhile
            return
        batch.correlation_id = -1
        if response.error_code in (0, DuplicateSequenceNumberError.code):
            queue.acknowledged(batch)
            offset = response.base_offset if not response.error_code else -1
            self._complete([(batch, batch.metadata(offset))])
            if queue.recovering:
                self._settle(queue)
            else:
                self._send_all(queue, channel)
        else:
            queue.failed(batch, error_from_code(response.error_code, response.error_message))
            self._settle(queue)

    def _broke(self, broker_id: int, channel: _Channel, error: SparkBrokerError) -> None:
        """Whether what is in flight was stored is not known: it is sent again, to whoever leads then."""
        if self._channels.get(broker_id) is not channel:
            return
        del self._channels[broker_id]
        touched: dict[PartitionQueue, None] = {}
        for queue, batch in channel.in_flight.values():
            batch.correlation_id = -1
            queue.failed(batch, error if error.retriable else NetworkError(str(error)))
            touched[queue] = None
        channel.in_flight.clear()
        for operation in channel.plain.values():
            self.world.history.failed(operation, error)
        channel.plain.clear()
        for queue in touched:
            self._settle(queue)

    def _timed_out(self, broker_id: int, channel: _Channel) -> None:
        if channel.in_flight or channel.plain:
            channel.end.close()
            self._broke(broker_id, channel, RequestTimedOutError("the leader did not answer an append in time"))

    def _settle(self, queue: PartitionQueue) -> None:
        if not queue.recovering or queue.in_flight or queue.settled:
            return
        completions = queue.settle()
        queue.retry_at_s = self._now_s + BACKOFF_MS / 1000
        queue.failures += 1
        self.want_metadata()
        self._complete(completions)

    def _complete(self, completions: list[Completion]) -> None:
        for batch, outcome in completions:
            batch.complete(outcome)

    def _expire(self) -> None:
        for queue in list(self._queues.values()):
            for batch, in_flight in queue.expire(self._now_s):
                if in_flight and queue.channel is not None:
                    queue.channel.in_flight.pop(batch.correlation_id, None)
                batch.complete(RequestTimedOutError("not acknowledged within delivery.timeout.ms"))
            self._settle(queue)

    # ---- recovery ----------------------------------------------------------------------------------------------

    def refreshed(self) -> bool:
        for broker_id, channel in list(self._channels.items()):
            broker = self.image.brokers.get(broker_id)
            if broker is None or broker.fenced or (broker.host, broker.port) != channel.address:
                channel.end.close()
                self._broke(broker_id, channel, NetworkError(f"broker {broker_id} is fenced or has moved"))
        if self._identity is None or any(queue.recovering and queue.needs_identity for queue in self._queues.values()):
            self._want_identity()
        for queue in list(self._queues.values()):
            self._resume(queue)
        return any(queue.recovering for queue in self._queues.values())

    def _resume(self, queue: PartitionQueue) -> None:
        state = self.image.partition(queue.topic_id, queue.topic_partition.partition)
        elected = state is not None and state.leader_epoch > queue.failed_epoch
        ready = queue.recovering and queue.settled and not queue.needs_identity
        if not ready or not (elected or self._now_s >= queue.retry_at_s):
            return
        channel = self._channel_of(queue)
        if channel is not None:
            queue.recovering = False
            self._send_all(queue, channel)

    def _want_identity(self) -> None:
        if self._asking_identity:
            return
        self._asking_identity = True
        machine = self.world.client_rng.choice(self.world.machines)
        self.world.network.call(
            self,
            machine.host,
            machine.address,
            InitProducerId(),
            timeout_ms=REQUEST_TIMEOUT_MS,
            on_answer=self._identified,
            on_error=lambda _: self._not_identified(),
        )

    def _not_identified(self) -> None:
        self._asking_identity = False
        self.want_metadata()

    def _identified(self, answer: object) -> None:
        self._asking_identity = False
        if not isinstance(answer, ProducerIdentity):
            return
        self._identity = Identity(answer.producer_id, answer.producer_epoch)
        for queue in self._queues.values():
            if queue.recovering and queue.needs_identity:
                queue.take_identity(self._identity)
        self.want_metadata()

    # ---- plain appends -----------------------------------------------------------------------------------------

    def _append_plainly(self, topic_id: str, tp: TopicPartition, number: int, rows: int) -> bool:
        """Sent once, whatever becomes of it. acks 0 and 1 promise nothing, so their outcome is "failed" at once."""
        found = self.leader(topic_id, tp.partition)
        if found is None:
            self.want_metadata()
            return False
        self._plain_count += 1
        operation = self.world.history.invoked(f"{self.name}/{self._plain_count}", tp, values_of(number, rows))
        broker_id, leader_epoch, address = found
        channel = self._open_channel(broker_id, address)
        self._correlation_id += 1
        acks = self.world.client_rng.choice([0, 1, 1, ACKS_ALL])
        if acks == ACKS_ALL:
            channel.plain[self._correlation_id] = operation
        else:
            self.world.history.failed(operation, NetworkError(f"acks={acks} promises nothing"))
        request = AppendRequest(self._correlation_id, topic_id, tp.partition, leader_epoch, acks, REQUEST_TIMEOUT_MS)
        channel.end.send((request, encoded(number, rows)))
        channel.timer.set(REQUEST_TIMEOUT_MS * 1.5)
        return True

    def _plain_answered(self, operation: int, response: AppendResponse) -> None:
        if response.error_code:
            self.world.history.failed(operation, error_from_code(response.error_code, response.error_message))
            self.want_metadata()
        else:
            self.world.append_acknowledged(operation, response.base_offset)
