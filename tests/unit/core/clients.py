"""Producers of a random run: they repeat, in order, what no leader has acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spark_broker.errors import (
    DuplicateSequenceNumberError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    NotEnoughReplicasError,
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
)
from tests.unit.core.checker import ViolationError
from tests.unit.core.harness import Cluster, Outcome, Producer

IN_FLIGHT_MAX = 5
CLIENT_ID = 7


def rows_of(value: int) -> int:
    return 1 + value % 3


@dataclass(slots=True)
class Client:
    """One epoch of an idempotent producer; five batches at most are open."""

    numbers: Callable[[], int]
    id: int = CLIENT_ID
    epoch: int = 0
    transactional: bool = False
    next_sequence: int = 0
    open: list[tuple[int, int]] = field(default_factory=list)  # sequence number and value
    sent_to: tuple[int, int] = (-1, -1)  # broker and leader epoch
    sent: int = 0  # how many of `open` went to `sent_to`
    waiting: list[tuple[int, Outcome]] = field(default_factory=list)

    def producer(self, sequence: int) -> Producer:
        return Producer(self.id, self.epoch, sequence, self.transactional)

    def send(self, cluster: Cluster, broker: int) -> tuple[Outcome, Producer] | None:
        """The next batch that was not sent to this leader, perhaps a new one. None if nothing can be sent now.

        Raises InvalidProducerEpochError or InvalidTxnStateError if the transaction was ended by another.
        """
        self.collect()
        epoch = cluster.replica(broker).assignment.leader_epoch
        if self.sent_to != (broker, epoch):
            self.sent_to, self.sent, self.waiting = (broker, epoch), 0, []
        if self.sent == len(self.open):
            if self.open and self.next_sequence - self.open[0][0] >= IN_FLIGHT_MAX:
                return None
            self.open.append((self.next_sequence, self.numbers()))
            self.next_sequence += 1
        sequence, value = self.open[self.sent]
        producer = self.producer(sequence)
        try:
            outcome = cluster.append(broker, value, rows=rows_of(value), producer=producer)
        except NotEnoughReplicasError:
            return None
        except (OutOfOrderSequenceNumberError, DuplicateSequenceNumberError, UnknownProducerIdError) as error:
            # A deposed leader may lack what its successor has; the successor itself never does.
            if epoch == cluster.controller.assignment.leader_epoch:
                raise ViolationError(f"the leader refused a retry: {error}") from error
            return None
        except (InvalidProducerEpochError, InvalidTxnStateError) as error:
            if not self.transactional:
                raise ViolationError(f"the leader fenced a producer without a rival: {error}") from error
            raise
        if not outcome.awaits:
            self.sent += 1
            self.waiting.append((sequence, outcome))
        return outcome, producer

    def collect(self) -> None:
        """Take in the answers; after a refusal every open batch is sent again."""
        for sequence, outcome in self.waiting:
            if outcome.base_offset is not None:
                open_sequences = [number for number, _ in self.open]
                if sequence in open_sequences:
                    self.sent -= open_sequences.index(sequence) < self.sent
                    self.open = [batch for batch in self.open if batch[0] != sequence]
            elif outcome.error is not None:
                self.sent = 0
        self.waiting = [waiting for waiting in self.waiting if not waiting[1].answered]
