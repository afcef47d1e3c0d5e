"""A producer's transactions, one after the other: each is committed or aborted as a whole, over all its partitions.

The producer needs no list of partitions: their leaders add them to the transaction (KIP-890). The producer asks for a
commit only when every append of the transaction is acknowledged. When it got no outcome, it asks for the outcome again
before it does anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from spark_broker.client import given
from spark_broker.client.coordinator import CoordinatorClient
from spark_broker.client.group_offsets import to_messages
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.client.sender import Sender
from spark_broker.client.transaction_machine import Phase
from spark_broker.client.transaction_state import ProducerTransaction
from spark_broker.config import ProducerConfig
from spark_broker.core.producers import SEQUENCE_LIMIT
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import (
    ClosedError,
    InvalidConfigError,
    InvalidTxnStateError,
    OffsetOutOfRangeError,
    RequestTimedOutError,
    SparkBrokerError,
    TransactionAbortableError,
)
from spark_broker.interrupts import Turn, uninterrupted
from spark_broker.model import (
    CONSUMER_OFFSETS_TOPIC,
    NAME_MAX,
    TRANSACTION_STATE_TOPIC,
    GroupMetadata,
    OffsetAndMetadata,
    TopicPartition,
)
from spark_broker.protocol.messages import (
    EmptyResponse,
    EndTransactionRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
    TransactionalOffsetCommitRequest,
)

ABORTS_MAX = 3
"""How often an abort is begun that a signal handler interrupts."""

Offsets = Mapping[TopicPartition, "int | OffsetAndMetadata"]


def check_transactional(config: ProducerConfig) -> None:
    """Raises InvalidConfigError for settings that do not go with a transactional id."""
    if config.acks not in ("all", "-1"):
        raise InvalidConfigError(f"transactional.id needs acks=all, not {config.acks}")
    if not config.enable_idempotence:
        raise InvalidConfigError("transactional.id needs enable.idempotence")
    check_name("transactional.id", config.transactional_id)


def check_name(what: str, name: str) -> None:
    """Raises InvalidConfigError for an empty or too long name."""
    if not 0 < len(name) <= NAME_MAX:
        raise InvalidConfigError(f"{what} has {len(name)} characters; 1 to {NAME_MAX} are allowed")


@contextmanager
def transaction_block(
    begin: Callable[[], None], commit: Callable[[], None], abort: Callable[[], None]
) -> Iterator[None]:
    """See `Producer.transaction`. What a signal handler raises before or after the caller's block aborts, too."""
    begun = ended = False
    try:  # One block around all: it may come between any two steps.
        begin()
        begun = True
        yield
        ended = True
        try:
            commit()
        except TransactionAbortableError:
            abort()
            raise
    except BaseException as error:
        if (begun and not ended) or not isinstance(error, SparkBrokerError):
            _abort_after(error, abort)
        raise


def _abort_after(error: BaseException, abort: Callable[[], None]) -> None:
    for _ in range(ABORTS_MAX):
        try:
            abort()
        except SparkBrokerError as failure:
            error.add_note(f"The transaction could not be aborted: {failure}")
        except BaseException as interrupt:  # noqa: BLE001  (what a signal handler raised)
            error.add_note(f"The abort was interrupted: {interrupt!r}")  # It is the way to the end, so it goes on.
            continue
        return


