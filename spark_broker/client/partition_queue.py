"""The batches of one partition that are not acknowledged yet, in the order in which they are stored.

    state     event                                               next
    --------  --------------------------------------------------  ------------------------------------------------------
    SENDING   an attempt failed, or there is no leader: `stop`    DRAINING: nothing is sent, answers come in
    DRAINING  every answer is in: `settle`                        SETTLED: it is decided what each batch's error means
    SETTLED   there is a leader, and a producer id: `resume`      SENDING: again from the first unacknowledged, in order

While SENDING, a prefix of `unacked` (`in_flight` batches) is sent, and the rest waits its turn.

Sequence numbers say what is certain. A broker that answers OUT_OF_ORDER_SEQUENCE_NUMBER to the first unacknowledged
batch does not have it: numbers are missing before it. If they are those of a batch of ours that failed, this one gets a
new number under a new producer id (KIP-360); otherwise acknowledged batches were lost, and the user must get the error.
So it must if earlier attempts may have stored both of them: a replica with what was not committed then may lead again.
A batch of `send` that is larger than the topic takes, by a limit that is newer than the batch, was certainly refused
(unless an earlier attempt may have stored it). It is divided, and its pieces and what follows get new numbers under a
new producer id: no batch of the old one with a later number can ever be stored. In a transaction they get the same
numbers again, if every attempt that used these was answered: no copy of them is under way then.

Otherwise, in a transaction, no batch gets a new number: a batch that failed ends the transaction, and what follows it
is aborted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum

from spark_broker.client.leader_channel import LeaderChannel
from spark_broker.client.outgoing import OutgoingBatch
from spark_broker.client.retry import UNKNOWN_TOPIC_GRACE_MS
from spark_broker.core.producers import REMEMBERED_BATCHES, SEQUENCE_LIMIT
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import (
    InconsistentTopicIdError,
    InvariantError,
    MessageTooLargeError,
    NotEnoughReplicasError,
    OutOfOrderSequenceNumberError,
    RecordListTooLargeError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
    UnknownProducerIdError,
    UnknownTopicOrPartitionError,
    invariant,
)
from spark_broker.model import TopicPartition

TOO_LARGE = (MessageTooLargeError, RecordListTooLargeError)

CERTAIN_REFUSALS = (
    *TOO_LARGE,
    NotEnoughReplicasError,
    OutOfOrderSequenceNumberError,
    ThrottlingQuotaExceededError,
    UnknownProducerIdError,
)
"""An attempt that is answered so has stored nothing."""

MAY_BE_STORED = "an earlier attempt may have stored it"

WRITE_AGAIN = "Write everything again: what was written to the deleted topic is gone with it."


class QueueState(Enum):
    """See the table at the top."""

    SENDING = "sending"
    DRAINING = "draining"
    SETTLED = "settled"


class QueueEvent(Enum):
    """See the table at the top."""

    STOP = "stop"
    SETTLE = "settle"
    RESUME = "resume"


TRANSITIONS: Mapping[tuple[QueueState, QueueEvent], QueueState] = {
    (QueueState.SENDING, QueueEvent.STOP): QueueState.DRAINING,
    (QueueState.DRAINING, QueueEvent.STOP): QueueState.DRAINING,
    (QueueState.DRAINING, QueueEvent.SETTLE): QueueState.SETTLED,
    (QueueState.SETTLED, QueueEvent.STOP): QueueState.SETTLED,
    (QueueState.SETTLED, QueueEvent.RESUME): QueueState.SENDING,
}


class PartitionQueue:
    """A part of the sender's machine. Times are in ms.

    Invariants: 0 <= in_flight <= len(unacked). While SENDING, `unacked[:in_flight]` are in flight; once SETTLED, no
    batch is. While `ready`, the queue is in the line of `channel`, once; it is in no other line.
    """

    def __init__(
        self,
        topic_partition: TopicPartition,
        topic_id: str,
        identity: ProducerIdentity | None,
        *,
        numbered: bool,
        renumbers: bool = True,
    ) -> None:
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.state = QueueState.SENDING
        self.unacked: deque[OutgoingBatch] = deque()
        self.in_flight = 0
        self.channel: LeaderChannel | None = None
        self.leader_epoch = -1
        self.ready = False  # whether it waits in its channel's line
        self.failed_epoch = -1
        self.failures = 0
        self.retry_at_ms = 0
        self.missing_since_ms = -1
        self.identity = identity
        self._numbered = numbered
        self._renumbers = renumbers
        self._next_sequence = 0
        self._gaps: set[ProducerIdentity] = set()
        """Identities under which sequence numbers are missing. Only identities of unacknowledged batches are kept."""
        self._doubtful: set[ProducerIdentity] = set()
        """Those of them where some log may have these numbers, and later ones."""

    @property
    def recovering(self) -> bool:
        """Whether an attempt failed and nothing is sent until the partition has recovered."""
        return self.state is not QueueState.SENDING

    @property
    def needs_identity(self) -> bool:
        return self._numbered and self.identity is None

    def sendable(self, max_in_flight: int) -> OutgoingBatch | None:
        """The next batch, if it may be sent now."""
        if self.recovering or self.in_flight >= max_in_flight or self.in_flight >= len(self.unacked):
            return None
        batch = self.unacked[self.in_flight]
        if not self._numbered or batch.identity is not None:
            return batch
        # A number under the new identity says nothing about batches of the old one. They go first, or else the order is
        # lost.
        settled = all(self.unacked[i].identity == self.identity for i in range(self.in_flight))
        return batch if self.identity is not None and settled and self._is_remembered() else None

    def _is_remembered(self) -> bool:
        """Whether a partition that has stored the next number still knows the oldest batch that may be sent again."""
        oldest = self.unacked[0]
        return not self.in_flight or (self._next_sequence - oldest.sequence) % SEQUENCE_LIMIT < REMEMBERED_BATCHES

    def sent(self, batch: OutgoingBatch) -> None:
        """The batch is about to be written. It gets a number if it has none."""
        if self._numbered and batch.identity is None and self.identity is not None:
            batch.number(self.identity, self._next_sequence)
            self._next_sequence = (self._next_sequence + 1) % SEQUENCE_LIMIT
        self.in_flight += 1

    def acknowledged(self, batch: OutgoingBatch) -> None:
        self._answered()
        self.unacked.remove(batch)
        self.failures = 0

    def failed(self, batch: OutgoingBatch, error: SparkBrokerError) -> None:
        """An attempt failed, for good or not. `settle` decides once all answers are in."""
        self._answered()
        batch.error = batch.last_error = error
        batch.uncertain |= not isinstance(error, CERTAIN_REFUSALS)
        self.stop()

    def stop(self) -> None:
        """Send nothing until the partition is settled and resumed."""
        if self.state is QueueState.SENDING:
            self.failed_epoch = self.leader_epoch
        self._move(QueueEvent.STOP)

    def resume(self) -> None:
        """Send again, to the leader that is known now."""
        self._move(QueueEvent.RESUME)

    def expire(self, now_ms: int) -> list[tuple[OutgoingBatch, bool]]:
        """Take out the batches whose delivery time-out has passed. Says of each whether it is in flight."""
        expired = []
        while self.unacked and self.unacked[0].deadline_ms <= now_ms:
            batch = self.unacked.popleft()
            in_flight = batch.correlation_id >= 0
            if in_flight:
                self._answered()
            if batch.identity is not None:
                self._leave_gap(batch)
            self.stop()
            expired.append((batch, in_flight))
        return expired

    def settle(self) -> list[tuple[OutgoingBatch, SparkBrokerError]]:
        """Decide what the errors of the last round mean. Takes out the batches that failed for good, and keeps the
        others.
        """
        self._move(QueueEvent.SETTLE)
        invariant(self.in_flight == 0, "a partition is settled when every answer is in")
        failed: list[tuple[OutgoingBatch, SparkBrokerError]] = []
        kept: deque[OutgoingBatch] = deque()
        for batch in self.unacked:
            error, batch.error = batch.error, None
            if error is not None and self._may_divide(batch, error):
                batch.too_large = True
                self._renumber_from(batch)
                kept.append(batch)
                continue
            verdict = None if error is None else self._verdict(batch, error, first=not kept)
            if verdict is None:
                kept.append(batch)
            else:
                self._leave_gap(batch)
                failed.append((batch, verdict))
        self.unacked = kept
        identities = {batch.identity for batch in kept if batch.identity is not None}
        self._gaps &= identities
        self._doubtful &= identities
        return failed

    def divide(self, limit_bytes: int) -> list[tuple[OutgoingBatch, list[OutgoingBatch]]]:
        """Put pieces in the places of the batches that were too large. Returns those with their pieces."""
        done: list[tuple[OutgoingBatch, list[OutgoingBatch]]] = []
        unacked: deque[OutgoingBatch] = deque()
        for batch in self.unacked:
            if batch.too_large and batch.divide is not None:
                pieces = batch.divide(batch, limit_bytes)
                for piece in pieces:
                    piece.deadline_ms, piece.last_error = batch.deadline_ms, batch.last_error
                done.append((batch, pieces))
                unacked.extend(pieces)
            else:
                unacked.append(batch)
        if done:
            self.unacked = unacked
        return done

    def _may_divide(self, batch: OutgoingBatch, error: SparkBrokerError) -> bool:
        """Whether it was certainly refused for its size, has more than a row, and what follows may be renumbered."""
        if not isinstance(error, TOO_LARGE) or batch.divide is None or batch.rows == 1 or batch.uncertain:
            return False
        return self._renumbers or not any(later.uncertain for later in self._from(batch))

    def _from(self, batch: OutgoingBatch) -> list[OutgoingBatch]:
        """The batch, and those after it."""
        return list(self.unacked)[self.unacked.index(batch) :]

    def _renumber_from(self, batch: OutgoingBatch) -> None:
        """A batch was refused, so none that follows under its identity can be stored."""
        identity = batch.identity
        if identity is None:
            return
        if self._renumbers:
            self._leave_gap(batch)
        else:
            self._next_sequence = batch.sequence
        for later in self._from(batch):
            if later.identity == identity:
                later.forget_number()

    def fail_all(self) -> list[OutgoingBatch]:
        """Take out every batch, in flight or not."""
        batches = list(self.unacked)
        self.unacked.clear()
        self.in_flight = 0
        return batches

    def gone(self, topic_id: str | None, now_ms: int) -> SparkBrokerError | None:
        """The error of a topic that has been missing, or another one, for longer than a broker may lag behind.

        `topic_id`: the id of the topic that has the name now; None: there is none.
        """
        if topic_id == self.topic_id:
            self.missing_since_ms = -1
            return None
        if self.missing_since_ms < 0:
            self.missing_since_ms = now_ms
        if now_ms - self.missing_since_ms < UNKNOWN_TOPIC_GRACE_MS:
            return None
        return topic_gone(self.topic_partition.topic, created_again=topic_id is not None)

    def _verdict(self, batch: OutgoingBatch, error: SparkBrokerError, *, first: bool) -> SparkBrokerError | None:
        """The error that ends the batch. None: it is sent again."""
        if isinstance(error, TOO_LARGE):
            return _undivided(batch, error)
        if not isinstance(error, OutOfOrderSequenceNumberError | UnknownProducerIdError):
            return None if error.retriable else error
        if not first:
            return None  # it follows a batch that is sent again
        if not self._renumbers:
            return error
        # UNKNOWN_PRODUCER_ID: the log has nothing of this producer, so it does not have this batch.
        if not isinstance(error, UnknownProducerIdError) and batch.identity not in self._gaps:
            return error
        if batch.uncertain and batch.identity in self._doubtful:
            return type(error)(f"{error.message}; {MAY_BE_STORED}", hint=_LOOK_FIRST)
        self._renumber(batch)
        return None

    def _renumber(self, batch: OutgoingBatch) -> None:
        self._leave_gap(batch)
        batch.forget_number()

    def _leave_gap(self, batch: OutgoingBatch) -> None:
        """Sequence numbers after this batch's cannot be stored under its identity any more."""
        if batch.identity is None or not self._renumbers:
            return
        self._gaps.add(batch.identity)
        if batch.uncertain or batch.correlation_id >= 0:
            self._doubtful.add(batch.identity)
        if self.identity == batch.identity:
            self.identity = None

    def take_identity(self, identity: ProducerIdentity) -> None:
        self.identity = identity
        self._next_sequence = 0

    def _move(self, event: QueueEvent) -> None:
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise InvariantError(f"{self.topic_partition}: {event.value} while it is {self.state.value}")
        self.state = after

    def _answered(self) -> None:
        self.in_flight -= 1
        invariant(self.in_flight >= 0, "an answer belongs to a batch in flight")


def _undivided(batch: OutgoingBatch, error: SparkBrokerError) -> SparkBrokerError:
    """The error of a batch that is not divided, with the reason."""
    if batch.uncertain:
        return type(error)(f"{error.message}; {MAY_BE_STORED}", hint=_LOOK_FIRST)
    if batch.divide is None:
        return type(error)(f"{error.message}; what `append` has handed on is never divided", hint=_APPEND_AGAIN)
    return error


_LOOK_FIRST = "Read the partition's end before you send these records again."
_APPEND_AGAIN = "Append the rows again: the producer learns of the limit within a second, and slices tables by it."


def topic_gone(name: str, *, created_again: bool) -> SparkBrokerError:
    """The error of an append to a topic that was deleted."""
    if created_again:
        return InconsistentTopicIdError(f"topic {name!r} was deleted and created again", hint=WRITE_AGAIN)
    return UnknownTopicOrPartitionError(f"topic {name!r} was deleted")
