"""What a try of a tiering run does, step by step. Pure: Spark and the simulator carry out the same steps.

A try reads the table's newest transaction v and its end offsets from one snapshot, and commits transaction v + 1. Delta
takes one commit of a transaction. So of two tries that began at v, one commits. The commit is read back, and the
controller records it. A try that ends before that leaves either nothing, or a commit that the next try finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from spark_broker.client.cluster_view import TopicView
from spark_broker.errors import StaleMetadataError
from spark_broker.history.plan import (
    HistoryState,
    PartitionLog,
    TableCommit,
    TieringRange,
    Written,
    after,
    cut_back,
    next_ranges,
    recover,
    shortened,
    unrecorded,
)
from spark_broker.history.retention import HistoryMark, HistoryRetention, expired_before, with_mark
from spark_broker.history.steps import (
    AppendRecords,
    CompareWithLogs,
    Confirm,
    CutTable,
    DeleteRows,
    HistoryFound,
    ListLogs,
    RaiseLogStarts,
    ReadClock,
    ReadRecords,
    ReadTable,
    SaveRefused,
    Steps,
    ask,
)
from spark_broker.protocol.messages import ConfirmHistoryRequest, ListedOffset


@dataclass(frozen=True)
class TieredTopic:
    """What a run has done. `table_version` is None when there was nothing to write. `ends`: of the history now.

    `log_starts`: the topic's records before these offsets are deleted, by partition. `quarantined`: how many records of
    this run the table refused; they are in its dead-letter table.
    """

    topic: str
    path: str
    table_version: int | None
    records: int
    files: int
    size_bytes: int
    ends: tuple[int, ...]
    log_starts: tuple[int, ...] = ()
    quarantined: int = 0


class Attempt:
    """One try for the topic as it is known now."""

    def __init__(self, topic: TopicView, *, include_active_segments: bool, new_id: Callable[[], str]) -> None:
        """`include_active_segments`: tier all that is committed. `new_id`: gives each commit an id of its own."""
        self._topic = topic
        self._include_active_segments = include_active_segments
        self._new_id = new_id
        self._leaders_ms: list[int] = []  # their clocks, when they were asked last

    def steps(self) -> Steps[TieredTopic]:
        """What to do, in order. Raises HistoryNotFoundError where the table lacks what is recorded, and
        TieringStoppedError where the end of the history is not known.
        """
        recorded = recorded_history(self._topic)
        snapshot = yield from ask(ReadTable(recorded.version))
        history = recover(recorded, snapshot)
        if self._topic.history is not None and self._topic.history.missing:
            yield from ask(HistoryFound())  # at once: partitions without a leader may wait for it
        if len(history.ends) > len(self._topic.partitions):
            here, there = len(self._topic.partitions), len(history.ends)
            raise StaleMetadataError(f"{self._topic.name} has {here} partitions here, and {there} in its table")
        marks: Sequence[HistoryMark] = () if snapshot is None else snapshot.marks
        if snapshot is not None and history.version > recorded.version:
            history, marks = yield from self._recovered(recorded, snapshot.commits[history.version], history)
        if history.uncut:
            history, marks = yield from self._cut(history, marks)
        deleted = yield from self._delete(history, self._topic.log_starts)
        listed = yield from self._list(history.ends)
        ranges = next_ranges(history, [self._log(info) for info in listed])
        if not ranges:
            log_starts = yield from self._expire(history, marks)
            return self._tiered(None, history.ends, log_starts, 0)
        sizes = {each.partition: _size(listed[each.partition], each) for each in ranges}
        refused = yield from ask(ReadRecords(ranges, sum(sizes.values()), snapshot is not None))
        commit = yield from self._commit(history, ranges, deleted, marks, sizes)
        commit = replace(commit, quarantined=history.quarantined + refused, refused=tuple(ranges) if refused else ())
        written = yield from ask(AppendRecords(commit))
        yield from self._settle(written.commit, _state(written))
        log_starts = yield from self._expire(_state(written), commit.marks)
        return self._tiered(written, commit.ends, log_starts, refused)

    def _commit(
        self,
        history: HistoryState,
        ranges: Sequence[TieringRange],
        deleted: Sequence[int],
        marks: Sequence[HistoryMark],
        sizes: Mapping[int, int],
    ) -> Steps[TableCommit]:
        """The next transaction. Its mark has a time after all that it reads was appended."""
        partitions = len(self._topic.partitions)
        starts, ends = after(history, ranges, partitions, deleted)
        clocks_ms = yield from self._clocks()
        mark = HistoryMark(max(clocks_ms), tuple(ends), tuple(sizes.get(p, 0) for p in range(partitions)))
        retention = HistoryRetention.of_topic(self._topic.config)
        return TableCommit(
            table_version=-1,
            version=history.version + 1,
            attempt=self._new_id(),
            starts=tuple(starts),
            ends=tuple(ends),
            marks=with_mark(marks, mark, self._topic.log_starts, retention),
        )

    def _recovered(
        self, recorded: HistoryState, commit: TableCommit, history: HistoryState
    ) -> Steps[tuple[HistoryState, Sequence[HistoryMark]]]:
        """Let the controller record a commit that it does not know, as far as the log has what is in it.

        An unclean election since may have cut the log. What the table has beyond is to be deleted: others have these
        offsets. The controller decides that first, and only once for each commit: a try that found no departures, under
        another leader, is refused from then on. And after it recorded the commit, nothing of it is cut: what the log
        lacks then may have been compacted.
        """
        offsets = yield from self._departures(recorded, commit)
        kept = [replace(each, end=min(each.end, offsets.get(each.partition, each.end))) for each in commit.refused]
        commit = replace(commit, refused=tuple(each for each in kept if each.start < each.end))
        history = shortened(history, offsets) if offsets else history
        yield from self._settle(commit, history)
        return history, commit.marks

    def _cut(
        self, history: HistoryState, marks: Sequence[HistoryMark]
    ) -> Steps[tuple[HistoryState, Sequence[HistoryMark]]]:
        """Delete what the table has beyond the history."""
        commit = cut_back(history, marks, self._new_id())
        written = yield from ask(CutTable(dict(enumerate(history.ends)), commit))
        yield from self._confirm(_state(written))
        return _state(written), written.commit.marks

    def _departures(self, recorded: HistoryState, commit: TableCommit) -> Steps[dict[int, int]]:
        """From which offset on the commit has other records than the log, by partition."""
        listed = yield from self._list(recorded.ends)
        ranges = unrecorded(recorded, commit, [self._log(info) for info in listed])
        if not ranges:
            return {}
        in_logs = [replace(each, end=min(each.end, listed[each.partition].offset)) for each in ranges]
        in_logs = [each for each in in_logs if each.start < each.end]
        return (yield from ask(CompareWithLogs(ranges, in_logs, sum(commit.marks[-1].sizes))))

    def _settle(self, commit: TableCommit, history: HistoryState) -> Steps[None]:
        """Once a commit is in the table: save the records that the table refused, and let the controller record it.

        The controller comes last: brokers keep the records until then.
        """
        yield from self._save_refused(commit)
        yield from self._confirm(history)

    def _confirm(self, history: HistoryState) -> Steps[None]:
        """The controller takes it only if the leaders are still those that are asked here."""
        listed = yield from self._list(history.ends)
        yield from ask(Confirm(history, tuple(info.start_epoch for info in listed)))

    def _save_refused(self, commit: TableCommit) -> Steps[None]:
        if not commit.refused:
            return
        listed = yield from self._list()
        starts = [(each, max(each.start, listed[each.partition].log_start_offset)) for each in commit.refused]
        ranges = [TieringRange(each.partition, start, each.end) for each, start in starts if start < each.end]
        if ranges:
            yield from ask(SaveRefused(ranges, commit))

    def _delete(self, history: HistoryState, log_starts: Sequence[int]) -> Steps[tuple[int, ...]]:
        """Delete rows of records that are deleted already. Returns before which offsets the table has none now."""
        deleted = tuple(min(start, end) for start, end in zip(log_starts, history.ends, strict=False))
        due = {p: start for p, start in enumerate(deleted) if start > history.starts[p]}
        if due:
            yield from ask(DeleteRows(due))
        return deleted

    def _expire(self, history: HistoryState, marks: Sequence[HistoryMark]) -> Steps[tuple[int, ...]]:
        """Apply the topic's retention. First the controller, so that readers get no row that is about to go."""
        topic = self._topic
        clocks_ms = yield from self._clocks()
        retention = HistoryRetention.of_topic(topic.config)
        log_starts = expired_before(marks, retention, min(clocks_ms), topic.log_starts, len(topic.partitions))
        raised = [(p, start) for p, start in enumerate(log_starts) if start > topic.deleted_before(p)]
        if raised:
            yield from ask(RaiseLogStarts(raised))
            yield from self._delete(history, log_starts)
        return log_starts

    def _list(self, ends: tuple[int, ...] = ()) -> Steps[list[ListedOffset]]:
        listed = yield from ask(ListLogs(ends))
        self._leaders_ms = [info.now_ms for info in listed if info.now_ms >= 0]
        return listed

    def _clocks(self) -> Steps[list[int]]:
        """The present time by the tierer's clock, which may be wrong, and by those of the leaders, which the controller
        compares. What is committed was appended before the latest. What is old is so by all of them.
        """
        now_ms = yield from ask(ReadClock())
        return [now_ms, *self._leaders_ms]

    def _log(self, info: ListedOffset) -> PartitionLog:
        return PartitionLog(info.log_start_offset, info.offset if self._include_active_segments else info.sealed_offset)

    def _tiered(
        self, written: Written | None, ends: tuple[int, ...], log_starts: tuple[int, ...], refused: int
    ) -> TieredTopic:
        return TieredTopic(
            topic=self._topic.name,
            path=self._topic.settings.delta_path,
            table_version=None if written is None else written.commit.table_version,
            records=0 if written is None else written.rows,
            files=0 if written is None else written.files,
            size_bytes=0 if written is None else written.size_bytes,
            ends=ends,
            log_starts=log_starts,
            quarantined=refused,
        )


