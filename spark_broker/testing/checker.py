"""Judges a history: is all that was promised there for every reader, once, in order, whole, and for good?

The topic must keep everything, but for what compaction removes (`history.Invoked` has the keys then): no retention.
`checks/` has one file for each idea.
"""

from __future__ import annotations

from collections.abc import Iterable

from spark_broker.testing.checks.appends import check_order, check_required, check_whole_batches
from spark_broker.testing.checks.facts import Facts, Outcome
from spark_broker.testing.checks.groups import check_groups
from spark_broker.testing.checks.members import check_members
from spark_broker.testing.checks.places import check_promises, check_reads, check_snapshots
from spark_broker.testing.checks.reading import (
    check_latest,
    check_noticed,
    check_polls,
    check_snapshots_on_the_way,
)
from spark_broker.testing.checks.transactions import check_isolation, check_versions, check_whole_transactions
from spark_broker.testing.checks.violations import CheckResult, Violation, ViolationKind
from spark_broker.testing.history import History, Stored

__all__ = ["CheckResult", "ViolationKind", "Violation", "check_history"]


def check_history(history: History, stored: Iterable[Stored] = ()) -> CheckResult:
    """Check a history. `stored`: what the replicas' files hold, to tell a lost value from one that was not delivered;
    it is read only when a value is missing.

    Raises InvalidDataError for a history that cannot be judged: a value appended twice, no final snapshot, an outcome
    of an operation that never began.
    """
    facts = Facts(history.events)
    violations = [
        *check_promises(facts),
        *check_reads(facts),
        *check_snapshots(facts),
        *check_order(facts),
        *check_required(facts, stored),
        *check_whole_batches(facts),
        *check_polls(facts),
        *check_latest(facts),
        *check_snapshots_on_the_way(facts),
        *check_noticed(facts),
        *check_isolation(facts),
        *check_whole_transactions(facts),
        *check_versions(facts),
        *check_groups(facts),
        *check_members(facts),
    ]
    outcomes = [transaction.outcome for transaction in facts.transactions.values()]
    return CheckResult(
        tuple(violations),
        acknowledged_values=sum(len(invoked.values) for invoked in facts.required()),
        failed_values=sum(len(facts.invoked[operation].values) for operation in facts.failed),
        values_read=len(facts.final_values),
        committed_transactions=outcomes.count(Outcome.COMMITTED),
        aborted_transactions=outcomes.count(Outcome.NOT_COMMITTED),
        unknown_transactions=outcomes.count(Outcome.UNKNOWN),
        whole_reads=facts.on_the_way,
    )