class TransactionManager:
    """Begins and ends transactions. One thread at a time does so; the others wait. What a signal handler raises ends a
    wait, and leaves a transaction that can be ended.
    """

    def __init__(
        self,
        state: ProducerTransaction,
        metadata: ClusterMetadata,
        sender: Sender,
        hand_on: Callable[[Deadline], bool],
        config: ProducerConfig,
    ) -> None:
        self._state = state
        self._metadata = metadata
        self._sender = sender
        self._hand_on = hand_on  # hands `send`'s micro-batches to the sender
        self._config = config
        self._coordinator = CoordinatorClient(metadata, TRANSACTION_STATE_TOPIC, config.transactional_id)
        self._identity = ProducerIdentity(-1, -1)
        self._control = Turn()
        self._offsets_lock = threading.Lock()
        self._offset_sequences: dict[int, int] = {}  # next sequence number, by partition of __consumer_offsets
        self.committed = 0
        self.aborted = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a transaction that can be aborted, and whose end nobody has begun."""
        return self._state.phase in (Phase.OPEN, Phase.ABORTABLE)

    def init(self) -> None:
        """Take the transactional id over: fence older producers and abort what they left open."""
        with uninterrupted(), self._control:
            self._init()
            self._state.raise_failure()

    def begin(self) -> None:
        """Raises InvalidTxnStateError inside of a transaction, the errors of `init`, and the error of an outcome that
        was still open.
        """
        with uninterrupted(), self._control:
            self._init()
            if self._state.awaits_outcome:
                self._ask_outcome(self._config.delivery_timeout_ms)
            self._state.begin()

    def commit(self) -> None:
        """Wait for every append, then for the outcome. Raises as `Producer.commit_transaction` says."""
        with uninterrupted(), self._control:
            if self._state.awaits_outcome:
                committing = self._state.phase is Phase.COMMITTING
                self._ask_outcome(self._config.delivery_timeout_ms)
                if not committing:
                    raise InvalidTxnStateError("cannot commit: the transaction has been aborted")
                return
            self._state.close(committing=True)
            try:
                self._flush()
                self._state.end()
            finally:
                self._state.reopen()
            self._ask_outcome(self._config.delivery_timeout_ms)

    def abort(self) -> None:
        """Discard what is not acknowledged, and wait for the outcome."""
        with uninterrupted(), self._control:
            self._abort(Deadline.after_ms(self._config.delivery_timeout_ms))

    def close(self, timeout_ms: int) -> None:
        """Abort an open transaction. Otherwise readers would wait for its time-out. Raises what `abort` raises."""
        if not self.is_open:
            return
        deadline = Deadline.after_ms(timeout_ms)
        with uninterrupted():
            if not self._control.take(deadline.remaining_s):
                raise RequestTimedOutError("another thread is still ending the transaction")
            try:
                self._abort(deadline)
            finally:
                self._control.give_back()

    def send_offsets(self, offsets: Offsets, group_id: str | GroupMetadata) -> None:
        """Make the group's offsets a part of the transaction. Raises typed errors; then it can only be aborted."""
        member = given.group(group_id)
        check_name("group.id", member.group_id)
        positions = given.offsets(offsets)
        negative = next((tp for tp, position in positions.items() if position.offset < 0), None)
        if negative is not None:
            raise OffsetOutOfRangeError(f"{negative}: a commit of offset {positions[negative].offset}")
        with self._state, self._offsets_lock:
            if not positions:
                return
            try:
                self._send_offsets(positions, member, Deadline.after_ms(self._config.max_block_ms))
            except SparkBrokerError as error:
                self._state.append_failed(error)
                raise

    def _send_offsets(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], member: GroupMetadata, deadline: Deadline
    ) -> None:
        group = CoordinatorClient(self._metadata, CONSUMER_OFFSETS_TOPIC, member.group_id)
        partition = group.partition(deadline)
        sequence = self._offset_sequences.get(partition, 0)
        request = TransactionalOffsetCommitRequest(
            member.group_id,
            to_messages(offsets, member.topic_ids),
            self._config.transactional_id,
            *self._identity,
            sequence,
            member.member_id,
            member.member_epoch,
            member.instance_id,
        )
        group.ask(request, EmptyResponse, deadline, patient=False)
        self._offset_sequences[partition] = (sequence + 1) % SEQUENCE_LIMIT

    def _init(self) -> None:
        if self._state.phase is not Phase.UNINITIALIZED:
            return
        request = InitTransactionsRequest(self._config.transactional_id, self._config.transaction_timeout_ms)
        deadline = Deadline.after_ms(self._config.max_block_ms)
        self._take(self._coordinator.ask(request, InitProducerIdResponse, deadline))

    def _flush(self) -> None:
        """Every batch has its outcome by delivery.timeout.ms."""
        deadline = Deadline.after_ms(self._config.delivery_timeout_ms + 5000)
        try:
            self._state.await_quiet(deadline)
            if not (self._hand_on(deadline) and self._sender.drain(deadline)):
                raise RequestTimedOutError("not every append of the transaction was acknowledged in time")
            self._sender.check()
        except SparkBrokerError as error:
            self._state.append_failed(error)  # the next step raises it

    def _abort(self, deadline: Deadline) -> None:
        if self._state.awaits_outcome:
            committing = self._state.phase is Phase.COMMITTING
            self._ask_outcome(deadline.remaining_ms)
            if committing:
                raise InvalidTxnStateError("cannot abort: the transaction has been committed")
            return
        self._state.close(committing=False)
        try:
            self._discard(deadline.or_sooner(Deadline.after_ms(self._config.max_block_ms)))
            self._state.end()
        finally:
            self._state.reopen()
        self._ask_outcome(deadline.remaining_ms)

    def _discard(self, deadline: Deadline) -> None:
        self._sender.refuse(TransactionAbortableError("the transaction was aborted before the append was acknowledged"))
        self._state.await_quiet(deadline)
        if not (self._hand_on(deadline) and self._sender.drain(deadline)):
            raise RequestTimedOutError("the callback of an append has not returned")

    def _ask_outcome(self, timeout_ms: int) -> None:
        committing = self._state.phase is Phase.COMMITTING
        # No leader and no coordinator knows of a transaction in which nothing was appended.
        self._take(self._end(committing, timeout_ms) if self._state.touched else self._identity)
        self.committed += committing
        self.aborted += not committing

    def _end(self, committing: bool, timeout_ms: int) -> InitProducerIdResponse:
        """Returns the next transaction's identity. Translates the coordinator's error into the producer's."""
        request = EndTransactionRequest(self._config.transactional_id, *self._identity, committing)
        try:
            return self._coordinator.ask(request, InitProducerIdResponse, Deadline.after_ms(timeout_ms), patient=False)
        except ClosedError:
            raise
        except SparkBrokerError as error:
            refusal = self._state.refused(error)
            if refusal is error:
                raise
            raise refusal or _unknown(committing, timeout_ms, error) from error

    def _take(self, answer: InitProducerIdResponse | ProducerIdentity) -> None:
        """Sequence numbers begin at 0 again in every partition: a marker has begun the identity's epoch there."""
        with uninterrupted():
            self._identity = ProducerIdentity(answer.producer_id, answer.producer_epoch)
            self._offset_sequences.clear()
            self._sender.take_identity(self._identity)
            self._state.identified()


def _unknown(committing: bool, timeout_ms: int, error: SparkBrokerError) -> RequestTimedOutError:
    call, done = ("commit_transaction", "committed") if committing else ("abort_transaction", "aborted")
    return RequestTimedOutError(
        f"whether the transaction was {done} is not known: no coordinator said so within {timeout_ms} ms "
        f"({error.name}: {error.message}); {call}() asks for the same outcome again"
    )
