"""A run of a replica's whole log (batches, epochs, producers, transactions) on a simulated disk, beside a tiny model.

It is `torture.Run` one layer higher: `points` are the places to crash at, and `check` opens the `ReplicaLog` after a
crash there. The remaining batches and the log's base must determine the epoch history (KAFKA-10706). They must also
determine the producers with their transactions, for every high watermark (KAFKA-5435, KIP-360).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.topic import Topic
from spark_broker.config import TopicConfig
from spark_broker.core.batch import batch_info
from spark_broker.core.epochs import UNDEFINED_EPOCH, EpochHistory
from spark_broker.core.producers import ProducerEntry, ProducerStates, StoredBatch
from spark_broker.core.transaction_index import TransactionIndex
from spark_broker.errors import DamagedLogError
from spark_broker.protocol.arrow_message import assign, encode_batch, encode_marker
from spark_broker.protocol.frame import TRANSACTIONAL, Frame
from spark_broker.protocol.messages import ProducerStateEntry
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import CHANGING, Fault, Operation, SimFileSystem
from tests.storage.logs import SCHEMAS, same, schema_message, sim_directory

DIRECTORY = Path("/p-0")
TOPIC = Topic("t", "topic-id", (SCHEMAS[0],), (schema_message(0),), TopicConfig(), "")
PLAIN = -1
"""The producer id of a producer that is not idempotent."""

Step = tuple[str, int]
"""A name of `STEPS` and its number: a producer id, or how many batches or offsets."""


def open_replica(start: StartKind, fs: SimFileSystem) -> ReplicaLog:
    return ReplicaLog(DIRECTORY, TOPIC, start, fs=fs)


@dataclass(frozen=True, slots=True)
class Base:
    """What a log was started from: nothing, or the leader's state before its log start.

    `epoch` is that of the record before it.
    """

    offset: int = 0
    epoch: int = UNDEFINED_EPOCH
    producers: tuple[tuple[int, ProducerEntry], ...] = ()
    ongoing: tuple[tuple[int, int], ...] = ()

    def states(self) -> ProducerStates:
        return ProducerStates(self.producers, TransactionIndex(self.ongoing))

    def entries(self) -> list[ProducerStateEntry]:
        """The state as the leader sends it."""
        ongoing = dict(self.ongoing)
        return [
            ProducerStateEntry(
                producer_id,
                entry.producer_epoch,
                entry.last_append_ms,
                [(b.sequence, b.sequence, b.base_offset, b.last_offset) for b in entry.batches],
                ongoing.get(producer_id, -1),
            )
            for producer_id, entry in self.producers
        ]


def leaders_base(offset: int, epoch: int) -> Base:
    """Two producers have written before `offset`, and one has an open transaction."""
    if offset < 2:
        return Base(offset, epoch if offset else UNDEFINED_EPOCH)
    entry = ProducerEntry(0, (StoredBatch(0, 0, offset - 1),), 0)
    return Base(offset, epoch, ((1, entry), (9, entry)), ((9, 0),))


@dataclass(frozen=True, slots=True)
class Legal:
    """A log that was started from `base`, has had `frames`, and starts at `start`.

    It ends from `least` to `most`, at the end of a batch or at its start.
    """

    base: Base
    frames: tuple[Frame, ...]
    start: int
    least: int
    most: int

    def states(self, end: int) -> ProducerStates:
        states = self.base.states()
        for frame in self.frames:
            if frame.header.base_offset < end:
                states.replay(batch_info(frame.header))
        states.start_at(self.start)
        return states

    def epochs(self, end: int) -> EpochHistory:
        history = EpochHistory()
        if self.base.epoch != UNDEFINED_EPOCH:
            history = history.assign(self.base.epoch, 0)
        for frame in self.frames:
            if frame.header.next_offset <= end:
                history = history.assign(frame.header.leader_epoch, frame.header.base_offset)
        return history.start_at(self.start)

    def is_history(self, found: EpochHistory, end: int) -> bool:
        """Whether it names the epoch of every record, and, if known, of the record before the log start.

        If a log begins where it was rebuilt, the latter may be of the earlier log, because a crash came in between.
        """
        wanted = self.epochs(end)
        before = found.epoch_at(self.start - 1)
        above = next((f.header for f in self.frames if f.header.next_offset >= self.start), None)  # or across the start
        last = above.leader_epoch if above and above.base_offset < self.start else self.base.epoch
        return (
            found == found.start_at(self.start).truncate_to(end)
            and all(found.epoch_at(offset) == wanted.epoch_at(offset) for offset in range(self.start, end))
            and (self.start == self.base.offset or before in (UNDEFINED_EPOCH, last))
        )

    def problem(self, log: ReplicaLog) -> str:
        """Why the log is none of these; empty if it is one. Raises DamagedLogError."""
        state = log.state(high_watermark=0)
        start, end = state.log_start_offset, state.log_end_offset
        if start != self.start or not self.least <= end <= self.most:
            return f"the log is [{start}, {end}), not [{self.start}, {self.least}..{self.most})"
        frames = everything(log)
        if not same(frames, [f for f in self.frames if start < f.header.next_offset <= end]):
            return f"it holds {[f.header.base_offset for f in frames]} of [{start}, {end})"
        if end != (frames[-1].header.next_offset if frames else start):
            return "its end is not a batch's end"
        if not self.is_history(state.epochs, end):
            return f"its epochs are {state.epochs.to_pairs()}, not {self.epochs(end).to_pairs()}"
        wanted = self.states(end)
        marks = sorted({start, end, *(f.header.next_offset for f in frames)})
        wrong = [mark for mark in marks if log.rebuild_producers(mark) != wanted]
        return f"its producers are others than those of its batches, with high watermarks {wrong}" if wrong else ""


def everything(log: ReplicaLog) -> list[Frame]:
    """All batches of the log."""
    frames: list[Frame] = []
    state = log.state(high_watermark=0)
    offset = state.log_start_offset
    while offset < state.log_end_offset:
        frames += log.read(offset, 1 << 20, state.log_end_offset)
        offset = frames[-1].header.next_offset
    return frames


@dataclass(frozen=True, slots=True)
class Point:
    """A place to crash at: the disk before an operation (None: between two steps), and the logs that may be found."""

    fs: SimFileSystem
    step: Step
    operation: Operation | None
    process: tuple[Legal, ...]
    machine: tuple[Legal, ...]

    def __str__(self) -> str:
        what = "after it" if self.operation is None else f"before {self.operation.kind} {self.operation.path}"
        return f"step {self.step}, {what}"


@lru_cache(maxsize=4000)
def batch_at(base_offset: int, epoch: int, first: bool, writer: tuple[int, int, int], attributes: int) -> Frame:
    """Two rows of the writer, which is producer id, producer epoch and sequence number."""
    producer_id, producer_epoch, sequence = writer
    rows = pa.RecordBatch.from_arrays([pa.array([base_offset, base_offset + 1], pa.int64())], schema=SCHEMAS[0])
    message = encode_batch(
        rows,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=sequence,
        attributes=attributes,
    )
    return _stored(message, base_offset, epoch, first)


@lru_cache(maxsize=1000)
def marker_at(base_offset: int, epoch: int, first: bool, producer: tuple[int, int], committed: bool) -> Frame:
    """A marker that begins the epoch of `producer`, which is id and epoch."""
    message = encode_marker(
        SCHEMAS[0], producer_id=producer[0], producer_epoch=producer[1], committed=committed, schema_id=0
    )
    return _stored(message, base_offset, epoch, first)


def _stored(message: bytes, base_offset: int, epoch: int, first: bool) -> Frame:
    header, stored = assign(
        message,
        base_offset=base_offset,
        leader_epoch=epoch,
        append_time_ms=base_offset,
        max_timestamp_us=base_offset,
        first_of_segment=first,
    )
    return Frame(header, bytes(stored))


@dataclass(slots=True)
class ReplicaRun:
    """The replica's log, its model, and the points passed."""

    recording: bool = True
    fs: SimFileSystem = field(default_factory=lambda: sim_directory()[0])
    log: ReplicaLog = field(init=False)
    base: Base = field(default_factory=Base)
    frames: tuple[Frame, ...] = ()
    start: int = 0
    synced: int = 0
    epoch: int = 0
    saved: EpochHistory = field(default_factory=EpochHistory)
    points: list[Point] = field(default_factory=list)
    _now: tuple[Step, tuple[Legal, ...], tuple[Legal, ...]] = (("begin", 0), (), ())

    def __post_init__(self) -> None:
        self.log = open_replica(StartKind.CLEAN, self.fs)
        self.settle(("begin", 0))
        if self.recording:
            self.fs.on_operation = self._record

    @property
    def end(self) -> int:
        return self.frames[-1].header.next_offset if self.frames else self.base.offset

    @property
    def states(self) -> ProducerStates:
        """What the replica knows of its producers."""
        return self.now().states(self.end)

    def perform(self, steps: Sequence[Step]) -> None:
        for step in steps:
            STEPS[step[0]](self, step)

    def now(self, *, least: int | None = None) -> Legal:
        return Legal(self.base, self.frames, self.start, self.end if least is None else least, self.end)

    def settle(self, step: Step, synced: int = 0) -> None:
        """End the step: `synced` may raise what counts as synced."""
        self.synced = max(min(self.synced, self.end), synced)
        assert not self.now().problem(self.log), (step, self.now().problem(self.log))
        self._now = (step, (self.now(),), (self.now(least=max(self.start, self.synced)),))
        if self.recording:
            self.points.append(Point(self.fs.copy(), step, None, self._now[1], self._now[2]))

    def _record(self, operation: Operation) -> Fault | None:
        if operation.kind in CHANGING:
            step, process, machine = self._now
            self.points.append(Point(self.fs.copy(), step, operation, process, machine))
        return None

    def write(self, step: Step) -> None:
        """Append a batch of the producer: "plain", "data", "txn"; "roll" begins a segment with it."""
        name, producer_id = step
        entry = dict(self.states.entries()).get(producer_id)
        open_transaction = self.states.transactions.first_offset(producer_id) >= 0
        writer = (producer_id, entry.producer_epoch if entry else 0, entry.next_sequence if entry else 0)
        attributes = TRANSACTIONAL if name == "txn" or open_transaction else 0
        writer, attributes = (writer, attributes) if producer_id != PLAIN else ((PLAIN, -1, -1), 0)
        first = name == "roll" or self.log.should_roll(400, 0, self.end)
        self._append(step, batch_at(self.end, self.epoch, first, writer, attributes))

    def mark(self, step: Step) -> None:
        """Append a marker for the producer: "commit" or "abort"."""
        entry = dict(self.states.entries()).get(step[1])
        producer = (step[1], entry.producer_epoch + 1 if entry else 0)
        first = self.log.should_roll(400, 0, self.end)
        self._append(step, marker_at(self.end, self.epoch, first, producer, step[0] == "commit"))

    def _append(self, step: Step, frame: Frame) -> None:
        after = Legal(self.base, (*self.frames, frame), self.start, self.end, frame.header.next_offset)
        machine = Legal(self.base, after.frames, self.start, max(self.start, self.synced), after.most)
        self._now = (step, (after,), (machine,))
        sealed = self.end if frame.header.first_of_segment else 0
        self.log.append([frame], self.states)
        self.frames = after.frames
        self._save(after.epochs(self.end))
        self.settle(step, sealed)

    def _save(self, history: EpochHistory) -> None:
        """Save an epoch that the file lacks with its first batch, as the core does."""
        if history.latest_epoch != self.saved.latest_epoch:
            self.log.save_epochs(history)
            self.saved = history

    def new_epoch(self, step: Step) -> None:
        """A leader epoch begins at the log end; the history is saved before anything is written in it."""
        self.epoch += 1
        self._save(self.now().epochs(self.end).assign(self.epoch, self.end))
        self.settle(step)

    def truncate(self, step: Step) -> None:
        """Truncate so many batches, but only above the log start; the history comes first, as in the core."""
        above = sum(f.header.base_offset >= self.start for f in self.frames)
        kept = self.frames[: len(self.frames) - min(step[1], above)]
        offset = kept[-1].header.next_offset if kept else self.base.offset
        before, done = self.now(), Legal(self.base, kept, self.start, offset, offset)
        least = max(self.start, min(self.synced, offset))
        some = Legal(self.base, self.frames, self.start, offset, self.end)
        machine = Legal(self.base, self.frames, self.start, least, self.end)
        self._now = (step, (some, before), (machine,))
        self.saved = before.epochs(self.end).truncate_to(offset)
        self.log.save_epochs(self.saved)
        self.log.truncate_to(offset)
        self.log.rebuild_producers(offset)
        self.frames, self.synced = kept, min(self.synced, offset)
        assert not done.problem(self.log), done.problem(self.log)
        self.settle(step)

    def advance(self, step: Step) -> None:
        """Advance the log start by so many offsets, but not past undecided ones."""
        stable = self.states.transactions.last_stable_offset(self.end)
        offset = max(self.start, min(self.start + step[1], stable))
        done = Legal(self.base, self.frames, offset, self.end, self.end)
        machine = Legal(self.base, self.frames, offset, max(offset, self.synced), self.end)
        self._now = (step, (self.now(), done), (self.now(least=max(self.start, self.synced)), machine))
        self.log.advance_log_start(offset)
        self.start = offset
        self.settle(step, offset)

    def restart(self, step: Step) -> None:
        """Rebuild the replica from its leader's state, at so many offsets from its present end."""
        base = leaders_base(max(0, self.end + step[1]), self.epoch)
        done = Legal(base, (), base.offset, base.offset, base.offset)
        before = self.now(least=self.start)
        self._now = (step, (before, done), (before, done))
        self.log.restart_at(base.offset, [(self.epoch, 0)], base.entries())
        self.base, self.frames, self.start, self.synced = base, (), base.offset, base.offset
        self.saved = done.epochs(self.end)
        self.settle(step)

    def flush(self, step: Step) -> None:
        self.log.flush()
        self.settle(step, self.end)

    def crash(self, step: Step) -> None:
        """The process dies; the next one opens the log."""
        self.fs = self.fs.crash_process()
        self.log = open_replica(StartKind.PROCESS_CRASH, self.fs)
        self.settle(step)

    def close(self, step: Step) -> None:
        """A clean stop and start."""
        self.log.close(clean=True)
        self.fs = self.fs.crash_process()
        self.log = open_replica(StartKind.CLEAN, self.fs)
        self.settle(step, self.end)


