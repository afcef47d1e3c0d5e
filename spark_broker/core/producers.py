"""What a partition remembers of its producers, to store a retry only once and to refuse a zombie.

A producer numbers its micro-batches per partition: 0, 1, 2, ... in each of its epochs. A marker that ends a transaction
names the producer's *next* epoch (KIP-890). After the marker, a late batch of the ended epoch is refused. The numbers
begin at 0 again, so a number that is reused after an abort is no duplicate of the aborted batch. The state is a
function of the log: after truncation or reload it equals the state rebuilt from the log (KAFKA-5435), except for
producers that have expired.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spark_broker.core.batch import NO_PRODUCER, BatchInfo
from spark_broker.core.transaction_index import TransactionIndex
from spark_broker.errors import (
    DuplicateSequenceNumberError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
    invariant,
)

REMEMBERED_BATCHES = 5
"""As many batches as may be in flight: a retry of any of them is recognised."""

ENDED_MS = 120_000
"""A producer whose last event was a marker is remembered for this long. Then its late batches need no memory here: each
begins an epoch, so its coordinator is asked, and refuses it. The last confirmation of a coordinator has ended by then.

Each attempt of a Spark task is a producer of its own. A day of them would not fit into a broker's memory.
"""

SEQUENCE_LIMIT = 2**31
"""Sequence numbers wrap to 0 here."""


class StoredBatch(NamedTuple):
    """A batch in the log: its sequence number and its offsets, both ends inclusive."""

    sequence: int
    base_offset: int
    last_offset: int


class ProducerEntry(NamedTuple):
    """Invariant: `batches` has 0 to 5 entries, oldest first, with consecutive sequence numbers.

    `batches` is empty while the epoch, which began with a marker, has no batch yet.
    """

    producer_epoch: int
    batches: tuple[StoredBatch, ...]
    last_append_ms: int

    def remembers(self, batch: BatchInfo) -> bool:
        if self.producer_epoch == batch.producer_epoch:
            for stored in self.batches:
                if stored.base_offset == batch.base_offset:
                    return stored.sequence == batch.sequence
        return False

    @property
    def next_sequence(self) -> int:
        return (self.batches[-1].sequence + 1) % SEQUENCE_LIMIT if self.batches else 0


class ProducerStates:
    """The producers of one partition, by producer id, and their transactions there."""

    def __init__(
        self, entries: Iterable[tuple[int, ProducerEntry]] = (), transactions: TransactionIndex | None = None
    ) -> None:
        self._entries = dict(entries)
        self.transactions = transactions or TransactionIndex()

    def copy(self) -> ProducerStates:
        return ProducerStates(self._entries.items(), self.transactions.copy())

    def entries(self) -> list[tuple[int, ProducerEntry]]:
        """Sorted by producer id."""
        return sorted(self._entries.items())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ProducerStates)
            and self._entries == other._entries
            and self.transactions == other.transactions
        )

    __hash__ = None  # type: ignore[assignment]

    def check(
        self, producer_id: int, producer_epoch: int, sequence: int, *, transactional: bool = False
    ) -> StoredBatch | None:
        """None if the batch is new and next in order. If it is a retry, the StoredBatch that it repeats.

        Raises InvalidProducerEpochError, OutOfOrderSequenceNumberError, UnknownProducerIdError,
        DuplicateSequenceNumberError or InvalidTxnStateError.
        """
        entry = self._entries.get(producer_id)
        if entry is None:
            if sequence != 0:
                raise UnknownProducerIdError(f"producer {producer_id} begins with sequence number {sequence}")
            return None
        if producer_epoch < entry.producer_epoch:
            raise InvalidProducerEpochError(
                f"producer {producer_id} has epoch {entry.producer_epoch}, the batch {producer_epoch}"
            )
        if self.transactions.first_offset(producer_id) >= 0:
            if producer_epoch > entry.producer_epoch:
                raise InvalidTxnStateError(f"producer {producer_id} has a transaction of epoch {entry.producer_epoch}")
            if not transactional:
                raise InvalidTxnStateError(f"producer {producer_id} appends outside of its transaction")
        if producer_epoch > entry.producer_epoch:
            if sequence != 0:
                raise OutOfOrderSequenceNumberError(f"epoch {producer_epoch} begins with sequence number {sequence}")
            return None
        return self._check_sequence(producer_id, entry, sequence)

    @staticmethod
    def _check_sequence(producer_id: int, entry: ProducerEntry, sequence: int) -> StoredBatch | None:
        for batch in entry.batches:
            if batch.sequence == sequence:
                return batch
        if sequence == entry.next_sequence:
            return None
        if entry.batches and 0 < (entry.next_sequence - 1 - sequence) % SEQUENCE_LIMIT < SEQUENCE_LIMIT // 2:
            raise DuplicateSequenceNumberError(
                f"producer {producer_id}: sequence number {sequence} is older than {entry.batches[0].sequence}"
            )
        raise OutOfOrderSequenceNumberError(
            f"producer {producer_id}: sequence number {sequence} where {entry.next_sequence} is next"
        )

    def is_fenced(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether a later epoch of the producer has begun here."""
        entry = self._entries.get(producer_id)
        return entry is not None and producer_epoch < entry.producer_epoch

    def check_marker(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether a marker that begins this epoch is new here; False: it has been written already.

        Raises InvalidProducerEpochError for a late marker, which must not end a newer transaction (KIP-890).
        """
        entry = self._entries.get(producer_id)
        if entry is None or producer_epoch > entry.producer_epoch:
            return True
        ongoing = self.transactions.first_offset(producer_id) >= 0
        if producer_epoch < entry.producer_epoch or ongoing or entry.batches:
            raise InvalidProducerEpochError(
                f"producer {producer_id} goes on in epoch {entry.producer_epoch}; the marker is of {producer_epoch}"
            )
        return False

    def replay(self, batch: BatchInfo) -> None:
        """Take the next batch of the log. Followers do not call `check` first (KAFKA-6003)."""
        if batch.producer_id == NO_PRODUCER:
            return
        if batch.control:
            self._entries[batch.producer_id] = ProducerEntry(batch.producer_epoch, (), batch.append_time_ms)
            self.transactions.ended(batch.producer_id, batch.base_offset, aborted=batch.aborted)
            return
        entry = self._entries.get(batch.producer_id)
        if entry is not None and entry.remembers(batch):
            return  # The log start is inside the batch. The state there has it, but a follower may copy it again.
        # A forgotten producer may begin at 0 again. A replay that still knows it must come to the same state.
        goes_on = entry is not None and (entry.producer_epoch, entry.next_sequence) == (
            batch.producer_epoch,
            batch.sequence,
        )
        earlier = entry.batches if entry is not None and goes_on else ()
        follows = not earlier or earlier[-1].last_offset < batch.base_offset
        invariant(follows, "producer %d goes on at %d, before its last batch", batch.producer_id, batch.base_offset)
        stored = StoredBatch(batch.sequence, batch.base_offset, batch.next_offset - 1)
        batches = (*earlier, stored)[-REMEMBERED_BATCHES:]
        self._entries[batch.producer_id] = ProducerEntry(batch.producer_epoch, batches, batch.append_time_ms)
        if batch.transactional:
            self.transactions.began(batch.producer_id, batch.base_offset)

    def committed(self, high_watermark: int) -> None:
        """The markers below the high watermark are committed."""
        self.transactions.committed(high_watermark)

    def start_at(self, log_start_offset: int) -> None:
        """The log starts here now. Retention removes records, not what is known of their producers (KIP-360)."""
        self.transactions.start_at(log_start_offset)

    def expire(self, before_ms: int, ended_before_ms: int) -> list[int]:
        """Forget producers without an open transaction; returns their ids. They appended nothing since `before_ms`, or
        their last event was a marker before `ended_before_ms`.
        """
        expired = [
            producer_id
            for producer_id, entry in self._entries.items()
            if entry.last_append_ms < (before_ms if entry.batches else ended_before_ms)
            and self.transactions.first_offset(producer_id) < 0
        ]
        for producer_id in expired:
            del self._entries[producer_id]
        return expired
