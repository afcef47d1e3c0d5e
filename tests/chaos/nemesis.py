"""Faults one after the other, drawn from a seed, while clients are at work; then the judgement of what they saw."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from spark_broker.errors import SparkBrokerError
from spark_broker.model import NewTopic, TopicPartition
from spark_broker.testing.checker import check_history
from spark_broker.testing.compacted_replicas import compacted_batches, compare_compacted_replicas
from spark_broker.testing.copy_workload import check_copies
from spark_broker.testing.history import History, Isolation, Snapshot, Stored
from spark_broker.testing.history_file import save_history
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.replicas import (
    ReplicaDifference,
    compare_replicas,
    find_replicas,
    stored_values,
)
from spark_broker.testing.report import explain
from tests.chaos.clients import Clients, Load
from tests.chaos.target import REPLICAS, NotHealedError, Target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 4
TOPIC = "chaos"
COPIES = "chaos-copies"
STATE = "chaos-state"
STATE_PARTITIONS = 2
OVERLAPPING = 0.3
"""Share of faults after which the next one does not wait until the cluster is whole again."""

RECOVERY_S = 240.0
EVERYTHING = 1 << 62


class Fault(msgspec.Struct, frozen=True):
    """One fault and what it cost. `unavailable_s`: the longest that a partition was without an acknowledgement.

    `recovered_s`: from the end of the fault until every partition had acknowledged again; `healed_s`: until all
    replicas were in sync, -1 where the next fault did not wait for it.
    """

    number: int
    kind: str
    target: str
    lasted_s: float
    unavailable_s: float
    recovered_s: float
    healed_s: float
    acknowledged: int


class Outcome(msgspec.Struct, kw_only=True):
    """One run on one cluster. `problem`: why it ended before its end; `page`: the anomalies, explained; `removed`: the
    records that compaction removed, of all replicas.
    """

    target: str
    seed: int
    planned: int
    faults: list[Fault] = []
    missing: dict[str, str] = {}
    acknowledged: int = 0
    failed: int = 0
    read: int = 0
    transactions: dict[str, int] = {}
    violations: dict[str, int] = {}
    replica_differences: list[str] = []
    copy_problems: list[str] = []
    removed: int = 0
    client_errors: dict[str, int] = {}
    whole_reads: int = 0
    seconds: float = 0.0
    check_seconds: float = 0.0
    history: str = ""
    problem: str = ""
    under_way: str = ""
    page: str = ""

    @property
    def ok(self) -> bool:
        return (
            not (self.violations or self.replica_differences or self.copy_problems or self.problem)
            and self.acknowledged > 0
            and self.removed > 0
        )


@dataclass(frozen=True)
class Planned:
    """A fault that is to come. Its randomness depends on the run's seed and its number alone."""

    number: int
    kind: str
    overlaps: bool
    rng: random.Random


def plan(seed: int, faults: int, kinds: Sequence[str]) -> Iterator[Planned]:
    """Every kind comes once before any comes twice, each round in an order of its own."""
    rng = random.Random(seed)
    round_: list[str] = []
    for number in range(faults):
        if not round_:
            round_ = rng.sample(kinds, len(kinds))
        yield Planned(number, round_.pop(), rng.random() < OVERLAPPING, random.Random(f"{seed}/{number}"))


Comparison = Callable[..., tuple[ReplicaDifference, ...]]
Tell = Callable[[Outcome, str, int], None]
"""Called with the outcome so far, what is going on, and how many records are acknowledged."""


def torment(
    target: Target,
    directory: Path,
    *,
    seed: int,
    faults: int,
    load: Load,
    records: int,
    spark: SparkSession | None,
    tell: Tell,
) -> Outcome:
    """Make the faults, and go on until `records` are acknowledged; then stop, read everything and judge."""
    began_s = time.monotonic()
    outcome = Outcome(target=target.name, seed=seed, planned=faults, missing=target.missing)
    recorder = HistoryRecorder()
    partitions, (copies,), state = _create_topics(target)
    servers = target.bootstrap_servers
    try:
        with Clients(recorder, servers, partitions, copies, state, load, seed=seed, spark=spark) as clients:
            outcome.under_way = "the start"
            started_s = time.monotonic()
            target.wait_for(lambda: clients.acknowledged_since(started_s), "the first acknowledgements", RECOVERY_S)
            for planned in plan(seed, faults, target.kinds):
                outcome.under_way = f"fault {planned.number + 1}, {planned.kind}"
                _strike(target, clients, planned, outcome, tell)
            outcome.under_way = "the end"
            tell(outcome, "healing", recorder.acknowledged_values)
            target.await_healed(TOPIC, RECOVERY_S)
            _reach(target, clients, records, outcome, tell)
            tell(outcome, "reading everything", recorder.acknowledged_values)
            outcome.client_errors = clients.finish()
        _judge(target, recorder, partitions, copies, state, outcome, tell)
    except (NotHealedError, SparkBrokerError) as error:
        outcome.problem = f"{outcome.under_way}: {error}"
    _keep(directory, recorder, outcome)
    outcome.seconds = time.monotonic() - began_s
    return outcome


