"""What a partition remembers of its idempotent producers, so that a retry stores nothing twice.

A producer numbers its micro-batches per partition: 0, 1, 2, ... in each of its epochs. The state is a function of the
log: after truncation or reload it equals the state rebuilt from the log (KAFKA-5435).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spark_broker.errors import (
    DuplicateSequenceNumberError,
    InvalidProducerEpochError,
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
)

REMEMBERED_BATCHES = 5
"""As many as may be in flight: a retry of any of them is recognised."""

NO_PRODUCER = -1
SEQUENCE_LIMIT = 2**31
"""Sequence numbers wrap to 0 here."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch in the log: its sequence number and its offsets, both ends inclusive."""

    sequence: int
    base_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class ProducerEntry:
    """Invariant: `batches` has 1 to 5 entries, oldest first, with consecutive sequence numbers."""

    producer_epoch: int
    batches: tuple[StoredBatch, ...]
    last_append_ms: int

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].sequence


def next_sequence(sequence: int) -> int:
    return (sequence + 1) % SEQUENCE_LIMIT


class ProducerStates:
    """The producers of one partition, by producer id."""

    def __init__(self, entries: Iterable[tuple[int, ProducerEntry]] = ()) -> None:
        self._entries = dict(entries)

    def copy(self) -> ProducerStates:
        return ProducerStates(self._entries.items())

    def entries(self) -> list[tuple[int, ProducerEntry]]:
        """Sorted by producer id."""
        return sorted(self._entries.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProducerStates) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    def check(self, producer_id: int, producer_epoch: int, sequence: int) -> StoredBatch | None:
        """None: the batch is new and next in order. A StoredBatch: it is a retry of that one.

        Raises InvalidProducerEpochError, OutOfOrderSequenceNumberError, UnknownProducerIdError or
        DuplicateSequenceNumberError.
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
        if sequence == next_sequence(entry.last_sequence):
            return None
        if 0 < (entry.last_sequence - sequence) % SEQUENCE_LIMIT < SEQUENCE_LIMIT // 2:
            raise DuplicateSequenceNumberError(
                f"producer {producer_id}: sequence number {sequence} is older than {entry.batches[0].sequence}"
            )
        raise OutOfOrderSequenceNumberError(
            f"producer {producer_id}: sequence number {sequence} after {entry.last_sequence}"
        )

    def appended(self, producer_id: int, producer_epoch: int, batch: StoredBatch, append_time_ms: int) -> None:
        """Remember a batch of the log. Followers come here without `check` (KAFKA-6003)."""
        if producer_id == NO_PRODUCER:
            return
        entry = self._entries.get(producer_id)
        earlier = entry.batches if entry and entry.producer_epoch == producer_epoch else ()
        batches = (*earlier, batch)[-REMEMBERED_BATCHES:]
        self._entries[producer_id] = ProducerEntry(producer_epoch, batches, append_time_ms)
