"""What of a topic is in its Delta table, as far as the controller knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from spark_broker.controller.records import HistoryRecord, HistoryStatusRecord
from spark_broker.errors import invariant


@dataclass(frozen=True, slots=True)
class TopicHistory:
    """The newest commit to the topic's table that a tierer has read back.

    The history of partition p is what was committed of the offsets `starts[p]` up to `ends[p]` (exclusive). A partition
    beyond these has no history yet. `table_id` is Delta's id of the table, `version` the number of the transaction in
    it, `table_version` Delta's version of the table. `stopped`: why tiering has stopped; empty: it has not.
    `end_epochs[p]`: the leader epoch of the record before `ends[p]`; -1, or beyond these: not known. `uncut`: the table
    may have rows of that transaction beyond `ends`, which no reader gets. A tierer deletes them before it appends.
    `missing`: the last tierer that looked did not find this history in the table. The brokers may have the last copy.
    """

    table_id: str = ""  # Invariant: never changes once it is set
    version: int = -1  # Invariant: never falls; -1: nothing was ever committed
    table_version: int = -1
    starts: tuple[int, ...] = ()  # Invariant: never fall, at most `ends`
    ends: tuple[int, ...] = ()  # Invariant: never fall
    stopped: str = ""
    quarantined: int = 0  # records that the table has refused so far
    end_epochs: tuple[int, ...] = ()
    uncut: bool = False
    missing: bool = False

    def range_of(self, partition: int) -> tuple[int, int]:
        """The offsets of this partition's history: first, and end (exclusive). (0, 0): it has none."""
        return (self.starts[partition], self.ends[partition]) if partition < len(self.ends) else (0, 0)

    def end_epoch(self, partition: int) -> int:
        """The leader epoch of the record before the end of this partition's history; -1: it is not known."""
        return self.end_epochs[partition] if partition < len(self.end_epochs) else -1


def replayed(history: TopicHistory | None, record: HistoryRecord | HistoryStatusRecord) -> TopicHistory:
    """The history after this record."""
    before = history or TopicHistory()
    if isinstance(record, HistoryStatusRecord):
        return replace(before, stopped=record.stopped, missing=record.missing)
    after = replace(
        before,
        table_id=record.table_id,
        version=record.version,
        table_version=record.table_version,
        starts=tuple(record.starts),
        ends=tuple(record.ends),
        quarantined=record.quarantined,
        end_epochs=tuple(record.end_epochs),
        uncut=record.uncut,
    )
    invariant(before.table_id in ("", after.table_id), "the table %s becomes %s", before.table_id, after.table_id)
    invariant(after.version >= before.version, "version %d after version %d", after.version, before.version)
    risen = not_below(after.ends, before.ends) and not_below(after.starts, before.starts)
    invariant(risen, "the history falls back from %s to %s", before, after)
    invariant(len(after.starts) == len(after.ends) and not_below(after.ends, after.starts), "history %s", after)
    return after


def history_records(topic_id: str, history: TopicHistory | None) -> list[HistoryRecord | HistoryStatusRecord]:
    """The records that rebuild this history."""
    records: list[HistoryRecord | HistoryStatusRecord] = []
    if history is not None and history.version >= 0:
        record = HistoryRecord(
            topic_id,
            history.table_id,
            history.version,
            history.table_version,
            starts=list(history.starts),
            ends=list(history.ends),
            quarantined=history.quarantined,
            end_epochs=list(history.end_epochs),
            uncut=history.uncut,
        )
        records.append(record)
    if history is not None and (history.stopped or history.missing):
        records.append(HistoryStatusRecord(topic_id, history.stopped, history.missing))
    return records


def not_below(offsets: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether no offset is below the other one of its partition; a missing one is below all others."""
    return all(offset >= other for offset, other in zip_longest(offsets, others, fillvalue=-1))
