"""Producer state, step by step, against a model that keeps every batch and looks through all of them."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spark_broker.core.batch import BatchInfo
from spark_broker.core.producers import REMEMBERED_BATCHES, ProducerStates, StoredBatch
from spark_broker.core.transaction_index import TransactionIndex
from spark_broker.errors import (
    DuplicateSequenceNumberError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    OutOfOrderSequenceNumberError,
    SparkBrokerError,
    UnknownProducerIdError,
)
from spark_broker.storage.producer_snapshots import decode_snapshot, encode_snapshot
from tests.support.machines import machine_settings

producers = st.integers(1, 3)
epochs = st.integers(0, 3)
sequences = st.integers(0, 8)

Refusal = type[SparkBrokerError]


class Model:
    """All batches ever written, and when each producer was forgotten. Every answer searches all of them."""

    def __init__(self) -> None:
        self.batches: list[BatchInfo] = []
        self.log_start = 0
        self.forgotten: dict[int, int] = {}  # producer id to the log end at that time

    def of(self, producer_id: int) -> list[BatchInfo]:
        since = self.forgotten.get(producer_id, 0)
        return [b for b in self.batches if b.producer_id == producer_id and b.base_offset >= since]

    def epoch(self, producer_id: int) -> int:
        mine = self.of(producer_id)
        return mine[-1].producer_epoch if mine else -1

    def run(self, producer_id: int) -> list[BatchInfo]:
        """Batches of the current epoch since its marker, or since the producer last restarted its sequence."""
        run: list[BatchInfo] = []
        for batch in self.of(producer_id):
            follows = run and batch.sequence == run[-1].sequence + 1 and not batch.control
            if batch.control:
                run = []
            elif follows and run[-1].producer_epoch == batch.producer_epoch:
                run.append(batch)
            else:
                run = [batch]
        return run

    def open_since(self, producer_id: int) -> int:
        """Where the open transaction begins; -1 if none is open."""
        first = -1
        for batch in self.batches:
            if batch.producer_id == producer_id and batch.control:
                first = -1
            elif batch.producer_id == producer_id and batch.transactional and first < 0:
                first = batch.base_offset
        return first

    def answer(
        self, producer_id: int, epoch: int, sequence: int, *, transactional: bool
    ) -> StoredBatch | Refusal | None:
        if not self.of(producer_id):
            return None if sequence == 0 else UnknownProducerIdError
        if epoch < self.epoch(producer_id):
            return InvalidProducerEpochError
        newer = epoch > self.epoch(producer_id)
        if self.open_since(producer_id) >= 0 and (newer or not transactional):
            return InvalidTxnStateError
        run = [] if newer else self.run(producer_id)
        for batch in run[-REMEMBERED_BATCHES:]:
            if batch.sequence == sequence:
                return StoredBatch(sequence, batch.base_offset, batch.next_offset - 1)
        if sequence == (run[-1].sequence + 1 if run else 0):
            return None
        older = bool(run) and sequence < run[-1].sequence
        return DuplicateSequenceNumberError if older else OutOfOrderSequenceNumberError

    def marker_is_new(self, producer_id: int, epoch: int) -> bool | Refusal:
        if epoch > self.epoch(producer_id):
            return True
        if epoch < self.epoch(producer_id) or self.run(producer_id) or self.open_since(producer_id) >= 0:
            return InvalidProducerEpochError
        return False

    def transactions(self) -> list[tuple[int, int, int, bool]]:
        """Producer, first offset, marker's offset and outcome of every transaction that has ended."""
        ended, first = [], dict[int, int]()
        for batch in self.batches:
            if batch.control:
                if batch.producer_id in first:
                    began = first.pop(batch.producer_id)
                    ended.append((batch.producer_id, began, batch.base_offset, batch.aborted))
            elif batch.transactional:
                first.setdefault(batch.producer_id, batch.base_offset)
        return ended

    def last_stable_offset(self, high_watermark: int) -> int:
        undecided = [first for _, first, marker, _ in self.transactions() if marker >= high_watermark]
        undecided += [first for pid in range(1, 4) if (first := self.open_since(pid)) >= 0]
        return min([high_watermark, *undecided])


