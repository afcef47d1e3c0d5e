"""Offsets that transactions commit, among those of others: live, and replayed from a log that was compacted."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import GroupRecord, OffsetKey, OffsetValue
from spark_broker.core.groups.requests import GroupSettings

GROUPS = ("a", "b")
T0 = ("t", 0)


@dataclass(frozen=True)
class Written:
    """A record of the log, or a marker (`offset` None). `producer_id`: of a transaction; -1: it is of none."""

    producer_id: int
    group: str
    offset: int | None
    committed: bool = True


records = st.builds(Written, st.sampled_from([-1, -1, 1, 2]), st.sampled_from(GROUPS), st.integers(0, 99))
markers = st.builds(Written, st.sampled_from([1, 2]), st.just(""), st.none(), st.booleans())
logs = st.lists(st.one_of(records, records, markers), max_size=30)


def shard(log: list[Written]) -> GroupShard:
    replayed = GroupShard(GroupSettings(), 1)
    for written in log:
        if written.offset is None:
            replayed.decide(written.producer_id, committed=written.committed)
            continue
        record = GroupRecord(OffsetKey(written.group, *T0), OffsetValue(written.offset))
        if written.producer_id < 0:
            replayed.replay(record)
        else:
            replayed.write_undecided(written.producer_id, [record])
    return replayed


def offsets(of: GroupShard) -> dict[str, int]:
    return {group: value.offset for group in GROUPS for value in of.offsets(group).values()}


def compacted(log: list[Written]) -> list[Written]:
    """What the cleaner leaves below the first undecided record: each key's last record, nothing that was aborted."""
    outcomes: dict[int, bool | None] = {}
    decided: dict[int, bool | None] = {}
    for at in reversed(range(len(log))):
        written = log[at]
        if written.offset is None:
            outcomes[written.producer_id] = written.committed
        elif written.producer_id >= 0:
            decided[at] = outcomes.get(written.producer_id)
    first = min((at for at, outcome in decided.items() if outcome is None), default=len(log))
    alive = [at for at in range(first) if log[at].offset is not None and decided.get(at, True)]
    last = {log[at].group: at for at in alive}
    return [w for at, w in enumerate(log) if at >= first or w.offset is None or last.get(w.group) == at]


@given(logs)
def test_a_compacted_log_says_the_same(log: list[Written]) -> None:
    """Known bug 36: a transaction's offset ranks where it was written, and not where it was decided."""
    assert offsets(shard(compacted(log))) == offsets(shard(log))


def test_a_transactions_offsets_count_once_it_is_committed() -> None:
    log = [Written(-1, "a", 1), Written(7, "a", 2), Written(8, "a", 9), Written(7, "a", 3)]
    open_ = shard(log)
    assert offsets(open_) == {"a": 1}
    open_.decide(8, committed=False)
    assert offsets(open_) == {"a": 1}
    open_.decide(7, committed=True)
    assert offsets(open_) == {"a": 3}


def test_a_later_commit_stands_although_the_transaction_is_decided_after_it() -> None:
    of = shard([Written(7, "a", 2), Written(8, "b", 7), Written(-1, "a", 5)])
    for producer_id in (7, 8):
        of.decide(producer_id, committed=True)
    assert offsets(of) == {"a": 5, "b": 7}


def test_a_group_is_unstable_while_a_transaction_may_move_one_of_its_partitions() -> None:
    of = shard([Written(-1, "a", 1), Written(7, "a", 2)])
    undecided = of.state.undecided
    assert undecided.of("a") == undecided.of("a", [("u", 0), T0]) == T0
    assert undecided.of("a", [("t", 1)]) is undecided.of("b") is None
    of.decide(7, committed=False)
    assert undecided.of("a") is None
