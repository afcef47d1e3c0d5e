"""A compacted log beside a tiny model, with steps in any order: Hypothesis looks for a short way to break it."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import SimFileSystem
from tests.broker.compacted_partition import DAY_MS, CompactedPartition
from tests.storage.logs import sim_directory
from tests.support.machines import machine_settings

pytestmark = pytest.mark.timeout(600)

KEYS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
PRODUCERS = st.integers(1, 2)
WRITERS = st.integers(11, 12)


class CompactionMachine(RuleBasedStateMachine):
    """Idempotent producers 1 and 2, transactional ones 11 and 12, plain appends; passes that end anywhere."""

    def __init__(self) -> None:
        super().__init__()
        fs, directory = sim_directory()
        self.lone = CompactedPartition(directory, {"segment.bytes": "3000"}, fs=fs)
        self.number = 0
        self.purging = False
        self.sent: dict[int, list[tuple[int, list[tuple[bytes, bytes | None]]]]] = {1: [], 2: []}
        self.epochs = {11: 0, 12: 0}
        self.sequences = {11: 0, 12: 0}
        self.open: dict[int, list[int]] = {11: [], 12: []}

    def rows(self, keys: list[int], tombstone: bool = False) -> list[tuple[bytes, bytes | None]]:
        self.number += 1
        return [(b"k%d" % key, None if tombstone else b"%d.%d" % (self.number, at)) for at, key in enumerate(keys)]

    @rule(keys=KEYS, tombstone=st.booleans())
    def append(self, keys: list[int], tombstone: bool) -> None:
        self.lone.put(*self.rows(keys, tombstone))

    @rule(keys=KEYS, pid=PRODUCERS)
    def append_in_sequence(self, keys: list[int], pid: int) -> None:
        rows = self.rows(keys)
        sent = self.sent[pid]
        sent.append((self.lone.put(*rows, pid=pid, sequence=len(sent)), rows))

    @rule(pid=PRODUCERS, back=st.integers(1, 5))
    def retry(self, pid: int, back: int) -> None:
        sent = self.sent[pid]
        if back <= len(sent):
            offset, rows = sent[-back]
            assert self.lone.put(*rows, pid=pid, sequence=len(sent) - back) == offset

    @rule(keys=KEYS, pid=WRITERS)
    def append_in_a_transaction(self, keys: list[int], pid: int) -> None:
        rows = self.rows(keys)
        offset = self.lone.put(*rows, pid=pid, epoch=self.epochs[pid], sequence=self.sequences[pid], txn=True)
        self.open[pid] += range(offset, offset + len(rows))
        self.sequences[pid] += 1

    @rule(pid=WRITERS, committed=st.booleans())
    def end_a_transaction(self, pid: int, committed: bool) -> None:
        self.epochs[pid] += 1
        self.sequences[pid] = 0
        self.lone.finish(pid, self.epochs[pid], committed=committed, offsets=self.open[pid])
        self.open[pid] = []

    @rule()
    def compact(self) -> None:
        self.lone.compact()

    @precondition(lambda self: self.lone.passes().due() is not None)
    @rule(steps=st.integers(0, 6))
    def give_up_a_pass(self, steps: int) -> None:
        running = self.lone.passes().steps()
        with suppress(StopIteration):
            for _ in range(steps):
                next(running)
        running.close()

    @rule()
    def time_passes(self) -> None:
        self.lone.clock.ahead_ms += DAY_MS + 1
        self.purging = True

    @rule(start=st.sampled_from(StartKind), seed=st.integers(0, 1000), keep=st.booleans())
    def restart(self, start: StartKind, seed: int, keep: bool) -> None:
        lone = self.lone
        lone.partition.flush()
        high_watermark = lone.close(clean=start is StartKind.CLEAN)
        assert isinstance(lone.fs, SimFileSystem)
        rng = random.Random(seed)
        lone.fs = lone.fs.crash_machine(rng) if start is StartKind.MACHINE_CRASH else lone.fs.crash_process()
        lone.partition = lone._open(start, high_watermark if keep else rng.randrange(high_watermark + 1))

    @invariant()
    def holds(self) -> None:
        self.lone.check(deletions_may_be_gone=self.purging)

    def teardown(self) -> None:
        for pid in (11, 12):
            self.end_a_transaction(pid, committed=True)
        self.lone.compact()
        self.holds()
        assert self.lone.last_stable_offset() == self.lone.partition.replica.log_end_offset


TestCompactionMachine = CompactionMachine.TestCase
# A step opens and compacts real files: with the profile "full", half of its examples take a minute alone on a machine.
TestCompactionMachine.settings = machine_settings(40)
