"""Compaction of one replica: what a pass takes, under the partition's lock, and what it does outside of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from spark_broker.broker.clock import Clock
from spark_broker.broker.partition import Partition
from spark_broker.broker.state_lock import ForeseenError
from spark_broker.core.compaction import CompactionRules, Dirt, PlacesKept, is_due
from spark_broker.core.replica import Role
from spark_broker.errors import (
    DamagedLogError,
    InvariantError,
    KafkaStorageError,
    SparkBrokerError,
    StorageRefusedError,
)
from spark_broker.storage.cleaner import Cleaner, PassPlan, Swap
from spark_broker.storage.files import storage_error
from spark_broker.storage.filesystem import ReadError
from spark_broker.storage.segment import Segment
from spark_broker.storage.segment_swap import discard_compacted

logger = logging.getLogger(__name__)


class AbandonedError(ForeseenError):
    """The pass ends without a result: the broker stops, or the log is not what it was."""


@dataclass(frozen=True, slots=True)
class PassLimits:
    """`dedupe_bytes_max`: keys that a pass holds in memory. `room_bytes`: what it leaves free on the disk.

    `pace` waits until so many bytes more may be read or written, or raises AbandonedError.
    """

    dedupe_bytes_max: int
    room_bytes: int
    pace: Callable[[int], None] = lambda _: None


class PartitionCompaction:
    """Every replica compacts its own log, whether it leads or follows. For one thread."""

    def __init__(self, partition: Partition, limits: PassLimits, clock: Clock) -> None:
        self._partition = partition
        self._log = partition.log
        self._limits = limits
        self._clock = clock
        self._waiting: tuple[Segment, ...] = ()  # segments of the pass that are still to be looked at
        self._beginnings = 0  # of the log when the pass began

    def due(self) -> Dirt | None:
        """How much there is to compact; None: it is not time for a pass."""
        with self._partition.lock:
            if not self._partition.topic.is_compacted or not self._is_active:
                return None
            if not self._partition.lease.allows_expiry:
                return None  # Tombstones go by the time of passes, and this clock may be wrong.
            if self._partition.is_unreadable and not self._partition.replica.has_other_copy:
                return None  # The next pass would end there, too.
            now_ms, cleaned = self._clock.wall_ms(), self._log.cleaned
            segments = self._segments(now_ms)
            if not all(self._partition.topic.knows_schema(segment.first.schema_id) for segment in segments):
                return None  # Their rows cannot be read before the metadata has the schema.
            if not segments:
                return None
            dirt = _dirt(segments, cleaned.clean_to)
            policy = self._partition.topic.compaction_policy
            return dirt if is_due(dirt, cleaned, policy, self._purge_to(now_ms), now_ms) else None

    @property
    def _is_active(self) -> bool:
        return self._partition.replica.role in (Role.LEADER, Role.FOLLOWER)

    def _segments(self, now_ms: int) -> tuple[Segment, ...]:
        """What may be compacted: sealed, decided and committed segments that are old enough.

        Of a topic with a table, only what is in the table: it gets every record. Without a lag no time is looked at: a
        clock that was ahead once has given later times than it is now.
        """
        topic, replica = self._partition.topic, self._partition.replica
        bound = min(replica.last_stable_offset, topic.retained_from(self._partition.key[1]))
        segments, lag_ms = self._log.sealed_below(bound), topic.config.min_compaction_lag_ms
        if lag_ms == 0:
            return segments
        count = next((n for n, s in enumerate(segments) if s.last.append_time_ms > now_ms - lag_ms), len(segments))
        return segments[:count]

    def _purge_to(self, now_ms: int) -> int:
        """Tombstones and markers below this offset go."""
        purgeable = self._log.cleaned.purgeable_to(now_ms, self._partition.topic.config.delete_retention_ms)
        return self._partition.replica.purgeable_to(purgeable, self._clock.boottime_ms())

    def steps(self) -> Generator[None]:
        """One pass, in steps between which others may work. It may be left at any step: the next one cleans up.

        Raises StorageRefusedError (there is no room for it now), CorruptMessageError and UnknownSchemaError (rows that
        cannot be read) and, if a disk has failed or damage was met, what `Partition.guard_storage` raises.
        """
        try:
            with self._judging():
                yield from self._steps()
        except AbandonedError as error:
            logger.debug("%s: a pass of compaction is abandoned: %s", self._partition, error)

    def _steps(self) -> Generator[None]:
        with self._partition.lock:
            cleaner = self._cleaner()
        for swap in cleaner.swaps():
            yield
            try:
                self._carry_out(swap)
            except InvariantError:
                raise  # This process ends, and the next one finishes the swap, if that was recorded.
            except Exception:
                # A swap that failed half-way is finished when the log is opened anew: it needs the new files.
                if not self._log.is_unusable:
                    discard_compacted(self._log.fs, self._log.directory, swap.compacted.base_offset)
                raise
            yield
        with self._partition.lock:
            self._check()
            self._log.mark_cleaned(cleaner.cleaned())
            self._partition.replica.swept(self._log.cleaned.clean_to)
            self._partition.lines.compacted(cleaner.result)

    def _cleaner(self) -> Cleaner:
        self._beginnings = self._log.beginnings
        self._check()
        partition, log, topic = self._partition, self._log, self._partition.topic
        now_ms, producers = self._clock.wall_ms(), partition.replica.producers
        committed = log.producers_at(partition.replica.high_watermark)
        rules = CompactionRules(
            self._purge_to(now_ms),
            producers.transactions.copy(),
            PlacesKept.of(committed, producers, log.unended_at_log_start()),
        )
        self._waiting = self._segments(now_ms)
        plan = PassPlan(
            self._waiting,
            log.cleaned.relying_on(partition.replica.high_watermark),
            rules,
            topic.config.segment_bytes,
            topic.config.segment_index_bytes,
            self._limits.dedupe_bytes_max,
            self._limits.room_bytes,
            now_ms,
        )
        view = log.begin_pass()
        return Cleaner(log.fs, log.directory, view, plan, topic.keyed_rows, self._limits.pace)

    def _carry_out(self, swap: Swap) -> None:
        with self._partition.lock:
            self._check()
            if not self._log.holds(swap.segments):
                raise AbandonedError("segments were removed meanwhile")
            self._log.swap(swap)
            self._partition.replica.compacted(swap.cleaned.purge_offset)
        last = swap.segments[-1].base_offset
        self._waiting = tuple(segment for segment in self._waiting if segment.base_offset > last)

    def _check(self) -> None:
        if not self._is_active:
            raise AbandonedError(f"the replica is {self._partition.replica.role.value}")
        if self._log.beginnings != self._beginnings:  # What the pass knows is not true of what was fetched since.
            raise AbandonedError("the log began anew meanwhile")

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """A file that is gone, cannot be read, or is another than it was, matters only if the log has its segment."""
        try:
            yield
        except (FileNotFoundError, ReadError, DamagedLogError) as error:
            self._judge(error)
        except OSError as error:
            self._failed(storage_error(error, f"compaction of {self._partition}"))
        except (KafkaStorageError, StorageRefusedError) as error:
            self._failed(error)

    def _judge(self, error: FileNotFoundError | ReadError | DamagedLogError) -> NoReturn:
        with self._partition.lock:
            if not self._is_active or (self._waiting and not self._log.holds(self._waiting)):
                raise AbandonedError(f"the log has changed meanwhile: {error}") from error
        if isinstance(error, FileNotFoundError):
            self._failed(DamagedLogError(f"a file is gone: {error}"))
        self._failed(storage_error(error, f"{self._partition}") if isinstance(error, ReadError) else error)

    def _failed(self, error: SparkBrokerError) -> NoReturn:
        """The disk has failed, or damage was met. A pass without room has changed nothing."""
        if isinstance(error, StorageRefusedError):
            self._partition.give_up_if_unusable(error)
            raise error

        def fail() -> NoReturn:
            raise error

        self._partition.guard_storage(fail, reads=True)


def _dirt(segments: tuple[Segment, ...], clean_to: int) -> Dirt:
    """Whole segments count: no index is read for it."""
    dirty = [segment for segment in segments if segment.next_offset > clean_to]
    size = sum(segment.size_bytes for segment in segments)
    new = sum(segment.size_bytes for segment in dirty)
    return Dirt(size - new, new, dirty[0].first.append_time_ms if dirty else -1)
