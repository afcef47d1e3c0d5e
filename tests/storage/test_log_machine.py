"""A log beside a tiny model, with steps in any order: Hypothesis looks for a short way to break it."""

from __future__ import annotations

import random
from bisect import bisect_left

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spark_broker.storage.config import LogConfig
from spark_broker.testing.simulation.filesystem import CHANGING, Fault, Operation
from tests.storage.logs import same
from tests.storage.torture import Run
from tests.support.machines import machine_settings


class LogMachine(RuleBasedStateMachine):
    """Steps succeed, find the disk full, or are interrupted by a crash of the process or of the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(LogConfig(segment_bytes=1500), recording=False)
        self.dies_in = -1  # Changes of the disk until the process dies during one; negative if it does not.
        self.kept_bytes = 0

    def _attempt(self, name: str, number: int = 0) -> None:
        self.run.fs.on_operation = self._count if self.dies_in >= 0 else None
        outcome = self.run.attempt((name, number))
        assert outcome != "full" or self.run.fs.capacity_bytes is not None
        self.run.fs.on_operation = None
        self.dies_in = -1

    def _count(self, operation: Operation) -> Fault | None:
        if operation.kind not in CHANGING:
            return None
        self.dies_in -= 1
        if self.dies_in >= 0:
            return None
        self.dies_in = 1 << 30  # Only once: later changes are the next process's.
        return Fault(kept_bytes=self.kept_bytes if operation.kind == "pwritev" else 0, kills=True)

    @rule(number=st.integers(1, 39))
    def append(self, number: int) -> None:
        self._attempt("append", number)

    @rule(number=st.integers(1, 39))
    def roll(self, number: int) -> None:
        self._attempt("roll", number)

    @rule(number=st.integers(1, 8))
    def append_from_within_the_first_batch(self, number: int) -> None:
        self._attempt("within", number)

    @rule(offsets=st.integers(0, 30))
    def truncate(self, offsets: int) -> None:
        self._attempt("truncate", offsets)

    @rule(offsets=st.integers(0, 20))
    def delete_records(self, offsets: int) -> None:
        self._attempt("advance", offsets)

    @rule(size=st.integers(0, 4000))
    def apply_retention(self, size: int) -> None:
        self._attempt("retain", size)

    @rule(offsets=st.integers(-20, 20))
    def restart(self, offsets: int) -> None:
        self._attempt("restart", offsets)

    @rule()
    def flush(self) -> None:
        self._attempt("flush")

    @rule()
    def begin_an_epoch(self) -> None:
        self._attempt("epoch")

    @rule()
    def stop_cleanly(self) -> None:
        self._attempt("close")

    @rule()
    def kill_the_process(self) -> None:
        self.run.perform([("crash", 0)])

    @rule(seed=st.integers(0, 1 << 32))
    def lose_power(self, seed: int) -> None:
        self.run.lose_power(random.Random(seed))

    @precondition(lambda self: self.dies_in < 0)
    @rule(changes=st.integers(0, 12), kept_bytes=st.integers(0, 200))
    def let_the_process_die_soon(self, changes: int, kept_bytes: int) -> None:
        self.dies_in, self.kept_bytes = changes, kept_bytes

    @rule(free_bytes=st.integers(0, 2000))
    def fill_the_disk(self, free_bytes: int) -> None:
        self.run.fs.capacity_bytes = self.run.fs.used_bytes + free_bytes

    @rule()
    def free_the_disk(self) -> None:
        self.run.fs.capacity_bytes = None

    @rule(offset=st.integers(0, 200), max_bytes=st.integers(0, 3000), below_end=st.integers(0, 20))
    def read(self, offset: int, max_bytes: int, below_end: int) -> None:
        log = self.run.log
        offset = min(max(offset, log.log_start_offset), log.log_end_offset)
        limit = log.log_end_offset - below_end
        wanted = [f for f in self.run.frames if f.header.next_offset > offset and f.header.next_offset <= limit]
        frames = log.read(offset, max_bytes=max_bytes, end_offset=limit)
        assert same(frames, wanted[: len(frames)])
        assert frames or not wanted, "at least one batch, if there is one"
        assert len(frames) <= 1 or sum(f.header.length for f in frames) <= max_bytes

    @rule(timestamp_us=st.integers(0, 300))
    def look_up_a_time(self, timestamp_us: int) -> None:
        """KAFKA-3163: what the index finds is what a scan finds."""
        headers = [f.header for f in self.run.frames if f.header.next_offset > self.run.start]
        at = bisect_left(headers, timestamp_us, key=lambda header: header.max_timestamp_us)
        expected = (headers[at].base_offset, headers[at]) if at < len(headers) else None
        assert self.run.log.offset_for_timestamp(timestamp_us) == expected

    @invariant()
    def is_what_the_model_says(self) -> None:
        run = self.run
        assert not run.now().problem(run.log), run.now().problem(run.log)
        assert run.log.recovery_point <= run.log.log_end_offset
        assert not [name for name in run.fs.list_directory(run.directory) if name.endswith(".tmp")], "room for others"


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = machine_settings(30)
