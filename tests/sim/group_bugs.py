"""Known bugs 17, 32 and 33, put back into production code: commits that say too much, and commits that are forgotten.

A log that is shortened before its snapshot is committed is not here: followers learn the new log start from the same
answer that brings them the snapshot, so a leader that has one has the other. Nor is an older leader that judges a
position of an epoch that it does not know: in 16,000 schedules no such leader was asked. `tests/unit/core` and
`tests/client` cover the leader that refuses and the consumer that does not ask.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial

import pytest

from spark_broker.broker import coordinator
from spark_broker.broker.append import Append, AppendToken
from spark_broker.broker.offsets_shard import OffsetsShard
from spark_broker.client.partition_position import PartitionPosition, Prefetched
from spark_broker.core import group_offsets
from spark_broker.core.group_offsets import CommittedOffsets, OffsetKey, OffsetRecord, _Commit
from spark_broker.errors import SparkBrokerError
from spark_broker.model import NO_EPOCH, ConsumedRecord, OffsetAndMetadata, known_epoch
from spark_broker.protocol.messages import CommittedOffset
from tests.sim import bugs
from tests.sim.kinds import has_groups, has_groups_and_unclean_elections

Patch = pytest.MonkeyPatch

bug = partial(bugs.bug, shows=has_groups)


@bug("32")
def commit_what_is_fetched_ahead(patch: Patch) -> None:
    """The position moves with the fetch, and a commit passes records that wait to be handed out."""
    add = PartitionPosition.add

    def buggy(self: PartitionPosition, fetched: Iterable[Prefetched]) -> None:
        add(self, fetched)
        if self.buffer:
            self.position, self.last_epoch = self.buffer[-1].next_offset, self.buffer[-1].leader_epoch

    patch.setattr(PartitionPosition, "add", buggy)


@bug("32")
def commit_a_batch_with_its_first_record(patch: Patch) -> None:
    """The position moves past a whole batch when its first record is handed out."""
    take_record = PartitionPosition.take_record

    def buggy(self: PartitionPosition) -> ConsumedRecord | None:
        record = take_record(self)
        if self.is_inside_a_batch:
            self.position = self.buffer[0].next_offset
        return record

    patch.setattr(PartitionPosition, "take_record", buggy)


@bugs.bug("17", quick=False, shows=has_groups_and_unclean_elections)
def resume_without_the_committed_epoch(patch: Patch) -> None:
    """KAFKA-20507: what was read before the committed offset is not compared with the log on resume."""
    move_to = PartitionPosition.move_to

    def buggy(self: PartitionPosition, offset: int, leader_epoch: int = NO_EPOCH) -> None:
        del leader_epoch
        move_to(self, offset)

    patch.setattr(PartitionPosition, "move_to", buggy)


@bugs.bug("17", shows=has_groups_and_unclean_elections)
def commit_past_a_truncation_before_its_notification(patch: Patch) -> None:
    """The position moves when the truncation is noticed. Its commit is all that a successor hears of."""

    def buggy(self: PartitionPosition) -> OffsetAndMetadata:
        if self.truncation is None:
            return OffsetAndMetadata(self.position, known_epoch(self.last_epoch))
        offset = self.truncation.divergent_offset
        return OffsetAndMetadata(offset, self.lineage.epoch_at(offset - 1))

    patch.setattr(PartitionPosition, "to_commit", property(buggy))


@bug("17")
def store_offsets_without_their_epoch(patch: Patch) -> None:
    """KAFKA-20507: a commit's leader epoch gets lost with its coordinator."""
    record = group_offsets.offset_record

    def buggy(group_id: str, committed: CommittedOffset) -> OffsetRecord:
        without = CommittedOffset(committed.topic, committed.partition, committed.offset, topic_id=committed.topic_id)
        return record(group_id, without)

    patch.setattr(coordinator, "offset_record", buggy)


@bug("32")
def begin_as_a_coordinator_that_knows_nothing(patch: Patch) -> None:
    """A new coordinator does not read what its predecessors have left in the log."""
    catch_up = OffsetsShard._catch_up

    def buggy(self: OffsetsShard) -> None:
        if not self._read_to:
            _, self._read_to = self.partition.reader.offsets(self.leader_epoch)
        catch_up(self)

    patch.setattr(OffsetsShard, "_catch_up", buggy)


@bug("32", quick=False)
def answer_before_the_log_is_known(patch: Patch) -> None:
    """A new coordinator goes by its own high watermark, which lags behind what is committed."""

    def buggy(self: OffsetsShard) -> None:
        while self._read_to < (high_watermark := self.partition.replica.high_watermark):
            self._read_to = max(self._read_to, self.partition.replica.log_start_offset)
            for frame in self.partition.log.read(self._read_to, 1 << 20, high_watermark):
                self._replay(frame)
                self._read_to = frame.header.next_offset

    patch.setattr(OffsetsShard, "_catch_up", buggy)


@bug("32")
def answer_a_commit_that_the_leader_alone_has(patch: Patch) -> None:
    """Commits are appended with acks=1."""

    def buggy(self: OffsetsShard, message: bytes, deadline_ms: int) -> Append:
        return Append(message, self.leader_epoch, 1, self.partition.topic.schema_id, deadline_ms)

    patch.setattr(OffsetsShard, "_append", buggy)


@bug("32", quick=False)
def shorten_the_log_without_its_snapshot(patch: Patch) -> None:
    """The log starts where the snapshot was to be, though the log did not take it."""
    begin = OffsetsShard._begin_snapshot

    def buggy(self: OffsetsShard, every: int, deleted: Container[str]) -> None:
        try:
            begin(self, every, deleted)
        except SparkBrokerError:
            self.partition.advance_log_start(self._read_to)
            raise

    patch.setattr(OffsetsShard, "_begin_snapshot", buggy)


@bug("32", quick=False)
def leave_a_group_out_of_the_snapshot(patch: Patch) -> None:
    """The snapshot has one offset less than the log that it replaces."""
    snapshot = CommittedOffsets.snapshot

    def buggy(self: CommittedOffsets) -> list[OffsetRecord]:
        records = snapshot(self)
        return records[:-1] if len(records) > 1 else records

    patch.setattr(CommittedOffsets, "snapshot", buggy)


@bug("32", quick=False)
def take_back_what_was_committed_during_a_snapshot(patch: Patch) -> None:
    """Found by reading, and mended: a snapshot counts like a commit, and comes after one that was on its way."""

    def buggy(self: CommittedOffsets, commits: list[tuple[OffsetKey, _Commit]]) -> None:
        self._offsets.update(commits)

    patch.setattr(CommittedOffsets, "_take", buggy)


@bug("33", quick=False)
def answer_without_knowing_who_leads(patch: Patch) -> None:
    """A coordinator that does not know of its successor answers with what was committed in its own epoch."""

    def buggy(self: OffsetsShard, token: AppendToken, deadline_ms: int) -> None:
        del self, deadline_ms
        token.acknowledge(-1)

    patch.setattr(OffsetsShard, "confirm_leadership", buggy)
