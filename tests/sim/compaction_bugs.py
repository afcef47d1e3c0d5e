"""What compaction can do wrong, put back into production code.

Two bugs need deleted records in the middle of a transaction of a compacted log: snapshots of producers that outlive a
swap, and markers that the log start needs. `tests/broker/test_compaction.py` has both.
"""

from __future__ import annotations

from functools import partial

import pytest

from spark_broker.broker import partition as partition_module
from spark_broker.broker.compaction import PartitionCompaction
from spark_broker.core.compaction import Cleaned, CompactionRules, PlacesKept
from spark_broker.core.replica import Fetched, Replica
from spark_broker.protocol.frame import BatchHeader, Frame
from spark_broker.storage import rewriting
from spark_broker.storage.segment import Segment
from tests.sim import bugs
from tests.sim.kinds import has_compaction, has_compaction_and_transactions

Patch = pytest.MonkeyPatch

bug = partial(bugs.bug, shows=has_compaction)
bug_of_transactions = partial(bugs.bug, shows=has_compaction_and_transactions)


@bug("34")
def follow_from_below_what_was_purged(patch: Patch) -> None:
    """A follower that lacks deletions which its leader has forgotten goes on, and deleted keys come back."""
    awaits = Replica.awaits

    def buggy(self: Replica, answer: Fetched) -> bool:
        self.purge_offset = max(self.purge_offset, answer.purge_offset)
        return awaits(self, answer)

    patch.setattr(Replica, "awaits", buggy)


@bug("34")
def purge_without_saying_so(patch: Patch) -> None:
    """A log does not remember up to where its deletions are gone."""
    patch.setattr(Cleaned, "purging", lambda self, offset: self)


@bug("22")
def keep_no_places_of_producers(patch: Patch) -> None:
    """The batches that a retry is compared with go, and a replica that copies the log does not know them."""
    patch.setattr(PlacesKept, "of", staticmethod(lambda committed, known, unended: PlacesKept()))


@bug_of_transactions("24")
def keep_batches_in_their_transactions(patch: Patch) -> None:
    """Committed batches wait for a marker that a later pass removes."""
    patch.setattr(rewriting, "TRANSACTIONAL", 0)


@bug_of_transactions("24")
def compact_what_is_undecided(patch: Patch) -> None:
    """A pass goes on past the last stable offset."""

    def buggy(self: PartitionCompaction, now_ms: int) -> tuple[Segment, ...]:
        del now_ms
        return self._log.sealed_below(self._partition.replica.high_watermark)

    patch.setattr(PartitionCompaction, "_segments", buggy)


@bug("35")
def compact_what_is_not_committed(patch: Patch) -> None:
    """A pass goes on past the high watermark."""

    def buggy(self: PartitionCompaction, now_ms: int) -> tuple[Segment, ...]:
        del now_ms
        return self._log.sealed_below(self._log.log_end_offset)

    patch.setattr(PartitionCompaction, "_segments", buggy)


@bug_of_transactions("24, 35")
def let_aborted_records_supersede(patch: Patch) -> None:
    """An aborted record removes the last one of its key."""
    patch.setattr(CompactionRules, "is_aborted", lambda self, batch: False)


@bug("22")
def keep_places_of_uncommitted_batches(patch: Patch) -> None:
    """The newest batches of a producer count, committed or not. When these are cut off, the places before are gone."""
    original = PlacesKept.of
    patch.setattr(PlacesKept, "of", staticmethod(lambda committed, known, unended: original(known, known, unended)))


@bug("35")
def forget_what_a_pass_took_for_committed(patch: Patch) -> None:
    """After a restart, a key has neither its old record nor, below the high watermark, its new one."""
    patch.setattr(Cleaned, "relying_on", lambda self, high_watermark: self)


@bug("")
def join_gaps_over_epochs(patch: Patch) -> None:
    """One gap has batches of two leader epochs, and the epoch history cannot be rebuilt from it."""
    joined = rewriting.joined

    def buggy(gap: BatchHeader, header: BatchHeader) -> BatchHeader | None:
        return joined(gap, header._replace(leader_epoch=gap.leader_epoch))

    patch.setattr(rewriting, "joined", buggy)


@bug("")
def send_a_gap_as_it_is(patch: Patch) -> None:
    """A follower whose log ends within a gap of the leader is sent all of it."""

    def buggy(frames: list[Frame], offset: int) -> list[Frame]:
        del offset
        return frames

    patch.setattr(partition_module, "from_offset", buggy)
