"""The transactional part of a random run: two producers, one coordinator, and messages of theirs that come late."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from spark_broker.errors import (
    InvalidProducerEpochError,
    InvalidTxnStateError,
    NotEnoughReplicasError,
    SparkBrokerError,
)
from tests.unit.core.checker import Checker, ViolationError, require
from tests.unit.core.clients import Client, rows_of
from tests.unit.core.harness import Cluster, Producer
from tests.unit.core.model_coordinator import ModelCoordinator

PRODUCER_IDS = (50, 51)
LATE_MAX = 30
HEAL_ROUNDS_MAX = 20


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The coordinator's confirmation on its way to the leader that asked."""

    broker: int
    run: int
    leader_epoch: int
    producer: Producer
    asked_ms: int


@dataclass(slots=True)
class TransactionSteps:
    """Each public method is a step of the schedule."""

    rng: random.Random
    cluster: Cluster
    numbers: Callable[[], int]
    coordinator: ModelCoordinator = field(default_factory=ModelCoordinator)
    clients: dict[int, Client] = field(default_factory=dict)
    confirmations: list[Confirmation] = field(default_factory=list)
    late: list[tuple[int, Producer]] = field(default_factory=list)  # values that were sent, with their producers

    def __post_init__(self) -> None:
        for producer_id in PRODUCER_IDS:
            self._begin(producer_id, 0)

    def _begin(self, producer_id: int, epoch: int) -> None:
        self.clients[producer_id] = Client(self.numbers, producer_id, epoch, transactional=True)

    def _leader(self) -> int | None:
        """A leader, mostly the one that the controller elected."""
        leaders = self.cluster.leaders()
        current = self.cluster.controller.assignment.leader
        return current if current in leaders and self.rng.random() < 0.8 else self.rng.choice(leaders or [None])

    def write(self) -> None:
        """A new or a repeated batch of a transaction."""
        if (leader := self._leader()) is not None:
            self._write(self.clients[self.rng.choice(PRODUCER_IDS)], leader)

    def _write(self, client: Client, leader: int) -> None:
        is_open = self._is_open(client)
        try:
            sent = client.send(self.cluster, leader)
        except (InvalidProducerEpochError, InvalidTxnStateError) as error:
            current = self.cluster.replica(leader).assignment.leader_epoch
            if is_open and current == self.cluster.controller.assignment.leader_epoch:
                raise ViolationError(f"an open transaction was refused: {error}") from error
            self._go_on(client)
            return
        if sent is None:
            return
        outcome, producer = sent
        self.late = [*self.late, (outcome.value, producer)][-LATE_MAX:]
        if outcome.awaits:
            self._ask(leader, producer)

    def _is_open(self, client: Client) -> bool:
        transaction = self.coordinator.transaction(client.id)
        return transaction.epoch == client.epoch and transaction.ending is None

    def _ask(self, leader: int, producer: Producer) -> None:
        """The answer comes at once, or later, or never."""
        if not self.coordinator.add(producer.id, producer.epoch):
            return
        confirmation = Confirmation(
            leader,
            self.cluster.nodes[leader].run,
            self.cluster.replica(leader).assignment.leader_epoch,
            producer,
            self.cluster.now_ms,
        )
        if self.rng.random() < 0.7:
            self._confirm(confirmation)
        else:
            self.confirmations = [*self.confirmations, confirmation][-LATE_MAX:]

    def _confirm(self, one: Confirmation) -> None:
        node = self.cluster.nodes[one.broker]
        if node.replica is not None and node.run == one.run:
            node.replica.transaction_confirmed(one.leader_epoch, one.producer.id, one.producer.epoch, one.asked_ms)

    def confirm(self) -> None:
        """The coordinator's answer arrives, perhaps long after its transaction has ended."""
        if self.confirmations:
            self._confirm(self.confirmations.pop(self.rng.randrange(len(self.confirmations))))

    def finish(self) -> None:
        """A producer aborts, or commits if everything has been acknowledged."""
        client = self.clients[self.rng.choice(PRODUCER_IDS)]
        client.collect()
        if client.next_sequence:
            self._end(client, committed=not client.open and self.rng.random() < 0.7)
        self._go_on(client)

    def _end(self, client: Client, *, committed: bool) -> None:
        self.coordinator.end(client.id, client.epoch, committed=committed)

    def _go_on(self, client: Client) -> None:
        """Begin the next epoch, once the coordinator has finished this one."""
        self.coordinator.ending()
        transaction = self.coordinator.transaction(client.id)
        if transaction.epoch > client.epoch:
            self._begin(client.id, transaction.epoch)

    def time_out(self) -> None:
        """The coordinator aborts; the producer does not know."""
        client = self.clients[self.rng.choice(PRODUCER_IDS)]
        self.coordinator.end(client.id, self.coordinator.transaction(client.id).epoch, committed=False)

    def write_late(self) -> None:
        """A batch that was sent before arrives again."""
        if self.late and (leader := self._leader()) is not None:
            value, producer = self.rng.choice(self.late)
            try:
                outcome = self.cluster.append(leader, value, rows=rows_of(value), producer=producer)
            except SparkBrokerError:
                return
            if outcome.awaits:
                self._ask(leader, producer)

    def mark(self) -> None:
        """The coordinator writes a marker, or writes it again."""
        ending = self.coordinator.ending()
        if ending and (leader := self._leader()) is not None:
            self._mark(self.rng.choice(ending), leader)

    def _mark(self, producer_id: int, leader: int) -> None:
        try:
            self.coordinator.write_marker(self.cluster, leader, producer_id, self.numbers())
        except NotEnoughReplicasError:
            return
        except InvalidProducerEpochError as error:
            raise ViolationError(f"the marker of an open transaction was refused: {error}") from error

    def mark_late(self) -> None:
        """A marker arrives again long after its transaction has ended."""
        if self.coordinator.sent and (leader := self._leader()) is not None:
            marker = self.rng.choice(self.coordinator.sent)
            try:
                self.cluster.append_marker(
                    leader, self.numbers(), marker.producer_id, marker.producer_epoch, committed=marker.committed
                )
            except SparkBrokerError:
                return

    def heal(self, checker: Checker) -> None:
        """Every transaction ends, and every marker is written: nothing hangs."""
        for client in self.clients.values():
            client.collect()
            self._end(client, committed=not client.open and client.next_sequence > 0)
        for _ in range(HEAL_ROUNDS_MAX):
            ending = self.coordinator.ending()
            if not ending:
                break
            for producer_id in ending:
                self._mark(producer_id, self.cluster.controller.assignment.leader)
            self.cluster.settle()
            checker.check(self.cluster)
        require(not self.coordinator.ending(), "a marker could not be written")
        for broker in self.cluster.nodes:
            replica = self.cluster.replica(broker)
            stable = replica.last_stable_offset
            require(stable == replica.log_end_offset, f"broker {broker}: a transaction hangs at {stable}")