def _create_topics(target: Target) -> tuple[list[TopicPartition], list[TopicPartition], list[TopicPartition]]:
    """The partitions of the topics: the one that everyone uses, the copies, and the compacted one."""
    config: dict[str, object] = {"min.insync.replicas": 2, "segment.bytes": 1_048_576, "retention.ms": -1}
    compacted = {**config, "cleanup.policy": "compact", "segment.bytes": 32_768, "min.cleanable.dirty.ratio": 0.3}
    for topic in (NewTopic(TOPIC, PARTITIONS, REPLICAS, config=config), NewTopic(COPIES, 1, REPLICAS, config=config)):
        target.admin().create_topic(topic)
    target.admin().create_topic(NewTopic(STATE, STATE_PARTITIONS, REPLICAS, config=compacted))
    return target.partitions(TOPIC), target.partitions(COPIES), target.partitions(STATE)


def _strike(target: Target, clients: Clients, planned: Planned, outcome: Outcome, tell: Tell) -> None:
    def count() -> int:
        return clients.recorder.acknowledged_values

    target.hold(planned.rng.uniform(0.0, 2.0))
    clients.steady.forget_gap()
    began_s = time.monotonic()
    with target.strike(planned.kind, planned.rng) as hit:
        tell(outcome, f"{planned.number + 1}: {planned.kind} of {hit}", count())
    ended_s = time.monotonic()
    target.wait_for(lambda: clients.acknowledged_since(ended_s), "an acknowledgement of every partition", RECOVERY_S)
    recovered_s = time.monotonic()
    unavailable_s = clients.steady.longest_gap_s
    tell(outcome, f"{planned.number + 1}: {planned.kind} of {hit}, served again", count())
    if not planned.overlaps:
        target.await_healed(TOPIC, RECOVERY_S)
    target.check_spared()
    outcome.faults.append(
        Fault(
            number=planned.number + 1,
            kind=planned.kind,
            target=hit,
            lasted_s=ended_s - began_s,
            unavailable_s=unavailable_s,
            recovered_s=recovered_s - ended_s,
            healed_s=-1.0 if planned.overlaps else time.monotonic() - ended_s,
            acknowledged=count(),
        )
    )
    clients.pace()
    tell(outcome, "", count())


def _reach(target: Target, clients: Clients, records: int, outcome: Outcome, tell: Tell) -> None:
    """Go on until so many records are acknowledged; raises NotHealedError when they stop coming."""
    while (before := clients.recorder.acknowledged_values) < records:
        tell(outcome, "appending on", before)
        target.wait_for(lambda: clients.recorder.acknowledged_values > before, "another acknowledgement", RECOVERY_S)
        target.hold(0.5)


def _judge(
    target: Target,
    recorder: HistoryRecorder,
    partitions: list[TopicPartition],
    copies: TopicPartition,
    state: list[TopicPartition],
    outcome: Outcome,
    tell: Tell,
) -> None:
    tell(outcome, "comparing replicas", recorder.acknowledged_values)
    for topic in (TOPIC, COPIES, STATE):
        target.await_healed(topic, RECOVERY_S)
    outcome.replica_differences += _differences(target, [*partitions, copies], compare_replicas)
    outcome.replica_differences += _differences(target, state, compare_compacted_replicas)
    outcome.removed = _removed(target, state)
    tell(outcome, "checking the history", recorder.acknowledged_values)
    history = recorder.history()
    began_s = time.monotonic()
    result = check_history(history, _stored(target, [*partitions, copies, *state]))
    outcome.check_seconds = time.monotonic() - began_s
    outcome.copy_problems = list(_wrong_copies(history, partitions[0], copies))
    outcome.acknowledged = result.acknowledged_values
    outcome.failed, outcome.read = result.failed_values, result.values_read
    outcome.transactions = {
        "committed": result.committed_transactions,
        "aborted": result.aborted_transactions,
        "unknown": result.unknown_transactions,
    }
    outcome.whole_reads = result.whole_reads
    outcome.violations = {kind.name: count for kind, count in result.counts().items()}
    if not outcome.ok:
        outcome.page = explain(history, result)


def _differences(target: Target, partitions: list[TopicPartition], compare: Comparison) -> list[str]:
    differences: list[str] = []
    for partition in partitions:
        description = target.described(partition.topic)[partition.partition]
        assert description.high_watermark is not None, f"{partition} has no leader"
        replicas, end = description.replicas, description.high_watermark
        differences += map(str, compare(target.log_dirs, partition, replicas, up_to_offset=end))
    return differences


def _removed(target: Target, state: list[TopicPartition]) -> int:
    """How many records compaction has removed, of all replicas' together."""
    removed = 0
    for partition in state:
        for replica in find_replicas(target.log_dirs, partition):
            headers = [frame.header for frame in compacted_batches(replica, EVERYTHING)]
            removed += sum(header.last_offset_delta + 1 - header.row_count for header in headers)
    return removed


def _wrong_copies(history: History, source: TopicPartition, copies: TopicPartition) -> Iterator[str]:
    """Exactly once: in the last whole read, the copies are the originals."""
    last = [e for e in history.events if isinstance(e, Snapshot) and e.isolation is Isolation.READ_COMMITTED][-1]
    values = {
        partition: [value for run in last.runs if run.partition == partition for value in run.values]
        for partition in (source, copies)
    }
    yield from check_copies(values[source], values[copies])


def _stored(target: Target, partitions: list[TopicPartition]) -> Iterator[Stored]:
    """What lies in the replicas' files: read only when something is missing."""
    for partition in partitions:
        for replica in find_replicas(target.log_dirs, partition):
            yield from stored_values(replica, "value", EVERYTHING)


def _keep(directory: Path, recorder: HistoryRecorder, outcome: Outcome) -> None:
    path = directory / "history.jsonl"
    save_history(recorder.history(), path)
    outcome.history = str(path)
