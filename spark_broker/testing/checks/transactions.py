"""Transactions: all or nothing, never shown before they are committed, and one commit a version."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from spark_broker.model import TopicPartition
from spark_broker.testing.checks.facts import Commit, Facts, Outcome
from spark_broker.testing.checks.violations import NOWHERE, Violation, ViolationKind
from spark_broker.testing.history import CommitInvoked, Invoked, Isolation, Polled, Run, Snapshot


def check_isolation(facts: Facts) -> Iterator[Violation]:
    """A reader of committed records is given nothing of an aborted transaction, and nothing before its commit."""
    if not facts.transactions:
        return
    aborted = {n for n, transaction in facts.transactions.items() if transaction.outcome is Outcome.NOT_COMMITTED}
    forbidden = set(facts.values_of(aborted))
    undecided: set[bytes] = set()
    for event in facts.events:
        match event:
            case Invoked() if event.transaction is not None and event.transaction not in aborted:
                undecided.update(event.values)
            case CommitInvoked():
                undecided.difference_update(facts.values_of(event.transactions))
            case Polled():
                opened = facts.readers.get(event.reader)
                if opened is None or opened.isolation is Isolation.READ_COMMITTED:
                    run = Run(event.partition, event.base_offset, event.values)
                    yield from _shown(event.reader, run, forbidden, undecided)
            case Snapshot() if event.isolation is Isolation.READ_COMMITTED:
                for run in event.runs:
                    yield from _shown(event.source, run, forbidden, undecided)
            case _:
                pass


def _shown(source: str, run: Run, forbidden: set[bytes], undecided: set[bytes]) -> Iterator[Violation]:
    for kind, values in ((ViolationKind.ABORTED_READ, forbidden), (ViolationKind.UNCOMMITTED_READ, undecided)):
        if not values.isdisjoint(run.values):
            records = [(offset, value) for offset, value in enumerate(run.values, run.base_offset) if value in values]
            offset, value = records[0]
            more = f" and {len(records) - 1} more" if len(records) > 1 else ""
            yield Violation(kind, run.partition, offset, f"{source} read {value!r}{more}")


def check_whole_transactions(facts: Facts) -> Iterator[Violation]:
    """All values that one commit names are there, or none of them."""
    judged: set[frozenset[int]] = set()
    for commit in facts.commits.values():
        named = frozenset(commit.invoked.transactions)
        if commit.outcome is Outcome.NOT_COMMITTED or named in judged:
            continue
        judged.add(named)
        invoked = [facts.invoked[op] for n in sorted(named) for op in facts.transactions[n].operations]
        if any(append.partition in facts.unclean for append in invoked):
            continue
        missing = [(append, v) for append in invoked for v in append.values if v not in facts.final_values]
        total = sum(len(append.values) for append in invoked)
        if missing and len(missing) < total:
            append, value = missing[0]
            offset = facts.base_offsets.get(append.operation, -1)
            offset += append.values.index(value) if offset >= 0 else 0
            asked = "committed" if commit.outcome is Outcome.COMMITTED else "perhaps committed"
            detail = f"transaction {sorted(named)}, {asked}: {len(missing)} of {total} values lack, the first {value!r}"
            yield Violation(ViolationKind.TORN_TRANSACTION, append.partition, offset, detail)


def check_versions(facts: Facts) -> Iterator[Violation]:
    """An application's version is committed once, versions rise, and ALREADY_COMMITTED is true."""
    by_app: dict[str, list[Commit]] = defaultdict(list)
    for commit in facts.commits.values():
        if commit.app:
            by_app[commit.app].append(commit)
    for app, commits in by_app.items():
        happened = [commit for commit in commits if _happened(facts, commit)]
        for at, commit in enumerate(happened):
            for other in happened[:at]:
                yield from _check_pair(facts, app, other, commit)
        for commit in commits:
            if commit.already_committed and not any(_happened(facts, c) for c in facts.same_or_later_commits(commit)):
                detail = f"commit {commit.invoked.commit} of {app!r}, version {commit.version}"
                yield Violation(ViolationKind.COMMIT_MISSING, *_place(facts, commit), detail)


def _happened(facts: Facts, commit: Commit) -> bool:
    """Whether the commit happened: its outcome says so, or its values are there."""
    if commit.outcome is Outcome.UNKNOWN:
        return not facts.final_values.isdisjoint(facts.values_of(commit.invoked.transactions))
    return commit.outcome is Outcome.COMMITTED


def _check_pair(facts: Facts, app: str, first: Commit, second: Commit) -> Iterator[Violation]:
    """Two commits that happened; `first` was requested first. With the same winners they are one, requested twice."""
    if set(first.invoked.transactions) == set(second.invoked.transactions) and first.version == second.version:
        return
    overtaken = 0 <= first.ended_position < second.position and second.version < first.version
    if first.version == second.version or (overtaken and second.outcome is Outcome.COMMITTED):
        names = f"commits {first.invoked.commit} and {second.invoked.commit}"
        detail = f"{names} of {app!r}, versions {first.version} and {second.version}, both happened"
        yield Violation(ViolationKind.COMMITTED_TWICE, *_place(facts, second), detail)


def _place(facts: Facts, commit: Commit) -> tuple[TopicPartition, int]:
    for transaction in commit.invoked.transactions:
        for operation in facts.transactions[transaction].operations:
            return facts.invoked[operation].partition, facts.base_offsets.get(operation, -1)
    return NOWHERE, -1
