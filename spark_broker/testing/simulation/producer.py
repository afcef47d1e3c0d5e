"""Simulated producers: the production machine of a sender, with events in place of its threads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from spark_broker.client.leader_channel import LeaderChannel
from spark_broker.client.outgoing import Outcome, OutgoingBatch
from spark_broker.client.retry import Backoff
from spark_broker.client.sender_effects import (
    BatchDivided,
    CloseChannel,
    CompleteBatch,
    RefreshMetadata,
    RequestProducerIds,
    SendAppends,
    SenderEffect,
)
from spark_broker.client.sender_machine import SenderMachine
from spark_broker.config import ProducerConfig
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import SparkBrokerError
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import (
    AppendResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    MetadataRequest,
)
from spark_broker.testing.simulation.client import BACKOFF_MAX_MS, BACKOFF_MS, Client
from spark_broker.testing.simulation.network import End
from spark_broker.testing.simulation.plain_appends import PlainAppends

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World

REQUEST_TIMEOUT_MS = 800
MAX_ROWS = 3
BLOCKED_FACTOR = 4
"""How much longer a producer waits before its next append when it could not append."""


class SenderShell(Client):
    """`client.sender.Sender` without its threads: it carries out what the machine decides, and decides nothing."""

    def __init__(self, world: World, name: str, *, delivery_timeout_ms: int, transactional_id: str = "") -> None:
        super().__init__(world, name)
        config = ProducerConfig(
            transactional_id=transactional_id,
            max_in_flight_requests_per_connection=world.swarm.in_flight_max,
            delivery_timeout_ms=delivery_timeout_ms,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            retry_backoff_ms=BACKOFF_MS,
            retry_backoff_max_ms=BACKOFF_MAX_MS,
        )
        backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms, rng=world.client_rng)
        self.machine = SenderMachine(config, backoff)
        self._streams: dict[LeaderChannel, End] = {}
        self._refreshed_ms = -math.inf
        self._wakes_at_us = math.inf
        self._identities: list[ProducerIdentity] = []

    @property
    def open_batches(self) -> int:
        """Batches without an outcome."""
        return self.machine.open_batches

    def enqueue(self, batch: OutgoingBatch) -> None:
        """Take a batch."""
        self.carry_out(self.machine.enqueue(batch, self.view, self.now_ms))

    @property
    def now_ms(self) -> int:
        return self.world.scheduler.now_ms

    def learn(self, answer: object) -> None:
        super().learn(answer)
        self._refreshed_ms = self.now_ms

    def refreshed(self) -> bool:
        return False

    def carry_out(self, effects: list[SenderEffect]) -> None:
        """Do what the machine asks for."""
        for effect in effects:
            match effect:
                case BatchDivided():
                    pass  # The pieces complete it.
                case CompleteBatch(batch, outcome):
                    batch.complete(outcome)
                case SendAppends(channel):
                    self._send(channel)
                case CloseChannel(channel):
                    end = self._streams.pop(channel, None)
                    if end is not None:
                        end.close()
                case RefreshMetadata():
                    self.ask_any(MetadataRequest(), self._metadata_answered, self._refresh_failed)
                case RequestProducerIds(count):
                    self._identities = []
                    self._ask_identity(count)
        self._wake_by(self.machine.due_ms * 1000)

    def _send(self, channel: LeaderChannel) -> None:
        while (taken := self.machine.next_append(channel, self.now_ms)) is not None:
            request, batch = taken
            self._stream(channel).send((request, bytes(batch.message)))
            self.carry_out(self.machine.written(channel, batch, self.now_ms))

    def _stream(self, channel: LeaderChannel) -> End:
        end = self._streams.get(channel)
        if end is None:
            end = self.world.network.open(self, channel.address.host, channel.address, "append")
            self._streams[channel] = end
            end.on_message = lambda message: self._received(channel, message)
            end.on_break = lambda error: self._broke(channel, error)
        return end

    def _received(self, channel: LeaderChannel, message: object) -> None:
        if isinstance(message, SparkBrokerError):
            self._broke(channel, message)
            return
        response, _ = cast("tuple[AppendResponse, bytes]", message)
        self.carry_out(self.machine.answered(channel, response, self.now_ms))

    def _broke(self, channel: LeaderChannel, error: SparkBrokerError) -> None:
        self.carry_out(self.machine.broke(channel, error, self.now_ms))

    def _metadata_answered(self, answer: object) -> None:
        self.learn(answer)
        self.carry_out(self.machine.metadata_refreshed(self.view, self.now_ms))

    def _refresh_failed(self, error: SparkBrokerError) -> None:
        self.carry_out(self.machine.refresh_failed(error, self.now_ms))

    def _ask_identity(self, count: int) -> None:
        def came(answer: object) -> None:
            if isinstance(answer, InitProducerIdResponse):
                self._identities.append(ProducerIdentity(answer.producer_id, answer.producer_epoch))
            if len(self._identities) < count:
                self._ask_identity(count)
            else:
                self.carry_out(self.machine.producer_ids_came(self._identities, self.view, self.now_ms))

        self.ask_any(InitProducerIdRequest(), came, self._refresh_failed, REQUEST_TIMEOUT_MS)

    def _wake_by(self, due_us: float) -> None:
        if due_us < self._wakes_at_us:
            self._wakes_at_us = due_us
            self.world.scheduler.push_quiet(int(due_us), self, lambda: self._woken(due_us))

    def _woken(self, due_us: float) -> None:
        if due_us != self._wakes_at_us:
            return  # something was due sooner
        self._wakes_at_us = math.inf
        if self.machine.due_ms <= self.now_ms:
            self.carry_out(self.machine.tick(self.now_ms, self.now_ms - self._refreshed_ms))
        else:
            self._wake_by(self.machine.due_ms * 1000)


class SimProducer(SenderShell):
    """Appends from time to time: idempotent batches, and plain ones."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, delivery_timeout_ms=world.swarm.delivery_timeout_ms)
        self.stopped = False
        self._plain = PlainAppends(self)
        self._asking_identity = False

    def start(self) -> None:
        """Learn of the cluster, then append from time to time."""
        self.want_metadata()
        self._produce_later()

    def _produce_later(self, *, blocked: bool = False) -> None:
        interval_ms = self.world.swarm.produce_interval_ms * (0.2 + 1.6 * self.world.client_rng.random())
        interval_ms *= BLOCKED_FACTOR if blocked else 1.0
        self.world.scheduler.after(interval_ms, self, "append", self._produce)

    def _produce(self) -> None:
        if not self.stopped:
            self._produce_later(blocked=not self._append_one())

    def _append_one(self) -> bool:
        """Append a batch; returns whether that was possible."""
        rng, world = self.world.client_rng, self.world
        partitions = world.known_partitions(self.view)
        if not partitions:
            self.want_metadata()
            return False
        topic_id, tp = rng.choice(partitions)
        number, rows = world.next_batch(), rng.randint(1, MAX_ROWS)
        if rng.random() < world.swarm.plain_share:
            if self._plain.append(self.view, topic_id, tp, number, rows):
                return True
            self.want_metadata()
            return False
        if self.machine.identity is None:
            self._want_identity()
            return False
        if self.open_batches >= world.swarm.idempotent_open_max:
            return False
        self._append(topic_id, tp, number, rows)
        return True

    def _append(self, topic_id: str, tp: TopicPartition, number: int, rows: int) -> None:
        operation = self.world.invoked(self.name, tp, number, rows)

        def complete(outcome: Outcome) -> None:
            self.world.append_outcome(operation, outcome)

        self.enqueue(OutgoingBatch(tp, topic_id, 0, rows, self.world.payloads.encoded(number, rows), complete))

    def _want_identity(self) -> None:
        """Ask for a producer id before the first append, as `Sender.prepare` does."""
        if not self._asking_identity:
            self._asking_identity = True
            self.ask_any(
                InitProducerIdRequest(), self._identified, lambda _: self._identified(None), REQUEST_TIMEOUT_MS
            )

    def _identified(self, answer: object) -> None:
        self._asking_identity = False
        if isinstance(answer, InitProducerIdResponse) and self.machine.identity is None:
            self.machine.identity = ProducerIdentity(answer.producer_id, answer.producer_epoch)
