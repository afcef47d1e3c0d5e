"""What tiering can do wrong, put back into production code (known bugs 29 to 31, and what the simulator found)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from spark_broker.broker.compaction import PartitionCompaction
from spark_broker.broker.partition import Partition
from spark_broker.client import history_reader
from spark_broker.client.cluster_view import TopicView
from spark_broker.client.consumer_effects import ReadHistory
from spark_broker.client.leader_fetches import LeaderFetches
from spark_broker.client.offset_lookup import OffsetLookup
from spark_broker.client.partition_position import PartitionPosition, Prefetched
from spark_broker.config import INT64_MAX
from spark_broker.core.replica import Replica
from spark_broker.history import attempt
from spark_broker.history.attempt import Attempt
from spark_broker.history.plan import (
    HistoryState,
    PartitionLog,
    TableCommit,
    TableSnapshot,
    cut_back,
    shortened,
)
from spark_broker.history.retention import HistoryMark
from spark_broker.history.steps import Confirm, CutTable, Steps, ask
from spark_broker.protocol.messages import ListedOffset, MetadataRequest
from spark_broker.storage.segment import Segment
from spark_broker.testing.simulation import tiering
from spark_broker.testing.simulation.broker import BrokerProcess
from spark_broker.testing.simulation.network import Reply
from tests.sim import bugs
from tests.sim.kinds import has_compaction_and_tiering, has_tiering, has_tiering_and_unclean_elections

Patch = pytest.MonkeyPatch

bug = partial(bugs.bug, shows=has_tiering)
bug_of_compaction = partial(bugs.bug, shows=has_compaction_and_tiering)
bug_of_unclean_elections = partial(bugs.bug, shows=has_tiering_and_unclean_elections)


@bug("29")
def go_on_where_the_controller_knows_the_end(patch: Patch) -> None:
    """A try does not look for commits that the controller has not recorded, and tiers their offsets again."""

    def buggy(recorded: HistoryState, table: TableSnapshot | None) -> HistoryState:
        if table is None:
            return recorded
        return HistoryState(table.table_id, table.version, table.table_version, recorded.starts, recorded.ends)

    patch.setattr(attempt, "recover", buggy)


@bug("30")
def delete_what_is_not_recorded(patch: Patch) -> None:
    """Retention deletes sealed records, whether the table has them or not."""
    apply_retention = Partition.apply_retention

    def buggy(self: Partition, clock_skew_max_ms: int = 0) -> None:
        topic, self.topic = self.topic, replace(self.topic, history=None)
        try:
            apply_retention(self, clock_skew_max_ms)
        finally:
            self.topic = topic

    patch.setattr(Partition, "apply_retention", buggy)


@bug("31")
def tier_what_is_not_stable(patch: Patch) -> None:
    """A range ends beyond the last stable offset."""
    log = Attempt._log

    def buggy(self: Attempt, info: ListedOffset) -> PartitionLog:
        known = log(self, info)
        return PartitionLog(known.log_start, max(known.sealed, info.offset + 1))

    patch.setattr(Attempt, "_log", buggy)


@bug_of_compaction("31")
def compact_what_is_not_tiered(patch: Patch) -> None:
    """Compaction removes records that the table does not have yet."""

    def buggy(self: PartitionCompaction, now_ms: int) -> tuple[Segment, ...]:
        del now_ms
        return self._log.sealed_below(self._partition.replica.last_stable_offset)

    patch.setattr(PartitionCompaction, "_segments", buggy)


@bug_of_compaction("", rare=True)
def take_compacted_records_for_cut(patch: Patch) -> None:
    """A try with old metadata compares a commit that was recorded long ago with a log that was compacted since."""

    def buggy(
        self: Attempt, recorded: HistoryState, commit: TableCommit, history: HistoryState
    ) -> Steps[tuple[HistoryState, Sequence[HistoryMark]]]:
        offsets = yield from self._departures(recorded, commit)
        if offsets:
            yield from ask(CutTable(offsets, cut_back(shortened(history, offsets), commit.marks, "cut")))
        yield from self._settle(commit, history)
        return history, commit.marks

    patch.setattr(Attempt, "_recovered", buggy)


@bug_of_unclean_elections("")
def lead_with_other_records_than_the_table(patch: Patch) -> None:
    """A log that was never truncated leads after an unclean election, although the table has other records there."""
    patch.setattr(Replica, "_departs_from", lambda self, beginning: False)


@bug_of_unclean_elections("")
def cut_before_it_is_decided(patch: Patch) -> None:
    """A try cuts the table while another one, under another leader, has the commit recorded."""

    def buggy(
        self: Attempt, recorded: HistoryState, commit: TableCommit, history: HistoryState
    ) -> Steps[tuple[HistoryState, Sequence[HistoryMark]]]:
        offsets = yield from self._departures(recorded, commit)
        if offsets:
            yield from ask(Confirm(recorded))
            return (yield from self._cut(shortened(history, offsets), commit.marks))
        yield from self._settle(commit, history)
        return history, commit.marks

    patch.setattr(Attempt, "_recovered", buggy)


@bug_of_unclean_elections("")
def append_before_the_table_is_cut(patch: Patch) -> None:
    """A cut that was decided is forgotten when the tierer dies before it."""
    recorded_history = attempt.recorded_history
    patch.setattr(attempt, "recorded_history", lambda topic: replace(recorded_history(topic), uncut=False))


@bug("")
def begin_at_the_log_start(patch: Patch) -> None:
    """A reader with metadata from before the first tiering begins where the log does."""
    patch.setattr(OffsetLookup, "_known_history_end", lambda self, tp: INT64_MAX)


@bug("")
def take_tiered_offsets_for_deleted(patch: Patch) -> None:
    """A reader whose offset is only in the table begins anew."""

    def buggy(self: LeaderFetches, position: PartitionPosition, log_start: int, now_ms: float) -> None:
        del log_start, now_ms
        position.find_start(self._reset)

    patch.setattr(LeaderFetches, "_turn_to_history", buggy)


@bug("")
def claim_the_epoch_of_the_last_row(patch: Patch) -> None:
    """A reader says that the end of the history was written by the leader of the table's last row."""

    original = history_reader.to_the_end

    def buggy(fetched: Sequence[Prefetched], asked: ReadHistory) -> list[Prefetched]:
        *before, last = original(fetched, asked)
        epoch = before[-1].leader_epoch if before and last.decode is None else last.leader_epoch
        return [*before, last._replace(leader_epoch=epoch)]

    patch.setattr(history_reader, "to_the_end", buggy)
    patch.setattr(tiering, "to_the_end", buggy)


@bug("")
def read_what_was_deleted(patch: Patch) -> None:
    """A reader does not ask whether records were deleted before it opened the table."""

    def buggy(topic: TopicView, partition: int, start: int) -> None:
        del topic, partition, start

    patch.setattr(history_reader, "check_start", buggy)
    patch.setattr(tiering, "check_start", buggy)


@bug("")
def ask_brokers_what_was_deleted(patch: Patch) -> None:
    """A broker that lags behind answers what only the controller knows for certain."""

    def buggy(self: BrokerProcess, request: object, reply: Reply) -> None:
        asked = msgspec.structs.replace(request, certain=False) if isinstance(request, MetadataRequest) else request
        answer(self, asked, reply)

    answer = BrokerProcess._answer
    patch.setattr(BrokerProcess, "_answer", buggy)
