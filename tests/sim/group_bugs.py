"""Known bugs 17, 32, 33 and 50, put back into production code: commits that say too much, are forgotten, or come late.
And one of our own: topics of coordinators that stay on the broker that was there first.

An older leader that judges a position of an epoch that it does not know is not here: in 16,000 schedules no such leader
was asked. `tests/unit/core` and `tests/client` cover the leader that refuses and the consumer that does not ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
import pytest

from spark_broker.broker import group_shards
from spark_broker.broker.commit_order import CommitOrder
from spark_broker.broker.coordinator_runtime import Led
from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.partition import Partition
from spark_broker.broker.reply import Reply
from spark_broker.client.partition_position import PartitionPosition, Prefetched
from spark_broker.controller import housekeeping
from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import GroupRecord, OffsetKey, OffsetValue, OldCommit, StoredRecord, encode_record
from spark_broker.model import NO_EPOCH, ConsumedRecord, OffsetAndMetadata, known_epoch
from spark_broker.protocol.messages import Message, OffsetCommitRequest
from tests.sim import bugs
from tests.sim.kinds import has_groups, has_groups_and_unclean_elections, has_lone_start

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

    def buggy(self: PartitionPosition, offset: int, leader_epoch: int | None = None, **more: Any) -> None:
        del leader_epoch
        move_to(self, offset, **more)

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
    encode = encode_record

    def buggy(record: GroupRecord | OldCommit) -> StoredRecord:
        if isinstance(record.value, OffsetValue):
            record = record._replace(value=msgspec.structs.replace(record.value, leader_epoch=NO_EPOCH))
        return encode(record)

    patch.setattr(group_shards, "encode_record", buggy)


@bug("32")
def begin_as_a_coordinator_that_knows_nothing(patch: Patch) -> None:
    """A new coordinator does not read what its predecessors have left in the log."""
    patch.setattr(GroupCoordinator, "_replay", lambda self, led, frame: None)


@bug("32", quick=False)
def answer_before_the_log_is_known(patch: Patch) -> None:
    """A new coordinator goes by its own high watermark, which lags behind what is committed."""

    def buggy(self: GroupCoordinator, number: int, partition: Partition) -> Led[GroupShard]:
        led = Led(number, partition, partition.leader_epoch(), self._new_shard(partition))
        position, end = partition.replica.log_start_offset, partition.replica.high_watermark
        while position < end and (frames := partition.log.read(position, 1 << 20, end)):
            for frame in frames:
                self._replay(led, frame)
            position = frames[-1].header.next_offset
        return led

    patch.setattr(GroupCoordinator, "_load", buggy)


@bug("32")
def answer_a_commit_that_the_leader_alone_has(patch: Patch) -> None:
    """Commits are answered when they are appended."""

    def buggy(self: GroupCoordinator, led: Led[GroupShard], reply: Reply, answer: Message) -> None:
        del led
        self.reply_later(reply, answer)

    patch.setattr(GroupCoordinator, "_answer", buggy)


@bug("32")
def compact_with_the_first_commit_of_a_group(patch: Patch) -> None:
    """What is left of a group's commits in a log that was compacted is the first, and not the last one."""
    replay = GroupShard.replay

    def buggy(self: GroupShard, record: GroupRecord | OldCommit) -> None:
        key = record.key
        if isinstance(key, OffsetKey) and (key.topic_id, key.partition) in self.state.group(key.group_id).offsets:
            return
        replay(self, record)

    patch.setattr(GroupShard, "replay", buggy)


@bug("33", quick=False)
def answer_without_knowing_who_leads(patch: Patch) -> None:
    """A coordinator that does not know of its successor answers with what was committed in its own epoch."""
    patch.setattr(Partition, "is_replaceable", lambda self: False)


@bug("50", quick=False, rare=True)
def take_commits_for_an_earlier_leadership(patch: Patch) -> None:
    """A request that was under way for long is taken by a broker that coordinates the group again."""
    check = CommitOrder.check

    def buggy(self: CommitOrder, request: OffsetCommitRequest) -> None:
        check(self, msgspec.structs.replace(request, coordinator_epoch=-1))

    patch.setattr(CommitOrder, "check", buggy)


@bug("50", quick=False)
def take_commits_in_any_order(patch: Patch) -> None:
    """A request that was under way for long is taken behind newer ones of its consumer."""
    check = CommitOrder.check

    def buggy(self: CommitOrder, request: OffsetCommitRequest) -> None:
        check(self, msgspec.structs.replace(request, committer=""))

    patch.setattr(CommitOrder, "check", buggy)


@bugs.bug("", shows=has_lone_start)
def leave_lacking_replicas_lacking(patch: Patch) -> None:
    """Topics of coordinators have as many replicas as there were brokers when they were made, for good."""
    patch.setattr(housekeeping, "fill_up", lambda *_: ())
