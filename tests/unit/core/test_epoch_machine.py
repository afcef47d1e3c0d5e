"""Epoch histories of three logs, step by step, against models that name epoch and writer of every single record.

Leaders come and go freely, also with less than others have. Two logs must agree once one has followed the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spark_broker.core.divergence import FetchPosition, find_divergence, truncation_offset
from spark_broker.core.epochs import UNDEFINED_EPOCH, EpochEnd, EpochHistory
from tests.support.machines import machine_settings

LOGS = 3
numbers = st.integers(0, LOGS - 1)


@dataclass(frozen=True, slots=True)
class Record:
    """Every record that a leader writes has a new `id`."""

    epoch: int
    id: int


@dataclass(slots=True)
class Log:
    """A history, and the records from `start` on that it describes. `leads` is the epoch in which it may write.

    `before`: the record that precedes `start`, where the history knows its epoch.
    """

    history: EpochHistory = field(default_factory=EpochHistory)
    records: list[Record] = field(default_factory=list)
    start: int = 0
    leads: int = -1  # none
    before: Record | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    def at(self, offset: int) -> Record:
        return self.records[offset - self.start]

    def retain(self, start: int) -> None:
        self.before = self.at(start - 1) if start > self.start else self.before
        self.records = self.records[start - self.start :]
        self.start, self.history = start, self.history.start_at(start)

    def begin_anew(self, leader: Log) -> None:
        """Restart at the leader's log start, with what the leader knows of the part before it."""
        self.records, self.start, self.before = [], leader.start, leader.before
        self.history = leader.history.truncate_to(leader.start)

    def last(self) -> Record | None:
        return self.records[-1] if self.records else self.before

    def truncate(self, end: int) -> None:
        self.records = self.records[: max(end - self.start, 0)]
        self.history = self.history.truncate_to(end)

    def copy(self, record: Record) -> None:
        if record.epoch != self.history.latest_epoch:
            self.history = self.history.assign(record.epoch, self.end)
        self.records.append(record)

    def position(self, leader_epoch: int) -> FetchPosition:
        return FetchPosition(leader_epoch, self.end, self.history.epoch_at(self.end - 1))


class EpochMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.logs = [Log() for _ in range(LOGS)]
        self.epoch = -1
        self.written = 0

    @rule(number=numbers, count=st.integers(0, 3))
    def elect(self, number: int, count: int) -> None:
        """The previous leader goes on writing until it follows."""
        self.epoch += 1
        log = self.logs[number]
        log.leads = self.epoch
        log.history = log.history.assign(self.epoch, log.end)
        self.write(number, count)

    @rule(number=numbers, count=st.integers(1, 3))
    def write(self, number: int, count: int) -> None:
        log = self.logs[number]
        for _ in range(count if log.leads >= 0 else 0):
            self.written += 1
            log.records.append(Record(log.leads, self.written))

    @rule(number=numbers, data=st.data())
    def retain(self, number: int, data: st.DataObject) -> None:
        log = self.logs[number]
        log.retain(data.draw(st.integers(log.start, log.end)))

    @rule(number=numbers, data=st.data())
    def lose_the_end(self, number: int, data: st.DataObject) -> None:
        """The machine crashes, and its broker leads no longer."""
        log = self.logs[number]
        log.leads = -1
        log.truncate(data.draw(st.integers(log.start, log.end)))

    @rule(number=numbers)
    def reload(self, number: int) -> None:
        """The history is loaded from a file, which may name epochs that begin past the log end."""
        log = self.logs[number]
        log.leads = -1
        history = EpochHistory.from_pairs(log.history.to_pairs()).truncate_to(log.end)
        assert [history.epoch_at(offset) for offset in range(log.start, log.end)] == [r.epoch for r in log.records]
        log.history = history

    @rule(leader=numbers)
    def follow_all(self, leader: int) -> None:
        """All logs follow to the end."""
        for number in range(LOGS):
            self.follow(number, leader, 100)

    @rule(number=numbers, leader=numbers, count=st.integers(0, 5))
    def follow(self, number: int, leader: int, count: int) -> None:
        """Fetch until the logs agree, then copy some records."""
        mine, its = self.logs[number], self.logs[leader]
        if number == leader or its.leads < 0 or its.leads < mine.leads:
            return
        mine.leads = -1
        mine.history = mine.history.truncate_to(mine.end)
        self.cut_to_agreement(mine, its)
        if mine.end < its.start:
            mine.begin_anew(its)
        if mine.end == its.start and its.before is not None:
            assert mine.last() in (None, its.before), "the logs differ where one ends and the other begins"
        for offset in range(mine.end, min(mine.end + count, its.end)):
            mine.copy(its.at(offset))
        for offset in range(max(mine.start, its.start), mine.end):
            assert mine.at(offset) == its.at(offset), f"the logs differ at {offset}"

    def cut_to_agreement(self, mine: Log, its: Log) -> None:
        rounds = len(mine.history.entries) + len(its.history.entries) + 2
        for _ in range(rounds):
            diverging = find_divergence(its.history, its.end, mine.position(its.leads))
            if diverging is None:
                return
            before = mine.position(its.leads)
            cut = truncation_offset(mine.history, mine.end, diverging)
            assert cut <= mine.end
            if cut < mine.start:  # It is rebuilt (KAFKA-7897): it would keep no record.
                mine.begin_anew(its)
                return
            mine.truncate(cut)
            assert mine.position(its.leads) != before, "a divergence that cuts nothing is asked for ever"
        raise AssertionError(f"no agreement after {rounds} rounds")

    @invariant()
    def every_record_has_its_epoch(self) -> None:
        for log in self.logs:
            epochs = [log.history.epoch_at(offset) for offset in range(log.start, log.end)]
            assert epochs == [record.epoch for record in log.records]
            assert log.history.epoch_at(log.start - 1) == (UNDEFINED_EPOCH if log.before is None else log.before.epoch)

    @invariant()
    def every_epoch_ends_where_a_later_one_begins(self) -> None:
        for log in self.logs:
            for epoch in range(log.records[0].epoch if log.records else self.epoch + 1, self.epoch + 1):
                indexes = [n for n, record in enumerate(log.records) if record.epoch <= epoch]
                end = log.history.end_of(epoch, log.end)
                if epoch > log.history.latest_epoch:
                    assert end == EpochEnd(UNDEFINED_EPOCH, -1)
                elif epoch != log.leads and indexes:
                    assert end.end_offset == log.start + indexes[-1] + 1

    @invariant()
    def histories_increase(self) -> None:
        for log in self.logs:
            assert EpochHistory(log.history.entries) == log.history


TestEpochMachine = EpochMachine.TestCase
TestEpochMachine.settings = machine_settings(40)
