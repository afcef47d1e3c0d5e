"""What a consumer knows of one partition: its position, what is fetched ahead of it, and what is wrong.

A partition goes from `Start` (where to begin is not known) to a position. `seek` and an offset out of range send it
back. Every such move raises its generation, and what was fetched under an older generation is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from spark_broker.core.divergence import Diverging, truncation_offset
from spark_broker.core.epochs import EpochHistory
from spark_broker.errors import LogTruncationError, SparkBrokerError, invariant
from spark_broker.model import (
    NO_EPOCH,
    ConsumedBatch,
    ConsumedRecord,
    OffsetAndMetadata,
    TopicPartition,
    known_epoch,
)

NO_LINEAGE = EpochHistory()

LINEAGE_MAX = 100
"""Leader epochs of what was read that a partition remembers: enough to find where the log diverges."""


POLL_BATCHES_MAX = 1000
"""Batches that one poll decodes. A batch of one row takes five times its bytes when it is decoded."""


class Start(Enum):
    """How to find the first position."""

    COMMITTED = "committed"
    EARLIEST = "earliest"
    LATEST = "latest"
    NONE = "none"


class Prefetched(NamedTuple):
    """A batch that waits for poll; `decode` None: offsets that hold no records for this consumer.

    `decode` raises CorruptMessageError or SchemaMismatchError. `next_offset`: exclusive. `leader_epoch`: that of the
    last batch before it.
    """

    decode: Callable[[], ConsumedBatch] | None
    next_offset: int
    leader_epoch: int
    size_bytes: int


@dataclass(slots=True)
class FetchRetry:
    """When a partition that failed is fetched again: after its back-off, or from a leader that has come since."""

    failures: int = 0
    failed_epoch: int = NO_EPOCH
    at_ms: float = 0.0

    def failed(self, leader_epoch: int, now_ms: float, wait_ms: float) -> None:
        """The leader of this epoch did not answer with records."""
        self.failures += 1
        self.failed_epoch = leader_epoch
        self.at_ms = now_ms + wait_ms

    def may_try(self, leader_epoch: int, now_ms: float) -> bool:
        """Whether it is time to ask the leader of this epoch."""
        return now_ms >= self.at_ms or leader_epoch > self.failed_epoch


@dataclass(eq=False)
class PartitionPosition:
    """One assigned partition. `start`: how to find the position, None once there is one; `reset`: where to begin
    without a committed offset.

    Invariant: position <= fetch_offset, and `buffer` covers exactly what lies between; the position may lie inside its
    first batch, when records are handed out one at a time. Nothing is in the buffer, and nothing is fetched, between a
    truncation and its notification.
    """

    tp: TopicPartition
    start: Start | None
    reset: Start
    topic_id: str = ""
    position: int = -1
    fetch_offset: int = -1
    last_epoch: int = NO_EPOCH  # of the record before `position`
    lineage: EpochHistory = NO_LINEAGE  # of what lies before `fetch_offset`, as far as it is known
    truncation: LogTruncationError | None = None  # noticed; the next poll notifies of it
    truncated_generation: int = -1  # in which it was noticed
    generation: int = 0
    paused: bool = False
    error: SparkBrokerError | None = None
    high_watermark: int = -1
    served: int = 0
    retry: FetchRetry = field(default_factory=FetchRetry)

    def __post_init__(self) -> None:
        self.buffer: deque[Prefetched] = deque()
        self.buffered_bytes = 0
        self._records: Iterator[ConsumedRecord] | None = None  # of the first batch in the buffer, from `position` on

    @property
    def has_position(self) -> bool:
        return self.start is None and self.position >= 0

    @property
    def to_commit(self) -> OffsetAndMetadata:
        """The position with the leader epoch of the record before it.

        It lies before a truncation until poll has notified of it: whoever resumes from it is notified too.
        """
        return OffsetAndMetadata(self.position, known_epoch(self.last_epoch))

    def move_to(self, offset: int, leader_epoch: int | None = None) -> None:
        """Read from this offset on. `leader_epoch`: of the record before it, where that is known."""
        self._restart()
        self.start = None
        self.position = self.fetch_offset = offset
        self.last_epoch = NO_EPOCH if leader_epoch is None else leader_epoch
        if leader_epoch is not None and offset > 0:
            self.lineage = NO_LINEAGE.assign(leader_epoch, offset - 1)

    def find_start(self, start: Start) -> None:
        """Forget the position and look for one."""
        self._restart()
        self.start = start
        self.position = self.fetch_offset = -1

    def _restart(self) -> None:
        self.generation += 1
        self.buffer.clear()
        self.buffered_bytes = 0
        self._records = None
        self.lineage = NO_LINEAGE
        self.error = None
        self.retry = FetchRetry()
        self.high_watermark = -1

    def take(self, limit: int = POLL_BATCHES_MAX) -> list[ConsumedBatch]:
        """What was fetched ahead, handed out: the position is behind it from now on.

        It stops before a batch that does not decode, which is the next poll's error.
        """
        batches: list[ConsumedBatch] = []
        while self.buffer and len(batches) < limit and self.error is None:
            first = self.buffer[0]
            try:
                if first.decode is not None:
                    batches.append(self._rest_of(first.decode()))
            except SparkBrokerError as error:
                self.error = error
            else:
                self._pass(first)
        return batches

    def take_record(self) -> ConsumedRecord | None:
        """The next record of what was fetched ahead, handed out: the position is behind it from now on.

        None: there is none, or a batch does not decode, which is the next poll's error.
        """
        while self.buffer and self.error is None:
            first = self.buffer[0]
            if first.decode is None:
                self._pass(first)
                continue
            try:
                if self._records is None:
                    self._records = first.decode().records()
                record = next(self._records)
            except SparkBrokerError as error:
                self.error = error
            else:
                self.position, self.last_epoch = record.offset + 1, first.leader_epoch
                if self.position == first.next_offset:
                    self._pass(first)
                return record
        return None

    @property
    def is_inside_a_batch(self) -> bool:
        """Whether some of the next batch's records were handed out."""
        return self._records is not None

    def _rest_of(self, batch: ConsumedBatch) -> ConsumedBatch:
        return batch.slice(self.position - batch.base_offset) if self.is_inside_a_batch else batch

    def _pass(self, first: Prefetched) -> None:
        """All of the first batch was handed out."""
        self.buffer.popleft()
        self.buffered_bytes -= first.size_bytes
        self._records = None
        self.position, self.last_epoch = first.next_offset, first.leader_epoch

    def add(self, fetched: Iterable[Prefetched]) -> None:
        """What the leader answered from `fetch_offset` on."""
        self.retry.failures = 0
        for batch in fetched:
            self.buffer.append(batch)
            self.buffered_bytes += batch.size_bytes
            if batch.leader_epoch > self.lineage.latest_epoch:
                self.lineage = self.lineage.assign(batch.leader_epoch, self.fetch_offset).last(LINEAGE_MAX)
            self.fetch_offset = batch.next_offset

    @property
    def fetched_epoch(self) -> int:
        """The leader epoch of the record before `fetch_offset`: the leader compares it with its log (KIP-320)."""
        return self.lineage.epoch_at(self.fetch_offset - 1)

    def truncated(self, diverging: Diverging) -> None:
        """The log was truncated below what was read. Until poll notifies of it, the position stays.

        Without a reset policy poll repeats the error until the caller decides where to go on.
        """
        invariant(not self.buffer, f"{self.tp}: {len(self.buffer)} batches wait below a truncation")
        divergent_offset = truncation_offset(self.lineage, self.fetch_offset, diverging)
        error = LogTruncationError(
            f"{self.tp}: what was read from offset {divergent_offset} to {self.fetch_offset} (exclusive) is not in the "
            "log any more",
            divergent_offset=divergent_offset,
            diverging_epoch=diverging.epoch,
        )
        if self.reset is Start.NONE:
            self.error = error
        else:
            self.truncation, self.truncated_generation = error, self.generation

    def notify_truncation(self) -> LogTruncationError | None:
        """What poll has to raise once. The position is from now on where the log diverges, unless a seek moved it."""
        error, self.truncation = self.truncation, None
        if error is not None and self.generation == self.truncated_generation:
            self.move_to(error.divergent_offset, known_epoch(self.lineage.epoch_at(error.divergent_offset - 1)))
        return error

    def may_fetch(self, leader_epoch: int, now_ms: float) -> bool:
        """Whether a fetch from the leader of this epoch, the newest that is known, makes sense now, buffers aside."""
        if not self.has_position or self.paused or self.error is not None or self.truncation is not None:
            return False
        # KAFKA-20507: a position of an epoch that metadata has not reached is not judged by an older leader.
        return leader_epoch >= self.last_epoch and self.retry.may_try(leader_epoch, now_ms)
