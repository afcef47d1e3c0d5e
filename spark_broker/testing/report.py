"""One page about an anomaly: what it is and where, who wrote what lies around it, and what each reader saw there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spark_broker.model import TopicPartition
from spark_broker.testing.checks.violations import NOWHERE, CheckResult, Violation, ViolationKind
from spark_broker.testing.history import (
    Acknowledged,
    Assigned,
    CommitInvoked,
    CommitRefused,
    CommitUnknown,
    Event,
    Failed,
    Gone,
    History,
    Invoked,
    OffsetsCommitted,
    Polled,
    Revoked,
    Run,
    Snapshot,
    TransactionAborted,
    TransactionBegan,
    TransactionCommitted,
)

AROUND = 3
"""Offsets on either side of the anomaly that the page shows."""

WRITERS_MAX = 12
READS_MAX = 24
OWNERS_MAX = 40
PAGES_MAX = 4


def explain(history: History, result: CheckResult) -> str:
    """The counts, and a page for the first violation of each of the gravest kinds."""
    first: dict[ViolationKind, Violation] = {}
    for violation in result.violations:
        first.setdefault(violation.kind, violation)
    pages = [explain_violation(history, first[kind]) for kind in ViolationKind if kind in first]
    return "\n\n".join([str(result), *pages[:PAGES_MAX]])


def explain_violation(history: History, violation: Violation) -> str:
    """One page: the violation, the appends around its place, their transactions, and every read of the place."""
    if violation.partition == NOWHERE:
        return str(violation)
    first, last = violation.offset - AROUND, violation.offset + AROUND
    invoked = {event.operation: event for event in history.events if isinstance(event, Invoked)}
    reads = list(_reads(history.events, violation.partition, first, last))
    values = {value for _, _, run in reads for offset, value in _rows(run) if first <= offset <= last}
    # The detail of a violation contains the `repr` of its values.
    operations = [
        operation
        for operation, event in invoked.items()
        if not values.isdisjoint(event.values) or any(repr(value) in violation.detail for value in event.values)
    ]
    operations += [
        event.operation
        for event in history.events
        if isinstance(event, Acknowledged)
        and event.operation not in operations
        and invoked[event.operation].partition == violation.partition
        and event.base_offset <= last
        and event.base_offset + len(invoked[event.operation].values) > first
    ]
    owners = list(_owners(history.events, violation))
    named = {invoked[operation].transaction for operation in operations} - {None}
    return "\n".join(
        [
            str(violation),
            "  appended there (event number, what happened):",
            *_limited(_appends(history.events, set(operations)), WRITERS_MAX),
            *(["  their transactions:"] if named else []),
            *_limited(_transactions(history.events, named), WRITERS_MAX),
            *(["  members that owned it, and commits there:"] if owners else []),
            *(_limited(owners, OWNERS_MAX) if owners else []),
            f"  read there, offsets {max(first, 0)} to {last}:",
            *_limited((_described(number, source, run, first, last) for number, source, run in reads), READS_MAX),
        ]
    )


def _reads(events: Iterable[Event], partition: TopicPartition, first: int, last: int) -> Iterator[tuple[int, str, Run]]:
    for number, event in enumerate(events):
        runs: Iterable[tuple[str, Run]] = ()
        if isinstance(event, Polled):
            runs = [(f"{event.reader} polled", Run(event.partition, event.base_offset, event.values))]
        elif isinstance(event, Snapshot):
            when = "at the end" if event.final else "on the way"
            runs = [(f"{event.source} ({event.isolation}, whole read {when})", run) for run in event.runs]
        for source, run in runs:
            if run.partition == partition and run.base_offset <= last and run.next_offset > first:
                yield number, source, run


def _rows(run: Run) -> Iterator[tuple[int, bytes]]:
    return enumerate(run.values, run.base_offset)


def _described(number: int, source: str, run: Run, first: int, last: int) -> str:
    rows = "  ".join(f"{offset}={value!r}" for offset, value in _rows(run) if first <= offset <= last)
    return f"    {number:>8}  {source} {run.base_offset} to {run.next_offset - 1}: {rows}"


def _appends(events: Iterable[Event], operations: set[int]) -> Iterator[str]:
    for number, event in enumerate(events):
        match event:
            case Invoked() if event.operation in operations:
                within = "" if event.transaction is None else f" in transaction {event.transaction}"
                values = (
                    f"{event.values[0]!r} to {event.values[-1]!r}" if len(event.values) > 1 else repr(event.values[0])
                )
                what = f"{event.writer} began operation {event.operation}{within}: {values} to {event.partition}"
            case Acknowledged() if event.operation in operations:
                what = f"operation {event.operation} acknowledged at offset {event.base_offset}"
            case Failed() if event.operation in operations:
                what = f"operation {event.operation} failed: {event.error}"
            case _:
                continue
        yield f"    {number:>8}  {what}"


def _transactions(events: Iterable[Event], named: set[int | None]) -> Iterator[str]:
    commits: set[int] = set()
    for number, event in enumerate(events):
        match event:
            case TransactionBegan() if event.transaction in named:
                joined = f", {event.app!r} version {event.version}" if event.app else ""
                what = f"transaction {event.transaction} began: {event.writer}{joined}"
            case CommitInvoked() if not named.isdisjoint(event.transactions):
                commits.add(event.commit)
                what = f"commit {event.commit} of transactions {list(event.transactions)} asked for"
            case TransactionCommitted() if event.commit in commits:
                what = f"commit {event.commit} returned"
            case CommitRefused() | CommitUnknown() if event.commit in commits:
                what = f"commit {event.commit}: {event.error}"
            case TransactionAborted() if event.transaction in named:
                what = f"transaction {event.transaction} aborted"
            case _:
                continue
        yield f"    {number:>8}  {what}"


def _owners(events: Iterable[Event], violation: Violation) -> Iterator[str]:
    """Which members of groups owned the partition, and commits at the place; nothing where no members share."""
    partition, owning = violation.partition, set[str]()
    for number, event in enumerate(events):
        match event:
            case Assigned() if partition in event.partitions:
                owning.add(event.reader)
                what = f"{event.reader} was assigned it, in epoch {event.epoch}"
            case Revoked() if partition in event.partitions:
                what = f"{event.reader} {'lost it' if event.lost else 'gave it up'}"
            case Gone() if event.reader in owning:
                what = f"{event.reader} was gone"
            case OffsetsCommitted() if event.reader and (event.partition, event.offset) == (
                partition,
                violation.offset,
            ):
                what = f"{event.reader} committed {event.offset} for {event.group!r}, which began at {event.began}"
            case _:
                continue
        yield f"    {number:>8}  {what}"


def _limited(lines: Iterable[str], most: int) -> list[str]:
    all_lines = list(lines)
    if len(all_lines) <= most:
        return all_lines or ["    nothing"]
    half = most // 2
    return [*all_lines[:half], f"    ... {len(all_lines) - 2 * half} more ...", *all_lines[-half:]]
