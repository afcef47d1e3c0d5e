"""How readers move: forward, without a gap, and never behind what was acknowledged before their request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from spark_broker.model import TopicPartition
from spark_broker.testing.checks.facts import Facts, table_of
from spark_broker.testing.checks.violations import Violation, ViolationKind
from spark_broker.testing.history import (
    Acknowledged,
    Isolation,
    LatestShown,
    Polled,
    Positioned,
    Run,
    Snapshot,
    SnapshotBegan,
    Truncated,
)

Key = tuple[str, TopicPartition]


def check_polls(facts: Facts) -> Iterator[Violation]:
    """Inside one assignment a reader is given every offset that it may see, one after the other.

    A poll may skip offsets that no reader may see: those of markers, and of aborted batches.
    """
    due: dict[Key, int] = {}
    for event in facts.events:
        if isinstance(event, Positioned | Truncated):
            due.pop((event.reader, event.partition), None)
            if event.offset is not None:
                due[event.reader, event.partition] = event.offset
        if not isinstance(event, Polled):
            continue
        key = (event.reader, event.partition)
        expected = due.get(key, event.base_offset)
        if event.base_offset < expected:
            yield Violation(
                ViolationKind.WENT_BACK, event.partition, event.base_offset, f"{event.reader} was due {expected}"
            )
        elif event.base_offset > expected and event.partition not in facts.unclean:
            yield from _skipped(facts, event, expected)
        due[key] = event.base_offset + len(event.values)


def _skipped(facts: Facts, event: Polled, expected: int) -> Iterator[Violation]:
    opened = facts.readers.get(event.reader)
    isolation = Isolation.READ_COMMITTED if opened is None else opened.isolation
    visible = facts.visible(isolation, event.partition)
    first = bisect_left(visible, expected)
    if first < len(visible) and visible[first] < event.base_offset:
        count = bisect_left(visible, event.base_offset) - first
        detail = f"{event.reader} was due {expected}, and {count} offsets from {visible[first]} on are to be seen"
        yield Violation(ViolationKind.SKIPPED, event.partition, event.base_offset, detail)


def check_latest(facts: Facts) -> Iterator[Violation]:
    """KIP-207: for one observer the latest offset never falls."""
    highest: dict[Key, int] = {}
    if LatestShown not in facts.kinds:
        return
    for event in facts.events:
        if isinstance(event, LatestShown):
            key = (event.observer, event.partition)
            before = highest.get(key, -1)
            if event.offset < before and event.partition not in facts.unclean:
                detail = f"{event.observer} was shown {before} before"
                yield Violation(ViolationKind.LATEST_FELL, event.partition, event.offset, detail)
            highest[key] = max(before, event.offset)


def check_snapshots_on_the_way(facts: Facts) -> Iterator[Violation]:
    """A whole read during the run has everything below its ends, and its ends are past what was acknowledged before."""
    acknowledged: dict[TopicPartition, int] = {}
    bounds: dict[str, dict[TopicPartition, int]] = {}
    if not facts.on_the_way:
        return
    for position, event in enumerate(facts.events):
        if isinstance(event, Acknowledged):
            invoked = facts.invoked[event.operation]
            end = event.base_offset + len(invoked.values)
            acknowledged[invoked.partition] = max(end, acknowledged.get(invoked.partition, 0))
        elif isinstance(event, SnapshotBegan):
            bounds[event.source] = dict(acknowledged)
            _hold_back(facts, position, bounds[event.source])
        elif isinstance(event, Snapshot) and not event.final:
            yield from _check_snapshot(facts, event, bounds.get(event.source, {}))


def _hold_back(facts: Facts, position: int, bounds: dict[TopicPartition, int]) -> None:
    """Lower each bound to the first transaction that may be open at this event: no reader gets past its beginning."""
    for transaction in facts.transactions.values():
        if transaction.began_position > position or 0 <= transaction.ended_position < position:
            continue
        for operation in transaction.operations:
            partition = facts.invoked[operation].partition
            begins = facts.base_offsets.get(operation, 0)
            bounds[partition] = min(begins, bounds.get(partition, 0))


def _check_snapshot(facts: Facts, snapshot: Snapshot, bounds: Mapping[TopicPartition, int]) -> Iterator[Violation]:
    table = table_of(snapshot.runs)
    for partition in sorted(table.keys() | bounds.keys()):
        if partition in facts.unclean:
            continue
        rows = table.get(partition, {})
        end = max(rows, default=-1) + 1
        visible = facts.visible(snapshot.isolation, partition)
        below = visible[: bisect_left(visible, end)]
        if len(below) > len(rows) or any(offset not in rows for offset in below):
            missing = [offset for offset in below if offset not in rows]
            detail = f"{snapshot.source} lacks {len(missing)} offsets below its end, {end}"
            yield Violation(ViolationKind.SKIPPED, partition, missing[0], detail)
        late = visible[bisect_left(visible, end) : bisect_left(visible, bounds.get(partition, 0))]
        # Uncommitted records are not held back by open transactions, so the bound is too low for them, never too high.
        if late:
            detail = f"{snapshot.source} ends at {end}; offsets up to {late[-1]} were acknowledged before it began"
            yield Violation(ViolationKind.STALE, partition, late[0], detail)


def check_noticed(facts: Facts) -> Iterator[Violation]:
    """KIP-320: after an unclean election no reader reads on past lost records unnotified, and none skips records.

    A group's members are one reader. Of the records before the offset at which it was positioned, a member knows only
    the epoch of the last one. It is notified that the log was truncated, but not always from which offset on. What
    earlier members had read is not judged after such a notification.
    """
    kept: dict[Key, list[tuple[str, Run]]] = {}
    judged = facts.unclean - facts.unnoticed
    if not judged:
        return
    for event in facts.events:
        if not isinstance(event, Polled | Positioned | Truncated) or event.partition not in judged:
            continue
        group = _group(facts, event.reader)
        runs = kept.setdefault((group or event.reader, event.partition), [])
        if isinstance(event, Polled):
            runs.append((event.reader, Run(event.partition, event.base_offset, event.values)))
        elif isinstance(event, Truncated):
            runs[:] = [(who, _below(run, event.offset)) for who, run in runs if who == event.reader]
        elif group:
            runs[:] = [(who, _below(run, event.offset or 0)) for who, run in runs]
        else:
            runs.clear()  # It seeks: what it has read counts no more.
    for (reader, partition), reader_runs in kept.items():
        runs_of_all = [run for _, run in reader_runs]
        # After its last run the reader has read nothing: it may still be notified.
        yield from _gone(facts, reader, runs_of_all[:-1])
        yield from _passed_over(facts, reader, partition, runs_of_all)


def _gone(facts: Facts, reader: str, runs: Iterable[Run]) -> Iterator[Violation]:
    for run in runs:
        rows = facts.final_rows(run.partition)
        begins = min(rows, default=run.next_offset)  # records deleted on purpose lie below
        for offset, value in enumerate(run.values, run.base_offset):
            if offset >= begins and rows.get(offset) != value:
                detail = f"{reader} read {value!r}, was not told of a cut, and read on"
                yield Violation(ViolationKind.CHANGED, run.partition, offset, detail)
                break


def _passed_over(facts: Facts, reader: str, partition: TopicPartition, runs: Sequence[Run]) -> Iterator[Violation]:
    """Records that the reader was not handed, between the first and the last that it was handed."""
    if not runs:
        return
    handed_out = {offset for run in runs for offset in range(run.base_offset, run.next_offset)}
    opened = facts.readers.get(reader)
    isolation = Isolation.READ_COMMITTED if opened is None else opened.isolation
    first, last = min(run.base_offset for run in runs), runs[-1].base_offset
    visible = facts.visible(isolation, partition)
    between = visible[bisect_left(visible, first) : bisect_left(visible, last)]
    passed = [offset for offset in between if offset not in handed_out]
    if passed:
        detail = f"{reader} was not handed {len(passed)} records from {passed[0]} on, and read on"
        yield Violation(ViolationKind.SKIPPED, partition, passed[0], detail)


def _group(facts: Facts, reader: str) -> str:
    """The reader's group; empty for a reader without one."""
    opened = facts.readers.get(reader)
    return opened.group if opened is not None else ""


def _below(run: Run, offset: int) -> Run:
    return run._replace(values=run.values[: max(0, offset - run.base_offset)])