STEPS: dict[str, Callable[[ReplicaRun, Step], None]] = {
    **dict.fromkeys(("plain", "data", "txn", "roll"), ReplicaRun.write),
    **dict.fromkeys(("commit", "abort"), ReplicaRun.mark),
    "epoch": ReplicaRun.new_epoch,
    "truncate": ReplicaRun.truncate,
    "advance": ReplicaRun.advance,
    "restart": ReplicaRun.restart,
    "flush": ReplicaRun.flush,
    "crash": ReplicaRun.crash,
    "close": ReplicaRun.close,
}


def check(fs: SimFileSystem, start: StartKind, allowed: Sequence[Legal]) -> None:
    """Recovery after this crash gives an allowed log; it goes on, and later syncs are durable."""
    try:
        log = open_replica(start, fs)
        problems = [legal.problem(log) for legal in allowed]
    except DamagedLogError as error:
        raise AssertionError(f"a crash alone is not damage: {error}; {_listing(fs)}") from error
    assert "" in problems, f"{problems}; {_listing(fs)}"
    after, added = _one_more(allowed[problems.index("")], log.log_end_offset)
    log.append([added], replace(after, frames=after.frames[:-1]).states(log.log_end_offset))
    log.flush()
    again = open_replica(StartKind.MACHINE_CRASH, fs.crash_machine_keeping(0))
    assert not after.problem(again), f"after a batch more and a machine crash: {after.problem(again)}"


def _one_more(found: Legal, end: int) -> tuple[Legal, Frame]:
    """The log with the next batch: a new one, or again the batch that holds the log start, if it was lost."""
    kept = tuple(f for f in found.frames if f.header.next_offset <= end)
    lost = next((f.header for f in found.frames if f.header.base_offset < end < f.header.next_offset), None)
    if lost is not None:
        writer = (lost.producer_id, lost.producer_epoch, lost.base_sequence)
        added = batch_at(lost.base_offset, lost.leader_epoch, True, writer, lost.attributes & TRANSACTIONAL)
    else:
        states = replace(found, frames=kept).states(end)
        entry = dict(states.entries()).get(3)
        writer = (3, entry.producer_epoch, entry.next_sequence) if entry else (3, 0, 0)
        attributes = TRANSACTIONAL if states.transactions.first_offset(3) >= 0 else 0
        added = batch_at(end, 99, True, writer, attributes)
    most = added.header.next_offset
    return Legal(found.base, (*kept, added), found.start, most, most), added


def _listing(fs: SimFileSystem) -> str:
    return ", ".join(f"{name}: {fs.size_of(DIRECTORY / name)}" for name in fs.list_directory(DIRECTORY))