def confirmation(topic: TopicView, controller_epoch: int, confirm: Confirm) -> ConfirmHistoryRequest:
    """What the controller is asked to record. `topic`, `controller_epoch`: as they were when the try began."""
    history = confirm.history
    return ConfirmHistoryRequest(
        topic_id=topic.topic_id,
        controller_epoch=controller_epoch,
        table_id=history.table_id,
        version=history.version,
        table_version=history.table_version,
        starts=list(history.starts),
        ends=list(history.ends),
        quarantined=history.quarantined,
        leader_epochs=[state.leader_epoch for state in topic.partitions],
        end_epochs=list(confirm.end_epochs),
        uncut=history.uncut,
    )


def recorded_history(topic: TopicView) -> HistoryState:
    """The history as the controller has recorded it."""
    history = topic.history
    if history is None:
        return HistoryState()
    return HistoryState(
        table_id=history.table_id,
        version=history.version,
        table_version=history.table_version,
        starts=tuple(history.starts),
        ends=tuple(history.ends),
        quarantined=history.quarantined,
        uncut=history.uncut,
    )


def _state(written: Written) -> HistoryState:
    commit = written.commit
    return HistoryState(
        written.table_id, commit.version, commit.table_version, commit.starts, commit.ends, commit.quarantined
    )


def _size(info: ListedOffset, tiered: TieringRange) -> int:
    """About how many stored bytes the range has: the leader says how many there are up to the last stable offset."""
    offsets = info.offset - tiered.start
    return max(0, info.size_bytes) * (tiered.end - tiered.start) // max(1, offsets)
