"""What simulated transactional clients share: appends in a transaction, and questions to its coordinator.

`client.transactions` and `client.transaction_group` without their threads: the same rules, one event after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.client.cluster_view import address_of
from spark_broker.client.coordinator import coordinator_of
from spark_broker.client.outgoing import Outcome, OutgoingBatch
from spark_broker.client.transaction_machine import TransactionMachine
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    OutOfOrderSequenceNumberError,
    RequestTimedOutError,
    SparkBrokerError,
    TransactionAbortableError,
)
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.frame import TRANSACTIONAL
from spark_broker.protocol.messages import CallRequest, Message
from spark_broker.testing.simulation.producer import MAX_ROWS, SenderShell
from spark_broker.testing.simulation.trace import TraceKind
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.transactional import Transactional
    from spark_broker.testing.simulation.world import World

CALL_TIMEOUT_MS = 700
FLUSH_LOOK_US = 10_000
PATIENCE_MS = 6_000
"""How long a client asks for an outcome before it gives up."""

DELIVERY_MS = 3_000
"""How long an append of a transaction is tried before the transaction is aborted instead."""

Answer = Message | SparkBrokerError


class TransactionalClient(SenderShell):
    """One process. It quits, or is killed; whoever started it learns that by `replaced`."""

    def __init__(self, world: World, transactional: Transactional, name: str, transactional_id: str) -> None:
        super().__init__(world, name, delivery_timeout_ms=DELIVERY_MS, transactional_id=transactional_id)
        self.stopped = False
        self.transactional_id = transactional_id
        self.transactional = transactional
        self.rng = transactional.rng
        self.state = TransactionMachine()
        self._has_failed: set[tuple[str, int]] = set()
        self._waiting: list[Callable[[], None]] = []  # for metadata

    def quit(self, reason: str) -> None:
        """The process is gone, with whatever it had open."""
        if self.alive:
            self.world.note(self.name, TraceKind.CLIENT, f"ends: {reason}")
            self.world.end_client(self)

    def replaced(self) -> None:
        """Another process takes over what this one was for, while this one may still run."""
        raise NotImplementedError

    def take_identity(self, identity: ProducerIdentity) -> None:
        """Begin an epoch: no batch of the last transaction is under way any more, and sequence numbers start again."""
        self.machine.begin_epoch(identity)
        self.state.identified()
        self._has_failed.clear()

    def append_one(self, transaction: int) -> bool:
        """Append a batch to any partition; False while none is known."""
        partitions = self.world.known_partitions(self.view)
        if not partitions:
            self.want_metadata()
            return False
        self.state.admit()
        topic_id, tp = self.rng.choice(partitions)
        number, rows = self.world.next_batch(), self.rng.randint(1, MAX_ROWS)
        operation = self.world.invoked(self.name, tp, number, rows, transaction)
        complete = partial(self._completed, operation, (topic_id, tp.partition))
        message = self.world.payloads.encoded(number, rows, TRANSACTIONAL)
        self.enqueue(OutgoingBatch(tp, topic_id, 0, rows, message, complete))
        return True

    def _completed(self, operation: int, key: tuple[str, int], outcome: Outcome) -> None:
        if not isinstance(outcome, SparkBrokerError):
            if outcome.base_offset is None:
                raise ViolationError("a retry gets its own offset", f"append {operation} was answered without one")
            self.world.append_acknowledged(operation, outcome.base_offset)
            return
        # Sequence numbers are missing only behind a failed batch: otherwise acknowledged batches were lost.
        if isinstance(outcome, OutOfOrderSequenceNumberError) and key not in self._has_failed:
            raise ViolationError("no acknowledged batch is forgotten", f"append {operation} of {self}: {outcome}")
        self._has_failed.add(key)
        self.world.history.failed(operation, outcome)
        self.world.note(self.name, TraceKind.CLIENT, f"append {operation} failed: {outcome}")
        refusal = self.state.append_failed(outcome)
        if refusal is not None:
            self.carry_out(self.machine.refuse(refusal))

    def discard(self) -> None:
        """Give up the batches that are not acknowledged. They may arrive all the same, and late."""
        error = TransactionAbortableError("the transaction was aborted before the append was acknowledged")
        self.carry_out(self.machine.refuse(error))

    def refreshed(self) -> bool:
        waiting, self._waiting = self._waiting, []
        for again in waiting:
            again()
        return bool(self._waiting)

    def look_again(self, again: Callable[[], None]) -> None:
        """Call `again` once newer metadata is there."""
        self._waiting.append(again)
        self.want_metadata()

    def ask(self, request: CallRequest, answered: Callable[[Answer], None], patience_ms: float = PATIENCE_MS) -> None:
        """Ask until there is an answer: `answered` is called with it, a final error, or RequestTimedOutError."""
        _Question(self, request, answered, self.now_ms + patience_ms).attempt()

    def look_later(self, look: Callable[[], None]) -> None:
        """Call `look` a little later. It counts as no event: in production a thread is woken instead."""
        scheduler = self.world.scheduler
        scheduler.push_quiet(scheduler.now_us + FLUSH_LOOK_US, self, look)

    def after(self, delay_ms: float, label: str, action: Callable[[], None]) -> None:
        self.world.scheduler.after(delay_ms, self, label, action)


class _Question:
    """A request to the coordinator, repeated until it is answered."""

    def __init__(
        self, client: TransactionalClient, request: CallRequest, answered: Callable[[Answer], None], deadline_ms: float
    ) -> None:
        self._client = client
        self._request = request
        self._answered = answered
        self._deadline_ms = deadline_ms

    def attempt(self) -> None:
        client = self._client
        if client.now_ms > self._deadline_ms:
            self._answered(RequestTimedOutError(f"{type(self._request).__name__} was not answered in time"))
            return
        try:
            broker, _ = coordinator_of(client.view, TRANSACTION_STATE_TOPIC, client.transactional_id)
        except CoordinatorNotAvailableError:
            self._again()
            return
        client.world.network.call(
            client,
            broker.host,
            address_of(broker),
            self._request,
            timeout_ms=CALL_TIMEOUT_MS,
            on_answer=self._told,
            on_error=self._told,
        )

    def _told(self, answer: object) -> None:
        if isinstance(answer, SparkBrokerError) and answer.retriable:
            self._again()
        else:
            self._answered(answer)  # type: ignore[arg-type]

    def _again(self) -> None:
        self._client.look_again(self.attempt)
