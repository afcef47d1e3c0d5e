"""Compaction of a log: when it is due, which deletions may be forgotten, and what becomes of each batch. Pure.

Compaction keeps the last record of each key, at its offset. It removes records that a later record of the same key
supersedes, then tombstones and markers, and the batches in which nothing is left. What it removes leaves a gap: an
entry without records that has their offsets. So a log stays contiguous, and replication, recovery and truncation need
no rule for missing offsets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from spark_broker.core.batch import NO_PRODUCER, BatchInfo
from spark_broker.core.producers import ProducerStates
from spark_broker.core.transaction_index import TransactionIndex

PASSES_MAX = 32
"""Passes that are told apart. Of more, two that are close in time count as the later one."""


@dataclass(frozen=True, slots=True)
class CleanPass:
    """At `at_ms` (UTC, by this replica's clock) no key was more than once below `offset`."""

    offset: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What compaction has done to a log.

    `purge_offset`: tombstones and markers below it may be gone. A replica that was copied from another one begins with
    that one's. Whoever follows this log from below it would miss deletions, unless its log had them already: what
    `purge_offset` its own log has says so. `swept_to`: below it every tombstone and marker that may go has gone.
    `committed_to`: the high watermark that a pass began with. Records are gone because of others, and of markers, below
    it. So a replica must not forget that these are committed.

    Invariants: offsets of `passes` strictly increase; `clean_to` <= `committed_to`.
    """

    passes: tuple[CleanPass, ...] = ()
    purge_offset: int = 0
    swept_to: int = 0
    committed_to: int = 0

    @property
    def clean_to(self) -> int:
        """Below this offset no key is there twice."""
        return self.passes[-1].offset if self.passes else 0

    def purgeable_to(self, now_ms: int, delete_retention_ms: int) -> int:
        """Tombstones and markers below this offset may be removed.

        What they delete was removed `delete_retention_ms` ago or earlier. A reader that met it has passed the deletion
        since, unless it takes longer than that (KIP-534: the time counts from that pass, not from the append).
        """
        old = (one.offset for one in self.passes if now_ms - one.at_ms >= delete_retention_ms)
        return max(self.swept_to, *old, 0)

    def purging(self, offset: int) -> Cleaned:
        """Tombstones or markers below `offset` are about to go."""
        return replace(self, purge_offset=max(self.purge_offset, offset))

    def relying_on(self, high_watermark: int) -> Cleaned:
        """Records are about to go because of what is committed now."""
        return replace(self, committed_to=max(self.committed_to, high_watermark))

    def after(self, clean_to: int, swept_to: int, now_ms: int) -> Cleaned:
        """A pass has reached `clean_to`, and has removed the tombstones and markers below `swept_to`."""
        passes = list(self.passes)
        if clean_to > self.clean_to:
            passes.append(CleanPass(clean_to, now_ms))
        passes = [one for one in passes[:-1] if one.offset > swept_to] + passes[-1:]
        while len(passes) > PASSES_MAX:
            # Neither the oldest one, nor the newest: with each pass, one of them would go, and none would become old.
            del passes[min(range(1, len(passes) - 1), key=lambda i: abs(passes[i + 1].at_ms - passes[i - 1].at_ms))]
        return replace(self, passes=tuple(passes), swept_to=max(self.swept_to, swept_to))


NEVER_CLEANED = Cleaned()


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """A topic's settings for compaction."""

    dirty_ratio_min: float = 0.5
    lag_min_ms: int = 0
    lag_max_ms: int = 2**63 - 1
    delete_retention_ms: int = 86_400_000


@dataclass(frozen=True, slots=True)
class Dirt:
    """How much of what may be compacted is new. `oldest_append_ms`: of the first new batch; -1: there is none."""

    clean_bytes: int
    dirty_bytes: int
    oldest_append_ms: int = -1

    @property
    def ratio(self) -> float:
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0


def is_due(dirt: Dirt, cleaned: Cleaned, policy: CompactionPolicy, purge_to: int, now_ms: int) -> bool:
    """Whether it is time for a pass, which may remove tombstones and markers below `purge_to`.

    A log in which nothing new is gets one more pass, when all deletions that it has may go.
    """
    if not dirt.dirty_bytes:
        return cleaned.swept_to < purge_to == cleaned.clean_to
    too_old = now_ms - dirt.oldest_append_ms >= policy.lag_max_ms
    return too_old or dirt.ratio >= policy.dirty_ratio_min


class Fate(Enum):
    """What becomes of a batch."""

    RECORDS = auto()  # It stays, with the records that are left.
    PLACE = auto()  # It stays without records, for its place in its producer's sequence.
    GAP = auto()  # Only its offsets stay, as part of a gap.


@dataclass(frozen=True, slots=True)
class PlacesKept:
    """Which batches compaction keeps for their producers, so that a replica that copies the log knows as much of them.

    `batches`: producer id and base offset of each batch that a retry must be compared with. `epochs`: producer id and
    epoch where the epoch began with a marker and has no batch yet. `unended`: producers whose transaction began below
    the log start; its marker is still needed.
    """

    batches: frozenset[tuple[int, int]] = frozenset()
    epochs: frozenset[tuple[int, int]] = frozenset()
    unended: frozenset[int] = frozenset()

    @staticmethod
    def of(committed: ProducerStates, known: ProducerStates, unended: Iterable[int] = ()) -> PlacesKept:
        """What producers need. `committed`: their state at the high watermark. `unended`: as above.

        `known`: at the log end, without idle ones. Its batches do not count: those of later ones may be cut off, and
        then the earlier ones are the newest again.
        """
        still_known = {producer for producer, _ in known.entries()}
        entries = [(producer, entry) for producer, entry in committed.entries() if producer in still_known]
        batches = ((producer, batch.base_offset) for producer, entry in entries for batch in entry.batches)
        epochs = ((producer, entry.producer_epoch) for producer, entry in entries if not entry.batches)
        return PlacesKept(frozenset(batches), frozenset(epochs), frozenset(unended))


@dataclass(frozen=True, slots=True)
class CompactionRules:
    """What one pass does with a batch below its end: every transaction there is decided.

    `purge_to`: tombstones and markers below it go. `transactions`: which batches were aborted.
    """

    purge_to: int
    transactions: TransactionIndex
    kept: PlacesKept

    def is_aborted(self, batch: BatchInfo) -> bool:
        """Whether no reader is given the batch's records: they are removed, and supersede nothing."""
        return batch.transactional and self.transactions.is_aborted(batch.producer_id, batch.base_offset)

    def fate(self, batch: BatchInfo, records_left: int) -> Fate:
        """What becomes of a batch of which so many records are left."""
        if records_left:
            return Fate.RECORDS
        if batch.control:
            return Fate.PLACE if self._keeps_marker(batch) else Fate.GAP
        remembered = batch.producer_id != NO_PRODUCER and (batch.producer_id, batch.base_offset) in self.kept.batches
        return Fate.PLACE if remembered else Fate.GAP

    def _keeps_marker(self, marker: BatchInfo) -> bool:
        """A marker stays as long as a replica that lacks it may have batches that it ends."""
        if marker.base_offset >= self.purge_to or marker.producer_id in self.kept.unended:
            return True
        return (marker.producer_id, marker.producer_epoch) in self.kept.epochs