class ProducerMachine(RuleBasedStateMachine):
    """A leader's appends and markers, a follower's copies, truncation, reloads, retention and expiry."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.states = ProducerStates()
        self.at_log_start = ProducerStates()
        self.snapshots: dict[int, bytes] = {}
        self.forgotten_at: dict[int, dict[int, int]] = {}  # by the snapshot's offset
        self.high_watermark = 0
        self.now_ms = 0

    @property
    def log_end(self) -> int:
        return self.model.batches[-1].next_offset if self.model.batches else 0

    def write(self, batch: BatchInfo) -> None:
        self.model.batches.append(batch)
        self.states.replay(batch)

    def batch(self, pid: int, epoch: int, sequence: int, rows: int, *, transactional: bool) -> BatchInfo:
        self.now_ms += 1
        return BatchInfo(
            self.log_end, self.log_end + rows, 0, self.now_ms, pid, epoch, sequence, transactional=transactional
        )

    @rule(pid=producers, epoch=epochs, sequence=sequences, rows=st.integers(1, 3), transactional=st.booleans())
    def append(self, pid: int, epoch: int, sequence: int, rows: int, transactional: bool) -> None:
        expected = self.model.answer(pid, epoch, sequence, transactional=transactional)
        try:
            answer: object = self.states.check(pid, epoch, sequence, transactional=transactional)
        except SparkBrokerError as error:
            answer = type(error)
        assert answer == expected
        if expected is None:
            self.write(self.batch(pid, epoch, sequence, rows, transactional=transactional))

    @rule(pid=producers, transactional=st.booleans(), rows=st.integers(1, 3))
    def append_the_next(self, pid: int, transactional: bool, rows: int) -> None:
        """Append as a producer that knows its state, because most random numbers are refused."""
        run = self.model.run(pid)
        sequence = run[-1].sequence + 1 if run else 0
        transactional |= self.model.open_since(pid) >= 0
        self.append(pid, max(self.model.epoch(pid), 0), sequence, rows, transactional)

    @rule(pid=producers, epoch=epochs, aborted=st.booleans())
    def mark(self, pid: int, epoch: int, aborted: bool) -> None:
        expected = self.model.marker_is_new(pid, epoch)
        try:
            answer: object = self.states.check_marker(pid, epoch)
        except SparkBrokerError as error:
            answer = type(error)
        assert answer == expected
        if expected is True:
            self.now_ms += 1
            self.write(
                BatchInfo(
                    self.log_end, self.log_end + 1, 0, self.now_ms, pid, epoch,
                    transactional=True, control=True, aborted=aborted,
                )
            )  # fmt: skip

    @rule(pid=producers, aborted=st.booleans())
    def end(self, pid: int, aborted: bool) -> None:
        """End a transaction as a coordinator that knows that it is open."""
        if self.model.open_since(pid) >= 0:
            self.mark(pid, self.model.epoch(pid) + 1, aborted)

    @rule(pid=producers, epoch=epochs, sequence=sequences)
    def copy_unjudged(self, pid: int, epoch: int, sequence: int) -> None:
        """21: followers copy what the leader has stored, whatever its rule was."""
        transactional = self.model.open_since(pid) >= 0
        self.write(self.batch(pid, epoch, sequence, 1, transactional=transactional))

    @rule()
    def snapshot(self) -> None:
        """Save a snapshot, as at a roll."""
        self.snapshots[self.log_end] = encode_snapshot(self.log_end, self.states)
        self.forgotten_at[self.log_end] = dict(self.model.forgotten)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ends = [b.next_offset for b in self.model.batches if b.next_offset > self.high_watermark]
        if ends:
            self.high_watermark = data.draw(st.sampled_from(ends))
            self.states.committed(self.high_watermark)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """A log is never truncated below the high watermark."""
        bases = [b.base_offset for b in self.model.batches if b.base_offset >= self.high_watermark]
        if bases:
            end = data.draw(st.sampled_from(bases))
            self.model.batches = [b for b in self.model.batches if b.base_offset < end]
            self.snapshots = {offset: saved for offset, saved in self.snapshots.items() if offset <= end}
            self.reload()

    @rule()
    def reload(self) -> None:
        """19: the newest snapshot below the high watermark must give the same state as the whole log.

        Producers that were forgotten when it was made are forgotten again; those that were forgotten later come back.
        """
        usable = self.usable(self.high_watermark)
        self.model.forgotten = dict(self.forgotten_at[max(usable)]) if usable else {}
        self.states = self.rebuilt(self.high_watermark)
        assert self.states == self.rebuilt(-1) or self.model.forgotten

    def usable(self, newest: int) -> list[int]:
        """Offsets of the snapshots that a reload may begin from."""
        return [offset for offset in self.snapshots if self.model.log_start <= offset <= newest]

    def rebuilt(self, newest: int) -> ProducerStates:
        usable = self.usable(newest)
        start, states = self.model.log_start, self.at_log_start.copy()
        if usable:
            start, states = decode_snapshot(self.snapshots[max(usable)])
        for batch in self.model.batches:
            if batch.base_offset >= start:
                states.replay(batch)
        states.start_at(self.model.log_start)
        states.committed(self.high_watermark)
        return states

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        """20: records are deleted, but the state of their producers stays."""
        stable = self.states.transactions.last_stable_offset(self.high_watermark)
        starts = [b.next_offset for b in self.model.batches if self.model.log_start < b.next_offset <= stable]
        if starts:
            offset = data.draw(st.sampled_from(starts))
            for batch in self.model.batches:
                if self.model.log_start <= batch.base_offset < offset:
                    self.at_log_start.replay(batch)
            self.at_log_start.start_at(offset)
            self.model.log_start = offset
            self.states.start_at(offset)

    @precondition(lambda self: bool(self.model.batches))
    @rule(age=st.integers(0, 5), ended_age=st.integers(0, 5))
    def expire(self, age: int, ended_age: int) -> None:
        expected = [
            pid
            for pid in range(1, 4)
            if (mine := self.model.of(pid))
            and mine[-1].append_time_ms < self.now_ms - (ended_age if mine[-1].control else age)
            and self.model.open_since(pid) < 0
        ]
        assert sorted(self.states.expire(self.now_ms - age, self.now_ms - ended_age)) == expected
        self.model.forgotten.update(dict.fromkeys(expected, self.log_end))

    @invariant()
    def entries_are_the_last_batches_of_the_epoch(self) -> None:
        entries = dict(self.states.entries())
        for pid in range(1, 4):
            entry = entries.get(pid)
            mine = self.model.of(pid)
            assert (entry is not None) == bool(mine)
            if entry is not None:
                assert (entry.producer_epoch, entry.last_append_ms) == (
                    mine[-1].producer_epoch,
                    mine[-1].append_time_ms,
                )
                assert [b.base_offset for b in self.model.run(pid)][-REMEMBERED_BATCHES:] == [
                    stored.base_offset for stored in entry.batches
                ]

    @invariant()
    def transactions_are_those_of_the_log(self) -> None:
        index: TransactionIndex = self.states.transactions
        for mark in {self.high_watermark, self.log_end}:
            assert index.last_stable_offset(mark) == self.model.last_stable_offset(mark)
        aborted = [transaction for transaction in self.model.transactions() if transaction[3]]
        for batch in self.model.batches:
            if batch.transactional and not batch.control and batch.base_offset >= self.model.log_start:
                expected = any(
                    pid == batch.producer_id and first <= batch.base_offset < marker
                    for pid, first, marker, _ in aborted
                )
                assert index.is_aborted(batch.producer_id, batch.base_offset) == expected


TestProducerMachine = ProducerMachine.TestCase
TestProducerMachine.settings = machine_settings(40)
