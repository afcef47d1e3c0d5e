"""What a consumer knows of each partition that it reads: position, what is fetched ahead, what is wrong.

A partition goes from `Start` (where to begin is not known) to a position; `seek` and an offset out of range send it
back. Every such move raises its generation, and what was fetched under an older one is thrown away.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from spark_broker.core.divergence import Diverging, truncation_offset
from spark_broker.core.epochs import EpochHistory
from spark_broker.errors import InvariantError, LogTruncationError, PolicyViolationError, SparkBrokerError
from spark_broker.model import NO_EPOCH, ConsumedBatch, TopicPartition

NO_LINEAGE = EpochHistory()

LINEAGE_MAX = 100
"""Leader epochs of what was read that a partition remembers: enough to find where the log parts."""


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


@dataclass(eq=False)
class PartitionState:
    """One assigned partition. `start`: how to find the position, None once there is one; `reset`: where to begin
    without a committed offset. Invariant: position <= fetch_offset, and `buffer` covers exactly what lies between."""

    tp: TopicPartition
    start: Start | None
    reset: Start
    topic_id: str = ""
    position: int = -1
    fetch_offset: int = -1
    last_epoch: int = NO_EPOCH  # of the record before `position`
    lineage: EpochHistory = NO_LINEAGE  # of what lies before `fetch_offset`, as far as it is known
    truncation: LogTruncationError | None = None  # to be raised once by poll
    generation: int = 0
    paused: bool = False
    error: SparkBrokerError | None = None
    high_watermark: int = -1
    failures: int = 0
    failed_epoch: int = NO_EPOCH
    retry_at_s: float = 0.0
    served: int = 0

    def __post_init__(self) -> None:
        self.buffer: deque[Prefetched] = deque()
        self.buffered_bytes = 0

    @property
    def has_position(self) -> bool:
        return self.start is None and self.position >= 0

    def move_to(self, offset: int, leader_epoch: int = NO_EPOCH) -> None:
        """Read from this offset on."""
        self._restart()
        self.start = None
        self.position = self.fetch_offset = offset
        self.last_epoch = leader_epoch
        if leader_epoch != NO_EPOCH and offset > 0:
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
        self.lineage = NO_LINEAGE
        self.error = None
        self.failures = 0
        self.retry_at_s = 0.0
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
                    batches.append(first.decode())
            except SparkBrokerError as error:
                self.error = error
            else:
                self.buffer.popleft()
                self.buffered_bytes -= first.size_bytes
                self.position, self.last_epoch = first.next_offset, first.leader_epoch
        return batches

    def add(self, fetched: Iterable[Prefetched]) -> None:
        for one in fetched:
            self.buffer.append(one)
            self.buffered_bytes += one.size_bytes
            if one.leader_epoch > self.lineage.latest_epoch:
                self.lineage = self.lineage.assign(one.leader_epoch, self.fetch_offset).last(LINEAGE_MAX)
            self.fetch_offset = one.next_offset

    @property
    def fetched_epoch(self) -> int:
        """The leader epoch of the record before `fetch_offset`: the leader compares it with its log (KIP-320)."""
        return self.lineage.epoch_at(self.fetch_offset - 1)

    def truncated(self, diverging: Diverging) -> LogTruncationError:
        """The log was cut below what was read. The position is where it parts; poll tells of it once, or, without a
        reset policy, until the caller has decided where to go on."""
        read_to, lineage = self.fetch_offset, self.lineage
        cut = truncation_offset(lineage, read_to, diverging)
        error = LogTruncationError(
            f"{self.tp}: what was read from offset {cut} to {read_to} (exclusive) is not in the log any more",
            divergent_offset=cut,
            diverging_epoch=diverging.epoch,
        )
        if self.reset is Start.NONE:
            self.error = error
        else:
            self.move_to(cut, lineage.epoch_at(cut - 1))
            self.truncation = error
        return error

    def may_fetch(self, leader_epoch: int, now_s: float) -> bool:
        """Whether a fetch from the leader of this epoch, the newest that is known, makes sense now, buffers aside."""
        if not self.has_position or self.paused or self.error is not None:
            return False
        # KAFKA-20507: a position of an epoch that metadata has not reached is not judged by an older leader.
        if leader_epoch < self.last_epoch:
            return False
        return now_s >= self.retry_at_s or leader_epoch > self.failed_epoch


class Assignment:
    """All partitions of a consumer, under one lock; `changed` is notified whenever a waiting thread may go on."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.partitions: dict[TopicPartition, PartitionState] = {}
        self.topics: set[str] = set()
        self.topic_errors: dict[str, SparkBrokerError] = {}
        self.failure: SparkBrokerError | InvariantError | None = None
        self.refresh_wanted = False
        self.closed = False
        self._served = 0

    @property
    def unresolved(self) -> set[str]:
        """Subscribed topics whose partitions are not known yet."""
        return self.topics - {tp.topic for tp in self.partitions}

    def wake(self) -> None:
        """Let everybody who waits look again."""
        with self.changed:
            self.changed.notify_all()

    def replace(self, partitions: Iterable[TopicPartition], start: Start, reset: Start) -> None:
        """Read these partitions and no others; those that stay keep their positions."""
        wanted = dict.fromkeys(partitions)
        for tp in [tp for tp in self.partitions if tp not in wanted]:
            self.partitions.pop(tp).generation += 1
        for tp in wanted:
            if tp not in self.partitions:
                self.partitions[tp] = PartitionState(tp, start, reset)
        named = {tp.topic for tp in wanted} | self.topics
        self.topic_errors = {name: error for name, error in self.topic_errors.items() if name in named}
        self.refresh_wanted = True
        self.changed.notify_all()

    def state(self, tp: TopicPartition) -> PartitionState:
        """Raises PolicyViolationError for a partition that is not assigned."""
        found = self.partitions.get(tp)
        if found is None:
            raise PolicyViolationError(f"{tp} is not assigned to this consumer")
        return found

    def first_error(self) -> SparkBrokerError | InvariantError | None:
        """What poll has to raise."""
        for error in self.topic_errors.values():
            return error
        for state in self.partitions.values():
            if state.truncation is not None:
                error, state.truncation = state.truncation, None
                return error
        return next((state.error for state in self.partitions.values() if state.error is not None), self.failure)

    def take(self) -> tuple[list[ConsumedBatch], bool]:
        """What is fetched ahead, an equal share of each partition; and whether a position moved, if only past a gap."""
        taken: list[ConsumedBatch] = []
        ready = {state: state.position for state in self.partitions.values() if not state.paused and state.buffer}
        for state in ready:
            taken += state.take(max(POLL_BATCHES_MAX // len(ready), 1))
        moved = any(state.position > before for state, before in ready.items())
        if moved:
            self.changed.notify_all()
        return taken, moved

    def serve(self, state: PartitionState) -> None:
        """The partition had its turn in a fetch: others come before it in the next."""
        self._served += 1
        state.served = self._served
