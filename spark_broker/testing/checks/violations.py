"""What a checker finds, and how much there was to check."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from spark_broker.model import TopicPartition

SHOWN_MAX = 20
"""Violations that a report spells out."""

NOWHERE = TopicPartition("", -1)
"""Partition of a finding that has no place in a log, such as a commit without records."""


class ViolationKind(Enum):
    """What can be wrong, the gravest first."""

    LOST = "acknowledged, and nowhere"
    NOT_DELIVERED = "acknowledged and stored, and no reader was given it"
    DUPLICATE = "one value at two offsets"
    INCONSISTENT_OFFSETS = "two values at one offset"
    MISPLACED = "acknowledged at one offset, found at another"
    REORDERED = "one writer's appends to one partition changed their order"
    SKIPPED = "a read skipped what it should have shown"
    WENT_BACK = "a poll went back"
    CHANGED = "what was read is different later"
    SOURCES_DIFFER = "two readers disagree about what is there"
    UNKNOWN_VALUE = "a value that nobody appended"
    STALE = "a whole read lacks what was acknowledged before it began"
    TORN_BATCH = "a micro-batch is there in part, or in pieces"
    TORN_TRANSACTION = "a transaction is there in part"
    ABORTED_READ = "a reader of committed records was given an aborted one"
    UNCOMMITTED_READ = "a reader of committed records was given one before its commit was asked for"
    COMMITTED_TWICE = "two commits of one application's version"
    COMMIT_MISSING = "refused as already committed, and nothing was committed"
    OFFSET_PASSED_RECORDS = "a committed offset passes records that were not handed out"
    OFFSET_LOST = "a group's committed offset fell back"
    TWO_OWNERS = "two members of a group owned a partition at one time"
    FENCED_COMMIT = "a member's commit counted after the partition had gone to another member"
    HANDED_OUT_TWICE = "a member was handed what the group had committed before it came"
    NOT_OWNED = "a member was handed records of a partition that it did not own"
    EPOCH_FELL = "a member's epoch fell"
    TOLD_WRONGLY = "a member was assigned what it had, or gave up what it had not"
    LATEST_FELL = "the latest offset shown fell"


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding. `offset` is where it shows."""

    kind: ViolationKind
    partition: TopicPartition
    offset: int
    detail: str

    def __str__(self) -> str:
        place = "" if self.partition == NOWHERE else f" at {self.partition}, offset {self.offset}"
        return f"{self.kind.name}{place}: {self.detail} ({self.kind.value})"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The violations, and how much was there to check: a run that acknowledged nothing proves nothing.

    `acknowledged_values`: the values that must be there, of acknowledged plain appends and committed transactions.
    `whole_reads`: snapshots taken on the way.
    """

    violations: tuple[Violation, ...]
    acknowledged_values: int
    failed_values: int
    values_read: int
    committed_transactions: int = 0
    aborted_transactions: int = 0
    unknown_transactions: int = 0
    whole_reads: int = 0

    @property
    def ok(self) -> bool:
        return not self.violations

    def counts(self) -> Counter[ViolationKind]:
        """How many violations there are of each kind."""
        return Counter(violation.kind for violation in self.violations)

    def __str__(self) -> str:
        counts = f"{self.acknowledged_values} values acknowledged, {self.failed_values} failed, {self.values_read} read"
        if self.committed_transactions or self.aborted_transactions or self.unknown_transactions:
            counts += (
                f"; transactions: {self.committed_transactions} committed, {self.aborted_transactions} aborted, "
                f"{self.unknown_transactions} of unknown outcome"
            )
        totals = self.counts()
        by_kind = [f"  {totals[kind]:>8}  {kind.name}: {kind.value}" for kind in ViolationKind if totals[kind]]
        shown = [str(violation) for violation in self.violations[:SHOWN_MAX]]
        more = len(self.violations) - len(shown)
        return "\n".join(
            [f"{len(self.violations)} violations; {counts}", *by_kind, *shown, *([f"and {more} more"] if more else [])]
        )
