"""What a consumer knows of one partition: its position, the batches fetched ahead of it, and its error.

A partition begins with a `Start`, until its position is known. A `seek`, or an offset out of range, makes it begin
again. Each such move raises its generation. What was fetched under an older generation is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from spark_broker.core.divergence import Diverging, truncation_offset
from spark_broker.core.epochs import EpochHistory
from spark_broker.errors import LogTruncationError, OffsetOutOfRangeError, SparkBrokerError, invariant
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
"""A partition remembers at most this many leader epochs of what was read. They are enough to find where the log
diverges.
"""


POLL_BATCHES_MAX = 1000
"""One poll decodes at most this many batches. A decoded batch of one row takes five times its bytes."""


class Start(Enum):
    """How to find the first position."""

    COMMITTED = "committed"
    EARLIEST = "earliest"
    LATEST = "latest"
    NONE = "none"


class Prefetched(NamedTuple):
    """A batch that waits for poll. `decode` None: the offsets hold no records for this consumer.

    `decode` raises CorruptMessageError or SchemaMismatchError. `next_offset`: the first offset after the batch.
    `leader_epoch`: that of the last batch before `next_offset`; NO_EPOCH: not known.
    """

    decode: Callable[[], ConsumedBatch] | None
    next_offset: int
    leader_epoch: int
    size_bytes: int


@dataclass(slots=True)
class FetchRetry:
    """When a partition whose fetch failed is fetched again: after its back-off, or from a leader that was elected
    since.
    """

    failures: int = 0
    failed_epoch: int = NO_EPOCH
    at_ms: float = 0.0

    def failed(self, leader_epoch: int, now_ms: float, wait_ms: float) -> None:
        """The leader of this epoch has answered without records."""
        self.failures += 1
        self.failed_epoch = leader_epoch
        self.at_ms = now_ms + wait_ms

    def may_try(self, leader_epoch: int, now_ms: float) -> bool:
        """Whether it is time to ask the leader of this epoch."""
        return now_ms >= self.at_ms or leader_epoch > self.failed_epoch


@dataclass(slots=True)
class HandedOut:
    """What a poll is about to hand out of a partition: where that was before, and the batches that were passed."""

    of: PartitionPosition
    generation: int
    position: int
    last_epoch: int
    chosen: bool
    passed: list[Prefetched] = field(default_factory=list)


@dataclass(eq=False)
class PartitionPosition:
    """One assigned partition. `start`: how to find the position; None once there is one. `reset`: where to begin
    without a committed offset.

    Invariant: position <= fetch_offset, and `buffer` covers exactly the offsets between them. When records are handed
    out one at a time, the position may lie inside the buffer's first batch. Between a truncation and its notification
    the buffer is empty, and nothing is fetched.
    """

    tp: TopicPartition
    start: Start | None
    reset: Start
    topic_id: str = ""
    position: int = -1
    fetch_offset: int = -1
    last_epoch: int = NO_EPOCH  # of the record before `position`
    lineage: EpochHistory = NO_LINEAGE  # of what lies before `fetch_offset`, as far as it is known
    truncation: LogTruncationError | None = None  # poll has not raised it yet
    truncated_generation: int = -1  # in which the truncation was noticed
    generation: int = 0
    paused: bool = False
    error: SparkBrokerError | None = None
    high_watermark: int = -1
    asked: int = 0  # the turn of its last fetch
    served: int = 0  # the turn of its last fetch that had records
    read: int = 0  # the number of its last part of the table
    retry: FetchRetry = field(default_factory=FetchRetry)
    history_end: int = -1  # up to here (exclusive) the topic's table is read; -1: the log is
    chosen: bool = False  # by a seek or a commit, or something was handed out before it: only then it is committed

    def __post_init__(self) -> None:
        self.buffer: deque[Prefetched] = deque()
        self.buffered_bytes = 0
        self._records: Iterator[ConsumedRecord] | None = None  # of the first batch in the buffer, from `position` on
        self._epoch_before = NO_EPOCH  # of the record before that batch
        self.newest: tuple[ConsumedRecord, Prefetched] | None = None  # taken; the caller may not have got it

    @property
    def has_position(self) -> bool:
        return self.start is None and self.position >= 0

    @property
    def to_commit(self) -> OffsetAndMetadata:
        """The position with the leader epoch of the record before it.

        A truncation moves it only after poll has raised the error. So a consumer that resumes from it gets the error,
        too.
        """
        return OffsetAndMetadata(self.position, known_epoch(self.last_epoch))

    def move_to(self, offset: int, leader_epoch: int | None = None, *, chosen: bool | None = None) -> None:
        """Read from this offset on. `leader_epoch`: of the record before it, where that is known."""
        self._restart()
        self.chosen = self.chosen if chosen is None else chosen
        self.start = None
        self.position = self.fetch_offset = offset
        self.last_epoch = NO_EPOCH if leader_epoch is None else leader_epoch
        if leader_epoch is not None and offset > 0:
            self.lineage = NO_LINEAGE.assign(leader_epoch, offset - 1)

    def find_start(self, start: Start, *, chosen: bool = False) -> None:
        """Forget the position, and look for one. `chosen`: by the caller."""
        self._restart()
        self.chosen = chosen
        self.start = start
        self.position = self.fetch_offset = -1

    def came_later(self) -> None:
        """The partition was added since the consumer wanted to read it. With auto.offset.reset=latest it begins at its
        first record: the end would pass what was appended before the consumer noticed it. A caller's seek stays.
        """
        if self.reset is Start.LATEST:
            self.reset = Start.EARLIEST
        if self.start is Start.LATEST and not self.chosen:
            self.start = Start.EARLIEST

    def check_start(self) -> None:
        """Without a committed offset and without a reset policy, a caller has to seek."""
        if self.start is Start.NONE and self.error is None:
            self.error = OffsetOutOfRangeError(f"{self.tp} has no committed offset, and auto.offset.reset is none")

    def _restart(self) -> None:
        self.generation += 1
        self.buffer.clear()
        self.buffered_bytes = 0
        self._records = self.newest = None
        self.lineage = NO_LINEAGE
        self.error = None
        self.retry = FetchRetry()
        self.high_watermark = -1
        self.history_end = -1

    def take(self, limit: int = POLL_BATCHES_MAX, handed: HandedOut | None = None) -> list[ConsumedBatch]:
        """Hand out the batches that were fetched ahead, and move the position past them.

        Stops before a batch that does not decode; a later poll raises its error. `handed` remembers what was passed.
        """
        batches: list[ConsumedBatch] = []
        while self.buffer and len(batches) < limit and self.error is None:
            first = self.buffer[0]
            try:
                if first.decode is not None:
                    batches += self._rest_of(first.decode()).runs()
            except SparkBrokerError as error:
                self.error = error
            else:
                if handed is not None:
                    handed.passed.append(first)
                self._pass(first)
        return batches

    def about_to_hand_out(self) -> HandedOut:
        """What `take_back` needs."""
        return HandedOut(self, self.generation, self.position, self.last_epoch, self.chosen)

    def take_back(self, handed: HandedOut) -> None:
        """What was passed since then never reached the caller: it is handed out again."""
        if handed.generation != self.generation:
            return
        for batch in reversed(handed.passed):
            if not self.buffer or self.buffer[0] is not batch:
                self.buffer.appendleft(batch)
        self.buffered_bytes = sum(batch.size_bytes for batch in self.buffer)
        self.position, self.last_epoch, self.chosen = handed.position, handed.last_epoch, handed.chosen
        self._records = None

    def take_record_back(self) -> None:
        """The newest record never reached the caller: it is handed out again. So is what follows it: where a signal
        handler raised while rows were shown, `_records` has ended before its time.
        """
        newest, self.newest = self.newest, None
        if newest is not None:
            record, batch = newest
            if not self.buffer or self.buffer[0] is not batch:
                self.buffer.appendleft(batch)
            self.position, self.last_epoch = record.offset, self._epoch_before
        self.buffered_bytes = sum(batch.size_bytes for batch in self.buffer)
        self._records = None

    def take_record(self) -> ConsumedRecord | None:
        """Hand out the next record that was fetched ahead, and move the position past it.

        None: there is none, or it cannot be shown, or its batch does not decode; a later call raises the error.
        """
        while self.buffer and self.error is None:
            first = self.buffer[0]
            if first.decode is None:
                self._pass(first)
                continue
            try:
                if self._records is None:
                    self._epoch_before, self._records = self.last_epoch, self._records_of(first.decode())
                record = next(self._records, None)
            except SparkBrokerError as error:
                self.error = error
            else:
                if record is None:  # Compaction has removed the last rows of the batch.
                    self._pass(first)
                    continue
                self.newest = record, first
                self.position, self.last_epoch, self.chosen = record.offset + 1, first.leader_epoch, True
                if self.position == first.next_offset:
                    self._pass(first)
                return record
        return None

    @property
    def is_inside_a_batch(self) -> bool:
        """Whether some records of the next batch, but not all, were handed out."""
        return self._records is not None

    def _records_of(self, batch: ConsumedBatch) -> Iterator[ConsumedRecord]:
        return self._rest_of(batch).records()

    def _rest_of(self, batch: ConsumedBatch) -> ConsumedBatch:
        passed = batch.rows_below(self.position)
        return batch.slice(passed) if passed else batch

    def _pass(self, first: Prefetched) -> None:
        """All of the first batch was handed out."""
        self.buffer.popleft()
        self.buffered_bytes -= first.size_bytes
        self._records = None
        self.position, self.last_epoch, self.chosen = first.next_offset, first.leader_epoch, True

    def add(self, fetched: Iterable[Prefetched]) -> None:
        """Take the batches that the leader sent from `fetch_offset` on."""
        self.retry.failures = 0
        for batch in fetched:
            self.buffer.append(batch)
            self.buffered_bytes += batch.size_bytes
            if batch.leader_epoch == NO_EPOCH:
                self.lineage = NO_LINEAGE
            elif batch.leader_epoch > self.lineage.latest_epoch:
                self.lineage = self.lineage.assign(batch.leader_epoch, self.fetch_offset).last(LINEAGE_MAX)
            self.fetch_offset = batch.next_offset

    def add_history(self, fetched: Iterable[Prefetched]) -> None:
        """Take what came from the topic's table. After its end the log is fetched."""
        self.add(fetched)
        if self.fetch_offset >= self.history_end:
            self.history_end = -1

    @property
    def fetched_epoch(self) -> int:
        """The leader epoch of the record before `fetch_offset`: the leader compares it with its log (KIP-320)."""
        return self.lineage.epoch_at(self.fetch_offset - 1)

    def truncated(self, diverging: Diverging) -> None:
        """The log was truncated below what was read. The position stays until poll has raised the error.

        Without a reset policy, poll repeats the error until the caller decides where to go on.
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
        """The error that poll raises once. Moves the position to where the log diverges, unless a seek has moved it."""
        error, self.truncation = self.truncation, None
        if error is not None and self.generation == self.truncated_generation:
            offset, kept = error.divergent_offset, self.lineage.truncate_to(error.divergent_offset)
            # A reader that began further on has read nothing there: the leader said which of its epochs ends there.
            self.move_to(offset, known_epoch(kept.latest_epoch if kept.entries else error.diverging_epoch))
            if kept.entries:
                self.lineage = kept  # the next truncation may reach further back than this one
        return error

    def may_fetch(self, leader_epoch: int, now_ms: float) -> bool:
        """Whether to fetch now from the leader of this epoch, the newest known one. Full buffers do not count here."""
        if not self.has_position or self.paused or self.error is not None or self.truncation is not None:
            return False
        if self.history_end >= 0:
            return False
        # KAFKA-20507: an older leader must not judge a position whose epoch is newer than the metadata's.
        return leader_epoch >= self.last_epoch and self.retry.may_try(leader_epoch, now_ms)
